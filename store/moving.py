"""Carrying out a table of copies on real memory: tensors into tiles, and tiles into tensors.

What follows from the tables alone is worked out once and kept with them; a version then costs two views and
one copy for each tile, handed to torch many at a time. No view of a buffer is kept from one version to the
next: it would keep memory alive that its owner has replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from weightdepot.store import devices
from weightdepot.store.dtypes import dtype_name, torch_dtype
from weightdepot.store.errors import LayoutError, LayoutFault
from weightdepot.store.layout import Fill, Ints, Layout
from weightdepot.store.longrows import LongRows
from weightdepot.store.planning import Copies, Plan
from weightdepot.store.remembered import Remembered
from weightdepot.store.tiling import SourceTiling

BATCH = 256
"""Copies handed to torch at once: for small tiles the calls would cost more than the bytes."""


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


class _Geometry:
    """The columns of a table of copies as plain lists, and which type each tile's elements have."""

    def __init__(self, copies: Copies, names: Sequence[str], dtypes: Sequence[torch.dtype]) -> None:
        """dtypes: of the tile of each copy."""
        self._shape: list[list[int]] = copies.shape.tolist()
        self._tile: tuple[list[int], list[list[int]]] = (
            copies.tile_start.tolist(),
            copies.tile_strides.tolist(),
        )
        self._buffer = [names[b] for b in copies.buffer.tolist()]
        self._start: list[int] = copies.start.tolist()
        self._strides: list[list[int]] = copies.strides.tolist()
        self._dtypes = dtypes

    def in_buffer(self, i: int, buffers: Mapping[str, torch.Tensor]) -> torch.Tensor:
        buffer = buffers[self._buffer[i]]
        return buffer.as_strided(self._shape[i], self._strides[i], buffer.storage_offset() + self._start[i])

    def in_tile(self, i: int, memory: _Typed, at: int) -> torch.Tensor:
        """at: byte of the tile's first element within `memory`."""
        start, strides = self._tile
        return memory.region(self._dtypes[i], at, start[i], self._shape[i], strides[i])


