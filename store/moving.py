"""Carrying out a table of copies on real memory: tensors into tiles, and tiles into tensors.

Copies of equal bytes in pieces of some length are streamed, all of them in one call. What is left (casts,
transposed tensors, devices) is torch's: two views and one copy for each tile, handed over many at a time.
What follows from the tables alone is worked out once and kept with them. No view of a buffer is kept from one
version to the next: it would keep memory alive that its owner has replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from weightdepot.store import devices, streams
from weightdepot.store.dtypes import ITEMSIZE, dtype_name, torch_dtype
from weightdepot.store.errors import LayoutError, LayoutFault
from weightdepot.store.layout import Fill, Ints, Layout
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


def copy_all(to: list[torch.Tensor], source: list[torch.Tensor]) -> None:
    """torch's copies. In inference mode, since tensors of that mode can be written nowhere else; others can
    be there, too, and autograd hears of it."""
    with torch.inference_mode():
        torch._foreach_copy_(to, source)


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


class _Direct:
    """Those copies of a table that are streamed."""

    def __init__(self, copies: Copies, layout: Layout, dtypes: Sequence[str], *, into_tiles: bool) -> None:
        """dtypes: of the tile of each copy."""
        held = [b.dtype for b in layout.buffers]
        same = np.array([held[b] == d for b, d in zip(copies.buffer.tolist(), dtypes, strict=True)], bool)
        itemsize: Ints = np.array([ITEMSIZE[d] for d in dtypes], dtype=np.int64)
        tiles, buffers = copies.tile_strides, copies.strides
        to, source = (tiles, buffers) if into_tiles else (buffers, tiles)
        table = streams.Strided(copies.shape, itemsize, to, source)
        self.copies: Ints = np.flatnonzero(same & table.worth_it)
        table = table.take(self.copies)
        start = copies.start * itemsize
        if into_tiles:
            table, order = table.by_rows(copies.buffer[self.copies], start[self.copies])
            self.copies = self.copies[order]
        self.table = table
        self._buffer = copies.buffer[self.copies]
        self._start = start[self.copies]
        self.tile = copies.tile[self.copies]
        self.tile_start = (copies.tile_start * itemsize)[self.copies]
        self._reach = table.reach_source if into_tiles else table.reach_to

    def in_buffers(self, buffers: Sequence[torch.Tensor]) -> Ints:
        """Addresses. buffers: in the order of the layout."""
        return streams.Memories(buffers).at(self._buffer, self._start, self._reach)


def _in(memory: torch.Tensor, start: Ints, reach: Ints) -> Ints:
    return streams.Memories([memory]).at(np.zeros(len(start), dtype=np.int64), start, reach)


def _batches(copies: Sequence[int]) -> list[Sequence[int]]:
    return [copies[first : first + BATCH] for first in range(0, len(copies), BATCH)]


class _Packing:
    """What of a rank's packing does not depend on where its buffers and its slot lie."""

    def __init__(self, source: SourceTiling, packing: Copies, layout: Layout) -> None:
        names = [b.name for b in layout.buffers]
        at: Ints = source.offset[packing.tile]
        stored = [t.dtype for t in source.tensors]
        tiles = [stored[t] for t in source.boxes.tensor[packing.tile].tolist()]
        self._direct = _Direct(packing, layout, tiles, into_tiles=True)
        self._direct_at: Ints = source.offset[self._direct.tile] + self._direct.tile_start
        self._geometry = _Geometry(packing, names, [torch_dtype(d) for d in tiles])
        self._at: list[int] = at.tolist()
        self._nbytes: list[int] = source.nbytes[packing.tile].tolist()
        self._buffer = [names[b] for b in packing.buffer.tolist()]
        every = np.arange(len(packing))
        self._every = _batches(every.tolist())
        self._rest = _batches(np.setdiff1d(every, self._direct.copies).tolist())
        self._names = names

    def __call__(self, buffers: Mapping[str, torch.Tensor], slot: torch.Tensor) -> None:
        if not all(map(devices.on_host, buffers.values())):
            self._from_devices(buffers, slot)
            return
        held = [buffers[name] for name in self._names]
        direct = streams.ordinary(held)
        if direct:
            table = self._direct.table
            to = _in(slot, self._direct_at, table.reach_to)
            table.copy(to, self._direct.in_buffers(held))
        for batch in self._rest if direct else self._every:
            self._copy(batch, buffers, slot, 0)

    def _copy(
        self, batch: Sequence[int], buffers: Mapping[str, torch.Tensor], memory: torch.Tensor, first: int
    ) -> None:
        """memory: of the slot, or standing for it, from its byte `first` on."""
        typed = _Typed(memory)
        copy_all(
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
        stored = {t.name: t.dtype for t in layout.tensors}
        copies = plan.copies
        self.names = [b.name for b in layout.buffers]
        self.read: list[int] = copies.tile.tolist()
        dtypes = [stored[plan.tensors[t]] for t in plan.tensor[copies.tile].tolist()]
        self.geometry = _Geometry(copies, self.names, [torch_dtype(d) for d in dtypes])
        self.direct = _Direct(copies, layout, dtypes, into_tiles=False)
        every = np.arange(len(copies))
        self.every: list[int] = every.tolist()
        rest = np.setdiff1d(every, self.direct.copies)
        self.rest: list[int] = rest.tolist()
        # of each read: the first of its copies, of all, of those that are streamed and of the rest
        first = np.searchsorted(copies.tile, np.arange(len(plan.nbytes) + 1))
        self.first: list[int] = first.tolist()
        self.first_direct: list[int] = np.searchsorted(self.direct.copies, first).tolist()
        self.first_rest: list[int] = np.searchsorted(rest, first).tolist()


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
        held = [buffers[name] for name in found.names]
        self._streamed: Ints | None = None  # where the streamed copies lead to
        if self._on_host and len(found.direct.copies) and streams.ordinary(held):
            self._streamed = found.direct.in_buffers(held)
            streams.written(held)

    @torch.no_grad()
    def write(self, reads: range, memory: torch.Tensor, places: Sequence[int]) -> None:
        """Copy the tiles of these reads into the buffers.

        memory: uint8, contiguous. places: where in it each tile begins, in bytes, in the order of `reads`.
        """
        plan = self._plan
        if not self._on_host:
            self._to_devices(reads, memory, places)
            return
        if self._streamed is None:
            rest = plan.every[plan.first[reads.start] : plan.first[reads.stop]]
        else:
            self._stream(self._streamed, reads, memory, places)
            rest = plan.rest[plan.first_rest[reads.start] : plan.first_rest[reads.stop]]
        if not rest:
            return
        typed, geometry = _Typed(memory), plan.geometry
        for batch in _batches(rest):
            copy_all(
                [geometry.in_buffer(i, self._buffers) for i in batch],
                [geometry.in_tile(i, typed, places[plan.read[i] - reads.start]) for i in batch],
            )

    def _stream(self, to: Ints, reads: range, memory: torch.Tensor, places: Sequence[int]) -> None:
        direct = self._plan.direct
        chosen = slice(self._plan.first_direct[reads.start], self._plan.first_direct[reads.stop])
        start = (
            np.array(places, dtype=np.int64)[direct.tile[chosen] - reads.start] + direct.tile_start[chosen]
        )
        source = _in(memory, start, direct.table.reach_source[chosen])
        direct.table.copy(to[chosen], source, chosen.start)

    def _to_devices(self, reads: range, memory: torch.Tensor, places: Sequence[int]) -> None:
        geometry, first, read = self._plan.geometry, self._plan.first, self._plan.read
        there: dict[torch.device, _Typed] = {}
        for i in range(first[reads.start], first[reads.stop]):
            into = geometry.in_buffer(i, self._buffers)
            if into.device not in there:
                moved = memory if devices.on_host(into) else devices.brought_to(into.device, memory)
                there[into.device] = _Typed(moved)
            into.copy_(geometry.in_tile(i, there[into.device], places[read[i] - reads.start]))


class FromMemory:
    """Copies from places in one memory, each of which a table states as the start of a tile, into buffers."""

    def __init__(self, copies: Copies, layout: Layout, dtypes: Sequence[str]) -> None:
        """dtypes: of the elements in the memory, for each copy."""
        self._names = [b.name for b in layout.buffers]
        self._geometry = _Geometry(copies, self._names, [torch_dtype(d) for d in dtypes])
        self._direct = _Direct(copies, layout, dtypes, into_tiles=False)
        every = np.arange(len(copies))
        self._every = _batches(every.tolist())
        self._rest = _batches(np.setdiff1d(every, self._direct.copies).tolist())

    @torch.no_grad()
    def __call__(self, buffers: Mapping[str, torch.Tensor], memory: torch.Tensor) -> None:
        """memory: uint8, contiguous."""
        held = [buffers[name] for name in self._names]
        direct = streams.ordinary(held)
        if direct:
            table = self._direct.table
            source = _in(memory, self._direct.tile_start, table.reach_source)
            table.copy(self._direct.in_buffers(held), source)
            streams.written(held)
        typed = _Typed(memory)
        for batch in self._rest if direct else self._every:
            copy_all(
                [self._geometry.in_buffer(i, buffers) for i in batch],
                [self._geometry.in_tile(i, typed, 0) for i in batch],
            )


@torch.no_grad()
def fill(fills: Sequence[Fill], buffers: Mapping[str, torch.Tensor]) -> None:
    """Set the regions that the loader sets to constants."""
    for f in fills:
        buffer = buffers[f.buffer]
        buffer.as_strided(f.shape, f.strides, buffer.storage_offset() + f.offset).fill_(f.value)
