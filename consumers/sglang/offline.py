"""What SGLang's loader does with a checkpoint, for each rank, without a GPU and without weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Literal

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.server_args import ServerArgs
from torch import nn

from weightdepot.consumers.sglang.ranks import rank_context
from weightdepot.consumers.sglang.shadow import shadow_of
from weightdepot.store.layout import TensorSpec
from weightdepot.store.tracing import Trace, trace_module_load


def trace_model(
    module: nn.Module,
    tensors: Sequence[TensorSpec],
    *,
    optional: Collection[str] = (),
    on_fault: Literal["raise", "keep"] = "raise",
) -> Trace:
    """What SGLang's loader for this model (a shadow) does with a checkpoint of `tensors`.

    In the context of the rank that it was built for. Raises LayoutError naming everything that does not map,
    unless faults are kept.
    """
    return trace_module_load(module, tensors, optional=optional, on_fault=on_fault)


def trace_ranks(
    arguments: ServerArgs,
    tensors: Sequence[TensorSpec],
    ranks: Collection[int] | None = None,
    *,
    optional: Collection[str] = (),
) -> Iterator[tuple[int, Trace]]:
    """Rank and trace (with its faults kept) for each of `ranks` (all, if None) of an SGLang engine.

    Raises InvalidRequest for a model that SGLang does not build, and for ranks that do not exist.
    """
    for rank in range(arguments.tp_size * arguments.pp_size) if ranks is None else ranks:
        with rank_context(arguments, rank):
            shadow = shadow_of(ModelConfig.from_server_args(arguments))
            yield rank, trace_model(shadow, tensors, optional=optional, on_fault="keep")
