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
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np

from weightdepot.store import wire
from weightdepot.store.balance import Floats, quotas
from weightdepot.store.cutting import Cutting, Tiles
from weightdepot.store.dtypes import ITEMSIZE
from weightdepot.store.errors import LayoutError
from weightdepot.store.layout import Ints, Layout, TensorSpec
from weightdepot.store.overlap import Boxes, Sorted, expand
from weightdepot.store.sources import Sources
from weightdepot.store.universe import Universe, check_reader, universe_of

FORMAT = 2
ALIGNMENT = 64  # bytes; where a run of tiles begins
CUT_FROM = 64 << 10  # bytes; smaller tiles are not cut between two holders, one of them has it whole
SPREAD_FROM = 16 << 20  # bytes for each holder; from there on, what the same readers need is shared out alone
SLIVER = 4 << 10  # bytes; a part smaller than this is not cut off


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

    @cached_property
    def universe(self) -> Universe:
        return universe_of(self.tensors, self.boxes.offset.shape[1])

    @cached_property
    def sorted(self) -> Sorted:
        """For plans, of which one tiling serves many."""
        return Sorted.of(self.boxes)

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


class TilingMaker:
    """Makes the tilings of one producer group for whichever consumers there are, and does again only
    what a change of these touches. May be called from any thread; one tiling is made at a time."""

    def __init__(self, producers: Sequence[Layout]) -> None:
        """`producers` by rank. They are not kept.

        Raises LayoutError naming every tensor that the producers state differently or do not hold in full.
        """
        self._sources = Sources.of(producers)
        self._cutting = Cutting(self._sources)
        self._unfit: set[str] = set()
        self._lock = threading.Lock()

    @property
    def readers(self) -> frozenset[str]:
        """Digests of the consumers' layouts that the last tiling was made with."""
        return self._cutting.readers | self._unfit

    def make(self, consumers: Collection[str], load: Callable[[str], Layout]) -> Tiling:
        """The tiling for consumers' layouts of these digests. `load` gives the layout of a digest; it is
        asked for those alone that the last tiling was made without.

        Consumers that do not fit (a tensor missing or of another shape) are left out of the cutting: their
        own plan fails with their own error, and nobody else is held up.
        """
        with self._lock:
            wanted = set(consumers)
            join: dict[str, Boxes] = {}
            unfit = self._unfit & wanted
            for digest in sorted(wanted - self.readers):
                layout = load(digest)
                try:
                    check_reader(self._sources.universe, layout, "a consumer")
                except LayoutError:
                    unfit.add(digest)
                    continue
                join[digest] = self._sources.universe.boxes(layout)[1]
            self._unfit = unfit
            self._cutting.change(join, self._cutting.readers - wanted)
            return _place(self._sources, *_share_out(self._sources, self._cutting.tiles))


def make_tiling(producers: Sequence[Layout], consumers: Collection[Layout]) -> Tiling:
    """Cut, assign and place, from nothing; see `TilingMaker`. `producers` by rank."""
    layouts = {layout.digest: layout for layout in consumers}
    return TilingMaker(producers).make(layouts, layouts.__getitem__)


def _order(universe: Universe, tiles: Tiles, first: Ints) -> Ints:
    """Rows by `first`, then by their readers, the widest data types first, then by coordinates."""
    coordinates = [tiles.boxes.offset[:, d] for d in range(universe.dims - 1, -1, -1)]
    size = universe.itemsize[tiles.boxes.tensor]
    return np.lexsort([*coordinates, tiles.boxes.tensor, -size, tiles.signature, first])


