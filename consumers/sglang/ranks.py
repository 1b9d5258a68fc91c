"""Any rank of an SGLang engine, as SGLang's code sees it, in one process and without peers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sglang.srt.runtime_context import RuntimeContext, SpawnRanks, create_context, use_context
from sglang.srt.server_args import ServerArgs

from weightdepot.store.errors import InvalidRequest


@dataclass(frozen=True)
class Group:
    """What models ask of a process group while they are built and loaded. There are no peers: whoever wants
    to communicate finds no such method."""

    rank: int  # among all of the engine's
    rank_in_group: int
    world_size: int
    cpu_group: None = None
    device_group: None = None

    @property
    def is_first_rank(self) -> bool:
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank_in_group == self.world_size - 1


@contextmanager
def rank_context(arguments: ServerArgs, rank: int) -> Iterator[RuntimeContext]:
    """While it is entered, this process is `rank` of the engine that `arguments` describe.

    SGLang's own code numbers the ranks; the context is a second one beside that of a running engine, which
    is in force again afterwards. One thread at a time, and not while a model computes in this process.

    Raises InvalidRequest for a rank outside the engine, and with SGLang's reason where it refuses the engine.
    """
    size = arguments.tp_size * arguments.pp_size
    if not 0 <= rank < size:
        raise InvalidRequest(f"there is no rank {rank} among {size}: ranks count from 0 to {size - 1}")
    try:
        context = create_context(arguments, role="scheduler", ranks=SpawnRanks(world_rank=rank))
    except Exception as error:  # SGLang resolves its arguments here, and says why they do not do
        raise InvalidRequest(f"SGLang does not serve {arguments.model_path}: {_reason(error)}") from error
    context.parallel.override_permanently(**_groups(context.parallel))
    with use_context(context):
        yield context


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _groups(parallel: Any) -> dict[str, Group]:
    """Groups that are as wide as tensor parallelism are that group itself, as in an engine: SGLang compares
    them by identity."""
    rank = parallel.launch_world_rank
    tensor = Group(rank, parallel.tp_rank, parallel.tp_size)
    groups = {"tp_group": tensor, "pp_group": Group(rank, parallel.pp_rank, parallel.pp_size)}
    for name in ("attn_tp", "attn_cp", "moe_ep", "moe_dp", "moe_tp"):
        size = getattr(parallel, f"{name}_size")
        same = size == parallel.tp_size
        groups[f"{name}_group"] = tensor if same else Group(rank, getattr(parallel, f"{name}_rank"), size)
    return groups
