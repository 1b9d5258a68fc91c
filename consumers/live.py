"""Reading a part in place: straight from the trainer's parameters into this rank's, in one pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from weightdepot.store.dtypes import ITEMSIZE
from weightdepot.store.errors import LeaseLost, SourceLost, TransportUnavailable, WaitTimeout
from weightdepot.store.index.records import Part
from weightdepot.store.layout import Ints, Layout
from weightdepot.store.live import ENDPOINT, WORD_NBYTES, LiveEndpoint, TileTable, word_of
from weightdepot.store.moving import FromMemory
from weightdepot.store.overlap import widen
from weightdepot.store.planning import Copies, Plan
from weightdepot.store.remembered import Remembered
from weightdepot.store.transports.base import Range
from weightdepot.store.transports.select import Transports

AT_ONCE = 32 << 20  # bytes between two looks at the clock and the trainer's word


def is_live(part: Part) -> bool:
    return ENDPOINT in part.endpoints


def read_live(
    *,
    part: Part,
    plan: Plan,
    layout: Layout,
    buffers: Mapping[str, torch.Tensor],
    transports: Transports,
    deadline: float,
    model: str,
    version: int,
    on_write: Callable[[], None],
    on_moved: Callable[[int], object],
) -> int:
    """Copy what the plan reads from this part into the buffers; the bytes that it moved.

    on_write: called before the first byte is written. on_moved: after every few bytes, with their number.
    deadline: of the monotonic clock.

    There are no digests: what was copied is whole if the trainer had not taken its weights back when the last
    byte was read, which it says itself. Raises LeaseLost when it had, TransportUnavailable where this process
    shares no memory with the trainer, SourceLost (its details name the rank), WaitTimeout. Once `on_write`
    was called, the buffers may then hold anything.
    """
    endpoint = LiveEndpoint.from_plain(part.endpoints[ENDPOINT])
    with ExitStack() as stack:

        def mapped(where: Mapping[str, object], nbytes: int | None = None) -> torch.Tensor:
            size = where.get("nbytes") if nbytes is None else nbytes
            try:
                source = stack.enter_context(transports.reach({"shm": where}, int(str(size))))
            except TransportUnavailable as error:
                raise TransportUnavailable(
                    f"version {version} of {model!r} is read in place, from the memory of producer rank "
                    f"{part.rank}, and this reader has no shared memory with it: put the reader on the same "
                    f"host (and let containers share /dev/shm), or make the producer without zero_copy "
                    f"({error.message})",
                    model=model,
                    version=version,
                    rank=part.rank,
                ) from error
            except SourceLost as error:
                raise SourceLost(
                    f"rank {part.rank} of version {version} of {model!r} cannot be read: {error.message}",
                    **{**error.details, "model": model, "version": version, "rank": part.rank},
                ) from error
            ((_, memory),) = source.fetch([Range(0, source.nbytes)], deadline)
            return memory

        word = mapped(endpoint.word, WORD_NBYTES)

        def check() -> None:
            if word_of(word) != endpoint.number:
                raise LeaseLost(
                    f"the trainer has taken back version {version} of {model!r}, which was read in place: "
                    f"what was read is discarded; call update again for the next one",
                    model=model,
                    version=version,
                    rank=part.rank,
                )

        check()
        batches = _batches(plan, part.rank, endpoint, layout, lambda: mapped(endpoint.table))
        weights = mapped(endpoint.weights)
        moved = 0
        on_write()
        for batch in batches:
            if time.monotonic() > deadline:
                raise WaitTimeout(
                    f"rank {part.rank} of version {version} of {model!r} was not read in time", model=model
                )
            check()
            batch.copy(buffers, weights)
            moved += batch.nbytes
            on_moved(batch.nbytes)
        check()
        return moved


@dataclass(frozen=True)
class _Batch:
    copy: FromMemory  # out of the live weights
    nbytes: int


_known: Remembered[Plan, dict[tuple[int, str], list[_Batch]]] = Remembered()


def _batches(
    plan: Plan, rank: int, endpoint: LiveEndpoint, layout: Layout, table: Callable[[], torch.Tensor]
) -> list[_Batch]:
    """Made once for each plan and table: these change with who reads and publishes, not with versions."""
    kept = _known.of(plan, dict)
    key = rank, f"{endpoint.table.get('file')}/{endpoint.table.get('inode')}"
    found = kept.get(key)
    if found is None:
        found = _make_batches(plan, rank, layout, TileTable.from_bytes(bytes(table().numpy())))
        for old in [k for k in kept if k[0] == rank]:
            del kept[old]
        kept[key] = found
    return found


def _make_batches(plan: Plan, rank: int, layout: Layout, table: TileTable) -> list[_Batch]:
    copies = plan.copies
    rows = np.flatnonzero(plan.source[copies.tile] == rank)
    read = copies.tile[rows]
    tile = plan.index[read]
    shape, within = copies.shape[rows], copies.tile_strides[rows]
    strides = widen(table.strides, shape.shape[1], 0)[tile]
    # where the region begins within its tile, as one coordinate for each dimension
    rest = copies.tile_start[rows].copy()
    begin: Ints = np.zeros_like(shape)
    for dim in range(shape.shape[1]):
        step = np.maximum(within[:, dim], 1)
        begin[:, dim], rest = rest // step, rest % step
    stated = {t.name: t.dtype for t in layout.tensors}
    dtypes = [stated[plan.tensors[t]] for t in plan.tensor[read].tolist()]
    sizes: Ints = np.array([ITEMSIZE[d] for d in dtypes], dtype=np.int64)
    at = table.start[tile] // sizes + (begin * strides).sum(axis=1)
    nbytes = shape.prod(axis=1) * sizes
    found = Copies(
        tile=np.zeros(len(rows), dtype=np.int64),  # all of them in the one memory that the weights are
        tile_start=at,
        tile_strides=strides,
        shape=shape,
        buffer=copies.buffer[rows],
        start=copies.start[rows],
        strides=copies.strides[rows],
    )
    cuts = np.flatnonzero(np.diff((np.cumsum(nbytes) - nbytes) // AT_ONCE)) + 1
    edges = [0, *cuts.tolist(), len(rows)]
    return [
        _Batch(
            FromMemory(found.take(slice(first, stop)), layout, dtypes[first:stop]),
            int(nbytes[first:stop].sum()),
        )
        for first, stop in pairwise(edges)
        if stop > first
    ]
