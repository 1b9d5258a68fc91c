"""Traces of real processes in a real collector: from the trainer through the controller to the rollout."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .harness import ROOT, Child, Redis, Server, eventually

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from .collector import Collector, Seen


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    collector = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    yield collector
    collector.close()


def children_of(collector: Collector, parent: Seen) -> set[str]:
    return {s.name for s in collector.spans if s.parent == parent.id}


def test_a_version_is_one_trace_and_updates_refer_to_it(collector: Collector, model: str) -> None:
    server = Server("--port", "0")
    producer = Child("producer", server.url, model)
    consumer = Child("consumer", server.url, model)
    try:
        for child in (producer, consumer):
            assert child.heard()["joined"]
        for version in (1, 2):
            assert producer.ask(f"publish {version} wait=ready")["version"] == version
            assert consumer.ask("update")["seen"] == version
        eventually(lambda: len(collector.named("weightdepot.update", model=model)) == 2)
        eventually(lambda: len(collector.named("weightdepot.publish", model=model)) == 2)
        eventually(lambda: len([s for s in collector.spans if s.name == "seal"]) == 2)
        eventually(lambda: len([s for s in collector.spans if "/parts/" in s.name]) == 2)
    finally:
        for child in (producer, consumer):
            child.tell("exit")
            child.process.wait(20)
            child.close()
        server.stop()

    for version in (1, 2):
        (publish,) = collector.named("weightdepot.publish", model=model, version=version)
        assert publish.parent == ""
        assert publish.attributes["weightdepot.rank"] == 0
        assert publish.attributes["weightdepot.nbytes"] > 0
        assert {"open", "pack", "seal"} <= children_of(collector, publish)
        mine = [s for s in collector.spans if s.trace == publish.trace]
        # the controller's own, in another process, in the same trace
        (opened,) = [s for s in mine if s.name == "POST /v1/models/{model}/versions"]
        (opening,) = [s for s in mine if s.name == "open"]
        assert opened.parent == opening.id
        assert opened.attributes["http.response.status_code"] == 200
        (sealed,) = [s for s in mine if s.name == "POST /v1/models/{model}/versions/{version}/parts/{rank}"]
        (seal,) = [s for s in mine if s.name == "seal"]
        assert sealed.parent == seal.id

        (update,) = collector.named("weightdepot.update", model=model, version=version)
        assert update.trace != publish.trace
        assert update.attributes["weightdepot.group"] == "rollout"
        assert update.attributes["weightdepot.moved"] == update.attributes["weightdepot.needed"] > 0
        assert {"begin", "pull", "finish"} <= children_of(collector, update)
        (pull,) = [s for s in collector.spans if s.name == "pull" and s.trace == update.trace]
        assert pull.links == (publish.trace,)
    assert {s.service for s in collector.spans} == {"weightdepot"}
    assert not [s for s in collector.spans if s.failed]
    # what runs by itself makes no traces of its own
    assert not [s for s in collector.spans if "heartbeat" in s.name]


def test_what_fails_says_so_in_its_span(collector: Collector, model: str) -> None:
    server = Server("--port", "0")
    producer = Child("producer", server.url, model)
    try:
        assert producer.heard()["joined"]
        assert producer.ask("publish 5 wait=ready")["version"] == 5
        assert "error" in producer.ask("publish 4")
        eventually(lambda: len(collector.named("weightdepot.publish", version=4)) == 1)
    finally:
        producer.close()
        server.stop()
    (failed,) = collector.named("weightdepot.publish", version=4)
    assert "VersionNotNewer" in failed.failed
    assert "exception" in failed.events
    (answered,) = [
        s for s in collector.spans if s.trace == failed.trace and s.attributes.get("http.route") is not None
    ]
    assert answered.attributes["http.response.status_code"] == 409
    assert answered.failed == "", "that the caller was wrong is no fault of the controller's"


def test_a_collector_that_is_away_holds_nothing_up(
    monkeypatch: pytest.MonkeyPatch, model: str, tmp_path: Path
) -> None:
    silent = socket.create_server(("127.0.0.1", 0))  # takes connections, and says nothing
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
    redis = Redis(tmp_path)
    server = Server("--port", "0", "--redis-url", redis.url)
    producer = Child("producer", server.url, model)
    consumer = Child("consumer", server.url, model)
    try:
        for child in (producer, consumer):
            assert child.heard()["joined"]
        assert producer.ask("publish 1 wait=ready")["version"] == 1
        assert consumer.ask("update")["seen"] == 1
        begun = time.monotonic()
        for child in (consumer, producer):
            child.tell("exit")
        server.process.terminate()
        for process in (consumer.process, producer.process, server.process):
            process.wait(30)
        assert time.monotonic() - begun < 12
    finally:
        for child in (producer, consumer):
            child.close()
        server.stop()
        redis.stop()
        silent.close()


WITHOUT = """
import sys
import torch
import weightdepot
from weightdepot.api.client import ControllerClient

w = {"w": torch.ones(4, 4)}
with weightdepot.Producer(sys.argv[1], model=sys.argv[2], weights=w) as p:
    p.publish(1, wait="ready")
    with weightdepot.Consumer(sys.argv[1], model=sys.argv[2], weights={"w": torch.zeros(4, 4)}) as c:
        c.update()
print(sorted(name for name in sys.modules if name.startswith("opentelemetry")))
"""


@pytest.mark.parametrize("environment", [{}, {"OTEL_TRACES_EXPORTER": "none"}, {"OTEL_SDK_DISABLED": "true"}])
def test_where_none_are_asked_for_nothing_is_imported(
    controller: str, model: str, environment: dict[str, str]
) -> None:
    asked = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"} if environment else {}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, controller, model],
        env={**os.environ, **asked, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
