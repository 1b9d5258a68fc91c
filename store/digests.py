"""Digests of tiles: xxh3-64 of each, xxh3-128 over them all. They find accidents, not forgers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from weightdepot.store.errors import InvalidRequest


def digest_tiles(
    memory: torch.Tensor,
    offsets: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    threads: int = 1,
) -> npt.NDArray[np.uint64]:
    """xxh3-64 of bytes `offsets[i]` to `offsets[i] + sizes[i]` (exclusive) of `memory`, for each i.

    memory: uint8, in host memory, contiguous; read in place. offsets, sizes: bytes, of one length.
    threads: share the tiles among them by bytes; hashing releases the GIL. A tile is never split.
    Raises InvalidRequest when a tile is not within the memory.
    """
    if memory.dtype != torch.uint8 or memory.device.type != "cpu" or not memory.is_contiguous():
        raise InvalidRequest(
            f"digests are taken of contiguous uint8 in host memory, not of {memory.dtype} on {memory.device}"
        )
    if offsets.shape != sizes.shape or offsets.ndim != 1:
        raise InvalidRequest(f"offsets {offsets.shape} and sizes {sizes.shape} do not belong together")
    stops = offsets + sizes
    bad = np.flatnonzero((offsets < 0) | (sizes < 0) | (stops > memory.numel()))
    if bad.size:
        i = int(bad[0])
        raise InvalidRequest(
            f"{bad.size} tiles are outside the {memory.numel()} bytes of memory, the first is number {i}: "
            f"{offsets[i]}+{sizes[i]} (offset+bytes)"
        )
    digests = np.empty(len(offsets), dtype=np.uint64)
    flat = memoryview(memory.reshape(-1).numpy())  # type: ignore[arg-type]  # numpy 1's arrays are buffers too
    starts, ends = offsets.tolist(), stops.tolist()

    def run(first: int, last: int) -> None:
        for i in range(first, last):
            digests[i] = xxhash.xxh3_64_intdigest(flat[starts[i] : ends[i]])

    shares = list(_shares(sizes, max(1, threads)))
    if len(shares) <= 1:
        run(0, len(starts))
        return digests
    with ThreadPoolExecutor(len(shares), thread_name_prefix="weightdepot-digest") as pool:
        for share in [pool.submit(run, first, last) for first, last in shares]:
            share.result()
    return digests


def digests_of(memory: torch.Tensor, starts: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """As `digest_tiles`, for a few tiles at a time whose places are known to be right: without its checks and
    arrays, which would cost as much as hashing a small tile does."""
    flat = memoryview(memory.numpy())  # type: ignore[arg-type]  # numpy 1's arrays are buffers too
    return [xxhash.xxh3_64_intdigest(flat[a : a + n]) for a, n in zip(starts, sizes, strict=True)]


def combine(digests: npt.NDArray[np.uint64]) -> str:
    """Hex xxh3-128 over the digests in their order; the same on machines of either byte order."""
    return xxhash.xxh3_128_hexdigest(digests.astype("<u8", copy=False).tobytes())


def _shares(sizes: npt.NDArray[np.int64], count: int) -> Iterator[tuple[int, int]]:
    """Runs of tiles of about equal bytes, at most `count`."""
    # A tile costs about as much as hashing this many bytes, however small it is.
    cost = np.cumsum(sizes + 4096)
    if not len(cost):
        return
    cuts = np.searchsorted(cost, cost[-1] * np.arange(1, count) / count)
    edges = np.unique(np.concatenate(([0], cuts, [len(sizes)])))
    yield from zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
