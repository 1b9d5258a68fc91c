"""The typed client: what it returns, what it raises, and that nothing waits past the caller's time."""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from weightdepot.api import exchange
from weightdepot.api.client import ControllerClient
from weightdepot.api.exchange import ExchangeTimeouts
from weightdepot.api.schemas import answers, requests
from weightdepot.api.settings import Settings
from weightdepot.store.errors import (
    ControllerUnavailable,
    IndexUnavailable,
    InvalidRequest,
    LayoutError,
    MemberConflict,
    StaleGroup,
    StoreFull,
    UnknownModel,
    VersionGone,
    VersionNotNewer,
    WaitTimeout,
    WeightDepotError,
)
from weightdepot.store.index import records
from weightdepot.store.index.records import GroupState, VersionState
from weightdepot.store.layout import TensorSpec

from .helpers import PROCESS, Trainer, join_group, rows_layout, threaded

# -- over a real controller ------------------------------------------------------------------------------


def test_a_version_goes_from_open_to_applied(client: ControllerClient, trainer: Trainer, model: str) -> None:
    reader = client.put_layout(rows_layout(2, 6))
    (session,) = join_group(client, model, "g", layout=reader)
    assert client.manifest(model, timeout=5) == (TensorSpec("w", (8, 4), "float32"),)
    grant = trainer.open(1)
    assert isinstance(grant, records.Grant)
    assert client.source_tiling(model, grant.tiling, 0).payload == 64
    assert trainer.publish(1).state is VersionState.READY
    round_ = client.begin_round(model, "g", rank=0, session=session, timeout=5)
    assert (round_.version, round_.held) == (1, None)
    assert round_.parts[0].endpoints["shm"]["nested"] == {"list": [], "none": None}
    plan = client.plan(model, round_.tiling, reader)
    assert plan.needed_nbytes == 64
    assert client.digests(model, 1, plan.sources) == {0: bytes(16), 1: b"\x01" * 16}
    assert client.digests(model, 1, []) == {}
    assert client.heartbeat(model, session, rounds=[("g", round_.round)]) == records.Heartbeat(True, ())
    status = client.finish_round(model, "g", rank=0, session=session, round=round_.round, timeout=5)
    assert status == records.RoundStatus(1, GroupState.WHOLE, ())
    assert client.group(model, "g").version == 1
    assert [g.group for g in client.groups(model)] == ["g"]
    assert client.latest(model, timeout=0).version == client.version(model, 1).version == 1
    assert [v.version for v in client.versions(model)] == [1]
    assert model in client.models()
    assert client.model(model).latest == 1
    client.ready(timeout=5)


def test_every_record_is_mirrored_by_its_schema() -> None:
    """Else an answer would lack a field that the client wants."""
    for name in (
        "Process", "Member", "Part", "Version", "Model", "Group", "Joined", "Grant", "Wait", "Round",
        "RoundStatus", "Heartbeat", "Policy", "Applied", "Convergence",
    ):  # fmt: skip
        record = {field.name for field in dataclasses.fields(getattr(records, name))}
        assert set(getattr(answers, name).model_fields) == record, name
    assert set(answers.Event.model_fields) == set(records.Event._fields)
    for body, sent in ((requests.HeldIn, records.Held), (requests.PartIn, records.Part)):
        assert set(body.model_fields) == {field.name for field in dataclasses.fields(sent)}


def test_refusals_come_as_the_classes_that_the_controller_names(
    client: ControllerClient, trainer: Trainer, model: str
) -> None:
    trainer.publish(3)
    with pytest.raises(VersionNotNewer, match="3"):
        trainer.open(2)
    with pytest.raises(VersionGone):
        client.version(model, 77)
    with pytest.raises(UnknownModel):
        client.model(model + "x")
    with pytest.raises(MemberConflict) as conflict:
        client.join_producer(
            model, rank=0, world_size=2, session="other", layout=trainer.layout(0).digest, process=PROCESS
        )
    assert trainer.sessions[0] in str(conflict.value.details)
    other = client.put_layout(rows_layout(0, 8, name="other"))
    with pytest.raises(LayoutError) as misfit:
        client.plan(model, client.version(model, 3).tiling, other)
    assert [fault.tensor for fault in misfit.value.faults] == ["other"]


