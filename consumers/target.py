"""Where a consumer's weights go: named as the checkpoint, or found by tracing the engine's own loader."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from weightdepot.consumers.whole import mapped
from weightdepot.store.errors import InvalidRequest
from weightdepot.store.layout import TensorSpec
from weightdepot.store.tracing import LoadWeights, trace_load, trace_module_load
from weightdepot.store.weights import Mapped, Weights, layout_of, local_buffers

__all__ = ["LoadWeights", "target_of"]


def target_of(
    weights: Weights,
    load_weights: LoadWeights | None,
    tensors: Sequence[TensorSpec],
    optional: Collection[str],
) -> Mapped:
    """The weights with their layout. `tensors`: the checkpoint's, which a loader is traced with. Tensors that
    it computes with are pulled whole besides, and go through it at each update.

    Raises LayoutError naming everything that does not map.
    """
    if load_weights is None:
        return Mapped(layout_of(weights), lambda: local_buffers(weights))
    if isinstance(weights, nn.Module):
        module = weights
        trace = trace_module_load(module, load_weights=load_weights, tensors=tensors, optional=optional)
        return mapped(trace, lambda: _of_module(module), load_weights)
    if isinstance(weights, Mapped):
        raise InvalidRequest("these weights come with a layout already: leave load_weights out")
    plain = {name: w for name, w in weights.items() if isinstance(w, torch.Tensor)}
    if len(plain) != len(weights):
        raise InvalidRequest("with load_weights, weights are plain tensors: the loader says what goes where")
    trace = trace_load(load_weights, tensors, plain, optional=optional)
    return mapped(trace, lambda: plain, load_weights)


def _of_module(module: nn.Module) -> dict[str, torch.Tensor]:
    tensors = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    return {name: t.detach() for name, t in tensors.items()}
