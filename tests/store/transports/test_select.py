"""Which transport is chosen, and what is said when none will do."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from weightdepot.store.errors import InvalidRequest, SourceLost, TransportUnavailable
from weightdepot.store.segments import Segment
from weightdepot.store.transports.base import Range
from weightdepot.store.transports.memory import MemoryTransport
from weightdepot.store.transports.mooncake import engines
from weightdepot.store.transports.select import Allowed, Transports

from .conftest import content, read_all


@pytest.fixture
def segment() -> Iterator[Segment]:
    with Segment.create(5000, "test", f"{os.getpid()}") as made:
        made.tensor.copy_(content(5000, 1))
        yield made


@pytest.mark.mooncake
@pytest.mark.parametrize(
    ("allowed", "used"),
    [("auto", "shm"), ("shm", "shm"), ("tcp", "tcp"), ("mooncake", "mooncake/")],
    ids=["auto", "shm", "tcp", "mooncake"],
)
def test_the_best_allowed_transport_carries_it(segment: Segment, allowed: Allowed, used: str) -> None:
    # a protocol that is asked for by name brings the engine in, also where there is no device for RDMA
    with (
        Transports("auto", host="127.0.0.1", protocol="tcp") as server,
        Transports(allowed, host="127.0.0.1") as reader,
    ):
        endpoints = server.serve(segment)
        assert sorted(endpoints) == ["mooncake", "shm", "tcp"]
        with reader.reach(endpoints, 5000) as source:
            assert source.transport.startswith(used)
            assert torch.equal(read_all(source, [Range(0, 5000)])[0], segment.tensor)
        server.withdraw(segment)


@pytest.mark.skipif(bool(engines.rdma_devices()), reason="has a device")
def test_from_another_host_and_without_rdma_sockets_carry_it(segment: Segment) -> None:
    with Transports("auto", host="127.0.0.1") as server, Transports("auto", host="127.0.0.1") as reader:
        endpoints = server.serve(segment)
        assert sorted(endpoints) == ["shm", "tcp"]
        assert "RDMA" in server.unavailable["mooncake"]
        endpoints["shm"] = {**endpoints["shm"], "domain": "another host's"}
        with reader.reach(endpoints, 5000) as source:
            assert source.transport == "tcp"
            assert torch.equal(read_all(source, [Range(0, 5000)])[0], segment.tensor)


def test_forced_and_impossible_says_every_reason(segment: Segment) -> None:
    with Transports("shm") as server, Transports("shm") as reader:
        endpoints = server.serve(segment)
        assert list(endpoints) == ["shm"]
        endpoints["shm"]["domain"] = "another host's"
        with pytest.raises(TransportUnavailable, match=r"shm: .*another host"):
            reader.reach(endpoints, 5000)
    without = pytest.raises(TransportUnavailable, match="mooncake: the peer does not serve over it")
    with Transports("mooncake") as reader, without as caught:
        reader.reach(endpoints, 5000)
    assert list(caught.value.details["reasons"]) == ["mooncake"]


def test_a_segment_known_to_be_gone_is_lost_and_not_unavailable() -> None:
    with Transports("shm") as server, Transports("shm") as reader:
        with Segment.create(5000, "test", f"{os.getpid()}") as segment:
            endpoints = server.serve(segment)
        with pytest.raises(SourceLost, match="gone"):
            reader.reach(endpoints, 5000)


def test_without_the_engine_auto_serves_over_the_others_and_says_why_not_over_it(
    segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    with Transports("auto", protocol="tcp") as server:
        assert list(server.serve(segment)) == ["shm", "tcp"]
        assert "not installed" in server.unavailable["mooncake"]
    with Transports("mooncake") as server, pytest.raises(TransportUnavailable, match="not installed"):
        server.serve(segment)


@pytest.mark.skipif(bool(engines.rdma_devices()), reason="has a device")
def test_rdma_where_there_is_none_fails_when_forced_and_is_noted_in_auto(segment: Segment) -> None:
    with pytest.raises(TransportUnavailable, match="no device"):
        Transports("mooncake", protocol="rdma")
    with Transports("auto", protocol="rdma") as server:
        assert list(server.serve(segment)) == ["shm", "tcp"]
        assert "no device" in server.unavailable["mooncake"]


def test_other_transports_can_be_given_and_unknown_names_are_refused(segment: Segment) -> None:
    with Transports(transports=[MemoryTransport()]) as both, both.reach(both.serve(segment), 5000) as source:
        assert source.transport == "memory"
    with pytest.raises(InvalidRequest, match="no such transport"):
        Transports("carrier pigeon")  # type: ignore[arg-type]


def test_a_segment_of_another_directory_is_not_offered_over_shared_memory(tmp_path: Path) -> None:
    with Segment.create(10, "test", "s", directory=tmp_path) as segment, Transports("shm") as server:
        with pytest.raises(TransportUnavailable, match="does not lie in"):
            server.serve(segment)
        with Transports("shm", directory=tmp_path) as right:
            assert list(right.serve(segment)) == ["shm"]


def test_what_a_read_takes_is_predicted_from_earlier_ones_over_the_same_transport() -> None:
    with Transports(transports=[MemoryTransport()]) as transports:
        assert transports.predict("memory", 1 << 30) is None
        transports.observed("memory", 1000, 1.0)  # too little to tell anything
        assert transports.predict("memory", 1 << 30) is None
        transports.observed("memory", 1 << 30, 2.0)
        assert transports.predict("memory", 1 << 29) == 1.0
        assert transports.predict("tcp", 1 << 29) is None
        transports.observed("memory", 3 << 30, 2.0)
        assert transports.predict("memory", 1 << 30) == 1.0
