"""Digests are those of the bytes, whatever the threads, and say what is out of place."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from weightdepot.store.digests import combine, digest_tiles
from weightdepot.store.errors import InvalidRequest

MEMORY = torch.from_numpy(np.random.default_rng(1).integers(0, 256, 10_000, dtype=np.uint8))
tiles = st.lists(st.integers(0, 10_000).flatmap(lambda o: st.tuples(st.just(o), st.integers(0, 10_000 - o))))


def columns(pairs: list[tuple[int, int]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


@given(tiles, st.integers(1, 5))
def test_each_digest_is_xxh3_64_of_its_bytes_with_any_number_of_threads(
    pairs: list[tuple[int, int]], threads: int
) -> None:
    got = digest_tiles(MEMORY, *columns(pairs), threads=threads)
    assert got.dtype == np.uint64
    assert got.tolist() == [xxhash.xxh3_64_intdigest(bytes(MEMORY[o : o + n].tolist())) for o, n in pairs]


def test_one_changed_byte_changes_the_digest_of_its_tile_and_the_combined_one_and_no_other() -> None:
    offsets, sizes = columns([(0, 4000), (4000, 4000), (8000, 2000)])
    before = digest_tiles(MEMORY, offsets, sizes)
    torn = MEMORY.clone()
    torn[5000] ^= 1
    after = digest_tiles(torn, offsets, sizes)
    assert (before != after).tolist() == [False, True, False]
    assert combine(before) != combine(after)


def test_combined_digests_depend_on_the_order_and_are_32_hex_digits() -> None:
    digests = np.array([1, 2, 3], dtype=np.uint64)
    assert combine(digests) == xxhash.xxh3_128_hexdigest(digests.tobytes())
    assert combine(digests) == combine(digests.astype(">u8"))
    assert combine(digests) != combine(digests[::-1])
    assert len(combine(digests)) == 32
    assert combine(np.empty(0, dtype=np.uint64)) == xxhash.xxh3_128_hexdigest(b"")


@pytest.mark.parametrize("bad", [(-1, 5), (0, -5), (9_999, 2), (10_001, 0)])
def test_tiles_outside_the_memory_are_refused_with_the_first_of_them(bad: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequest, match=r"1 tiles .* number 1"):
        digest_tiles(MEMORY, *columns([(0, 1), bad]))


def test_memory_that_cannot_be_read_in_place_is_refused() -> None:
    for memory in (MEMORY[::2], MEMORY.view(torch.int16), torch.empty(4, dtype=torch.uint8, device="meta")):
        with pytest.raises(InvalidRequest, match="contiguous uint8"):
            digest_tiles(memory, *columns([(0, 1)]))
    with pytest.raises(InvalidRequest, match="do not belong together"):
        digest_tiles(MEMORY, np.zeros(2, np.int64), np.zeros(3, np.int64))
