"""What one rank reads, from whom, and where each element goes: pure arithmetic on a tiling and a layout.

The same join serves both ends. A producer rank's *packing* says which elements of its buffers make up each
of its tiles; a consumer rank's *plan* says which tiles it reads from which source, and which part of each
goes to which region of its buffers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import msgspec
import numpy as np

from weightdepot.store import wire
from weightdepot.store.errors import LayoutError, LayoutFault
from weightdepot.store.layout import Ints, Layout
from weightdepot.store.overlap import Boxes, Sorted, widen
from weightdepot.store.tiling import SourceTiling, Tiling
from weightdepot.store.universe import Universe, check_reader, universe_of


@dataclass(frozen=True)
class Copies:
    """Strided copies between tiles and buffers, as columns; the direction is the caller's.

    A tile is row-major. Columns with D dimensions are padded with shape 1 and stride 0.
    """

    tile: Ints  # (n,) row of the table of tiles that goes with it
    tile_start: Ints  # (n,) elements from the tile's first one
    tile_strides: Ints  # (n, D) elements
    shape: Ints  # (n, D)
    buffer: Ints  # (n,) index into Layout.buffers
    start: Ints  # (n,) elements from the buffer's first one
    strides: Ints  # (n, D) elements

    def __len__(self) -> int:
        return len(self.tile)

    def take(self, rows: slice) -> Copies:
        return Copies(*(getattr(self, name)[rows] for name in COPY_COLUMNS))


COPY_COLUMNS = {
    "tile": 1, "tile_start": 1, "tile_strides": 2, "shape": 2, "buffer": 1, "start": 1, "strides": 2,
}  # fmt: skip


def _row_major(shape: Ints) -> Ints:
    """(n, D) strides of contiguous tensors of these shapes."""
    strides = np.ones_like(shape)
    for dim in range(shape.shape[1] - 2, -1, -1):
        strides[:, dim] = strides[:, dim + 1] * shape[:, dim + 1]
    return strides


@dataclass(frozen=True)
class _Overlap:
    """Which rows of a layout's table meet which tiles, and the common boxes."""

    row: Ints
    tile: Ints
    common: Boxes

    @classmethod
    def of(cls, universe: Universe, layout: Layout, tiles: Sorted) -> _Overlap:
        rows, placed = universe.boxes(layout)
        at, tile, common = tiles.meet(placed)
        return cls(rows[at], tile, common)

    def take(self, rows: Ints) -> _Overlap:
        return _Overlap(self.row[rows], self.tile[rows], self.common.take(rows))

    def copies(self, layout: Layout, tiles: Boxes) -> Copies:
        table, dims = layout.table, self.common.offset.shape[1]
        strides = widen(table.strides, dims, 0)[self.row]
        placed = widen(table.offset, dims, 0)[self.row]
        tile_strides = _row_major(tiles.shape[self.tile])
        return Copies(
            self.tile,
            ((self.common.offset - tiles.offset[self.tile]) * tile_strides).sum(axis=1),
            tile_strides,
            self.common.shape,
            table.buffer[self.row],
            table.start[self.row] + ((self.common.offset - placed) * strides).sum(axis=1),
            strides,
        )


def make_packing(source: SourceTiling, layout: Layout) -> Copies:
    """How a producer rank fills its slot: one copy for each tile, in the order of the slot.

    Raises LayoutError when the rank does not hold a tile that it was given, which means that the tiling was
    made for another layout.
    """
    universe = universe_of(source.tensors, max(layout.table.dims, source.boxes.offset.shape[1]))
    tiles = source.boxes.widen(universe.dims)
    overlap = _Overlap.of(universe, layout, Sorted.of(tiles))
    full = np.flatnonzero((overlap.common.shape == tiles.shape[overlap.tile]).all(axis=1))
    # a rank may hold a tile twice (tied parameters): the first placement serves
    first = full[np.unique(overlap.tile[full], return_index=True)[1]]
    stated = {t.name: t for t in layout.tensors}
    wrong = [t.name for t in source.tensors if stated.get(t.name) != t]
    absent = np.setdiff1d(np.arange(len(source)), overlap.tile[first])
    wrong += [source.tensors[source.boxes.tensor[i]].name for i in absent]
    if wrong:
        raise LayoutError(
            "this rank's tiling was made for another layout",
            [
                LayoutFault(name, "this rank does not hold it so, in one piece")
                for name in dict.fromkeys(wrong)
            ],
        )
    return overlap.take(first).copies(layout, tiles)


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    tensors: list[str]


