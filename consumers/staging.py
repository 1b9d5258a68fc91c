"""Staging: a second set of a rank's buffers, so that only the copy into place stops the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from weightdepot.store.dtypes import torch_dtype
from weightdepot.store.errors import LayoutError
from weightdepot.store.geometry import extent
from weightdepot.store.layout import Layout
from weightdepot.store.moving import check_buffers
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
        self._whole, self._parts = _regions(layout)

    @torch.no_grad()
    def __call__(
        self,
        staged: Mapping[str, torch.Tensor],
        into: Mapping[str, torch.Tensor],
        on_write: Callable[[], None] = lambda: None,
    ) -> None:
        """Raises LayoutError, before the first byte, when `into` has not the form of the layout's buffers."""
        check_buffers(self.layout, into)
        targets = [into[name] for name in self._whole]
        sources = [staged[name] for name in self._whole]
        for name, start, shape, strides in self._parts:
            for memory, found in ((into[name], targets), (staged[name], sources)):
                found.append(memory.as_strided(shape, strides, memory.storage_offset() + start))
        on_write()
        if targets:
            torch._foreach_copy_(targets, sources)


def _regions(layout: Layout) -> tuple[list[str], list[Region]]:
    """The buffers that the layout fills to the last element, and the regions that it fills of the others."""
    try:
        partial = {left.parameter for left in coverage(layout, optional=("*",))}
    except LayoutError:  # a region is filled twice, which is allowed (the last write wins)
        partial = {spec.name for spec in layout.buffers}
    names = [spec.name for spec in layout.buffers]
    table = layout.table
    rows = zip(
        table.buffer.tolist(), table.start.tolist(), table.shape.tolist(), table.strides.tolist(), strict=True
    )
    parts: list[Region] = [
        (names[b], start, tuple(n), tuple(s)) for b, start, n, s in rows if names[b] in partial
    ]
    parts += [(f.buffer, f.offset, f.shape, f.strides) for f in layout.fills if f.buffer in partial]
    return [name for name in names if name not in partial], parts
