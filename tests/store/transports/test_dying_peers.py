"""Peers that are killed, stopped, replaced, or were never there. Every wait is bounded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from weightdepot.store.errors import SourceLost, TransportUnavailable, WaitTimeout
from weightdepot.store.segments import Segment
from weightdepot.store.transports.base import Range
from weightdepot.store.transports.mooncake import lanes, transport
from weightdepot.store.transports.mooncake.transport import MooncakeTransport
from weightdepot.store.transports.shm import ShmTransport

from .conftest import MIB, Peer, read_all, soon

Peers = Callable[..., Peer]


def pieces(nbytes: int, of: int = 64 << 10) -> list[Range]:
    return [Range(o, of) for o in range(0, nbytes, of)]


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "RETRY_S", 0.3)


@pytest.fixture
def reader() -> Iterator[MooncakeTransport]:
    # Small batches, so that a fetch is many of them.
    with MooncakeTransport(host="127.0.0.1", batch_bytes=256 << 10) as made:
        yield made


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_shm_a_peer_killed_in_mid_read_leaves_its_bytes_to_those_who_mapped_them(peers: Peers) -> None:
    peer = peers("shm", 4 * MIB)
    with ShmTransport() as shm, shm.reach(peer.endpoint, 4 * MIB) as source:
        reading = source.fetch(pieces(4 * MIB), soon())
        got = [next(reading)]
        peer.kill()
        got += list(reading)
        assert torch.equal(torch.cat([memory for _, memory in sorted(got, key=lambda g: g[0])]), peer.content)
        # The file is an orphan now, and still can be read; once it is removed it is lost.
        assert len(read_all(shm.reach(peer.endpoint, MIB), [Range(0, 9)])) == 1
        os.unlink(peer.path)
    with ShmTransport() as shm, pytest.raises(SourceLost, match="gone"):
        shm.reach(peer.endpoint, MIB)


def test_shm_a_stopped_peer_is_read_all_the_same(peers: Peers) -> None:
    peer = peers("shm")
    peer.signal(signal.SIGSTOP)
    with ShmTransport() as shm, shm.reach(peer.endpoint, MIB) as source:
        assert torch.equal(read_all(source, [Range(0, MIB)])[0], peer.content)


@pytest.mark.mooncake
def test_mooncake_a_peer_killed_in_mid_read_is_lost_at_once_and_named(
    peers: Peers, reader: MooncakeTransport
) -> None:
    peer = peers("mooncake", 8 * MIB)
    source = reader.reach(peer.endpoint, 8 * MIB)
    reading = source.fetch(pieces(8 * MIB), soon(60))
    next(reading)
    peer.kill()
    start = time.monotonic()
    with pytest.raises(SourceLost, match=peer.endpoint["session"]):
        list(reading)
    with pytest.raises(SourceLost, match="cannot be read"):
        list(source.fetch([Range(0, 1)], soon(60)))
    assert time.monotonic() - start < 5


@pytest.mark.mooncake
@pytest.mark.parametrize("forked", [False, True], ids=["alone", "with-a-forked-child-that-lives-on"])
def test_mooncake_killing_only_the_producer_ends_its_engine_too(peers: Peers, forked: bool) -> None:
    peer = peers("mooncake")
    child = peer.ask("fork") if forked else None
    try:
        os.kill(peer.pids[0], signal.SIGKILL)
        until = time.monotonic() + 10
        while is_alive(peer.pids[1]) and time.monotonic() < until:
            time.sleep(0.05)
        assert not is_alive(peer.pids[1])
    finally:
        if child:
            os.kill(child, signal.SIGKILL)


@pytest.mark.mooncake
@pytest.mark.parametrize("contacted", [False, True], ids=["first-contact", "in-mid-read"])
def test_case_35_a_stopped_peer_holds_up_nobody_else(
    peers: Peers, standing_peers: Peers, contacted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "STALLED_S", 0.3)
    stopped, healthy = peers("mooncake", 8 * MIB), standing_peers("mooncake", 2)
    # With a single lane: the stopped peer holds it, and the healthy one's fetch must get another.
    with MooncakeTransport(host="127.0.0.1", batch_bytes=256 << 10, lanes=1) as reader:
        source = reader.reach(stopped.endpoint, 8 * MIB)
        reading = source.fetch(pieces(8 * MIB), soon(3.0))
        if contacted:
            next(reading)
        stopped.signal(signal.SIGSTOP)
        outcome: list[BaseException | float] = []

        def wait_for_the_stopped_one() -> None:
            start = time.monotonic()
            try:
                list(reading)
            except WaitTimeout as error:
                outcome.extend([error, time.monotonic() - start])

        waiting = threading.Thread(target=wait_for_the_stopped_one)
        waiting.start()
        for _ in range(3):
            start = time.monotonic()
            with reader.reach(healthy.endpoint, MIB) as other:
                assert torch.equal(read_all(other, [Range(0, MIB)])[0], healthy.content[:MIB])
            assert time.monotonic() - start < 2
        assert waiting.is_alive(), "the stopped peer should have been waited for until its deadline"
        waiting.join(10)
        error, took = outcome
        assert isinstance(error, WaitTimeout)
        assert stopped.endpoint["session"] in str(error)
        assert isinstance(took, float)
        assert took < 5
        stopped.signal(signal.SIGCONT)
        assert torch.equal(read_all(source, [Range(0, 8 * MIB)])[0], stopped.content)


@pytest.mark.mooncake
def test_case_34_late_bytes_of_a_failed_read_land_nowhere(
    peers: Peers, standing_peers: Peers, reader: MooncakeTransport
) -> None:
    late, other = peers("mooncake", 16 * MIB), standing_peers("mooncake", 2)
    source = reader.reach(late.endpoint, 16 * MIB)
    reading = source.fetch(pieces(16 * MIB), soon(1.5))
    kept = [memory for _, memory in (next(reading), next(reading))]  # views of the staging memory
    whole_staging = torch.empty(0, dtype=torch.uint8).set_(kept[0].untyped_storage())
    (engine,) = reader.pids["reading"]
    late.signal(signal.SIGSTOP)
    with pytest.raises(WaitTimeout):
        list(reading)
    # Whoever could have written late is gone before the error is seen.
    assert not is_alive(engine)
    before = whole_staging.clone()
    late.signal(signal.SIGCONT)
    with reader.reach(other.endpoint, MIB) as healthy:
        for _ in range(3):
            for index, memory in healthy.fetch(pieces(MIB), soon()):
                at = memory.data_ptr() - whole_staging.data_ptr()
                assert not 0 <= at < whole_staging.numel(), "staging of a failed read was used again"
                assert torch.equal(memory, other.content[index << 16 : (index + 1) << 16])
    time.sleep(0.3)
    assert torch.equal(whole_staging, before)


@pytest.mark.mooncake
def test_a_process_that_answers_at_anothers_address_is_refused(
    standing_peers: Peers, reader: MooncakeTransport
) -> None:
    right, wrong = standing_peers("mooncake", 1), standing_peers("mooncake", 2)
    # As if the right one had died and the wrong one got its port, with memory at whatever addresses.
    for forged in (
        {**right.endpoint, "session": wrong.endpoint["session"]},
        {**wrong.endpoint, "generation": right.endpoint["generation"]},
    ):
        start = time.monotonic()
        with pytest.raises(SourceLost), reader.reach(forged, MIB) as source:
            list(source.fetch([Range(0, 64)], soon()))
        assert time.monotonic() - start < 4


@pytest.mark.mooncake
def test_a_wrong_address_is_refused_and_harms_no_later_read(
    standing_peers: Peers, reader: MooncakeTransport
) -> None:
    peer = standing_peers("mooncake")
    for base in (4096, peer.endpoint["base"] + 4 * MIB):
        with pytest.raises(SourceLost), reader.reach({**peer.endpoint, "base": base}, MIB) as source:
            list(source.fetch([Range(0, MIB)], soon()))
    with reader.reach(peer.endpoint, MIB) as source:
        assert torch.equal(read_all(source, [Range(0, MIB)])[0], peer.content[:MIB])


@pytest.mark.mooncake
def test_a_segment_served_after_the_first_read_is_found_and_a_withdrawn_one_is_not(
    peers: Peers, reader: MooncakeTransport
) -> None:
    peer = peers("mooncake")
    first = reader.reach(peer.endpoint, MIB)
    assert torch.equal(read_all(first, [Range(0, MIB)])[0], peer.content)
    with reader.reach(peer.ask("more"), MIB) as second:
        assert not torch.equal(read_all(second, [Range(0, MIB)])[0], peer.content)
        peer.ask("withdraw")
        with pytest.raises(SourceLost):
            list(first.fetch([Range(0, MIB)], soon()))
        assert len(read_all(second, [Range(0, MIB)])) == 1


@pytest.mark.mooncake
@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:1", "no-such-host.invalid:4711"],
    ids=["closed-port", "unknown-host"],
)
def test_a_peer_that_is_not_there_is_lost_at_once(
    standing_peers: Peers, reader: MooncakeTransport, address: str
) -> None:
    peer = standing_peers("mooncake")
    start = time.monotonic()
    with (
        pytest.raises(SourceLost, match=address),
        reader.reach({**peer.endpoint, "session": address}, MIB) as source,
    ):
        list(source.fetch([Range(0, 1)], soon()))
    assert time.monotonic() - start < 5


@pytest.mark.mooncake
def test_an_engine_that_dies_under_a_reader_is_replaced(
    standing_peers: Peers, reader: MooncakeTransport
) -> None:
    peer = standing_peers("mooncake")
    with reader.reach(peer.endpoint, MIB) as source:
        got: dict[int, torch.Tensor] = {}
        for index, memory in source.fetch(pieces(MIB), soon()):
            got[index] = memory.clone()
            if len(got) == 5:
                os.kill(reader.pids["reading"][0], signal.SIGKILL)
        assert torch.equal(torch.cat([got[i] for i in sorted(got)]), peer.content[:MIB])


@pytest.mark.mooncake
def test_a_serving_engine_that_died_is_replaced_by_the_next_serve(reader: MooncakeTransport) -> None:
    with Segment.create(4096, "test", f"{os.getpid()}") as segment:
        segment.tensor.fill_(5)
        before = reader.serve(segment)
        os.kill(reader.pids["serving"][0], signal.SIGKILL)
        until = time.monotonic() + 5
        while (after := reader.serve(segment)) == before and time.monotonic() < until:
            time.sleep(0.02)
        assert after["generation"] != before["generation"]
        with reader.reach(after, 4096) as source:
            assert read_all(source, [Range(0, 4)])[0].tolist() == [5] * 4


HANGING = """
import json, sys, threading, time
from weightdepot.store.transports.base import Range
from weightdepot.store.transports.mooncake.transport import MooncakeTransport
reader = MooncakeTransport(host="127.0.0.1")
source = reader.reach(json.loads(sys.argv[1]), 1000)
reading = lambda: list(source.fetch([Range(0, 1000)], time.monotonic() + 60))
threading.Thread(target=reading, daemon=True).start()
time.sleep(0.5)
print(reader.pids["reading"][0])
"""


@pytest.mark.mooncake
def test_a_process_can_end_while_a_thread_of_it_waits_for_a_stopped_peer(peers: Peers) -> None:
    peer = peers("mooncake")
    peer.signal(signal.SIGSTOP)
    done = subprocess.run(
        [sys.executable, "-c", HANGING, json.dumps(peer.endpoint)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    until = time.monotonic() + 10
    while is_alive(int(done.stdout)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_alive(int(done.stdout)), "its engine was left behind"


@pytest.mark.mooncake
def test_after_a_fork_the_child_is_told_and_the_parent_goes_on(
    standing_peers: Peers, reader: MooncakeTransport
) -> None:
    peer = standing_peers("mooncake")
    source = reader.reach(peer.endpoint, MIB)
    read_all(source, [Range(0, 9)])
    child = os.fork()
    if child == 0:
        told = 0
        try:
            list(source.fetch([Range(0, 9)], soon()))
        except TransportUnavailable:
            told += 1
        try:
            reader.reach(peer.endpoint, MIB)
        except TransportUnavailable:
            told += 1
        os._exit(told)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert torch.equal(read_all(source, [Range(0, MIB)])[0], peer.content[:MIB])
