"""Time-outs hold, and another controller is asked, also when the first is stopped and not dead."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from weightdepot.api.client import ControllerClient
from weightdepot.api.settings import Settings
from weightdepot.store.errors import ControllerUnavailable, InvalidRequest
from weightdepot.store.index import EmbeddedRedis
from weightdepot.store.index.records import Mode, Part

from .helpers import PROCESS, Trainer, join_group, rows_layout, serving, threaded, unique

OVERRUN = 1.3  # seconds past the time-out: the second that the client promises, and a busy machine's share


@contextmanager
def stopped(process: subprocess.Popen[str]) -> Iterator[None]:
    """Inside, the process (and nothing of its index) stands still."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def stoppable(redis_url: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    with serving("--redis-url", redis_url) as started:
        yield started


def calls(client: ControllerClient) -> dict[str, Callable[[float], Any]]:
    """Every method that waits in its own way, by name: given a time-out."""
    rank = {"rank": 0, "session": "s"}
    part = Part(0, "s", {}, 0, "0" * 32)
    return {
        "models": lambda t: client.models(timeout=t),
        "put_layout": lambda t: client.put_layout(rows_layout(0, 8), timeout=t),
        "heartbeat": lambda t: client.heartbeat("m", "s", timeout=t),
        "leave": lambda t: client.leave("m", "s", timeout=t),
        "manifest": lambda t: client.manifest("m", timeout=t),
        "latest": lambda t: client.latest("m", timeout=t),
        "applied": lambda t: client.applied("m", 1, timeout=t),
        "convergence": lambda t: client.convergence("m", timeout=t),
        "freshness": lambda t: client.freshness("m", "g", timeout=t),
        "open_version": lambda t: client.open_version("m", 1, timeout=t, **rank),  # type: ignore[arg-type]
        "seal": lambda t: client.seal("m", 1, part, b"", timeout=t),
        "begin_round": lambda t: client.begin_round("m", "g", timeout=t, **rank),  # type: ignore[arg-type]
        "finish_round": lambda t: client.finish_round("m", "g", round=1, timeout=t, **rank),  # type: ignore[arg-type]
        "set_policy": lambda t: client.set_policy("m", mode=Mode.SYNC, timeout=t),
        "events": lambda t: list(client.events("m", timeout=t)),
    }


def test_no_call_overruns_its_time_out_while_the_controller_is_stopped(
    stoppable: tuple[str, subprocess.Popen[str]],
) -> None:
    url, process = stoppable
    took: dict[str, float] = {}

    def time_it(name: str, call: Callable[[float], Any], timeout: float) -> None:
        begun = time.monotonic()
        with pytest.raises(ControllerUnavailable):
            call(timeout)
        took[f"{name} {timeout}"] = time.monotonic() - begun - timeout

    with ControllerClient(url) as client:
        client.ready(timeout=10)
        with stopped(process):
            threads = [
                threading.Thread(target=time_it, args=(name, call, timeout))
                for timeout in (0.0, 0.5, 2.0)
                for name, call in calls(client).items()
                if timeout or name != "events"  # which needs no time to hear nothing
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
        assert len(took) == len(threads), "each of them raised what it should"
        assert {name: over for name, over in took.items() if over > OVERRUN} == {}
        client.ready(timeout=10)


def test_a_wait_that_has_begun_keeps_its_time_when_the_controller_is_stopped_under_it(
    stoppable: tuple[str, subprocess.Popen[str]],
) -> None:
    url, process = stoppable
    with ControllerClient(url) as client:
        client.ready(timeout=10)
        took: list[float] = []

        def wait() -> None:
            begun = time.monotonic()
            with pytest.raises(ControllerUnavailable):
                client.latest(unique("m"), timeout=1.5)
            took.append(time.monotonic() - begun)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.3)
        with stopped(process):
            thread.join(20)
        assert took[0] < 1.5 + OVERRUN


def test_a_stopped_controller_is_left_for_another_and_the_call_succeeds(
    stoppable: tuple[str, subprocess.Popen[str]], redis_url: str
) -> None:
    url, process = stoppable
    with (
        threaded(Settings(redis_url=redis_url, port=0)) as other,
        ControllerClient(f"{url},{other}") as client,
    ):
        model = unique("model")
        trainer = Trainer(client, model, world_size=1).join_all()
        with stopped(process):
            begun = time.monotonic()
            trainer.publish(1)
            left = time.monotonic() - begun
            begun = time.monotonic()
            trainer.publish(2)
            assert time.monotonic() - begun < left, "it stays with the one that answers"
        assert client.latest(model, timeout=5).version == 2


def test_a_long_poll_goes_on_at_another_controller(
    stoppable: tuple[str, subprocess.Popen[str]], redis_url: str
) -> None:
    url, process = stoppable
    with threaded(Settings(redis_url=redis_url, port=0)) as other, ControllerClient(other) as direct:
        model = unique("model")
        trainer = Trainer(direct, model, world_size=1).join_all()
        found: list[int] = []
        with ControllerClient(f"{url},{other}") as client:
            thread = threading.Thread(target=lambda: found.append(client.latest(model, timeout=30).version))
            thread.start()
            time.sleep(0.3)
            with stopped(process):
                trainer.publish(1)
                thread.join(30)
        assert found == [1]


def test_a_controller_that_was_killed_is_not_missed(redis_url: str) -> None:
    """In the middle of rounds of a group: no call fails, whichever of the controllers dies."""
    own = ("--redis-url", redis_url)
    with (
        serving(*own) as (first, one),
        serving(*own) as (second, _),
        ControllerClient(f"{first} , {second}/") as client,
    ):
        model = unique("model")
        trainer = Trainer(client, model, world_size=1).join_all()
        (session,) = join_group(client, model, "g")
        for version in range(1, 7):
            trainer.publish(version)
            begun = client.begin_round(model, "g", rank=0, session=session, timeout=10)
            if version == 3:
                one.kill()
                one.communicate(timeout=5)
            client.finish_round(model, "g", rank=0, session=session, round=begun.round, timeout=10)
            assert client.group(model, "g").version == version


def test_when_none_answers_all_are_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        urls = f"http://127.0.0.1:{taken.getsockname()[1]},http://127.0.0.1:9"
        with ControllerClient(urls) as client:
            assert client.url == urls
            with pytest.raises(ControllerUnavailable) as error:
                client.models(timeout=0.3)
        assert all(url in error.value.message for url in urls.split(","))


@pytest.mark.parametrize("urls", ["http://a,", ",", "http://a,b:8300"])
def test_a_list_with_what_is_no_url_is_refused(urls: str) -> None:
    with pytest.raises(InvalidRequest, match="URL"):
        ControllerClient(urls)


def test_an_index_that_one_controller_has_lost_is_asked_for_at_the_other(redis_url: str) -> None:
    """The first answers, but its way to Redis is cut: its Redis is another that has died."""
    with (
        EmbeddedRedis() as doomed,
        threaded(Settings(redis_url=redis_url, port=0)) as good,
        threaded(Settings(redis_url=doomed.url, port=0)) as bad,
        ControllerClient(f"{bad},{good}") as client,
    ):
        client.ready(timeout=10)
        os.kill(doomed.pid, signal.SIGKILL)
        doomed.stop()
        joined = client.join_consumer(
            unique("m"), "g", rank=0, world_size=1, session="s", process=PROCESS, timeout=20
        )
        assert joined.world_size == 1
