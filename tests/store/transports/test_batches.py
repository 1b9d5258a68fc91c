"""The arithmetic of batches, against a copy by hand."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from weightdepot.store.transports.base import ALIGNMENT, Range
from weightdepot.store.transports.mooncake.batches import Entry, plan_batches, split

SIZE = 4000
SOURCE = torch.arange(SIZE, dtype=torch.int16)
ranges_of_size = st.lists(
    st.integers(0, SIZE).flatmap(lambda o: st.builds(Range, st.just(o), st.integers(0, min(700, SIZE - o)))),
    max_size=40,
)


@given(ranges_of_size, st.integers(1, 16), st.integers(1, 12))
def test_carrying_out_the_entries_puts_every_range_in_its_place(
    ranges: list[Range], units: int, max_entries: int
) -> None:
    capacity = units * ALIGNMENT
    seen = []
    for batch in plan_batches(ranges, capacity, max_entries):
        assert batch.nbytes <= capacity or len(batch.entries) == 1
        assert len(batch.entries) <= max_entries
        buffer = torch.full((batch.nbytes,), -1, dtype=torch.int16)
        for entry in split(batch.entries, capacity):
            assert 0 < entry.nbytes <= capacity
            target = buffer[entry.staging : entry.staging + entry.nbytes]
            assert target.numel() == entry.nbytes
            assert bool((target == -1).all()), "two reads write to one place"
            target.copy_(SOURCE[entry.source : entry.source + entry.nbytes])
        for place in batch.places:
            wanted = ranges[place.index]
            got = buffer[place.staging : place.staging + place.nbytes]
            assert torch.equal(got, SOURCE[wanted.offset : wanted.stop])
            assert (place.staging - wanted.offset) % ALIGNMENT == 0
            seen.append(place.index)
    assert sorted(seen) == [i for i, r in enumerate(ranges) if r.nbytes]


def test_ranges_that_touch_become_one_read_and_their_gaps_stay_below_the_alignment() -> None:
    touching = [Range(i * 100, 100) for i in range(10)]
    (batch,) = plan_batches(touching, 1 << 20, 999)
    assert batch.entries == (Entry(0, 0, 1000),)
    (batch,) = plan_batches([Range(0, 10), Range(10 + ALIGNMENT, 10)], 1 << 20, 999)
    assert [e.nbytes for e in batch.entries] == [10, 10]


@given(ranges_of_size)
def test_no_more_is_read_than_the_ranges_and_their_alignment_gaps(ranges: list[Range]) -> None:
    read = sum(e.nbytes for b in plan_batches(ranges, 1 << 20, 999) for e in b.entries)
    wanted = len({byte for r in ranges for byte in range(r.offset, r.stop)})
    assert wanted <= read <= wanted + ALIGNMENT * len(ranges)