class _Typed:
    """Bytes, looked at as elements of any type; two steps cheaper for each view than slicing first."""

    def __init__(self, memory: torch.Tensor) -> None:
        """memory: uint8, contiguous. Views of any of its bytes lie where they would in a slice of it."""
        self._storage = memory.untyped_storage()
        self._first = memory.storage_offset()
        self._bases: dict[torch.dtype, torch.Tensor] = {}
        self._memory = memory

    def region(
        self, dtype: torch.dtype, at: int, start: int, shape: Sequence[int], strides: Sequence[int]
    ) -> torch.Tensor:
        base = self._bases.get(dtype)
        if base is None:
            count = self._storage.nbytes() // dtype.itemsize
            base = torch.empty(0, dtype=dtype, device=self._memory.device).set_(
                self._storage, 0, (count,), (1,)
            )
            self._bases[dtype] = base
        byte = self._first + at
        if byte % dtype.itemsize:
            raise ValueError(f"byte {byte} of a tile's memory is not aligned for {dtype}")
        return base.as_strided(shape, strides, byte // dtype.itemsize + start)


class _Packing:
    """What of a rank's packing does not depend on where its buffers and its slot lie."""

    def __init__(self, source: SourceTiling, packing: Copies, layout: Layout) -> None:
        names = [b.name for b in layout.buffers]
        at: Ints = source.offset[packing.tile]
        stored = [t.dtype for t in source.tensors]
        held = [b.dtype for b in layout.buffers]
        tiles = [stored[t] for t in source.boxes.tensor[packing.tile].tolist()]
        same = np.array([held[b] == d for b, d in zip(packing.buffer.tolist(), tiles, strict=True)], bool)
        self._rows = LongRows(packing, at, tiles, np.flatnonzero(same))
        self._geometry = _Geometry(packing, names, [torch_dtype(d) for d in tiles])
        self._at: list[int] = at.tolist()
        self._nbytes: list[int] = source.nbytes[packing.tile].tolist()
        self._buffer = [names[b] for b in packing.buffer.tolist()]
        others: list[int] = np.setdiff1d(np.arange(len(packing)), self._rows.copies).tolist()
        self._batches = [others[first : first + BATCH] for first in range(0, len(others), BATCH)]
        self._names = names

    def __call__(self, buffers: Mapping[str, torch.Tensor], slot: torch.Tensor) -> None:
        if not all(map(devices.on_host, buffers.values())):
            self._from_devices(buffers, slot)
            return
        self._rows.write([buffers[name] for name in self._names], slot)
        for batch in self._batches:
            self._copy(batch, buffers, slot, 0)

    def _copy(
        self, batch: Sequence[int], buffers: Mapping[str, torch.Tensor], memory: torch.Tensor, first: int
    ) -> None:
        """memory: of the slot, or standing for it, from its byte `first` on."""
        typed = _Typed(memory)
        torch._foreach_copy_(
            [self._geometry.in_tile(i, typed, self._at[i] - first) for i in batch],
            [self._geometry.in_buffer(i, buffers) for i in batch],
        )

    def _from_devices(self, buffers: Mapping[str, torch.Tensor], slot: torch.Tensor) -> None:
        held: dict[torch.device | None, list[int]] = {}
        for i, name in enumerate(self._buffer):
            device = None if devices.on_host(buffers[name]) else buffers[name].device
            held.setdefault(device, []).append(i)
        for device, copies in held.items():
            if device is None:
                self._copy(copies, buffers, slot, 0)
            else:
                wanted = list(devices.chunks(copies, self._at, self._nbytes))
                devices.pack_from(
                    device, wanted, lambda c, memory: self._copy(c.copies, buffers, memory, c.start), slot
                )


_packings: Remembered[Copies, _Packing] = Remembered()


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
    _packings.of(packing, lambda: _Packing(source, packing, layout))(buffers, slot)


class _Scattering:
    """What of a plan does not depend on where its buffers lie."""

    def __init__(self, plan: Plan, layout: Layout) -> None:
        self.layout = layout.digest
        dtypes = {t.name: torch_dtype(t.dtype) for t in layout.tensors}
        of_read = [dtypes[plan.tensors[t]] for t in plan.tensor.tolist()]
        copies = plan.copies
        names = [b.name for b in layout.buffers]
        self.geometry = _Geometry(copies, names, [of_read[r] for r in copies.tile.tolist()])
        self.read: list[int] = copies.tile.tolist()
        self.first: list[int] = np.searchsorted(copies.tile, np.arange(len(plan.nbytes) + 1)).tolist()


_scatterings: Remembered[Plan, _Scattering] = Remembered()


class Scatter:
    """A plan bound to the buffers that it fills. Several threads may write different reads."""

    def __init__(self, plan: Plan, layout: Layout, buffers: Mapping[str, torch.Tensor]) -> None:
        found = _scatterings.of(plan, lambda: _Scattering(plan, layout))
        if found.layout != layout.digest:
            found = _Scattering(plan, layout)
        self._plan = found
        self._buffers = buffers
        self._on_host = all(map(devices.on_host, buffers.values()))

    @torch.no_grad()
    def write(self, reads: range, memory: torch.Tensor, places: Sequence[int]) -> None:
        """Copy the tiles of these reads into the buffers.

        memory: uint8, contiguous. places: where in it each tile begins, in bytes, in the order of `reads`.
        """
        geometry, first, read = self._plan.geometry, self._plan.first, self._plan.read
        if not self._on_host:
            self._to_devices(reads, memory, places)
            return
        typed = _Typed(memory)
        for start in range(first[reads.start], first[reads.stop], BATCH):
            batch = range(start, min(start + BATCH, first[reads.stop]))
            torch._foreach_copy_(
                [geometry.in_buffer(i, self._buffers) for i in batch],
                [geometry.in_tile(i, typed, places[read[i] - reads.start]) for i in batch],
            )

    def _to_devices(self, reads: range, memory: torch.Tensor, places: Sequence[int]) -> None:
        geometry, first, read = self._plan.geometry, self._plan.first, self._plan.read
        there: dict[torch.device, _Typed] = {}
        for i in range(first[reads.start], first[reads.stop]):
            into = geometry.in_buffer(i, self._buffers)
            if into.device not in there:
                moved = memory if devices.on_host(into) else devices.brought_to(into.device, memory)
                there[into.device] = _Typed(moved)
            into.copy_(geometry.in_tile(i, there[into.device], places[read[i] - reads.start]))


@torch.no_grad()
def fill(fills: Sequence[Fill], buffers: Mapping[str, torch.Tensor]) -> None:
    """Set the regions that the loader sets to constants."""
    for f in fills:
        buffer = buffers[f.buffer]
        buffer.as_strided(f.shape, f.strides, buffer.storage_offset() + f.offset).fill_(f.value)
