"""What is Mooncake's own: how it starts, what it cannot do, and who may write."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from weightdepot.store.errors import TransportUnavailable, WaitTimeout
from weightdepot.store.hosts import default_host
from weightdepot.store.segments import Segment
from weightdepot.store.transports.base import Range
from weightdepot.store.transports.mooncake import engines
from weightdepot.store.transports.mooncake.lanes import LanePool
from weightdepot.store.transports.mooncake.transport import MooncakeTransport

from .conftest import MIB, content, read_all, soon


@pytest.fixture
def segment() -> Iterator[Segment]:
    with Segment.create(MIB, "test", f"{os.getpid()}") as made:
        made.tensor.copy_(content(MIB, 1))
        yield made


def test_an_engine_that_is_not_installed_is_unavailable_and_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, segment: Segment
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    with MooncakeTransport(host="127.0.0.1") as transport:
        for _ in range(2):
            with pytest.raises(TransportUnavailable, match=r"weightdepot\[mooncake-cpu\].*libibverbs1"):
                transport.serve(segment)


def test_missing_system_libraries_are_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, segment: Segment
) -> None:
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "engine.py").write_text("raise ImportError('libibverbs.so.1: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with MooncakeTransport(host="127.0.0.1") as transport:
        with pytest.raises(TransportUnavailable, match=r"libibverbs.so.1.*apt install"):
            transport.serve(segment)
        endpoint = {
            "session": "127.0.0.1:9", "protocol": transport.protocol, "generation": "00" * 32,
            "card": 0, "base": 0, "nbytes": 1,
        }  # fmt: skip
        start = time.monotonic()
        for _ in range(50):  # found out once
            with pytest.raises(TransportUnavailable, match="libibverbs"):
                transport.reach(endpoint, 1)
        assert time.monotonic() - start < 3


@pytest.mark.mooncake
def test_the_engines_own_log_setting_that_aborts_it_is_refused_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, segment: Segment
) -> None:
    monkeypatch.setenv("MC_LOG_DIR", "/tmp")
    with MooncakeTransport() as transport, pytest.raises(TransportUnavailable, match="MC_LOG_DIR"):
        transport.serve(segment)


@pytest.mark.skipif(bool(engines.rdma_devices()), reason="has a device")
def test_rdma_without_a_device_is_refused_and_auto_is_tcp() -> None:
    with pytest.raises(TransportUnavailable, match="no device"):
        MooncakeTransport(protocol="rdma")
    with MooncakeTransport() as transport:
        assert transport.protocol == "tcp"


def test_a_peer_that_serves_over_the_other_protocol_is_unreachable_with_the_reason() -> None:
    endpoint = {
        "session": "127.0.0.1:9", "protocol": "rdma", "generation": "00" * 32,
        "card": 0, "base": 0, "nbytes": 1,
    }  # fmt: skip
    refused = pytest.raises(TransportUnavailable, match="serves over rdma")
    with MooncakeTransport(protocol="tcp") as transport, refused:
        transport.reach(endpoint, 1)


@pytest.mark.mooncake
def test_the_transport_in_use_is_reported_and_our_process_does_not_load_the_engine(segment: Segment) -> None:
    with (
        MooncakeTransport(protocol="tcp") as transport,
        transport.reach(transport.serve(segment), MIB) as source,
    ):
        assert source.transport == "mooncake/tcp"
        read_all(source, [Range(0, 5)])
    assert "mooncake.engine" not in sys.modules


@pytest.mark.mooncake
def test_close_is_quick_and_leaves_no_process(segment: Segment) -> None:
    transport = MooncakeTransport()
    with transport.reach(transport.serve(segment), MIB) as source:
        read_all(source, [Range(0, 5)])
    pids = [pid for group in transport.pids.values() for pid in group]
    assert len(pids) == 2
    start = time.monotonic()
    transport.close()
    transport.close()
    assert time.monotonic() - start < 1
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.mooncake
def test_a_range_longer_than_the_staging_memory_arrives_whole(segment: Segment) -> None:
    ranges = [Range(1, MIB - 1), Range(0, 10), Range(3, 9000), Range(5000, 4096)]
    with MooncakeTransport(host="127.0.0.1", batch_bytes=4096) as transport:
        source = transport.reach(transport.serve(segment), MIB)
        for _ in range(2):
            got = read_all(source, ranges)
            for index, wanted in enumerate(ranges):
                assert torch.equal(got[index], segment.tensor[wanted.offset : wanted.stop])


WRITE = """
import ctypes, sys
from mooncake.engine import TransferEngine
session, address = sys.argv[1], int(sys.argv[2])
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
bytes_ = (ctypes.c_ubyte * 65536)(*[0] * 65536)
print(engine.transfer_sync_write(session, ctypes.addressof(bytes_), address, 65536), flush=True)
import os; os._exit(0)
"""


@pytest.mark.mooncake
def test_over_tcp_nobody_can_overwrite_what_is_served(segment: Segment) -> None:
    """The bare engine lets whoever reaches its port write; the serving process maps segments read-only."""
    with MooncakeTransport(host="127.0.0.1", protocol="tcp") as transport:
        endpoint = transport.serve(segment)
        done = subprocess.run(
            [sys.executable, "-c", WRITE, endpoint["session"], str(endpoint["base"])],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "MC_FORCE_TCP": "1", "MC_TRANSFER_TIMEOUT": "5"},
            check=False,
        )
        assert done.stdout.strip() not in ("", "0"), done.stderr
        assert torch.equal(segment.tensor, content(MIB, 1))
        with transport.reach(endpoint, MIB) as source:  # and it still serves
            assert torch.equal(read_all(source, [Range(0, MIB)])[0], segment.tensor)


@pytest.mark.mooncake
def test_lanes_are_limited_used_again_and_waited_for_no_longer_than_the_deadline() -> None:
    pool = LanePool("127.0.0.1", "tcp", 4096, limit=2, hard_limit=2)
    try:
        first, second = pool.acquire(soon()), pool.acquire(soon())
        start = time.monotonic()
        with pytest.raises(WaitTimeout, match="2 are reading"):
            pool.acquire(time.monotonic() + 0.3)
        assert 0.2 < time.monotonic() - start < 2
        pool.release(first, usable=True)
        assert pool.acquire(soon()) is first
        pool.release(second, usable=False)
        assert not second.engine.alive
        third = pool.acquire(soon())
        assert third is not second
    finally:
        pool.close()
    for lane in (first, third):  # they were lent when it closed
        pool.release(lane, usable=True)
        assert not lane.engine.alive
    with pytest.raises(TransportUnavailable, match="closed"):
        pool.acquire(soon())
    assert pool.pids == []


def test_the_default_host_is_an_address_of_this_machine() -> None:
    host = default_host()
    assert host.count(".") == 3
    assert not host.startswith("0.")
