"""The link to Redis: events, blobs, many controllers at once, and what happens when it breaks."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import redis as sync_redis

from weightdepot.store.errors import IndexUnavailable, InvalidRequest
from weightdepot.store.index import EmbeddedRedis, Event, Index, VersionState

from .actors import PROCESS, TTL, begin, consumers, finish, open_version, part, producers, publish


@contextlib.asynccontextmanager
async def listening(index: Index) -> AsyncIterator[list[Event]]:
    """Events as they come, from when the subscription stands."""
    heard: list[Event] = []
    ready = asyncio.Event()

    async def listen() -> None:
        async for event in index.events():
            heard.append(event)
            ready.set()

    task = asyncio.create_task(listen())
    await asyncio.wait_for(ready.wait(), 5)
    yield heard
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


async def test_whatever_changes_is_told_in_order(index: Index) -> None:
    async with listening(index) as heard:
        await producers(index)
        await consumers(index, size=1)
        await publish(index, 7)
        await begin(index)
        await finish(index, 0, 1)
        await until(lambda: heard[-1].kind == "applied")
    assert heard[0] == Event("", "subscribed", None)
    assert [e for e in heard if e.kind not in ("subscribed", "member")] == [
        *(Event("m", kind, 7) for kind in ("open", "sealed", "ready")),
        *(Event("m", kind, 7, "g") for kind in ("round", "applied")),
    ]
    assert Event("m", "member", None) in heard


async def test_case_28_runs_on_one_server_do_not_see_each_other(valkey: str, index: Index) -> None:
    other = Index(valkey, run=index.run + "-other")
    try:
        async with listening(other) as heard:
            await producers(index)
            assert await other.models() == []
            await producers(other)
            await publish(index, 1)
            assert (await other.model("m")).latest is None
            await until(lambda: heard[-1].kind == "member")
        assert {e.kind for e in heard} == {"subscribed", "member"}
    finally:
        await other.close()


async def test_two_controllers_sealing_at_once_make_one_version_ready_once(valkey: str, index: Index) -> None:
    second = Index(valkey, run=index.run)
    try:
        async with listening(index) as heard:
            await producers(index, size=16)
            for rank in range(16):
                await open_version(index, 1, rank)
            sealed = await asyncio.gather(
                *(
                    (index, second)[rank % 2].seal("m", 1, rank, f"p{rank}", part(rank, f"p{rank}"), b"x")
                    for rank in range(16)
                )
            )
            await until(lambda: heard[-1].kind == "ready")
        assert sum(v.state is VersionState.READY for v in sealed) == 1
        assert sum(e.kind == "ready" for e in heard) == 1
    finally:
        await second.close()


async def test_ranks_racing_for_an_open_rank_get_it_once(index: Index) -> None:
    joins = [index.join_producer("m", 0, 1, f"s{n}", "l", PROCESS, 2, TTL) for n in range(20)]
    results = await asyncio.gather(*joins, return_exceptions=True)
    assert sum(not isinstance(r, BaseException) for r in results) == 1


async def test_more_calls_at_once_than_connections_queue_up(index: Index) -> None:
    await producers(index)
    answers = await asyncio.gather(*(index.heartbeat("m", "p0", TTL) for _ in range(300)))
    assert all(a.member for a in answers)


async def test_blobs_come_back_as_they_were_and_run_out(index: Index) -> None:
    data = bytes(range(256)) * 10
    await index.put_blob("layout", "xxh3:ab", data, 0.05)
    assert await index.get_blob("layout", "xxh3:ab") == data
    assert await index.get_blob("tiling", "xxh3:ab") is None
    assert await index.get_blob("layout", "xxh3:ab", ttl_s=60) == data
    await asyncio.sleep(0.1)
    assert await index.get_blob("layout", "xxh3:ab") == data, "reading it kept it"
    await index.put_blob("plan", "p", b"", 0.03)
    await asyncio.sleep(0.08)
    assert await index.get_blob("plan", "p") is None
    with pytest.raises(InvalidRequest, match="unknown kind"):
        await index.put_blob("pickle", "p", b"", 1)


async def test_ping_measures_a_round_trip(index: Index) -> None:
    assert 0 < await index.ping() < 5


async def refused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


CALLS: list[Callable[[Index], Awaitable[object]]] = [
    lambda i: i.ping(),
    lambda i: i.models(),
    lambda i: i.model("m"),
    lambda i: i.get_blob("plan", "p"),
    lambda i: i.put_blob("plan", "p", b"", 1),
    lambda i: i.digests("m", 1, [0]),
    lambda i: i.events().__anext__(),
]


@pytest.mark.parametrize("call", CALLS)
async def test_a_server_that_is_not_there_is_said_to_be_so(
    call: Callable[[Index], Awaitable[object]],
) -> None:
    port = await refused_port()
    index = Index(f"redis://user:secret@127.0.0.1:{port}/0")
    try:
        with pytest.raises(IndexUnavailable, match=f"127.0.0.1:{port} does not serve") as caught:
            await asyncio.wait_for(call(index), 5)
        assert "secret" not in str(caught.value)
    finally:
        await index.close()


async def test_a_server_that_accepts_and_says_nothing_costs_a_bounded_time() -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        index = Index(f"redis://127.0.0.1:{mute.getsockname()[1]}", connect_timeout=0.2, op_timeout=0.2)
        try:
            with pytest.raises(IndexUnavailable, match="Timeout"):
                await asyncio.wait_for(index.model("m"), 3)
        finally:
            await index.close()


@pytest.mark.parametrize("url", ["", "http://x", "redis://host:port"])
async def test_urls_that_name_no_redis_are_refused_at_once(url: str) -> None:
    with pytest.raises(InvalidRequest, match="no Redis URL"):
        Index(url)


async def test_a_server_out_of_memory_or_read_only_does_not_serve() -> None:
    with EmbeddedRedis() as server, sync_redis.Redis(port=server.port) as admin:
        index = Index(server.url)
        try:
            await producers(index)
            admin.config_set("maxmemory", "1")
            with pytest.raises(IndexUnavailable, match=r"OutOfMemory|OOM"):
                await open_version(index, 1)
            admin.config_set("maxmemory", "0")
            admin.replicaof("127.0.0.1", str(await refused_port()))
            with pytest.raises(IndexUnavailable, match=r"ReadOnly|READONLY"):
                await index.heartbeat("m", "p0", TTL)
            admin.replicaof("NO", "ONE")
            assert (await index.heartbeat("m", "p0", TTL)).member
        finally:
            await index.close()


async def test_scripts_are_loaded_again_after_the_server_forgot_them(index: Index, valkey: str) -> None:
    await producers(index)
    with sync_redis.Redis.from_url(valkey) as admin:
        admin.script_flush()
    assert (await index.heartbeat("m", "p0", TTL)).member
