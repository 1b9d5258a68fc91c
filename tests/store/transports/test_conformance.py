"""What every transport does, whatever carries the bytes."""

from __future__ import annotations

import itertools
import os
import random
import re
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weightdepot.store.errors import InvalidRequest, SourceLost, WaitTimeout
from weightdepot.store.segments import Segment
from weightdepot.store.transports.base import ALIGNMENT, Range, Source
from weightdepot.store.transports.memory import MemoryTransport
from weightdepot.store.transports.shm import ShmTransport

from .conftest import MIB, Kind, Served, content, read_all, soon


def check(source: Source, expected: torch.Tensor, ranges: list[Range]) -> None:
    got = read_all(source, ranges)
    assert sorted(got) == list(range(len(ranges)))
    for index, wanted in enumerate(ranges):
        assert torch.equal(got[index], expected[wanted.offset : wanted.stop]), wanted


def test_every_range_arrives_once_with_exactly_its_bytes(served: Served) -> None:
    whole = served.content.numel()
    chosen = random.Random(7)
    offsets = [chosen.randrange(whole - 300) for _ in range(1500)]
    with served.reach() as source:
        for ranges in (
            [],
            [Range(0, whole)],
            [Range(0, 0), Range(whole, 0), Range(whole - 1, 1), Range(0, 1)],
            [Range(5, 100), Range(5, 100), Range(50, 100), Range(0, whole)],  # twice, overlapping, within
            [Range(i, 1) for i in range(200, 0, -1)],
            [Range(o, chosen.randrange(300)) for o in offsets],
            [Range(i * 65536 + 3, 65536) for i in range(16)],
        ):
            check(source, served.content, ranges)


def test_what_arrives_can_be_viewed_as_the_dtype_that_its_offset_is_aligned_for(served: Served) -> None:
    ranges = [Range(o, 64) for o in (64, 4096 + 8, 30000 + 4, 100002, 500000 + 16)]
    with served.reach() as source:
        for index, memory in source.fetch(ranges, soon()):
            wanted = ranges[index]
            assert (memory.data_ptr() - wanted.offset) % ALIGNMENT == 0
            for dtype in (torch.int64, torch.float32, torch.bfloat16):
                if wanted.offset % dtype.itemsize == 0:
                    assert memory.view(dtype).numel() == 64 // dtype.itemsize


def test_case_02_every_byte_value_relayed_over_three_hops_arrives_equal(kind: Kind, served: Served) -> None:
    values = torch.arange(256, dtype=torch.uint8).repeat(1024)
    segments = [Segment.create(values.numel(), "relay", f"{os.getpid()}") for _ in range(4)]
    try:
        segments[0].tensor.copy_(values)
        for before, after in itertools.pairwise(segments):
            with kind.transport() as holder, kind.transport() as reader:
                endpoint = holder.serve(before)
                ranges = [Range(o, 4097) for o in range(0, values.numel() - 4097, 4097)]
                ranges.append(Range(ranges[-1].stop, values.numel() - ranges[-1].stop))
                with reader.reach(endpoint, values.numel()) as source:
                    for index, memory in source.fetch(ranges, soon()):
                        after.tensor[ranges[index].offset : ranges[index].stop].copy_(memory)
        assert torch.equal(segments[-1].tensor, values)
    finally:
        for segment in segments:
            segment.close()


@pytest.mark.parametrize(
    "bad", [Range(-1, 4), Range(0, -1), Range(MIB + 77, 1), Range(MIB, 78), Range(1 << 60, 1)]
)
def test_a_range_outside_the_segment_is_refused_and_named(served: Served, bad: Range) -> None:
    with served.reach() as source:
        with pytest.raises(InvalidRequest, match=re.escape(f"{bad.offset}+{bad.nbytes}")):
            list(source.fetch([Range(0, 1), bad], soon()))
        check(source, served.content, [Range(3, 9)])


def test_more_than_the_segment_holds_is_refused_at_once(served: Served) -> None:
    with pytest.raises(InvalidRequest, match="bytes"):
        served.reader.reach(served.endpoint, served.content.numel() + 1)


def test_an_endpoint_of_another_kind_is_refused_and_not_followed(served: Served) -> None:
    for endpoint in (
        {},
        {"key": 3},
        {**served.endpoint, "nbytes": "many"},
        {"session": "x", "file": "/etc/passwd"},
    ):
        with pytest.raises(InvalidRequest):
            served.reader.reach(endpoint, 1)


def test_a_deadline_in_the_past_is_a_timeout_and_the_source_stays_usable(served: Served) -> None:
    with served.reach() as source:
        with pytest.raises(WaitTimeout, match="0 of 1 ranges"):
            list(source.fetch([Range(0, 64)], time.monotonic() - 1))
        check(source, served.content, [Range(0, 64)])


