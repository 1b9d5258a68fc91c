"""Carrying out a table of copies on real memory: tensors into tiles, and tiles into tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from weightdepot.store.dtypes import dtype_name, torch_dtype
from weightdepot.store.errors import LayoutError, LayoutFault
from weightdepot.store.layout import Fill, Ints, Layout
from weightdepot.store.planning import Copies, Plan
from weightdepot.store.tiling import SourceTiling


def check_buffers(layout: Layout, buffers: Mapping[str, torch.Tensor]) -> None:
    """Raises LayoutError naming every tensor that is no longer what the layout was made from."""
    faults = []
    for spec in layout.buffers:
        tensor = buffers.get(spec.name)
        if tensor is None:
            faults.append(LayoutFault(spec.name, "is gone"))
            continue
        now = (tuple(tensor.shape), tuple(tensor.stride()), dtype_name(tensor.dtype))
        if now != (spec.shape, spec.strides, spec.dtype):
            faults.append(
                LayoutFault(
                    spec.name,
                    f"was {spec.dtype} {list(spec.shape)} with strides {list(spec.strides)}, "
                    f"is {now[2]} {list(now[0])} with strides {list(now[1])}",
                )
            )
    if faults:
        raise LayoutError("the weights changed their form since the layout was made", faults)


class _Regions:
    """Strided views of buffers and tiles, made from columns that were turned into plain lists once."""

    def __init__(self, copies: Copies, names: Sequence[str], buffers: Mapping[str, torch.Tensor]) -> None:
        self.shape: list[list[int]] = copies.shape.tolist()
        self._tile = copies.tile_start.tolist(), copies.tile_strides.tolist()
        self._buffer = copies.start.tolist(), copies.strides.tolist(), copies.buffer.tolist()
        self._names = names
        self._buffers = buffers

    def in_buffer(self, i: int) -> torch.Tensor:
        start, strides, which = self._buffer
        buffer = self._buffers[self._names[which[i]]]
        return buffer.as_strided(self.shape[i], strides[i], buffer.storage_offset() + start[i])

    def in_tile(self, i: int, tile: torch.Tensor) -> torch.Tensor:
        start, strides = self._tile
        return tile.as_strided(self.shape[i], strides[i], tile.storage_offset() + start[i])


def _copy(into: list[torch.Tensor], source: list[torch.Tensor]) -> None:
    # one call into torch for many copies: for small tiles the calls would cost more than the bytes
    if into:
        torch._foreach_copy_(into, source)


BATCH = 256  # copies handed to torch at once


@torch.no_grad()
def pack(
    source: SourceTiling,
    packing: Copies,
    layout: Layout,
    buffers: Mapping[str, torch.Tensor],
    slot: torch.Tensor,
) -> None:
    """Write every tile of `source` from the rank's buffers to its place in `slot` (uint8).

    Where a buffer's data type differs from the checkpoint's, elements are cast on the way.
    """
    regions = _Regions(packing, [b.name for b in layout.buffers], buffers)
    offset, nbytes = source.offset.tolist(), source.nbytes.tolist()
    dtype = [torch_dtype(source.tensors[t].dtype) for t in source.boxes.tensor.tolist()]
    for first in range(0, len(packing), BATCH):
        rows = range(first, min(first + BATCH, len(packing)))
        tiles = packing.tile[rows.start : rows.stop].tolist()
        _copy(
            [
                regions.in_tile(i, slot[offset[t] : offset[t] + nbytes[t]].view(dtype[t]))
                for i, t in zip(rows, tiles, strict=True)
            ],
            [regions.in_buffer(i) for i in rows],
        )


class Scatter:
    """A plan bound to the buffers that it fills."""

    def __init__(self, plan: Plan, layout: Layout, buffers: Mapping[str, torch.Tensor]) -> None:
        self._regions = _Regions(plan.copies, [b.name for b in layout.buffers], buffers)
        dtypes = {t.name: torch_dtype(t.dtype) for t in layout.tensors}
        self._dtype = [dtypes[plan.tensors[t]] for t in plan.tensor.tolist()]
        self._first: Ints = np.searchsorted(plan.copies.tile, np.arange(len(plan.nbytes) + 1))

    @torch.no_grad()
    def write(self, reads: range, tiles: Sequence[torch.Tensor]) -> None:
        """Copy the tiles of these reads (uint8 each, in the order of `reads`) into the buffers."""
        into, source = [], []
        for read, memory in zip(reads, tiles, strict=True):
            tile = memory.view(self._dtype[read])
            for i in range(int(self._first[read]), int(self._first[read + 1])):
                into.append(self._regions.in_buffer(i))
                source.append(self._regions.in_tile(i, tile))
        _copy(into, source)


@torch.no_grad()
def fill(fills: Sequence[Fill], buffers: Mapping[str, torch.Tensor]) -> None:
    """Set the regions that the loader sets to constants."""
    for f in fills:
        buffer = buffers[f.buffer]
        buffer.as_strided(f.shape, f.strides, buffer.storage_offset() + f.offset).fill_(f.value)
