"""Peers in processes of their own, and the kinds of transport that the conformance suite runs through."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from weightdepot.store.segments import Segment
from weightdepot.store.transports.base import Range, Source, Transport
from weightdepot.store.transports.memory import MemoryHub, MemoryTransport
from weightdepot.store.transports.mooncake.transport import MooncakeTransport
from weightdepot.store.transports.shm import ShmTransport
from weightdepot.store.transports.tcp.transport import TcpTransport

MIB = 1 << 20
STANDING = MIB + 77  # more than one batch, and no multiple of anything


def content(nbytes: int, seed: int) -> torch.Tensor:
    """What `peer.py` fills a segment with."""
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8))


class Peer:
    """A serving process. Signals go to all processes that serve: the engine has one of its own."""

    def __init__(self, transport: str, nbytes: int, seed: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("peer.py")), transport, str(nbytes), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.nbytes = nbytes
        self.content = content(nbytes, seed)
        hello = self._answer()
        self.endpoint: dict[str, Any] = hello["endpoint"]
        self.pids: list[int] = hello["pids"]
        self.path: str = hello["path"]

    def ask(self, line: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self._answer()

    def signal(self, number: signal.Signals) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait(10)

    def end(self) -> None:
        self.signal(signal.SIGCONT)
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self.process.communicate(timeout=10)
        self.kill()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            # Its traceback went to our standard error. Not left to the garbage collector, whose warning would
            # fail whichever test runs then.
            self.process.communicate()
            raise RuntimeError(f"the peer ended with status {self.process.returncode} before it answered")
        return json.loads(line)


@pytest.fixture
def peers() -> Iterator[Callable[..., Peer]]:
    """Starts peers; all of them are ended with the test."""
    started: list[Peer] = []

    def start(transport: str, nbytes: int = MIB, seed: int = 1) -> Peer:
        started.append(Peer(transport, nbytes, seed))
        return started[-1]

    yield start
    for peer in started:
        peer.end()


@dataclass
class Kind:
    """One transport, with its two sides in one process or in two."""

    name: str
    remote: bool
    hub: MemoryHub = field(default_factory=MemoryHub)

    def transport(self) -> Transport:
        if self.name == "mooncake":
            return MooncakeTransport(host="127.0.0.1", batch_bytes=256 << 10)
        if self.name == "tcp":
            return TcpTransport(host="127.0.0.1")
        return ShmTransport() if self.name == "shm" else MemoryTransport(self.hub)


KINDS = [
    pytest.param(("memory", False), id="memory"),
    pytest.param(("shm", False), id="shm"),
    pytest.param(("shm", True), id="shm-remote"),
    pytest.param(("tcp", False), id="tcp"),
    pytest.param(("tcp", True), id="tcp-remote"),
    pytest.param(("mooncake", False), id="mooncake", marks=pytest.mark.mooncake),
    pytest.param(("mooncake", True), id="mooncake-remote", marks=pytest.mark.mooncake),
]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return Kind(*request.param)


@dataclass
class Served:
    """A segment that somebody serves, as a reader sees it."""

    reader: Transport
    endpoint: dict[str, Any]
    content: torch.Tensor

    def reach(self) -> Source:
        return self.reader.reach(self.endpoint, self.content.numel())


@pytest.fixture(scope="session")
def standing_peers() -> Iterator[Callable[..., Peer]]:
    """Peers of `STANDING` bytes that nothing bad happens to: one per transport and seed."""
    started: dict[tuple[str, int], Peer] = {}

    def start(transport: str, seed: int = 1) -> Peer:
        if (transport, seed) not in started:
            started[transport, seed] = Peer(transport, STANDING, seed)
        return started[transport, seed]

    yield start
    for peer in started.values():
        peer.end()


@pytest.fixture
def served(kind: Kind, standing_peers: Callable[..., Peer]) -> Iterator[Served]:
    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(kind.transport())
        if kind.remote:
            peer = standing_peers(kind.name)
            yield Served(reader, peer.endpoint, peer.content)
            return
        segment = stack.enter_context(Segment.create(STANDING, "test", f"{os.getpid()}"))
        segment.tensor.copy_(content(STANDING, 1))
        server = stack.enter_context(kind.transport())
        yield Served(reader, server.serve(segment), content(STANDING, 1))


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def read_all(source: Source, ranges: list[Range], deadline: float | None = None) -> dict[int, torch.Tensor]:
    """Copies, by index; each index must come once."""
    out: dict[int, torch.Tensor] = {}
    for index, memory in source.fetch(ranges, soon() if deadline is None else deadline):
        assert index not in out
        assert memory.dtype == torch.uint8
        out[index] = memory.clone()
    return out
