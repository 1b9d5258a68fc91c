"""Staging: a second set of a rank's buffers, so that only the copy into place stops the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from weightdepot.store import streams
from weightdepot.store.dtypes import ITEMSIZE, torch_dtype
from weightdepot.store.errors import LayoutError
from weightdepot.store.geometry import extent
from weightdepot.store.layout import Ints, Layout
from weightdepot.store.moving import check_buffers, copy_all
from weightdepot.store.tracing import coverage

Region = tuple[str, int, tuple[int, ...], tuple[int, ...]]  # buffer, start, shape, strides


class Staging:
    """Memory of the same form as the buffers of `layout`. What no placement fills stays 0.

    Made once and filled again for each version: the memory that a version needs on its way is the size of
    the rank's weights.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.buffers: dict[str, torch.Tensor] = {
            spec.name: torch.zeros(
                extent(spec.shape, spec.strides), dtype=torch_dtype(spec.dtype)
            ).as_strided(spec.shape, spec.strides)
            for spec in layout.buffers
        }
        self._placing = Placing(layout)

    def place(self, into: Mapping[str, torch.Tensor], on_write: Callable[[], None]) -> None:
        """Copy what the layout fills, and nothing else, into the rank's own buffers. `on_write` is called
        before the first byte.

        Raises LayoutError, before that, when they changed their form.
        """
        self._placing(self.buffers, into, on_write)


class Placing:
    """Copies what a layout fills, and nothing else, from one set of its buffers into another."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._regions = _regions(layout)
        self._names = [spec.name for spec in layout.buffers]
        dtypes = {spec.name: spec.dtype for spec in layout.buffers}
        number = {name: i for i, name in enumerate(self._names)}
        dims = max((len(shape) for _, _, shape, _ in self._regions), default=0)
        shape: Ints = np.ones((len(self._regions), dims), dtype=np.int64)
        strides: Ints = np.zeros_like(shape)
        for i, (_, _, n, s) in enumerate(self._regions):
            shape[i, : len(n)], strides[i, : len(s)] = n, s
        itemsize: Ints = np.array([ITEMSIZE[dtypes[name]] for name, *_ in self._regions], dtype=np.int64)
        table = streams.Strided(shape, itemsize, strides, strides)
        chosen = np.flatnonzero(table.worth_it)
        self._table = table.take(chosen)
        self._buffer: Ints = np.array([number[name] for name, *_ in self._regions], dtype=np.int64)[chosen]
        start: Ints = np.array([start for _, start, _, _ in self._regions], dtype=np.int64)
        self._start = (start * itemsize)[chosen]
        self._rest = [self._regions[i] for i in np.setdiff1d(np.arange(len(self._regions)), chosen).tolist()]

    @torch.no_grad()
    def __call__(
        self,
        staged: Mapping[str, torch.Tensor],
        into: Mapping[str, torch.Tensor],
        on_write: Callable[[], None] = lambda: None,
    ) -> None:
        """Raises LayoutError, before the first byte, when `into` has not the form of the layout's buffers."""
        check_buffers(self.layout, into)
        to, source = ([buffers[name] for name in self._names] for buffers in (into, staged))
        direct = streams.ordinary(to) and streams.ordinary(source)
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for name, start, shape, strides in self._rest if direct else self._regions:
            for memory, found in ((into[name], targets), (staged[name], sources)):
                found.append(memory.as_strided(shape, strides, memory.storage_offset() + start))
        places = [self._places(side) for side in (to, source)] if direct else []
        on_write()
        if places:
            self._table.copy(places[0], places[1])
            streams.written(to)
        if targets:
            copy_all(targets, sources)

    def _places(self, buffers: Sequence[torch.Tensor]) -> Ints:
        return streams.Memories(buffers).at(self._buffer, self._start, self._table.reach_to)


def _regions(layout: Layout) -> list[Region]:
    """What the layout fills: whole buffers where it fills them to the last element, and regions of others."""
    try:
        partial = {left.parameter for left in coverage(layout, optional=("*",))}
    except LayoutError:  # a region is filled twice, which is allowed (the last write wins)
        partial = {spec.name for spec in layout.buffers}
    names = [spec.name for spec in layout.buffers]
    table = layout.table
    rows = zip(
        table.buffer.tolist(), table.start.tolist(), table.shape.tolist(), table.strides.tolist(), strict=True
    )
    whole: list[Region] = [
        (spec.name, 0, spec.shape, spec.strides) for spec in layout.buffers if spec.name not in partial
    ]
    parts: list[Region] = [
        (names[b], start, tuple(n), tuple(s)) for b, start, n, s in rows if names[b] in partial
    ]
    parts += [(f.buffer, f.offset, f.shape, f.strides) for f in layout.fills if f.buffer in partial]
    return whole + parts