@pytest.mark.parametrize("name", ["a/b", "..", "", "a b", "x" * 129])
def test_bad_names_are_refused_before_anything_is_sent(name: str) -> None:
    with ControllerClient("http://127.0.0.1:9", transport=_never()) as client:
        for call in (
            lambda: client.model(name),
            lambda: client.group("m", name),
            lambda: client.leave("m", name),
            lambda: client.latest(name, timeout=1),
        ):
            with pytest.raises(InvalidRequest, match="name"):
                call()


@pytest.mark.parametrize("url", ["", "127.0.0.1:8300", "ftp://host", "http://", "http://[::1"])
def test_what_is_no_url_is_refused_at_once(url: str) -> None:
    with pytest.raises(InvalidRequest, match="URL"):
        ControllerClient(url)


def test_a_wait_that_is_over_names_what_was_waited_for(client: ControllerClient, model: str) -> None:
    trainer = Trainer(client, model)
    with pytest.raises(WaitTimeout, match="no producer"):
        client.latest(model, timeout=0.1)
    with pytest.raises(WaitTimeout, match="no producer"):
        client.manifest(model, timeout=0.1)
    trainer.join(0)
    with pytest.raises(WaitTimeout, match=r"ranks? 1 .*not joined") as missing:
        trainer.open(1, timeout=0.1)
    assert missing.value.details["missing"] == [1]
    trainer.join(1)
    trainer.publish(1)
    with pytest.raises(WaitTimeout, match="newest is 1"):
        client.latest(model, min_version=2, timeout=0.1)
    trainer.open(2, rank=0)
    with pytest.raises(WaitTimeout, match="version 2"):
        trainer.open(3, rank=1, timeout=0.1)


def test_a_full_store_names_who_holds_the_leases(
    client: ControllerClient, trainer: Trainer, model: str
) -> None:
    for version, group in ((1, "a"), (2, "b")):
        trainer.publish(version)
        (session,) = join_group(client, model, group)
        client.begin_round(model, group, rank=0, session=session, timeout=5)
    with pytest.raises(StoreFull, match="a/1"):
        trainer.open(3, timeout=0.2)


def test_a_slot_that_comes_free_wakes_the_publisher(
    client: ControllerClient, trainer: Trainer, model: str
) -> None:
    sessions = {}
    for version, group in ((1, "a"), (2, "b")):
        trainer.publish(version)
        (sessions[group],) = join_group(client, model, group)
        client.begin_round(model, group, rank=0, session=sessions[group], timeout=5)

    def finish() -> None:
        time.sleep(0.3)
        client.finish_round(model, "a", rank=0, session=sessions["a"], round=1, timeout=5)

    thread = threading.Thread(target=finish)
    thread.start()
    begun = time.monotonic()
    assert trainer.open(3, timeout=10).version == 3
    assert time.monotonic() - begun < 0.9, "woken by the event, not by the re-check"
    thread.join(5)


def test_a_group_is_a_barrier(client: ControllerClient, trainer: Trainer, model: str) -> None:
    trainer.publish(1)
    sessions = join_group(client, model, "g", world_size=2)
    rounds = [client.begin_round(model, "g", rank=r, session=s, timeout=5) for r, s in enumerate(sessions)]
    assert rounds[0].round == rounds[1].round

    def finish(rank: int, timeout: float, barrier: bool = True) -> records.RoundStatus:
        return client.finish_round(
            model,
            "g",
            rank=rank,
            session=sessions[rank],
            round=rounds[0].round,
            timeout=timeout,
            barrier=barrier,
        )

    assert finish(0, 5, barrier=False).state is GroupState.MOVING
    with pytest.raises(StaleGroup, match="ranks 1 ") as stale:
        finish(0, 0.2)
    assert stale.value.details["pending"] == [1]
    results: list[records.RoundStatus] = []
    thread = threading.Thread(target=lambda: results.append(finish(0, 10)))
    thread.start()
    time.sleep(0.2)
    assert not results
    assert finish(1, 5).state is GroupState.WHOLE
    thread.join(5)
    assert results[0].state is GroupState.WHOLE


