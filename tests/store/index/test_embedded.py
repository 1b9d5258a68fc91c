"""The embedded server: it starts, keeps what it should, and never two on one directory."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from weightdepot.store.errors import IndexUnavailable, InvalidRequest
from weightdepot.store.index import EmbeddedRedis, Event, Index

from .actors import TTL, begin, consumers, finish, open_version, producers, publish, seal


def running(pid: int) -> bool:
    """A zombie does not run: its parent only has not asked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def gone_within(pid: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while running(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not running(pid)


async def exhausted(events: AsyncIterator[Event]) -> None:
    async for _ in events:
        pass


def test_it_serves_on_the_loopback_interface_only_and_is_gone_afterwards() -> None:
    with EmbeddedRedis() as server:
        pid, port = server.pid, server.port
        assert server.url == f"redis://127.0.0.1:{port}/0"
        with socket.socket() as other, pytest.raises(OSError, match="refused"):
            other.connect(("127.0.0.2", port))
    assert gone_within(pid, 5)
    with pytest.raises(IndexUnavailable, match="not running"):
        _ = server.url
    server.stop()


def test_two_of_them_do_not_clash() -> None:
    with EmbeddedRedis() as one, EmbeddedRedis() as two:
        assert one.port != two.port


async def test_case_09_a_restart_on_its_directory_has_everything_back(tmp_path: Path) -> None:
    """Also after the server was killed; in mid-publish, with a lease held."""
    server = EmbeddedRedis(tmp_path).start()
    index = Index(server.url)
    await producers(index)
    await consumers(index, size=1)
    await publish(index, 1)
    await begin(index)
    await open_version(index, 2)
    await open_version(index, 2, 1)
    await seal(index, 2, 0)
    before = await index.model("m")
    os.kill(server.pid, signal.SIGKILL)
    with pytest.raises(IndexUnavailable):
        await index.model("m")
    port = server.port
    server.stop()
    await index.close()
    with EmbeddedRedis(tmp_path, port=port) as again:
        index = Index(again.url)
        after = await index.model("m")
        assert [v.leases for v in after.versions] == [("g/1",), ()]
        assert after.versions == before.versions
        await seal(index, 2, 1)
        assert (await finish(index, 0, 1)).version == 1
        assert (await index.digests("m", 2, [1])) == {1: b"\x01" * 16}
        await index.close()


async def test_a_client_outlives_a_restart_of_the_server_on_its_port(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path).start()
    index = Index(server.url)
    await producers(index)
    events = index.events()
    assert await events.__anext__() == Event("", "subscribed", None)
    port = server.port
    server.stop()
    with EmbeddedRedis(tmp_path, port=port):
        assert (await index.heartbeat("m", "p0", TTL)).member
        # a listener is told that it may have missed something, never silently deaf
        assert await asyncio.wait_for(events.__anext__(), 5) == Event("", "subscribed", None)
        await publish(index, 1)
        assert (await asyncio.wait_for(events.__anext__(), 5)).kind == "open"
    with pytest.raises(IndexUnavailable, match="listen"):
        await asyncio.wait_for(exhausted(events), 5)
    await index.close()


async def test_without_persistence_a_restart_is_empty(tmp_path: Path) -> None:
    for kept in (True, False):
        with EmbeddedRedis(tmp_path / str(kept), persist=kept) as server:
            index = Index(server.url)
            await producers(index)
            await index.close()
        with EmbeddedRedis(tmp_path / str(kept), persist=kept) as server:
            index = Index(server.url)
            assert await index.models() == (["m"] if kept else [])
            await index.close()


def test_a_second_server_on_the_directory_is_refused(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path), pytest.raises(IndexUnavailable, match=f"by process {os.getpid()}"):
        EmbeddedRedis(tmp_path).start()
    with EmbeddedRedis(tmp_path):
        pass


def test_a_server_whose_owner_was_killed_is_stopped_by_the_next_one(tmp_path: Path) -> None:
    """Two servers appending to the same files would ruin them."""
    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time; from weightdepot.store.index import EmbeddedRedis;"
            "server = EmbeddedRedis(sys.argv[1]).start(); print(server.pid, flush=True); time.sleep(60)",
            str(tmp_path),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert owner.stdout is not None
        orphan = int(owner.stdout.readline())
    finally:
        owner.kill()
        owner.wait(10)
        if owner.stdout is not None:
            owner.stdout.close()
    assert running(orphan)
    with EmbeddedRedis(tmp_path) as server:
        assert gone_within(orphan, 5)
        assert running(server.pid)
        assert json.loads((tmp_path / "weightdepot.json").read_text(encoding="utf-8"))["pid"] == server.pid


def test_a_port_that_is_taken_is_an_error_that_says_so(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(IndexUnavailable, match=f"did not start, port {port}"):
            EmbeddedRedis(port=port).start()


def test_a_directory_that_cannot_be_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(IndexUnavailable, match="cannot use"):
        EmbeddedRedis(tmp_path / "file" / "below").start()


def test_arguments_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="data directory"):
        EmbeddedRedis(persist=True)
    with pytest.raises(InvalidRequest, match="port"):
        EmbeddedRedis(port=0)
