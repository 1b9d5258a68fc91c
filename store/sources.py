"""What the ranks of a producer group hold: disjoint pieces of the checkpoint, and who has each.

It depends on the producers alone, and is kept while consumers come and go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weightdepot.store.errors import LayoutError, LayoutFault
from weightdepot.store.layout import Ints, Layout, manifest_of
from weightdepot.store.overlap import Boxes, Grid, edges_of, expand
from weightdepot.store.universe import Universe, universe_of


@dataclass(frozen=True)
class Sources:
    """Disjoint pieces that cover every tensor, and the set of ranks that hold all of each."""

    universe: Universe
    world_size: int
    pieces: Boxes
    holders: Ints  # (pieces,) index into `sets`
    sets: tuple[Ints, ...]  # ranks, rising; the smaller sets first

    @classmethod
    def of(cls, producers: Sequence[Layout]) -> Sources:
        """`producers` by rank.

        Raises LayoutError naming every tensor that the producers state differently or do not hold in full.
        """
        universe = universe_of(manifest_of(producers))
        pieces, holding = _disjoint_pieces(universe, [universe.boxes(p)[1] for p in producers])
        return cls(universe, len(producers), pieces, *_distinct_sets(holding))


@dataclass(frozen=True)
class _Holding:
    """For each item the ranks that hold it: `rank[start[i]:start[i + 1]]`, rising."""

    start: Ints
    rank: Ints

    @property
    def count(self) -> Ints:
        return np.diff(self.start)

    @classmethod
    def group(cls, item: Ints, rank: Ints, items: int) -> _Holding:
        order = np.lexsort((rank, item))
        item, rank = item[order], rank[order]
        if len(item):
            first = np.concatenate([[True], (item[1:] != item[:-1]) | (rank[1:] != rank[:-1])])
            item, rank = item[first], rank[first]
        return cls(np.searchsorted(item, np.arange(items + 1)), rank)


def _distinct_sets(holding: _Holding) -> tuple[Ints, tuple[Ints, ...]]:
    """For each item the number of its set of ranks, and the sets."""
    count, which = holding.count, np.zeros(len(holding.start) - 1, np.int64)
    sets: list[Ints] = []
    for size in np.unique(count).tolist():
        items = np.flatnonzero(count == size)
        ranks = holding.rank[holding.start[items][:, None] + np.arange(size)]
        found, inverse = np.unique(ranks, axis=0, return_inverse=True)
        which[items] = len(sets) + inverse.reshape(-1)
        sets += list(found)
    return which, tuple(sets)


def _unique_boxes(boxes: Boxes) -> tuple[Boxes, Ints]:
    """The distinct boxes, and for each row which of them it is."""
    columns = [*boxes.shape.T, *boxes.offset.T, boxes.tensor]
    order = np.lexsort(columns)
    fresh = np.zeros(len(order), dtype=bool)
    fresh[:1] = True
    for column in columns:
        fresh[1:] |= column[order[1:]] != column[order[:-1]]
    which = np.empty(len(order), np.int64)
    which[order] = np.cumsum(fresh) - 1
    return boxes.take(order[fresh]), which


def _disjoint_pieces(universe: Universe, sources: Sequence[Boxes]) -> tuple[Boxes, _Holding]:
    """Disjoint boxes that cover every tensor, each with the ranks that hold all of it.

    Raises LayoutError naming every tensor of which some element is held by nobody.
    """
    stated = Boxes.concatenate(list(sources), universe.dims)
    rank = np.repeat(np.arange(len(sources)), [len(s) for s in sources])
    boxes, which = _unique_boxes(stated)
    holders = _Holding.group(which, rank, len(boxes))
    grid = Grid.cut(universe.shapes, edges_of(boxes))
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
    return pieces, _Holding.group(item, by, len(pieces))
