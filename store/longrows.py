"""Cutting a buffer into tiles by columns, row by row in the order of the buffer.

torch copies one tile at a time. Each then takes a piece out of every row, the processor sees gaps and
fetches nothing ahead, and copying takes a third longer than the bytes need. Where the pieces of all tiles
together are the whole of the memory, they are better handed out in the order in which they lie. numpy does
this with one call, by moving items of one size; it pays for pieces of 4 KiB and more, which the C library
moves without fetching first what it is about to overwrite.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weightdepot.store.dtypes import ITEMSIZE
from weightdepot.store.layout import Ints
from weightdepot.store.planning import Copies

SHORTEST = 4096  # bytes of a piece; below that it gains nothing (measured)
FEWEST = 8  # pieces that lie side by side, on average; below that the calls cost more than they gain


@dataclass(frozen=True)
class _Span:
    """Pieces of one size that lie side by side in a buffer."""

    buffer: int
    start: int  # byte, from the buffer's first element
    piece: int  # bytes
    step: int  # what `to` counts in, bytes
    to: Ints  # where in the slot each piece goes


class LongRows:
    """Those copies of a packing for which this way is the faster one."""

    def __init__(self, packing: Copies, at: Ints, dtypes: Sequence[str], candidates: Ints) -> None:
        """at: byte in the slot of the tile of each copy. dtypes: of each tile. candidates: the copies that do
        not cast. Every copy is of a whole tile."""
        groups: dict[tuple[int, int], list[tuple[int, Ints, Ints]]] = {}
        for i in candidates.tolist():
            size = ITEMSIZE[dtypes[i]]
            piece, starts = _pieces(packing.shape[i], packing.strides[i])
            if piece * size >= SHORTEST and len(starts) > 1:
                to = at[i] + np.arange(len(starts)) * (piece * size)
                source = (packing.start[i] + starts) * size
                groups.setdefault((int(packing.buffer[i]), piece * size), []).append((i, source, to))
        self._spans: list[_Span] = []
        chosen: list[int] = []
        for (buffer, piece), members in groups.items():
            found = _spans(buffer, piece, members)
            if found:
                self._spans += found
                chosen += [i for i, _, _ in members]
        self.copies: Ints = np.array(sorted(chosen), dtype=np.int64)

    def write(self, buffers: Sequence[torch.Tensor], slot: torch.Tensor) -> None:
        """Carry them out. buffers: in the order of the layout. slot: uint8. All in host memory."""
        if not self._spans:
            return
        memory = slot.numpy()
        for span in self._spans:
            buffer = buffers[span.buffer]
            kind = np.dtype((np.void, span.piece))
            # places overlap one another: only those at multiples of `step` are ever used, each once
            places = (memory.nbytes - span.piece) // span.step + 1
            slots = np.ndarray((places,), kind, buffer=memory, strides=(span.step,))
            count = len(span.to) * span.piece
            first = buffer.storage_offset() * buffer.itemsize + span.start
            storage = torch.empty(0, dtype=torch.uint8).set_(buffer.untyped_storage(), first, (count,), (1,))
            slots[span.to] = storage.numpy().view(kind)


def _pieces(shape: Ints, strides: Ints) -> tuple[int, Ints]:
    """How long the contiguous pieces of a region are, and where each begins, row-major; in elements."""
    kept = [(n, s) for n, s in zip(shape.tolist(), strides.tolist(), strict=True) if n != 1]
    piece = 1
    while kept and kept[-1][1] == piece:
        piece *= kept.pop()[0]
    starts = np.zeros(1, dtype=np.int64)
    for n, stride in kept:
        starts = (starts[:, None] + np.arange(n, dtype=np.int64) * stride).reshape(-1)
    return piece, starts


def _spans(buffer: int, piece: int, members: Sequence[tuple[int, Ints, Ints]]) -> list[_Span]:
    """The pieces of these copies in the order of the buffer; none when too few lie side by side."""
    source = np.concatenate([s for _, s, _ in members])
    to = np.concatenate([t for _, _, t in members])
    order = np.argsort(source, kind="stable")
    source, to = source[order], to[order]
    apart = np.flatnonzero(np.diff(source) != piece) + 1
    if len(source) < FEWEST * (len(apart) + 1):
        return []
    step = int(np.gcd.reduce(to, initial=piece))
    edges = [0, *apart.tolist(), len(source)]
    return [_Span(buffer, int(source[a]), piece, step, to[a:b] // step) for a, b in itertools.pairwise(edges)]