def test_an_iterator_may_be_left_half_way(served: Served) -> None:
    with served.reach() as source:
        for _ in range(3):
            for _, memory in source.fetch([Range(i * 1024, 1024) for i in range(1024)], soon()):
                assert memory.numel() == 1024
                break
        check(source, served.content, [Range(7, 1000)])


def test_threads_may_read_from_one_source_at_a_time(served: Served) -> None:
    failures: list[BaseException] = []
    source = served.reach()

    def read(seed: int) -> None:
        try:
            chosen = random.Random(seed)
            check(source, served.content, [Range(chosen.randrange(MIB), 77) for _ in range(50)])
        except BaseException as error:  # noqa: BLE001 - reported by the test itself
            failures.append(error)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    source.close()
    assert failures == []


def test_closing_twice_is_allowed_and_reading_afterwards_is_not(served: Served) -> None:
    source = served.reach()
    source.close()
    source.close()
    with pytest.raises(InvalidRequest, match="closed"):
        list(source.fetch([Range(0, 1)], soon()))
    served.reader.close()
    served.reader.close()
    with pytest.raises(InvalidRequest, match="closed"):
        served.reach()


@pytest.mark.parametrize("file", ["../../etc/passwd", "/etc/passwd", "passwd", "weightdepot-a/../../x"])
def test_shm_an_endpoint_cannot_make_a_reader_map_another_file(file: str) -> None:
    with ShmTransport() as transport, Segment.create(64, "test", f"{os.getpid()}") as segment:
        endpoint = {**transport.serve(segment), "file": file}
        with pytest.raises(InvalidRequest, match="not the name of a segment"):
            transport.reach(endpoint, 64)


def test_shm_mappings_are_shared_and_let_go_when_their_file_is_gone_and_nobody_reads() -> None:
    with ShmTransport() as transport, Segment.create(8192, "test", f"{os.getpid()}") as segment:
        endpoint = transport.serve(segment)
        first, second = transport.reach(endpoint, 8192), transport.reach(endpoint, 100)
        assert next(first.fetch([Range(0, 1)], soon()))[1].data_ptr() == (
            next(second.fetch([Range(0, 1)], soon()))[1].data_ptr()
        )
        first.close()
        with transport.reach(endpoint, 8192) as again:
            assert read_all(again, [Range(0, 8192)])[0].numel() == 8192
        segment.close()
        assert len(transport._mapped) == 1, "the second still reads"
        second.close()
        assert len(transport._mapped) == 0


@pytest.fixture
def local(kind: Kind) -> Kind:
    if kind.remote:
        pytest.skip("the same as with both sides in one process")
    return kind


def test_an_empty_segment_is_served_and_read(local: Kind) -> None:
    with local.transport() as transport, Segment.create(0, "test", f"{os.getpid()}") as segment:
        source = transport.reach(transport.serve(segment), 0)
        assert read_all(source, []) == {}
        assert read_all(source, [Range(0, 0)])[0].numel() == 0


def test_a_segment_served_twice_has_one_endpoint_and_one_withdrawn_twice_is_gone(local: Kind) -> None:
    with local.transport() as server, local.transport() as reader:
        segment = Segment.create(4096, "test", f"{os.getpid()}")
        endpoint = server.serve(segment)
        assert server.serve(segment) == endpoint
        server.withdraw(segment)
        server.withdraw(segment)
        segment.close()
        with pytest.raises(SourceLost), reader.reach(endpoint, 4096) as source:
            list(source.fetch([Range(0, 1)], soon()))


def test_segments_served_one_after_the_other_are_told_apart(local: Kind) -> None:
    with local.transport() as server, local.transport() as reader:
        for value in range(3):
            with Segment.create(8192, "test", f"{os.getpid()}") as segment:
                segment.tensor.fill_(value)
                with reader.reach(server.serve(segment), 8192) as source:
                    got = read_all(source, [Range(0, 8192)])[0]
                assert bool((got == value).all())
                server.withdraw(segment)


@pytest.fixture(scope="module", params=["memory", "shm"])
def quick(request: pytest.FixtureRequest) -> Iterator[tuple[Source, torch.Tensor]]:
    with Segment.create(5000, "test", f"{os.getpid()}") as segment:
        segment.tensor.copy_(content(5000, 3))
        transport = ShmTransport() if request.param == "shm" else MemoryTransport()
        with transport, transport.reach(transport.serve(segment), 5000) as source:
            yield source, content(5000, 3)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ranges=st.lists(
        st.integers(0, 5000).flatmap(lambda o: st.builds(Range, st.just(o), st.integers(0, 5000 - o)))
    )
)
def test_any_ranges_arrive(quick: tuple[Source, torch.Tensor], ranges: list[Range]) -> None:
    check(*quick, ranges)