def test_a_group_whose_ranks_never_come_is_named(
    client: ControllerClient, trainer: Trainer, model: str
) -> None:
    trainer.publish(1)
    client.join_consumer(model, "h", rank=0, world_size=2, session="lonely", process=PROCESS)
    with pytest.raises(StaleGroup, match="'h'") as stale:
        client.begin_round(model, "h", rank=0, session="lonely", timeout=0.2)
    assert stale.value.details["missing"] == [1]


def test_one_client_serves_many_threads(client: ControllerClient, trainer: Trainer, model: str) -> None:
    errors: list[BaseException] = []

    def beat() -> None:
        try:
            for _ in range(20):
                assert client.heartbeat(model, trainer.sessions[0]).member
        except BaseException as error:  # noqa: BLE001 - reported by the assertion below
            errors.append(error)

    threads = [threading.Thread(target=beat) for _ in range(4)]
    waiting = threading.Thread(target=lambda: client.latest(model, timeout=10))
    for thread in (*threads, waiting):
        thread.start()
    for thread in threads:
        thread.join(20)
    trainer.publish(1)
    waiting.join(5)
    assert not errors
    assert not waiting.is_alive()


def test_another_run_is_refused(controller: str, model: str) -> None:
    with (
        ControllerClient(controller, run="other") as client,
        pytest.raises(InvalidRequest, match="'default'"),
    ):
        client.models()


# -- a controller that is not there ----------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_a_controller_that_never_comes_is_named_in_time() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with ControllerClient(url) as client:
        for call in (
            lambda: client.models(timeout=0.5),
            lambda: client.latest("m", timeout=0.5),
            lambda: client.begin_round("m", "g", rank=0, session="s", timeout=0.5),
            lambda: client.heartbeat("m", "s", timeout=0.5),
        ):
            begun = time.monotonic()
            with pytest.raises(ControllerUnavailable, match="weightdepot serve") as error:
                call()
            assert url in error.value.message
            assert 0.4 < time.monotonic() - begun < 1.5


def test_a_controller_that_comes_late_is_found(redis_url: str) -> None:
    port = free_port()
    found: list[tuple[str, ...]] = []
    with ControllerClient(f"http://127.0.0.1:{port}") as client:
        thread = threading.Thread(target=lambda: found.append(client.models(timeout=30)))
        thread.start()
        time.sleep(0.3)
        with threaded(Settings(redis_url=redis_url, port=port)):
            thread.join(10)
    assert len(found) == 1


def test_a_controller_that_accepts_and_never_answers_does_not_hold_the_caller() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        timeouts = ExchangeTimeouts(answer=0.3, grace=0.2)
        with ControllerClient(url, timeouts=timeouts) as client:
            begun = time.monotonic()
            with pytest.raises(ControllerUnavailable, match=r"timed out|tried \d+ times"):
                client.models(timeout=1)
            assert time.monotonic() - begun < 2


# -- over a scripted transport ---------------------------------------------------------------------------


def _never() -> httpx.MockTransport:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise AssertionError(f"{request.url} was asked")

    return httpx.MockTransport(refuse)


def scripted(*answers: httpx.Response | Exception) -> tuple[ControllerClient, list[httpx.Request]]:
    """A client whose controller gives these answers, the last one for ever."""
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        now = answers[min(len(asked), len(answers)) - 1]
        if isinstance(now, Exception):
            raise now
        return httpx.Response(now.status_code, headers=now.headers, content=now.content)

    return ControllerClient("http://c", transport=httpx.MockTransport(answer)), asked


def as_problem(error: WeightDepotError) -> httpx.Response:
    return httpx.Response(error.status, json=error.to_problem())


def test_lost_connections_and_an_index_that_is_away_are_met_by_asking_again() -> None:
    client, asked = scripted(
        httpx.ConnectError("refused"),
        httpx.RemoteProtocolError("cut"),
        httpx.Response(502, text="Bad Gateway"),
        as_problem(IndexUnavailable("gone")),
        httpx.Response(200, json={"models": ["m"]}),
    )
    assert client.models(timeout=10) == ("m",)
    assert len(asked) == 5


