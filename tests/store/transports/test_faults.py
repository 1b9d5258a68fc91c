"""The wrapper does what its table says, and nothing else."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch

from weightdepot.store.errors import SourceLost, WaitTimeout
from weightdepot.store.segments import Segment
from weightdepot.store.transports.base import Range
from weightdepot.store.transports.faults import Fault, FaultyTransport
from weightdepot.store.transports.memory import MemoryTransport

from .conftest import soon

RANGES = [Range(i * 10, 10) for i in range(5)]


@pytest.fixture
def segment() -> Iterator[Segment]:
    with Segment.create(50, "test", f"{os.getpid()}") as made:
        made.tensor.copy_(torch.arange(50, dtype=torch.uint8))
        yield made


def read(
    segment: Segment, *faults: Fault, latency_s: float = 0.0, within: float = 5.0
) -> dict[int, list[int]]:
    with FaultyTransport(MemoryTransport(), *faults, latency_s=latency_s) as transport:
        source = transport.reach(transport.serve(segment), 50)
        return {i: memory.tolist() for i, memory in source.fetch(RANGES, soon(within))}


def test_without_faults_it_is_the_transport_inside(segment: Segment) -> None:
    assert read(segment) == {i: list(range(i * 10, i * 10 + 10)) for i in range(5)}


def test_corrupt_changes_one_byte_of_one_range_and_not_the_segment(segment: Segment) -> None:
    got = read(segment, Fault(2, "corrupt"))
    assert got[2] == [20 ^ 0xFF, *range(21, 30)]
    assert segment.tensor.tolist() == list(range(50))
    assert got[1] == list(range(10, 20))


def test_truncate_drop_and_call(segment: Segment) -> None:
    called: list[int] = []
    got = read(
        segment, Fault(0, "truncate"), Fault(1, "call", action=lambda: called.append(1)), Fault(3, "drop")
    )
    assert got == {0: list(range(9)), 1: list(range(10, 20)), 2: list(range(20, 30))}
    assert called == [1]


def test_fail_happens_once_and_names_the_peer(segment: Segment) -> None:
    with FaultyTransport(MemoryTransport(), Fault(1, "fail")) as transport:
        source = transport.reach(transport.serve(segment), 50)
        with pytest.raises(SourceLost, match=source.peer):
            list(source.fetch(RANGES, soon()))
        assert len(list(source.fetch(RANGES, soon()))) == 5
        assert transport.yielded == 7


def test_a_delay_past_the_deadline_is_a_timeout_at_the_deadline(segment: Segment) -> None:
    start = time.monotonic()
    with pytest.raises(WaitTimeout, match="2 of 5"):
        read(segment, Fault(2, "delay", seconds=30), within=0.2)
    assert time.monotonic() - start < 2
    start = time.monotonic()
    assert len(read(segment, latency_s=0.02)) == 5
    assert time.monotonic() - start >= 0.1
