"""Server-sent events: what changes is told as it happens, to slow and quick, until either side ends it."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import httpx
import pytest

from weightdepot.api.client import ControllerClient
from weightdepot.api.feed import COMMENT, Feed, TooManyListeners
from weightdepot.api.settings import Limits, Settings, Timeouts
from weightdepot.store.errors import ControllerUnavailable, WeightDepotError
from weightdepot.store.index import EmbeddedRedis
from weightdepot.store.index.records import Event

from .helpers import Trainer, serving, threaded, unique

# -- over a real controller ------------------------------------------------------------------------------


class Listening:
    """What one `events` call yields, read in a thread of its own."""

    def __init__(self, client: ControllerClient, model: str | None, timeout: float | None = 20) -> None:
        self.events: list[Event] = []
        self.error: BaseException | None = None
        self._stream = client.events(model, timeout=timeout)
        self.thread = threading.Thread(target=self._read)
        self.thread.start()
        self.heard("subscribed")

    def _read(self) -> None:
        try:
            for event in self._stream:
                self.events.append(event)
        except ControllerUnavailable as error:
            self.error = error

    def heard(self, kind: str, version: int | None = None, count: int = 1) -> None:
        deadline = time.monotonic() + 10
        while sum(e.kind == kind and version in (None, e.version) for e in self.events) < count:
            assert time.monotonic() < deadline, (kind, version, self.events)
            time.sleep(0.01)


def test_a_models_life_is_told_in_its_order(controller: str, client: ControllerClient, model: str) -> None:
    with ControllerClient(controller) as other:
        one, all_of_them = Listening(other, model), Listening(other, None)
        trainer = Trainer(client, model, world_size=1).join_all()
        trainer.publish(1)
        client.tag(model, "best", 1)
        for listening in (one, all_of_them):
            listening.heard("ready", 1)
            listening.heard("tagged", 1)
        kinds = [event.kind for event in one.events]
        order = [kinds.index(kind) for kind in ("subscribed", "member", "open", "ready", "tagged")]
        assert order == sorted(order)
        assert {event.model for event in one.events[1:]} == {model}
    for listening in (one, all_of_them):
        listening.thread.join(10)
        assert not listening.thread.is_alive(), "closing the client ends what it listens to"


def test_listening_ends_when_its_time_is_up(client: ControllerClient, model: str) -> None:
    begun = time.monotonic()
    assert [event.kind for event in client.events(model, timeout=0.3)] == ["subscribed"]
    assert 0.2 < time.monotonic() - begun < 2


def test_who_has_no_controller_to_listen_to_is_told() -> None:
    with ControllerClient("http://127.0.0.1:9") as client, pytest.raises(ControllerUnavailable):
        list(client.events("m", timeout=0.3))


def test_a_stream_is_well_formed_and_has_signs_of_life(redis_url: str) -> None:
    settings = Settings(redis_url=redis_url, run=unique("run"), port=0, timeouts=Timeouts(keep_alive=0.1))
    with threaded(settings) as url, ControllerClient(url, settings.run) as client:
        Trainer(client, "m", world_size=1).join_all().publish(1)
        response = httpx.get(f"{url}/v1/events", params={"seconds": 0.5, "model": "m"})
        assert response.headers["content-type"].startswith("text/event-stream")
        blocks = [block for block in response.text.split("\n\n") if block]
        assert blocks.count(": alive") >= 2
        lines = dict(line.split(": ", 1) for line in blocks[0].split("\n"))
        assert lines["event"] == "subscribed"
        assert lines["id"].isdecimal()
        assert json.loads(lines["data"]) == {"model": "", "kind": "subscribed", "version": None, "group": ""}


def test_a_controller_that_stops_ends_its_streams_and_the_next_one_is_listened_to(redis_url: str) -> None:
    with (
        serving("--redis-url", redis_url) as (first, process),
        serving("--redis-url", redis_url) as (second, _),
    ):
        with ControllerClient(f"{first},{second}") as client, ControllerClient(second) as direct:
            model = unique("model")
            listening = Listening(client, model)
            begun = time.monotonic()
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=5)
            assert process.returncode == 0
            assert time.monotonic() - begun < 3
            listening.heard("subscribed", count=2)
            Trainer(direct, model, world_size=1).join_all().publish(1)
            listening.heard("ready", 1)
        listening.thread.join(10)


def test_an_index_that_was_away_is_told_with_a_new_beginning(tmp_path: Path) -> None:
    with (
        EmbeddedRedis(tmp_path) as redis,
        threaded(Settings(redis_url=redis.url, port=0)) as url,
        ControllerClient(url) as client,
    ):
        port = redis.port
        listening = Listening(client, "m")
        before = len(listening.events)
        os.kill(redis.pid, signal.SIGKILL)
        redis.stop()
        with EmbeddedRedis(tmp_path, port=port):
            deadline = time.monotonic() + 20
            while not any(e.kind == "subscribed" for e in listening.events[before:]):
                assert time.monotonic() < deadline
                time.sleep(0.02)
            client.close()
            listening.thread.join(10)


def test_more_listeners_than_a_controller_takes_are_refused_in_words(redis_url: str) -> None:
    settings = Settings(redis_url=redis_url, run=unique("run"), port=0, limits=Limits(listeners=1))
    with threaded(settings) as url, ControllerClient(url, settings.run) as client:
        stream = client.events("m", timeout=5)
        next(stream)
        with httpx.stream("GET", f"{url}/v1/events") as refused:
            assert refused.status_code == 503
            refused.read()
            assert "ask another controller" in refused.json()["detail"]
        with pytest.raises(WeightDepotError, match="are open here"):
            next(client.events("m", timeout=1))
        stream.close()  # type: ignore[attr-defined]
        deadline = time.monotonic() + 10
        while httpx.get(f"{url}/v1/events", params={"seconds": 0.01}).status_code != 200:
            assert time.monotonic() < deadline, "a listener that has gone makes room"


# -- the feed itself -------------------------------------------------------------------------------------


def events(count: int) -> Iterator[Event]:
    return (Event("m", "open", number) for number in range(count))


async def test_a_listener_that_does_not_keep_up_is_told_and_let_go() -> None:
    feed = Feed(keep_alive=30, backlog=10, listeners=5)
    async with aclosing(feed.stream("m", None)) as slow, aclosing(feed.stream("m", None)) as quick:  # type: ignore[type-var]
        assert b"subscribed" in await anext(slow)
        heard = [await anext(quick)]
        for event in events(100):
            feed.hear(event)
            heard.append(await anext(quick))
        assert len(heard) == 101, "the quick one missed nothing"
        rest = [piece async for piece in slow]
        assert len(rest) == 1
        assert b"event: lagged" in rest[0]
    assert feed.listening == 0


async def test_what_concerns_another_model_is_not_told_but_a_new_beginning_is() -> None:
    feed = Feed(keep_alive=30, backlog=10, listeners=5)
    async with aclosing(feed.stream("m", None)) as stream:  # type: ignore[type-var]
        await anext(stream)
        feed.hear(Event("other", "open", 1))
        feed.hear(Event("", "subscribed", None))
        feed.hear(Event("m", "open", 2, "g"))
        assert b"event: subscribed" in await anext(stream)
        assert b'"version":2,"group":"g"' in await anext(stream)


async def test_closing_ends_all_streams_after_what_was_heard() -> None:
    feed = Feed(keep_alive=30, backlog=10, listeners=5)
    stream = feed.stream(None, None)
    await anext(stream)
    waiting = asyncio.ensure_future(anext(stream, None))
    await asyncio.sleep(0.01)
    feed.close()
    assert await asyncio.wait_for(waiting, 1) is None
    assert feed.listening == 0
    assert [piece async for piece in feed.stream("m", None)][1:] == []


async def test_silence_is_broken_by_signs_of_life() -> None:
    feed = Feed(keep_alive=0.01, backlog=10, listeners=1)
    async with aclosing(feed.stream("m", None)) as stream:  # type: ignore[type-var]
        await anext(stream)
        assert await anext(stream) == await anext(stream) == COMMENT
        with pytest.raises(TooManyListeners):
            feed.stream("m", None)


def test_numbers_of_events_rise() -> None:
    async def run() -> list[int]:
        feed = Feed(keep_alive=30, backlog=100, listeners=5)
        stream = feed.stream("m", None)
        for event in events(5):
            feed.hear(event)
        pieces = [await anext(stream) for _ in range(6)]
        return [int(piece.split(b"\n")[0].removeprefix(b"id: ")) for piece in pieces]

    numbers = asyncio.run(run())
    assert all(a < b for a, b in itertools.pairwise(numbers))
