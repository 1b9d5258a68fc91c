"""What vLLM's loader does with a checkpoint, for each rank, without a GPU and without weights."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.model_loader.default_loader import _CONFIG_BUILT_PARAMS

from weightdepot.consumers.vllm.groups import rank_groups
from weightdepot.consumers.vllm.shadow import Parallel, engine_config, shadow_of
from weightdepot.store.layout import TensorSpec
from weightdepot.store.tracing import Trace, trace_module_load


def trace_model(
    module: nn.Module,
    tensors: Sequence[TensorSpec],
    *,
    optional: Collection[str] = (),
    on_fault: Literal["raise", "keep"] = "raise",
) -> Trace:
    """What vLLM's loader for this model (a shadow) does with a checkpoint of `tensors`.

    In the context of the rank that it was built for. Raises LayoutError naming everything that does not map,
    unless faults are kept.
    """
    may_be_left = (*optional, *_with_defaults(module))
    made: list[tuple[nn.Module, str, nn.Parameter]] = []
    load: Any = module.load_weights
    before = {name for name, _ in module.named_parameters(remove_duplicate=False)}

    def spying(weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        loaded = load(weights)
        made.clear()
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if name not in before:
                owner, _, last = name.rpartition(".")
                made.append((module.get_submodule(owner), last, parameter))
        return loaded

    def trace(fault: Literal["raise", "keep"]) -> Trace:
        with _tables_aside(module):
            return trace_module_load(
                module, tensors, load_weights=spying, optional=may_be_left, on_fault=fault
            )

    first = trace("keep")
    if made:  # only loading says that they exist: now they do, as in a live model, which was loaded once
        for owner, name, parameter in made:
            owner.register_parameter(name, nn.Parameter(parameter.detach(), requires_grad=False))
            for key, value in vars(parameter).items():
                setattr(getattr(owner, name), key, value)
        before |= {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return trace(on_fault) if made or (first.faults and on_fault == "raise") else first


def _with_defaults(module: nn.Module) -> Iterator[str]:
    """Parameters that checkpoints need not hold, by the rules of vLLM's own check after loading: the scales
    of a quantized key-value cache, and what is made from the quantization's configuration."""
    for owner, part in module.named_modules():
        scales = isinstance(getattr(part, "quant_method", None), BaseKVCacheMethod)
        for name, _ in part.named_parameters(recurse=False):
            if scales or name in _CONFIG_BUILT_PARAMS:
                yield f"{owner}.{name}" if owner else name


@contextmanager
def _tables_aside(module: nn.Module) -> Iterator[None]:
    """A shadow's buffers with values (which experts are this rank's) are plain attributes for a while: they
    are no weights, and the tracer, which answers no question about a buffer's values, need not watch them."""
    tables = [
        (owner, name, buffer)
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None and not buffer.is_meta and not buffer.is_floating_point()
    ]
    for owner, name, buffer in tables:
        del owner._buffers[name]
        owner.__dict__[name] = buffer
    try:
        yield
    finally:
        for owner, name, buffer in tables:
            del owner.__dict__[name]
            owner._buffers[name] = buffer


def trace_ranks(
    directory: str | Path,
    tensors: Sequence[TensorSpec],
    parallel: Parallel | None = None,
    ranks: Collection[int] | None = None,
    *,
    optional: Collection[str] = (),
    **arguments: Any,
) -> Iterator[tuple[int, Trace]]:
    """Rank and trace (with its faults kept) for each of `ranks` (all, if None) of a vLLM engine.

    `arguments` go to vLLM's EngineArgs. Raises InvalidRequest for a model that vLLM does not build, and for
    ranks that do not exist.
    """
    config = engine_config(directory, parallel, **arguments)
    for rank in range(config.parallel_config.world_size) if ranks is None else ranks:
        with rank_groups(config, rank):
            yield rank, trace_model(shadow_of(config), tensors, optional=optional, on_fault="keep")
