"""Where a consumer's weights go: named as the checkpoint, or found by tracing the engine's own loader."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from weightdepot.consumers.whole import mapped
from weightdepot.store.errors import InvalidRequest, LayoutError, LayoutFault
from weightdepot.store.geometry import extent
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
        layout = layout_of(weights)
        if not isinstance(weights, Mapped):
            check_apart(local_buffers(weights))
        return Mapped(layout, lambda: local_buffers(weights))
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


def check_apart(buffers: Mapping[str, torch.Tensor]) -> None:
    """Raises LayoutError naming every two tensors that share an element: what is written to the one would be
    in the other too, whatever the checkpoint says of it."""
    spans = []
    for name, t in buffers.items():
        if t.numel() and t.device.type != "meta":
            length = extent(t.shape, t.stride()) * t.itemsize
            spans.append((str(t.device), t.data_ptr(), t.data_ptr() + length, name))
    faults: list[LayoutFault] = []
    near: list[tuple[str, int, int, str]] = []
    for span in sorted(spans):
        near = [other for other in near if other[0] == span[0] and other[2] > span[1]]
        faults += [
            LayoutFault(span[3], f"shares memory with {other[3]!r}: give one of them only (tied weights)")
            for other in near
            if _share(buffers[other[3]], buffers[span[3]])
        ]
        near.append(span)
    if faults:
        raise LayoutError("these weights overlap in memory", faults)


def _share(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors whose spans overlap share a byte (columns of one tensor lie between each other)."""
    first = min(a.data_ptr(), b.data_ptr())
    last = max(t.data_ptr() + extent(t.shape, t.stride()) * t.itemsize for t in (a, b))
    touched = np.zeros(last - first, dtype=np.bool_)
    for t in (a, b):
        at = t.data_ptr() - first
        view = np.lib.stride_tricks.as_strided(
            touched[at:], (*t.shape, t.itemsize), (*(s * t.itemsize for s in t.stride()), 1)
        )
        if t is b and view.any():
            return True
        view[...] = True
    return False