_READ_COLUMNS = {"source": 1, "index": 1, "offset": 1, "nbytes": 1, "tensor": 1, "needed": 1}


@dataclass(frozen=True, eq=False)
class Plan:
    """One rank's reads, sorted by source and offset, and the copies that they feed, sorted by read."""

    tensors: tuple[str, ...]
    source: Ints  # (r,) rank of the producer that stores the tile
    index: Ints  # (r,) the tile's row in that source's table, for its digest
    offset: Ints  # (r,) bytes from the start of the source's slot
    nbytes: Ints  # (r,) bytes of the tile; all of it is read
    tensor: Ints  # (r,) index into `tensors`
    needed: Ints  # (r,) bytes of the tile that this rank's layout has a place for
    copies: Copies  # `copies.tile` is a row of these reads

    @cached_property
    def sources(self) -> tuple[int, ...]:
        return tuple(np.unique(self.source).tolist())

    @property
    def moved_nbytes(self) -> int:
        return int(self.nbytes.sum())

    @property
    def needed_nbytes(self) -> int:
        return int(self.needed.sum())

    def to_bytes(self) -> bytes:
        arrays = {name: getattr(self, name) for name in _READ_COLUMNS}
        arrays |= {f"copy_{name}": getattr(self.copies, name) for name in COPY_COLUMNS}
        return wire.compress(wire.encode("plan", _Header(list(self.tensors)), arrays))

    @classmethod
    def from_bytes(cls, data: bytes) -> Plan:
        """Raises InvalidRequest for bytes that are not a plan."""
        columns = {**_READ_COLUMNS, **{f"copy_{name}": dims for name, dims in COPY_COLUMNS.items()}}
        header, a = wire.decode("plan", wire.decompress(data, "plan"), _Header, columns)
        reads = {name: a[name] for name in _READ_COLUMNS}
        return cls(tuple(header.tensors), **reads, copies=Copies(*(a[f"copy_{n}"] for n in COPY_COLUMNS)))


def make_plan(tiling: Tiling, layout: Layout) -> Plan:
    """The reads of a consumer rank.

    A layout that the tiling was made with needs whole tiles only; one that came later reads the tiles that
    cover what it needs (`needed` is then less than `nbytes`).

    Raises LayoutError naming every tensor that is not published, is published with another shape or data
    type, or is not covered.
    """
    check_reader(tiling.universe, layout, "the consumer")
    overlap = _Overlap.of(tiling.universe, layout, tiling.sorted)
    table = layout.table
    covered = np.bincount(overlap.row, weights=overlap.common.numel, minlength=len(table)).astype(np.int64)
    short = np.flatnonzero(covered != table.shape.prod(axis=1))
    if len(short):
        names = dict.fromkeys(layout.tensors[table.tensor[i]].name for i in short)
        raise LayoutError(
            "the published tiles do not cover what the consumer needs",
            [LayoutFault(name, "some of its elements are stored by nobody") for name in names],
        )
    order = np.argsort(overlap.tile, kind="stable")
    overlap = overlap.take(order)
    fresh = np.ones(len(order), dtype=bool)
    fresh[1:] = overlap.tile[1:] != overlap.tile[:-1]
    rows, read = overlap.tile[fresh], np.cumsum(fresh) - 1
    nbytes, tensor = tiling.nbytes[rows], tiling.boxes.tensor[rows]
    wanted = np.bincount(read, weights=overlap.common.numel, minlength=len(rows)).astype(np.int64)
    used, tensor_of_read = np.unique(tensor, return_inverse=True)
    source = tiling.source[rows]
    return Plan(
        tuple(tiling.tensors[i].name for i in used.tolist()),
        source,
        rows - tiling.first[source],
        tiling.offset[rows],
        nbytes,
        tensor_of_read.reshape(-1),
        np.minimum(wanted * tiling.itemsize[tensor], nbytes),
        replace(overlap.copies(layout, tiling.boxes), tile=read),
    )
