"""What the tests of the controller share: layouts, a trainer, a group, a controller process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
import xxhash

from weightdepot.api.app import create_app
from weightdepot.api.client import ControllerClient
from weightdepot.api.server import bind, url_of
from weightdepot.api.settings import Settings
from weightdepot.store.geometry import Box
from weightdepot.store.index.records import Grant, Joined, Part, Process, Version
from weightdepot.store.layout import Layout, LayoutBuilder

PROCESS = Process(host="test-host", pid=1, started=1)


def rows_layout(start: int, stop: int, total: int = 8, name: str = "w", dtype: str = "float32") -> Layout:
    """Rows `start` to `stop` of one tensor of `total` rows and 4 columns."""
    builder = LayoutBuilder()
    builder.tensor(name, (total, 4), dtype)
    builder.buffer(name, (stop - start, 4), (4, 1), dtype)
    builder.place(name, Box((start, 0), (stop - start, 4)), name, 0, (4, 1))
    return builder.build()


def unique(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex[:12]}"


@dataclass
class Trainer:
    """All ranks of a trainer, spoken for by one client: joins, opens, seals."""

    client: ControllerClient
    model: str
    world_size: int = 2
    retention: int = 2
    ttl: float = 30.0
    sessions: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sessions = [unique(f"producer{rank}") for rank in range(self.world_size)]

    def layout(self, rank: int) -> Layout:
        rows = 8 // self.world_size
        return rows_layout(rank * rows, (rank + 1) * rows)

    def join(self, rank: int, replace: str = "") -> Joined:
        digest = self.client.put_layout(self.layout(rank))
        return self.client.join_producer(
            self.model, rank=rank, world_size=self.world_size, session=self.sessions[rank], layout=digest,
            process=PROCESS, retention=self.retention, ttl=self.ttl, replace=replace,
        )  # fmt: skip

    def join_all(self) -> Trainer:
        for rank in range(self.world_size):
            self.join(rank)
        return self

    def open(self, version: int, rank: int = 0, timeout: float = 5.0) -> Grant:
        return self.client.open_version(
            self.model, version, rank=rank, session=self.sessions[rank], timeout=timeout
        )

    def seal(self, version: int, rank: int) -> Version:
        digests = bytes([rank]) * 16
        part = Part(
            rank=rank,
            session=self.sessions[rank],
            endpoints={"shm": {"segment": f"s{rank}", "nested": {"list": [], "none": None}}},
            nbytes=64,
            digests=xxhash.xxh3_128_hexdigest(digests),
        )
        return self.client.seal(self.model, version, part, digests)

    def publish(self, version: int) -> Version:
        for rank in range(self.world_size):
            self.open(version, rank)
        return [self.seal(version, rank) for rank in range(self.world_size)][-1]


def join_group(
    client: ControllerClient, model: str, group: str, world_size: int = 1, layout: str = ""
) -> list[str]:
    """The sessions by rank."""
    sessions = [unique(f"consumer{rank}") for rank in range(world_size)]
    for rank, session in enumerate(sessions):
        client.join_consumer(
            model, group, rank=rank, world_size=world_size, session=session, process=PROCESS, layout=layout,
            ttl=30.0,
        )  # fmt: skip
    return sessions


def body_of(**changes: Any) -> dict[str, Any]:
    """A join of producer rank 0 of 1, as JSON."""
    layout = rows_layout(0, 8)
    base = {
        "rank": 0, "world_size": 1, "session": "s0", "layout": layout.digest, "retention": 2,
        "process": {"host": "h", "pid": 1, "started": 1},
    }  # fmt: skip
    return {**base, **changes}


@contextmanager
def serving(*options: str, port: int = 0, prelude: str = "") -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`weightdepot serve` as a process; its URL. It is asked to stop at the end, and must within 5 s.

    prelude: Python that is run in it first.
    """
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", f"{prelude}\nfrom weightdepot.api.cli import main\nmain()"),
            *("serve", "--port", str(port), *options),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith("serving "):
            _, errors = process.communicate(timeout=10)
            raise AssertionError(f"the controller did not start: {errors}")
        yield line.split()[1], process
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=5)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=5)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


@contextmanager
def threaded(settings: Settings) -> Iterator[str]:
    """A controller in a thread of this process, over real HTTP: starts in a tenth of a process's time."""
    listener = bind(settings.host, settings.port)
    server = uvicorn.Server(uvicorn.Config(create_app(settings), log_config=None, ws="none", lifespan="on"))
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]))
    thread.start()
    try:
        deadline = time.monotonic() + 10
        while not server.started and thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.started
        yield url_of(listener)
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
