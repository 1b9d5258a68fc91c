"""Cutting the registered layouts into tiles, and giving each tile an owner and a place in its slot.

A *tile* is a box that no registered layout cuts any further; the unit of storage and transfer. Each tile is
packed contiguously by one producer rank that holds it, so that all strided work is done once, in the copy
that publishing makes anyway, and every read is long.

Two things make reads long: within a slot, tiles are ordered by the set of readers that need them, so that
each reader finds what it needs in few runs; and no padding is left between tiles (the widest data types come
first in each run, which keeps the others aligned).

A tile that several ranks hold (data-parallel replicas) is stored by one of them, so that nothing is stored or
sent twice; the owners are chosen such that the most-loaded has least to serve.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec
import numpy as np

from weightdepot.store import wire
from weightdepot.store.dtypes import ITEMSIZE
from weightdepot.store.errors import LayoutError, LayoutFault
from weightdepot.store.layout import Ints, Layout, TensorSpec, manifest_of, pad
from weightdepot.store.overlap import Boxes, Grid, expand, widen

FORMAT = 1
ALIGNMENT = 64  # bytes; where a run of tiles begins
LARGEST = 4 << 20  # bytes of a tile: bounds the staging memory of a reader, and what one digest covers
SPLIT_REPLICATED = 1 << 20  # bytes; replicated tiles from this size on are shared out among their holders


def tiling_id(producers: Sequence[str], consumers: Collection[str]) -> str:
    """Names a tiling by what it is made from: producers' layout digests by rank, and consumers' as a set."""
    text = "\n".join([f"format {FORMAT}", *producers, "--", *sorted(set(consumers))])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class SourceTiling:
    """What one producer rank stores: its tiles in the order in which they lie in its slot."""

    tensors: tuple[TensorSpec, ...]
    boxes: Boxes
    offset: Ints  # (n,) bytes from the start of the slot
    nbytes: Ints  # (n,)
    slot_nbytes: int

    def __len__(self) -> int:
        return len(self.boxes)

    @property
    def payload(self) -> int:
        """Bytes of all tiles, without what alignment adds."""
        return int(self.nbytes.sum())

    def to_bytes(self) -> bytes:
        return Tiling(self.tensors, self.boxes, np.zeros(len(self), np.int64), self.offset, 1).to_bytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> SourceTiling:
        return Tiling.from_bytes(data).source_tiling(0)


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    tensors: list[tuple[str, tuple[int, ...], str]]
    world_size: int


_ARRAYS = {"tensor": 1, "offset": 2, "shape": 2, "source": 1, "place": 1}


@dataclass(frozen=True, eq=False)
class Tiling:
    """The tiles of all producer ranks, sorted by owner and by place in its slot."""

    tensors: tuple[TensorSpec, ...]
    boxes: Boxes
    source: Ints  # (n,) the rank that stores the tile
    offset: Ints  # (n,) bytes from the start of that rank's slot
    world_size: int

    @cached_property
    def itemsize(self) -> Ints:
        return np.array([ITEMSIZE[t.dtype] for t in self.tensors] or [1], dtype=np.int64)

    @cached_property
    def nbytes(self) -> Ints:
        return self.boxes.numel * self.itemsize[self.boxes.tensor]

    @cached_property
    def first(self) -> Ints:
        """(world_size + 1,) where each source's tiles begin."""
        return np.searchsorted(self.source, np.arange(self.world_size + 1))

    def slot_nbytes(self, rank: int) -> int:
        a, b = self.first[rank], self.first[rank + 1]
        return int(self.offset[b - 1] + self.nbytes[b - 1]) if b > a else 0

    def source_tiling(self, rank: int) -> SourceTiling:
        rows = np.arange(self.first[rank], self.first[rank + 1])
        boxes = self.boxes.take(rows)
        used, tensor = np.unique(boxes.tensor, return_inverse=True)
        return SourceTiling(
            tuple(self.tensors[i] for i in used),
            Boxes(tensor.reshape(-1), boxes.offset, boxes.shape),
            self.offset[rows],
            self.nbytes[rows],
            self.slot_nbytes(rank),
        )

    def to_bytes(self) -> bytes:
        header = _Header([(t.name, t.shape, t.dtype) for t in self.tensors], self.world_size)
        b = self.boxes
        arrays = {"tensor": b.tensor, "offset": b.offset, "shape": b.shape}
        return wire.compress(
            wire.encode("tiling", header, {**arrays, "source": self.source, "place": self.offset})
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Tiling:
        """Raises InvalidRequest for bytes that are not a tiling."""
        header, a = wire.decode("tiling", wire.decompress(data, "tiling"), _Header, _ARRAYS)
        boxes = Boxes(a["tensor"], a["offset"], a["shape"])
        return cls(
            tuple(TensorSpec(*t) for t in header.tensors), boxes, a["source"], a["place"], header.world_size
        )


@dataclass(frozen=True)
class Universe:
    """The tensors of all layouts, numbered once."""

    tensors: tuple[TensorSpec, ...]
    index: Mapping[str, int]
    shapes: Ints  # (t, D)

    @property
    def dims(self) -> int:
        return int(self.shapes.shape[1])

    @cached_property
    def itemsize(self) -> Ints:
        """(t,) bytes of one element."""
        return np.array([ITEMSIZE[t.dtype] for t in self.tensors], dtype=np.int64)

    def nbytes(self, boxes: Boxes) -> Ints:
        """(n,)"""
        return boxes.numel * self.itemsize[boxes.tensor]

    def boxes(self, layout: Layout) -> tuple[Ints, Boxes]:
        """The layout's boxes with the universe's tensor numbers, and the row of each in the layout's table.
        Tensors that the universe does not know are left out."""
        numbers = np.array([self.index.get(t.name, -1) for t in layout.tensors] or [-1], dtype=np.int64)
        table = layout.table
        rows = np.flatnonzero(numbers[table.tensor] >= 0)
        return rows, Boxes(
            numbers[table.tensor[rows]],
            widen(table.offset[rows], self.dims, 0),
            widen(table.shape[rows], self.dims, 1),
        )


def universe_of(tensors: Sequence[TensorSpec], dims: int = 1) -> Universe:
    dims = max([dims, *(len(t.shape) for t in tensors)])
    shapes = np.array([pad(t.shape, dims, 1) for t in tensors], dtype=np.int64).reshape(-1, dims)
    return Universe(tuple(tensors), {t.name: i for i, t in enumerate(tensors)}, shapes)


def check_reader(universe: Universe, layout: Layout, who: str) -> None:
    """Raises LayoutError naming every tensor that the reader wants and the checkpoint does not have so."""
    faults = []
    wanted = set(np.unique(layout.table.tensor).tolist())
    for i, spec in enumerate(layout.tensors):
        if i not in wanted:
            continue
        at = universe.index.get(spec.name)
        if at is None:
            faults.append(LayoutFault(spec.name, "no producer rank publishes it"))
        elif universe.tensors[at] != spec:
            have = universe.tensors[at]
            faults.append(
                LayoutFault(
                    spec.name,
                    f"published as {have.dtype} {list(have.shape)}, "
                    f"wanted as {spec.dtype} {list(spec.shape)}",
                )
            )
    if faults:
        raise LayoutError(f"{who} asks for tensors that are not published so", faults)


def make_tiling(producers: Sequence[Layout], consumers: Collection[Layout]) -> Tiling:
    """Cut, assign and place. `producers` by rank.

    Consumers that do not fit (a tensor missing or of another shape) are left out of the cutting: their own
    plan fails with their own error, and nobody else is held up.

    Raises LayoutError naming every tensor that the producers state differently or do not hold in full.
    """
    dims = max([1, *(layout.table.dims for layout in (*producers, *consumers))])
    universe = universe_of(manifest_of(producers), dims)
    readers: dict[str, Boxes] = {}
    for layout in {c.digest: c for c in consumers}.values():
        try:
            check_reader(universe, layout, "a consumer")
        except LayoutError:
            continue
        readers[layout.digest] = universe.boxes(layout)[1]
    pieces, holders = _disjoint_pieces(universe, [universe.boxes(p)[1] for p in producers])
    grid = Grid.cut(universe.shapes, Boxes.concatenate(list(readers.values()), universe.dims))
    piece, boxes, cell = grid.split(pieces)
    signature, demand = _needed_by(grid, readers, cell)
    tiles = _Tiles(boxes, piece, signature, demand)
    tiles = _split_large(universe, _split_replicated(universe, tiles, holders))
    owner = _share_out(universe, tiles, holders, len(producers))
    return _place(universe, tiles, owner, len(producers))


@dataclass(frozen=True)
class _Holders:
    """For each piece the producer ranks that hold it: `rank[start[i]:start[i + 1]]`, rising."""

    start: Ints
    rank: Ints

    @property
    def count(self) -> Ints:
        return np.diff(self.start)

    @classmethod
    def group(cls, item: Ints, rank: Ints, items: int) -> _Holders:
        pairs = np.unique(np.stack([item, rank], axis=1), axis=0)
        return cls(np.searchsorted(pairs[:, 0], np.arange(items + 1)), pairs[:, 1])


@dataclass(frozen=True)
class _Tiles:
    boxes: Boxes
    piece: Ints  # row in the holders' table
    signature: Ints  # equal for tiles that the same readers need
    demand: Ints  # number of readers' layouts that need it

    def take(self, rows: Ints) -> _Tiles:
        return _Tiles(self.boxes.take(rows), self.piece[rows], self.signature[rows], self.demand[rows])


def _unique_boxes(boxes: Boxes) -> tuple[Boxes, Ints]:
    """The distinct boxes, and for each row which of them it is."""
    table = np.concatenate([boxes.tensor[:, None], boxes.offset, boxes.shape], axis=1)
    _, first, inverse = np.unique(table, axis=0, return_index=True, return_inverse=True)
    return boxes.take(first), inverse.reshape(-1)


def _disjoint_pieces(universe: Universe, sources: Sequence[Boxes]) -> tuple[Boxes, _Holders]:
    """Disjoint boxes that cover every tensor, each with the ranks that hold all of it.

    Raises LayoutError naming every tensor of which some element is held by nobody.
    """
    stated = Boxes.concatenate(list(sources), universe.dims)
    rank = np.repeat(np.arange(len(sources)), [len(s) for s in sources])
    boxes, which = _unique_boxes(stated)
    holders = _Holders.group(which, rank, len(boxes))
    grid = Grid.cut(universe.shapes, boxes)
    row, parts, cell = grid.split(boxes)
    cells, first, times = np.unique(cell, return_index=True, return_counts=True)
    covered = np.bincount(parts.tensor[first], minlength=len(universe.tensors))
    missing = np.flatnonzero(covered < grid.total)
    if len(missing):
        raise LayoutError(
            "the producers do not hold the whole checkpoint",
            [
                LayoutFault(
                    universe.tensors[t].name,
                    "no rank holds any of it" if not covered[t] else "no rank holds some of its elements",
                )
                for t in missing
            ],
        )
    # Where ranks hold boxes that overlap without being equal, their common refinement takes the boxes' place.
    crossing = np.zeros(len(universe.tensors), dtype=bool)
    crossing[parts.tensor[first[times > 1]]] = True
    keep = np.flatnonzero(~crossing[boxes.tensor])
    refined = np.flatnonzero(crossing[parts.tensor[first]])
    row_of_cell = np.flatnonzero(crossing[parts.tensor])
    kept_row, kept_at = expand(holders.count[keep])
    fine_row, fine_at = expand(holders.count[row[row_of_cell]])
    item = np.concatenate(
        [kept_row, len(keep) + np.searchsorted(cells[refined], cell[row_of_cell][fine_row])]
    )
    by = np.concatenate(
        [
            holders.rank[holders.start[keep][kept_row] + kept_at],
            holders.rank[holders.start[row[row_of_cell]][fine_row] + fine_at],
        ]
    )
    pieces = Boxes.concatenate([boxes.take(keep), parts.take(first[refined])], universe.dims)
    return pieces, _Holders.group(item, by, len(pieces))


def _needed_by(grid: Grid, readers: Mapping[str, Boxes], cell: Ints) -> tuple[Ints, Ints]:
    """For each tile (given by its cell) a number that names the set of its readers, and their count."""
    needed, names = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for digest, boxes in readers.items():
        cells = np.unique(grid.split(boxes)[2])
        needed.append(cells)
        # sums of 62-bit numbers wrap around, which does no harm: a clash only makes a run shorter
        names.append(np.full(len(cells), int(digest[:15], 16), np.int64))
    every, name = np.concatenate(needed), np.concatenate(names)
    if not len(every):
        return np.zeros(len(cell), np.int64), np.zeros(len(cell), np.int64)
    order = np.argsort(every, kind="stable")
    distinct, first, count = np.unique(every[order], return_index=True, return_counts=True)
    total = np.add.reduceat(name[order], first)
    at = np.searchsorted(distinct, cell).clip(max=len(distinct) - 1)
    found = distinct[at] == cell
    return np.where(found, total[at], 0), np.where(found, count[at], 0)


def _split(tiles: _Tiles, dim: Ints, parts: Ints) -> _Tiles:
    """Each tile cut in `parts` nearly equal pieces along its `dim`."""
    row, part = expand(parts)
    out = tiles.take(row)
    at = np.arange(len(row))
    n, k, d = out.boxes.shape[at, dim[row]], parts[row], dim[row]
    offset, shape = out.boxes.offset.copy(), out.boxes.shape.copy()
    offset[at, d] += part * n // k
    shape[at, d] = (part + 1) * n // k - part * n // k
    return replace(out, boxes=Boxes(out.boxes.tensor, offset, shape))


def _split_replicated(universe: Universe, tiles: _Tiles, holders: _Holders) -> _Tiles:
    """Large tiles with several holders are cut once more, so that each holder can serve its share."""
    count = holders.count[tiles.piece]
    wide_enough = tiles.boxes.shape >= count[:, None]
    cut = (count > 1) & (universe.nbytes(tiles.boxes) >= SPLIT_REPLICATED) & wide_enough.any(axis=1)
    return _split(tiles, wide_enough.argmax(axis=1), np.where(cut, count, 1)) if cut.any() else tiles


def _split_large(universe: Universe, tiles: _Tiles) -> _Tiles:
    """No tile is larger than LARGEST; the pieces of one still follow each other in its slot."""
    for dim in range(universe.dims):
        wanted = -(-universe.nbytes(tiles.boxes) // LARGEST)
        if (wanted <= 1).all():
            break
        along = np.full(len(wanted), dim)
        tiles = _split(tiles, along, np.minimum(wanted, tiles.boxes.shape[:, dim]).clip(min=1))
    return tiles


def _share_out(universe: Universe, tiles: _Tiles, holders: _Holders, world_size: int) -> Ints:
    """The rank that stores each tile: the one holder, or the one that leaves the most-loaded least loaded.

    Load is what a rank will be asked to serve: bytes times readers (bytes alone while nobody reads).
    """
    weight = universe.nbytes(tiles.boxes) * tiles.demand.clip(min=1)
    count = holders.count[tiles.piece]
    owner = holders.rank[holders.start[tiles.piece]].copy()
    single = count == 1
    load = np.bincount(owner[single], weights=weight[single], minlength=world_size).tolist()
    shared = np.flatnonzero(~single)
    groups: dict[bytes, list[int]] = {}
    set_of_piece: dict[int, bytes] = {}
    for tile in shared.tolist():
        piece = int(tiles.piece[tile])
        name = set_of_piece.get(piece)
        if name is None:
            name = holders.rank[holders.start[piece] : holders.start[piece + 1]].tobytes()
            set_of_piece[piece] = name
        groups.setdefault(name, []).append(tile)
    # those with the least choice first; longest processing time first within each
    for name, members in sorted(groups.items(), key=lambda item: (len(item[0]), item[0])):
        ranks = np.frombuffer(name, dtype=np.int64).tolist()
        heap = [(load[r], r) for r in ranks]
        heapq.heapify(heap)
        rows = np.array(members)
        for tile in rows[np.argsort(-weight[rows], kind="stable")].tolist():
            least, rank = heap[0]
            owner[tile] = rank
            heapq.heapreplace(heap, (least + float(weight[tile]), rank))
        for total, rank in heap:
            load[rank] = total
    return owner


def _place(universe: Universe, tiles: _Tiles, owner: Ints, world_size: int) -> Tiling:
    """Order each rank's tiles by their readers, then without gaps; runs begin at multiples of ALIGNMENT."""
    size = universe.itemsize[tiles.boxes.tensor]
    coordinates = [tiles.boxes.offset[:, d] for d in range(universe.dims - 1, -1, -1)]
    order = np.lexsort([*coordinates, tiles.boxes.tensor, -size, tiles.signature, owner])
    tiles, owner = tiles.take(order), owner[order]
    nbytes = universe.nbytes(tiles.boxes)
    place = np.zeros(len(order), np.int64)
    if len(order):
        begins = np.concatenate(
            [[True], (owner[1:] != owner[:-1]) | (tiles.signature[1:] != tiles.signature[:-1])]
        )
        first = np.flatnonzero(begins)
        run = np.cumsum(begins) - 1
        within = np.cumsum(nbytes) - nbytes
        padded = -(-np.add.reduceat(nbytes, first) // ALIGNMENT) * ALIGNMENT
        start = np.cumsum(padded) - padded
        source_first = np.searchsorted(owner[first], owner[first], side="left")
        start -= start[source_first]
        place = start[run] + within - within[first][run]
    return Tiling(universe.tensors, tiles.boxes, owner, place, world_size)