@pytest.mark.parametrize(
    ("answer", "expected", "says"),
    [
        (as_problem(IndexUnavailable("redis is gone")), IndexUnavailable, "redis is gone"),
        (httpx.Response(503, text="<html>"), ControllerUnavailable, "proxy"),
        (httpx.Response(404, text="<html>"), ControllerUnavailable, "something else"),
        (httpx.Response(200, text="<html>"), ControllerUnavailable, "not a controller of this release"),
        (httpx.Response(200, json={"models": 5}), ControllerUnavailable, "not a controller of this release"),
    ],
    ids=["index", "proxy", "stranger", "page", "json"],
)
def test_what_persists_until_the_deadline_is_raised_as_what_it_is(
    answer: httpx.Response, expected: type[WeightDepotError], says: str
) -> None:
    client, _ = scripted(answer)
    with pytest.raises(expected, match=says):
        client.models(timeout=0.2)


def test_refusals_are_not_asked_again() -> None:
    client, asked = scripted(as_problem(VersionNotNewer("no", model="m")))
    with pytest.raises(VersionNotNewer):
        client.open_version("m", 1, rank=0, session="s", timeout=5)
    assert len(asked) == 1


def test_a_controller_that_answers_waits_at_once_is_not_asked_at_full_speed() -> None:
    """One that shuts down does so."""
    client, asked = scripted(httpx.Response(200, json={"wait": {"reason": "slot", "message": "full"}}))
    with pytest.raises(StoreFull, match=r"waited 0.5 s for a slot for version 1 of 'm': full"):
        client.open_version("m", 1, rank=0, session="s", timeout=0.5)
    assert len(asked) < 20


@pytest.mark.parametrize(
    ("reason", "expected"),
    [("slot", StoreFull), ("ranks", WaitTimeout), ("open-version", WaitTimeout), ("planning", WaitTimeout),
     ("group", StaleGroup), ("version", WaitTimeout)],
)  # fmt: skip
def test_each_wait_becomes_the_error_that_fits(reason: str, expected: type[WeightDepotError]) -> None:
    wait = {"wait": {"reason": reason, "message": "not yet", "details": {"reason": reason, "who": ["x"]}}}
    client, _ = scripted(httpx.Response(200, json=wait))
    with pytest.raises(expected, match="not yet") as error:
        client.begin_round("m", "g", rank=0, session="s", timeout=0)
    assert error.value.details["who"] == ["x"]


def test_polls_never_wait_longer_than_the_caller() -> None:
    waits: list[float] = []

    def answer(request: httpx.Request) -> httpx.Response:
        waits.append(float(request.url.params["wait"]))
        assert request.extensions["timeout"]["read"] <= waits[-1] + 10
        return as_problem(WaitTimeout("waited 0 s: nothing", reason="version"))

    with ControllerClient("http://c", transport=httpx.MockTransport(answer)) as client:
        with pytest.raises(WaitTimeout, match=r"waited 0.3 s for a ready version of 'm': nothing"):
            client.latest("m", timeout=0.3)
        waits_short = list(waits)
        waits.clear()
        with pytest.raises(WaitTimeout):
            client.latest("m", timeout=0)
    assert max(waits_short) <= 0.3
    assert waits == [0.0]


def test_closing_ends_what_another_thread_retries() -> None:
    client, _ = scripted(httpx.ConnectError("refused"))
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            client.models(timeout=30)
        except ControllerUnavailable as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.1)
    client.close()
    thread.join(2)
    assert "was closed" in str(errors[0])


@pytest.mark.parametrize("timeout", [-1.0, float("nan")])
def test_a_timeout_that_is_no_time_is_refused(timeout: float) -> None:
    client, _ = scripted(httpx.Response(200, json={}))
    with pytest.raises(InvalidRequest, match="timeout"):
        client.models(timeout=timeout)


def test_every_method_is_bounded_by_a_timeout() -> None:
    import inspect

    public: dict[str, Callable[..., Any]] = {
        name: member
        for name, member in inspect.getmembers(ControllerClient, inspect.isfunction)
        if not name.startswith("_") and name != "close"
    }
    assert len(public) >= 20
    for name, method in public.items():
        parameter = inspect.signature(method).parameters["timeout"]
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY, name


def test_the_deadline_counts_down_and_stays_at_nothing() -> None:
    deadline = exchange.Deadline(0.05)
    assert 0 < deadline.remaining() <= 0.05
    time.sleep(0.06)
    assert deadline.remaining() == 0
    assert deadline.passed
