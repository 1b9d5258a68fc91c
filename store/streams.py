"""Copies between memories of this host, byte for byte and faster than torch's: what drives `_streams.c`.

torch copies one tile at a time, with stores that first read the lines that they overwrite. Here tiles that
are cut from the same rows are copied row by row, as those lie in memory, and lines are written without being
read. Where the extension was not built `available` says so, and callers leave all of it to torch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from weightdepot.store.layout import Ints

try:
    from weightdepot.store import _streams
except ImportError:  # there was no compiler
    _streams = None  # type: ignore[assignment]

SHORTEST = 64  # bytes; copies in shorter pieces (of transposed tensors, mostly) are better left to torch
SHARE = 16 << 20  # bytes for which one more thread is worth starting


def available() -> bool:
    return _streams is not None


def ordinary(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether what these hold is what lies in their memory, and that is this host's."""
    return all(
        type(t).__torch_dispatch__ is torch.Tensor.__torch_dispatch__  # no wrapper around others
        and t.device.type == "cpu"
        and t.layout is torch.strided
        and not t.is_conj()
        and not t.is_neg()
        for t in tensors
    )


class Memories:
    """Where some tensors lie, as long as somebody keeps them."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """tensors: `ordinary` ones."""
        self._first: Ints = np.array([t.data_ptr() for t in tensors], dtype=np.int64)
        self._room: Ints = np.array(
            [t.untyped_storage().nbytes() - t.storage_offset() * t.itemsize for t in tensors], dtype=np.int64
        )

    def at(self, tensor: Ints, start: Ints, reach: Ints) -> Ints:
        """Addresses of the bytes `start` of these tensors; `reach` bytes from there on are theirs.

        tensor, start, reach: (n,). Raises ValueError where they are not.
        """
        if ((start < 0) | (start + reach > self._room[tensor])).any():
            raise ValueError("a copy leads outside of the memory of its tensor")
        return self._first[tensor] + start


def written(tensors: Iterable[torch.Tensor]) -> None:
    """Let autograd know of what it has not seen, as if torch had copied."""
    tracked = [t for t in tensors if not t.is_inference()]
    if tracked:
        torch.autograd.graph.increment_version(tracked)


class Strided:
    """A table of copies as loops over contiguous pieces. Where they lead from and to is said each time."""

    def __init__(self, shape: Ints, itemsize: Ints, to: Ints, source: Ints) -> None:
        """shape: (n, D). itemsize: (n,) bytes. to, source: (n, D) strides in elements, 0 or more."""
        size = itemsize[:, None]
        # the loops may be in any order: the one that writes in the order of the memory
        order = np.argsort(np.where(shape == 1, np.iinfo(np.int64).min, -to), axis=1, kind="stable")
        shape, to, source = (np.take_along_axis(a, order, axis=1) for a in (shape, to * size, source * size))
        self.reach_to: Ints = ((shape - 1) * to).sum(axis=1) + itemsize
        self.reach_source: Ints = ((shape - 1) * source).sum(axis=1) + itemsize
        self.nbytes: Ints = shape.prod(axis=1) * itemsize
        piece = itemsize.copy()
        joined = np.ones(len(piece), dtype=bool)
        loops = shape.copy()
        for dim in range(shape.shape[1] - 1, -1, -1):
            joined &= (shape[:, dim] == 1) | ((to[:, dim] == piece) & (source[:, dim] == piece))
            piece = np.where(joined, piece * shape[:, dim], piece)
            loops[:, dim] = np.where(joined, 1, shape[:, dim])
        kept = np.flatnonzero((loops != 1).any(axis=0))
        self.piece: Ints = piece
        self._loops, self._to, self._source = (np.ascontiguousarray(a[:, kept]) for a in (loops, to, source))
        self._to[self._loops == 1] = self._source[self._loops == 1] = 0
        self._first: Ints = np.arange(len(piece) + 1, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.piece)

    @property
    def worth_it(self) -> npt.NDArray[np.bool_]:
        """(n,) which of them had better be carried out here than by torch."""
        return (self.piece >= SHORTEST) & available()

    def take(self, rows: Ints) -> Strided:
        taken = object.__new__(Strided)
        for name in ("reach_to", "reach_source", "nbytes", "piece", "_loops", "_to", "_source"):
            setattr(taken, name, np.ascontiguousarray(getattr(self, name)[rows]))
        taken._first = np.arange(len(rows) + 1, dtype=np.int64)
        return taken

    def by_rows(self, memory: Ints, start: Ints) -> tuple[Strided, Ints]:
        """The same, so ordered that what is cut from the same rows of a source is copied together, and which
        copy each was before.

        memory, start: (n,) which source each copies from, and from which byte on.
        """
        row = np.zeros(len(self), dtype=np.int64)  # the length of one, where there are several
        for dim in range(self._loops.shape[1]):
            row = np.where(self._loops[:, dim] > 1, self._source[:, dim], row)
        row = np.where(row > 0, start // np.maximum(row, 1), start)
        keys = np.column_stack([memory, row, self._loops, self._source])
        order = np.lexsort((start, *keys.T[::-1])).astype(np.int64)
        taken = self.take(order)
        apart = (np.diff(keys[order], axis=0) != 0).any(axis=1)
        taken._first = np.concatenate(([0], np.flatnonzero(apart) + 1, [len(order)])).astype(np.int64)
        return taken, order

    def copy(self, to: Ints, source: Ints, first: int = 0) -> None:
        """Carry out the copies from number `first` on, one for each pair of addresses.

        Of a table that is ordered `by_rows` they must be all. What they lead to must be there: see
        `Memories.at`. Large ones take torch's number of threads.
        """
        last = first + len(to)
        if first == last:
            return
        whole = len(to) == len(self)
        to, source = np.ascontiguousarray(to), np.ascontiguousarray(source)
        piece, loops = self.piece[first:last], self._loops[first:last]
        steps_to, steps_source = self._to[first:last], self._source[first:last]
        groups = self._first if whole else self._first[: len(to) + 1]
        parts = max(1, min(torch.get_num_threads(), int(self.nbytes[first:last].sum()) // SHARE))

        def carry_out(part: int) -> None:
            _streams.copy(
                _address(to), _address(source), _address(piece), _address(loops), _address(steps_to),
                _address(steps_source), _address(groups), len(groups) - 1, loops.shape[1], part, parts,
            )  # fmt: skip

        others = [threading.Thread(target=carry_out, args=(part,)) for part in range(1, parts)]
        for other in others:
            other.start()
        carry_out(0)
        for other in others:
            other.join()


def _address(column: npt.NDArray[np.int64]) -> int:
    assert column.dtype == np.int64
    assert column.flags.c_contiguous
    return int(column.ctypes.data)
