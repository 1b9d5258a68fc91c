"""Sockets: peers that die, stop or are others, and strangers at the port."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from weightdepot.store.errors import SourceLost, TransportUnavailable, WaitTimeout
from weightdepot.store.segments import Segment
from weightdepot.store.transports.base import Range
from weightdepot.store.transports.tcp import frames, server
from weightdepot.store.transports.tcp.transport import TcpTransport

from .conftest import MIB, Peer, content, read_all, soon

Peers = Callable[..., Peer]
LARGE = 32 * MIB  # more than the sockets' buffers hold


def pieces(nbytes: int, of: int = 64 << 10) -> list[Range]:
    return [Range(o, of) for o in range(0, nbytes, of)]


@pytest.fixture
def reader() -> Iterator[TcpTransport]:
    with TcpTransport(host="127.0.0.1") as made:
        yield made


@pytest.fixture
def segment() -> Iterator[Segment]:
    with Segment.create(MIB, "test", f"{os.getpid()}") as made:
        made.tensor.copy_(content(MIB, 1))
        yield made


def test_a_peer_killed_in_mid_read_is_lost_at_once_and_named(peers: Peers, reader: TcpTransport) -> None:
    peer = peers("tcp", LARGE)
    source = reader.reach(peer.endpoint, LARGE)
    reading = source.fetch(pieces(LARGE), soon(60))
    next(reading)
    peer.kill()
    start = time.monotonic()
    with pytest.raises(SourceLost, match=str(peer.endpoint["port"])):
        list(reading)
    with pytest.raises(SourceLost, match="cannot be read"):
        list(source.fetch([Range(0, 1)], soon(60)))
    assert time.monotonic() - start < 5


def test_a_forked_child_of_a_dead_peer_keeps_no_reader_waiting(peers: Peers, reader: TcpTransport) -> None:
    peer = peers("tcp", LARGE)
    source = reader.reach(peer.endpoint, LARGE)
    reading = source.fetch(pieces(LARGE), soon(60))
    next(reading)
    child = peer.ask("fork")
    try:
        peer.kill()
        start = time.monotonic()
        with pytest.raises(SourceLost):
            list(reading)
        with pytest.raises(SourceLost):
            list(source.fetch([Range(0, 1)], soon(60)))
        assert time.monotonic() - start < 5
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("contacted", [False, True], ids=["first-contact", "in-mid-read"])
def test_a_stopped_peer_is_waited_for_until_the_deadline_and_holds_up_nobody_else(
    peers: Peers, standing_peers: Peers, reader: TcpTransport, contacted: bool
) -> None:
    stopped, healthy = peers("tcp", LARGE), standing_peers("tcp", 2)
    source = reader.reach(stopped.endpoint, LARGE)
    reading = source.fetch(pieces(LARGE), soon(1.5))
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
    with reader.reach(healthy.endpoint, MIB) as other:
        assert torch.equal(read_all(other, [Range(0, MIB)])[0], healthy.content[:MIB])
    waiting.join(10)
    error, took = outcome
    assert isinstance(error, WaitTimeout)
    assert isinstance(took, float)
    assert took < 4
    stopped.signal(signal.SIGCONT)
    assert torch.equal(read_all(source, [Range(0, LARGE)])[0], stopped.content)


def test_closing_a_source_ends_the_fetches_that_wait_for_it(peers: Peers, reader: TcpTransport) -> None:
    peer = peers("tcp", LARGE)
    source = reader.reach(peer.endpoint, LARGE)
    reading = source.fetch(pieces(LARGE), soon(60))
    next(reading)
    peer.signal(signal.SIGSTOP)
    threading.Timer(0.3, source.close).start()
    start = time.monotonic()
    with pytest.raises(SourceLost):
        list(reading)
    assert time.monotonic() - start < 10


def test_whoever_does_not_know_the_token_reads_nothing(segment: Segment, reader: TcpTransport) -> None:
    endpoint = reader.serve(segment)
    for changed in ({"token": "00" * frames.TOKEN_BYTES}, {"key": "00" * frames.KEY_BYTES}):
        with (
            pytest.raises(SourceLost, match="does not serve this segment"),
            reader.reach({**endpoint, **changed}, MIB) as source,
        ):
            list(source.fetch([Range(0, 1)], soon()))
    assert len({endpoint["token"], endpoint["key"]}) == 2


def test_after_a_restart_at_the_same_port_the_old_endpoint_is_refused(segment: Segment) -> None:
    with TcpTransport(host="127.0.0.1") as first, TcpTransport(host="127.0.0.1") as second:
        old, new = first.serve(segment), second.serve(segment)
        with pytest.raises(SourceLost), second.reach({**old, "port": new["port"]}, MIB) as source:
            list(source.fetch([Range(0, 1)], soon()))


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 64,
        b"",
        frames.hello(b"k" * frames.KEY_BYTES, b"t" * frames.TOKEN_BYTES) + frames.request([Range(0, 9)]),
    ],
    ids=["http", "nothing", "unknown-key"],
)
def test_a_stranger_is_cut_off_and_harms_nobody(segment: Segment, reader: TcpTransport, sent: bytes) -> None:
    endpoint = reader.serve(segment)
    with socket.create_connection(("127.0.0.1", endpoint["port"]), timeout=10) as stranger:
        stranger.sendall(sent)
        stranger.shutdown(socket.SHUT_WR)
        heard = b""
        while chunk := stranger.recv(100):
            heard += chunk
        assert heard in (b"", frames.REFUSED)
    with reader.reach(endpoint, MIB) as source:
        assert torch.equal(read_all(source, [Range(0, MIB)])[0], segment.tensor)


@pytest.mark.parametrize(
    "asked",
    [
        frames.COUNT.pack(1) + frames.PAIR.pack(MIB - 1, 2),
        frames.COUNT.pack(1) + frames.PAIR.pack(1 << 63, 1 << 63),
        frames.COUNT.pack(0),
        frames.COUNT.pack(frames.MAX_RANGES + 1),
    ],
    ids=["past-the-end", "far-past-the-end", "none", "too-many"],
)
def test_one_who_knows_the_token_gets_nothing_outside_the_segment(
    segment: Segment, reader: TcpTransport, asked: bytes
) -> None:
    endpoint = reader.serve(segment)
    with socket.create_connection(("127.0.0.1", endpoint["port"]), timeout=10) as peer:
        peer.sendall(frames.hello(bytes.fromhex(endpoint["key"]), bytes.fromhex(endpoint["token"])) + asked)
        heard = b""
        while chunk := peer.recv(100):
            heard += chunk
        assert heard == frames.WELCOME


def test_readers_above_the_limit_are_refused_and_those_below_it_go_on(
    segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_READERS", 2)
    with TcpTransport(host="127.0.0.1") as transport:
        endpoint = transport.serve(segment)
        with transport.reach(endpoint, MIB) as source:
            # left half-way, so that their connections stay open
            held = [source.fetch(pieces(MIB), soon()) for _ in range(2)]
            for reading in held:
                next(reading)
            with pytest.raises(SourceLost, match="too many readers"):
                list(source.fetch([Range(0, 1)], soon()))
            assert len(list(held[0])) == len(pieces(MIB)) - 1


def test_one_who_says_nothing_is_let_go(segment: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HELLO_S", 0.2)
    monkeypatch.setattr(server, "_ROUND_S", 0.1)
    with TcpTransport(host="127.0.0.1") as transport:
        port = transport.serve(segment)["port"]
        with socket.create_connection(("127.0.0.1", port), timeout=10) as silent:
            assert silent.recv(1) == b""


def test_nobody_at_the_port_is_lost_at_once(segment: Segment, reader: TcpTransport) -> None:
    endpoint = reader.serve(segment)
    for address in ({"port": 1}, {"host": "no-such-host.invalid"}):
        start = time.monotonic()
        with pytest.raises(SourceLost), reader.reach({**endpoint, **address}, MIB) as source:
            list(source.fetch([Range(0, 1)], soon()))
        assert time.monotonic() - start < 5


def test_after_a_fork_the_child_is_told_and_the_parent_goes_on(
    segment: Segment, reader: TcpTransport
) -> None:
    endpoint = reader.serve(segment)
    child = os.fork()
    if child == 0:
        told = 0
        try:
            reader.serve(segment)
        except TransportUnavailable:
            told = 1
        os._exit(told)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    with reader.reach(endpoint, MIB) as source:
        assert torch.equal(read_all(source, [Range(0, MIB)])[0], segment.tensor)


def test_a_host_that_is_not_this_machine_s_is_told_to_peers_and_listened_for_on_all_addresses(
    segment: Segment,
) -> None:
    with TcpTransport(host="192.0.2.7") as transport:
        endpoint = transport.serve(segment)
        assert endpoint["host"] == "192.0.2.7"
        with transport.reach({**endpoint, "host": "127.0.0.1"}, MIB) as source:
            assert read_all(source, [Range(0, 9)])[0].numel() == 9
