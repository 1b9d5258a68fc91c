"""vLLM's process groups for any rank, in one process and without peers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.platforms import current_platform

from weightdepot.store.errors import InvalidRequest

# vLLM's own base class: it keeps ranks, and asks neither peers nor devices
_COMMUNICATOR = "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"


@contextmanager
def rank_groups(config: VllmConfig, rank: int) -> Iterator[None]:
    """While it is entered, this process is `rank` of the world that `config` describes, as vLLM sees it.

    vLLM's own code makes the groups (so that all kinds of parallelism are numbered as in an engine), over
    torch's `fake` backend, which answers every collective at once and moves nothing. The config is vLLM's
    current one. Groups and torch's default process group are gone afterwards.

    Raises InvalidRequest for a rank outside the world, and where this process has process groups already.
    """
    world_size = config.parallel_config.world_size
    if not 0 <= rank < world_size:
        raise InvalidRequest(
            f"there is no rank {rank} among {world_size}: ranks count from 0 to {world_size - 1}"
        )
    if dist.is_initialized():
        raise InvalidRequest(
            "this process has process groups already: in a vLLM worker build the shadow from the worker's "
            "own config (shadow_of); elsewhere do it in another process"
        )
    with ExitStack() as undo:
        undo.enter_context(set_current_vllm_config(config))
        undo.callback(_leave)
        with _nobody_answers():
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
            # local rank 0: a machine with one device, or none, stands in for all of them
            parallel_state.init_distributed_environment(
                world_size, rank, "fake://", local_rank=0, backend="fake"
            )
            parallel = config.parallel_config
            parallel_state.initialize_model_parallel(
                parallel.tensor_parallel_size,
                parallel.pipeline_parallel_size,
                parallel.prefill_context_parallel_size,
                parallel.decode_context_parallel_size,
            )
        yield


def _leave() -> None:
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


@contextmanager
def _nobody_answers() -> Iterator[None]:
    """Replaces what asks the peers something while groups are made. Put back when they are."""
    real = dist.new_group

    def fake_group(*arguments: Any, **options: Any) -> Any:
        return real(*arguments, **{**options, "backend": "fake"})  # vLLM asks for gloo by name

    def all_on_one_node(group: Any, *_: Any) -> list[bool]:
        return [True] * dist.get_world_size(group)

    with (
        patch.object(dist, "new_group", fake_group),
        patch.object(parallel_state, "in_the_same_node_as", all_on_one_node),
        patch.object(type(current_platform), "get_device_communicator_cls", lambda *_: _COMMUNICATOR),
        patch.object(MessageQueue, "create_from_process_group", lambda *_, **__: None),
    ):
        yield
