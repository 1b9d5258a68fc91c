"""The tiles that a set of readers makes of what the producers hold, kept while readers come and go.

A reader that joins or leaves changes two things: where tensors are cut, and who needs which tile. Only the
tensors in which a cut appears or disappears are cut anew; for all others the reader is added to, or taken
from, those that need its tiles. What comes out depends on the readers that are there, not on how they came.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightdepot.store.layout import Ints
from weightdepot.store.overlap import COORDINATE_BITS, Boxes, Grid, distinct, edges_of, expand
from weightdepot.store.sources import Sources
from weightdepot.store.universe import Universe

Bools = npt.NDArray[np.bool_]

LARGEST = 4 << 20  # bytes of a tile: bounds the staging memory of a reader, and what one digest covers


@dataclass(frozen=True)
class Tiles:
    """Disjoint boxes, in no particular order."""

    boxes: Boxes
    holders: Ints  # the set of ranks that hold it, by its number in the sources
    signature: Ints  # equal for tiles that the same readers need
    demand: Ints  # number of readers' layouts that need it

    def take(self, rows: Ints) -> Tiles:
        return Tiles(self.boxes.take(rows), self.holders[rows], self.signature[rows], self.demand[rows])

    @classmethod
    def concatenate(cls, parts: list[Tiles], dims: int) -> Tiles:
        return cls(
            Boxes.concatenate([p.boxes for p in parts], dims),
            np.concatenate([p.holders for p in parts]),
            np.concatenate([p.signature for p in parts]),
            np.concatenate([p.demand for p in parts]),
        )


@dataclass(frozen=True)
class _Reader:
    boxes: Boxes
    cuts: Ints  # its edges within tensors
    name: int

    @classmethod
    def of(cls, digest: str, boxes: Boxes, universe: Universe) -> _Reader:
        edges = edges_of(boxes)
        at = edges & ((1 << COORDINATE_BITS) - 1)
        inner = (at > 0) & (at < universe.shapes.reshape(-1)[edges >> COORDINATE_BITS])
        # sums of 60-bit numbers wrap around, which does no harm: a clash only makes a run shorter
        return cls(boxes, edges[inner], int(digest[:15], 16))


class Cutting:
    """Not for several threads at once."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        universe = sources.universe
        self._readers: dict[str, _Reader] = {}
        self._cuts = np.zeros(0, np.int64)
        self._grid = Grid.cut(universe.shapes, self._cuts)
        self._signature = np.zeros(int(self._grid.total.sum()), np.int64)
        self._demand = np.zeros_like(self._signature)
        self._boxes = sources.pieces.take(np.zeros(0, np.int64))
        self._piece = np.zeros(0, np.int64)
        self._cell = np.zeros(0, np.int64)  # counted from the first of its tensor
        self._cut(np.ones(len(universe.tensors), dtype=bool))

    @property
    def readers(self) -> frozenset[str]:
        return frozenset(self._readers)

    @property
    def tiles(self) -> Tiles:
        cell = self._grid.base[self._boxes.tensor] + self._cell
        holders = self._sources.holders[self._piece]
        return Tiles(self._boxes, holders, self._signature[cell], self._demand[cell])

    def change(self, join: Mapping[str, Boxes], leave: Collection[str]) -> None:
        """`join`: what each new reader needs, by the digest of its layout. `leave`: digests of readers."""
        leaving = [self._readers.pop(digest) for digest in leave]
        staying = list(self._readers.values())
        joining = {
            digest: _Reader.of(digest, boxes, self._sources.universe) for digest, boxes in join.items()
        }
        self._readers |= joining
        touched = self._move_cuts()
        if touched.any():
            for reader in staying:
                self._count(reader, touched, 1)
        for reader in leaving:
            self._count(reader, ~touched, -1)
        for reader in joining.values():
            self._count(reader, np.ones_like(touched), 1)

    def _move_cuts(self) -> Bools:
        """Returns which tensors were cut anew; nobody is counted as needing their tiles yet."""
        universe, old = self._sources.universe, self._grid
        touched = np.zeros(len(universe.tensors), dtype=bool)
        cuts = distinct(np.concatenate([self._cuts[:0], *(r.cuts for r in self._readers.values())]))
        lines = np.setxor1d(self._cuts, cuts, assume_unique=True) >> COORDINATE_BITS
        touched[lines // universe.dims] = True
        if not len(lines):
            return touched
        self._cuts, self._grid = cuts, Grid.cut(universe.shapes, cuts)
        tensor, ordinal = expand(np.where(touched, 0, old.total))
        here, there = old.base[tensor] + ordinal, self._grid.base[tensor] + ordinal
        signature = np.zeros(int(self._grid.total.sum()), np.int64)
        demand = np.zeros_like(signature)
        signature[there], demand[there] = self._signature[here], self._demand[here]
        self._signature, self._demand = signature, demand
        self._cut(touched)
        return touched

    def _cut(self, touched: Bools) -> None:
        """Cut the pieces of these tensors along the grid; the tiles of all others stay."""
        pieces = np.flatnonzero(touched[self._sources.pieces.tensor])
        row, boxes, cell = self._grid.split(self._sources.pieces.take(pieces))
        cell -= self._grid.base[boxes.tensor]
        boxes, part = _bounded(self._sources.universe, boxes)
        keep = np.flatnonzero(~touched[self._boxes.tensor])
        self._boxes = Boxes.concatenate([self._boxes.take(keep), boxes], self._sources.universe.dims)
        self._piece = np.concatenate([self._piece[keep], pieces[row[part]]])
        self._cell = np.concatenate([self._cell[keep], cell[part]])

    def _count(self, reader: _Reader, among: Bools, times: int) -> None:
        """Count a reader `times` times with those that need its tiles, in the tensors `among`."""
        boxes = reader.boxes.take(np.flatnonzero(among[reader.boxes.tensor]))
        cells = distinct(self._grid.split(boxes)[2])
        self._signature[cells] += times * reader.name
        self._demand[cells] += times


def _bounded(universe: Universe, boxes: Boxes) -> tuple[Boxes, Ints]:
    """The boxes cut so that none is larger than LARGEST where that can be; the row that each was before."""
    which = np.arange(len(boxes))
    for dim in range(universe.dims):
        wanted = -(-universe.nbytes(boxes) // LARGEST)
        if (wanted <= 1).all():
            break
        parts = np.minimum(wanted, boxes.shape[:, dim]).clip(min=1)
        row, part = expand(parts)
        n, k = boxes.shape[row, dim], parts[row]
        boxes, which = boxes.take(row), which[row]
        boxes.offset[:, dim] += part * n // k
        boxes.shape[:, dim] = (part + 1) * n // k - part * n // k
    return boxes, which