def _share_out(sources: Sources, tiles: Tiles) -> tuple[Tiles, Ints]:
    """The rank that stores each tile: its one holder, or of several one, such that the most-loaded has least.

    Load is what a rank will be asked to serve: bytes times readers (bytes alone while nobody reads). Tiles of
    the same holders are laid end to end, ordered as in a slot, and each holder takes a stretch as long as its
    quota. A large tile in which two stretches meet is cut there, so that replicas divide the load as evenly
    as can be. What the same readers need is shared out on its own where it is much, so that they find it at
    all its holders however many readers of each kind there are; else they find it at few.
    """
    universe = sources.universe
    several = np.array([len(ranks) > 1 for ranks in sources.sets], dtype=bool)[tiles.holders]
    rest, shared = tiles.take(np.flatnonzero(~several)), tiles.take(np.flatnonzero(several))
    owner = np.array([ranks[0] for ranks in sources.sets], dtype=np.int64)[rest.holders]
    if not len(shared.boxes):
        return rest, owner
    shared, group = _shared_together(sources, shared)
    holders = [sources.sets[i] for i in shared.holders[group.searchsorted(np.arange(group[-1] + 1))]]
    fixed = _sums(owner, _load(universe, rest), sources.world_size)
    shares = quotas(fixed, holders, _sums(group, _load(universe, shared), len(holders)))
    ends = np.cumsum(np.concatenate(shares))  # where each stretch ends, all groups on one line
    shared, begins, stops = _cut_at(universe, shared, ends)
    taker = np.searchsorted(ends, (begins + stops) / 2, side="right").clip(max=len(ends) - 1)
    owners = np.concatenate([owner, np.concatenate(holders)[taker]])
    return Tiles.concatenate([rest, shared], universe.dims), owners


def _shared_together(sources: Sources, tiles: Tiles) -> tuple[Tiles, Ints]:
    """The tiles in the order in which they are shared out, and for each the number of its group, rising."""
    universe = sources.universe
    tiles = tiles.take(_order(universe, tiles, tiles.holders))
    same = np.stack([tiles.holders, tiles.signature])
    run = np.cumsum(np.concatenate([[0], (same[:, 1:] != same[:, :-1]).any(axis=0)]))
    size = np.array([len(ranks) for ranks in sources.sets])[tiles.holders]
    much = np.bincount(run, weights=universe.nbytes(tiles.boxes))[run] >= SPREAD_FROM * size
    alike = np.where(much, run + 1, 0)
    order = np.lexsort((alike, tiles.holders))
    tiles, alike = tiles.take(order), alike[order]
    same = np.stack([tiles.holders, alike])
    return tiles, np.cumsum(np.concatenate([[0], (same[:, 1:] != same[:, :-1]).any(axis=0)]))


def _load(universe: Universe, tiles: Tiles) -> Ints:
    load: Ints = universe.nbytes(tiles.boxes) * tiles.demand.clip(min=1)
    return load


def _sums(rows: Ints, weights: Ints, count: int) -> Floats:
    """Of the weights, for each of `count` rows. Exact, and so the same in any order, up to 2^53."""
    return np.bincount(rows, weights=weights, minlength=count).astype(np.float64)


def _cut_at(universe: Universe, tiles: Tiles, ends: Floats) -> tuple[Tiles, Floats, Floats]:
    """Tiles that lie end to end on a line, large ones cut near `ends` (rising) along their longest dimension;
    with the places on the line where each begins and stops."""
    stops = np.cumsum(_load(universe, tiles)).astype(np.float64)
    begins = np.concatenate([[0.0], stops[:-1]])
    nbytes = universe.nbytes(tiles.boxes)
    tile = np.searchsorted(stops, ends, side="right").clip(max=len(stops) - 1)
    dim = tiles.boxes.shape.argmax(axis=1)
    size = tiles.boxes.shape[np.arange(len(dim)), dim]
    at = np.rint((ends - begins[tile]) / (stops - begins)[tile] * size[tile]).astype(np.int64)
    front = at * (nbytes // size)[tile]
    cut = (nbytes[tile] >= CUT_FROM) & (front >= SLIVER) & (nbytes[tile] - front >= SLIVER)
    places = np.unique(np.stack([tile[cut], at[cut]], axis=1), axis=0)  # few: one for each holder
    row, part = expand(1 + np.bincount(places[:, 0], minlength=len(tiles.boxes)))
    first = np.zeros(len(row), np.int64)
    first[part > 0] = places[:, 1]
    is_last = np.concatenate([row[1:] != row[:-1], [True]])
    last = np.where(is_last, size[row], np.roll(first, -1))
    parts = tiles.take(row)
    where = np.arange(len(row))
    parts.boxes.offset[where, dim[row]] += first
    parts.boxes.shape[where, dim[row]] = last - first
    step = (stops - begins)[row] / size[row]
    return parts, begins[row] + first * step, begins[row] + last * step


def _place(sources: Sources, tiles: Tiles, owner: Ints) -> Tiling:
    """Order each rank's tiles by their readers, then without gaps; runs begin at multiples of ALIGNMENT."""
    universe = sources.universe
    order = _order(universe, tiles, owner)
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
    return Tiling(universe.tensors, tiles.boxes, owner, place, sources.world_size)
