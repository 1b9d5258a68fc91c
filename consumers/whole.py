"""Tensors that the engine's own loader must compute with: pulled whole, and given to it at each update.

For each of them a layout has one more buffer, `whole:NAME`, so that they are planned, read and checked like
everything else. When a version's other elements are in place, the loader is called with private copies, in
the checkpoint's order: it may change or keep what it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from weightdepot.store.dtypes import torch_dtype
from weightdepot.store.errors import LayoutError, LayoutFault
from weightdepot.store.geometry import Box, contiguous_strides
from weightdepot.store.layout import Layout, LayoutBuilder, TensorSpec
from weightdepot.store.tracing import LoadWeights, Trace
from weightdepot.store.weights import Mapped

PREFIX = "whole:"


def with_whole(trace: Trace) -> Layout:
    """The layout of a trace with a contiguous buffer, in the checkpoint's data type, for each tensor that is
    needed whole."""
    if not trace.whole:
        return trace.layout
    layout, builder = trace.layout, LayoutBuilder()
    specs = {t.name: t for t in layout.tensors}
    for t in layout.tensors:
        builder.tensor(t.name, t.shape, t.dtype)
    for b in layout.buffers:
        builder.buffer(b.name, b.shape, b.strides, b.dtype)
    for p in layout.placements():
        builder.place(p.tensor, p.box, p.buffer, p.offset, p.strides)
    for f in layout.fills:
        builder.fill(f)
    for name in trace.whole:
        spec = specs[name]
        strides = contiguous_strides(spec.shape)
        builder.buffer(PREFIX + name, spec.shape, strides, spec.dtype)
        builder.place(name, Box.whole(spec.shape), PREFIX + name, 0, strides)
    return builder.build()


def given(names: Iterable[str], buffers: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """What a loader is called with: copies, one at a time, of the buffers that `with_whole` added."""
    for name in names:
        yield name, buffers[PREFIX + name].clone()


class Whole:
    """The buffers of whole tensors, in host memory, as loaders get them from a checkpoint; and their use."""

    def __init__(self, specs: Iterable[TensorSpec], load_weights: LoadWeights) -> None:
        self.buffers = {PREFIX + s.name: torch.zeros(s.shape, dtype=torch_dtype(s.dtype)) for s in specs}
        self._load_weights = load_weights

    @torch.no_grad()
    def load(self) -> None:
        """Run the loader on what the buffers hold. Raises LayoutError when it raises, naming the tensor."""
        last = ["(none yet)"]

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in given((n.removeprefix(PREFIX) for n in self.buffers), self.buffers):
                last[0] = name
                yield name, tensor

        try:
            self._load_weights(weights())
        except Exception as error:
            raise LayoutError(
                "the loader failed on the tensors that it must load itself, which it did load when it was "
                "traced; the weights are neither the old nor the new version",
                [LayoutFault(last[0], f"{type(error).__name__}: {error}")],
            ) from error


def mapped(
    trace: Trace, buffers: Callable[[], Mapping[str, torch.Tensor]], load_weights: LoadWeights
) -> Mapped:
    """Weights as a loader fills them: by the layout, and by the loader itself where it must.

    buffers: gives the parameters that the layout speaks of, as they are now.
    """
    if not trace.needs_loader:
        return Mapped(trace.layout, buffers)
    specs = {t.name: t for t in trace.layout.tensors}
    whole = Whole([specs[name] for name in trace.whole], load_weights)
    return Mapped(with_whole(trace), lambda: {**buffers(), **whole.buffers}, whole.load)
