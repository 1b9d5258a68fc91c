"""Each alert fires in a real Prometheus when what it is about really happens, and is over when that is."""

from __future__ import annotations

import contextlib
import signal
import threading
import time

import pytest

from weightdepot import StoreFull
from weightdepot.api.client import ControllerClient

from ..system.fleet import publish, ranks, trainer
from ..system.harness import Child, Redis, Server, eventually, together
from .prometheus import RULES, Prometheus, needs_prometheus, quick_rules

pytestmark = [needs_prometheus, pytest.mark.slow]


def scraped(prometheus: Prometheus, expression: str) -> None:
    """Wait until it has been seen, and for one evaluation of the rules more."""
    eventually(lambda: bool(prometheus.query(expression)))
    time.sleep(0.5)


def test_a_group_that_does_not_update_lags(prometheus: Prometheus, controller: str, model: str) -> None:
    alert = {"alert": "WeightdepotGroupLags", "model": model, "group": "rollout"}
    with trainer(controller, model) as producer, ranks(controller, model, 1) as [consumer]:
        publish(producer, 1)
        consumer.update()
        publish(producer, 2, 3, 4)
        scraped(prometheus, f'weightdepot_group_lag{{model="{model}"}} == 3')
        time.sleep(1.5)
        assert not prometheus.fires(**alert), "three versions are no reason yet"
        publish(producer, 5)
        eventually(lambda: prometheus.fires(**alert))
        consumer.update()
        eventually(lambda: not prometheus.fires(**alert))


def test_a_group_is_half_way_between_versions(prometheus: Prometheus, controller: str, model: str) -> None:
    alert = {"alert": "WeightdepotGroupHalf", "model": model, "group": "rollout"}
    broken = [False]

    def before_serve(_: int) -> None:
        if broken[0]:
            raise RuntimeError("the engine has gone")

    hooks = [lambda _: None, before_serve]
    with (
        trainer(controller, model) as producer,
        ranks(controller, model, 2, before_serve=hooks) as [one, two],
    ):
        publish(producer, 1)
        together(one.update, two.update)
        scraped(prometheus, f'weightdepot_group_half{{model="{model}"}} == 0')
        assert not prometheus.fires(**alert)
        publish(producer, 2)
        broken[0] = True
        with pytest.raises(Exception, match="engine has gone"):
            together(one.update, two.update)
        eventually(lambda: prometheus.fires(**alert))
        broken[0] = False
        together(one.update, two.update)
        eventually(lambda: not prometheus.fires(**alert))


def test_a_reader_is_stuck_and_then_no_slot_is_free(
    prometheus: Prometheus, controller: str, model: str
) -> None:
    stuck = {"alert": "WeightdepotStuckReader", "model": model}
    full_up = {"alert": "WeightdepotNoFreeSlot", "model": model}
    go_on, reads = threading.Event(), threading.Event()

    def hold(_: int) -> None:
        reads.set()
        go_on.wait(30)

    with (
        trainer(controller, model, retention=2) as producer,
        ranks(controller, model, 1, before_write=hold) as [consumer],
        contextlib.ExitStack() as stack,
    ):
        stack.callback(go_on.set)
        publish(producer, 1)
        reading = threading.Thread(target=consumer.update)
        reading.start()
        stack.callback(reading.join)
        assert reads.wait(10)
        publish(producer, 2)
        scraped(prometheus, f'weightdepot_latest_version{{model="{model}"}} == 2')
        assert not prometheus.fires(**stuck)
        assert not prometheus.fires(**full_up)
        with pytest.raises(StoreFull, match="rollout"):
            producer.publish(3, timeout=1)
        eventually(lambda: prometheus.fires(**stuck))
        eventually(lambda: prometheus.fires(**full_up))
        for alert in (stuck, full_up):
            mine = [
                a for a in prometheus.alerts() if (a["alertname"], a.get("model")) == tuple(alert.values())
            ]
            assert len(mine) == 1, "one for both controllers"
        go_on.set()
        reading.join()
        publish(producer, 3)
        eventually(lambda: not prometheus.fires(**stuck))


def test_a_producer_dies_in_the_middle_of_a_version(
    prometheus: Prometheus, controller: str, model: str
) -> None:
    aborted = {"alert": "WeightdepotPublishAborted", "model": model}
    missing = {"alert": "WeightdepotProducersMissing", "model": model}
    with contextlib.ExitStack() as stack:

        def start(rank: int, **options: str) -> Child:
            child = Child("producer", controller, model, rank=rank, world_size=2, **options)
            stack.callback(child.close)
            assert child.heard()["joined"]
            return child

        steady, victim = start(0), start(1, halt="packing")
        for child in (steady, victim):
            child.tell("publish 1")
        assert [child.heard()["version"] for child in (steady, victim)] == [1, 1]
        scraped(prometheus, f'weightdepot_aborted_versions_total{{model="{model}"}} == 0')
        assert not prometheus.fires(**aborted)
        assert not prometheus.fires(**missing)
        for child in (steady, victim):
            child.tell("publish 2")
        assert "halted" in victim.heard()
        victim.kill()
        eventually(lambda: prometheus.fires(**missing))
        eventually(lambda: prometheus.fires(**aborted))
        start(1)
        eventually(lambda: not prometheus.fires(**missing))


def test_a_controller_is_down(prometheus: Prometheus, other: Server) -> None:
    alert = {"alert": "WeightdepotControllerAway", "instance": other.url.removeprefix("http://")}
    scraped(prometheus, f'up{{instance="{alert["instance"]}"}} == 1')
    assert not prometheus.fires(**alert)
    other.signal(signal.SIGSTOP)
    try:
        eventually(lambda: prometheus.fires(**alert))
    finally:
        other.signal(signal.SIGCONT)
    eventually(lambda: not prometheus.fires(**alert))


def test_the_index_goes_away(prometheus: Prometheus, controller: str, redis: Redis) -> None:
    alert = {"alert": "WeightdepotIndexAway", "instance": controller.removeprefix("http://")}
    scraped(prometheus, "weightdepot_index_up == 1")
    assert not prometheus.fires(**alert)
    redis.kill()
    eventually(lambda: prometheus.fires(**alert))
    redis.start()
    eventually(lambda: not prometheus.fires(**alert))


def test_nothing_fires_where_all_is_well(prometheus: Prometheus, controller: str, model: str) -> None:
    with (
        trainer(controller, model) as producer,
        ranks(controller, model, 1) as [consumer],
        ControllerClient(controller) as client,
    ):
        for version in range(1, 12):
            publish(producer, version)
            assert consumer.update() == version
            time.sleep(0.2)
        assert client.model(model).latest == 11
        for state in ("pending", "firing"):
            assert [labels for labels in prometheus.alerts(state) if labels.get("model") == model] == []


def test_the_rules_differ_from_those_that_are_run_here_in_their_patience_alone() -> None:
    shipped, run = RULES.read_text().splitlines(), quick_rules().splitlines()
    assert len(shipped) == len(run)
    assert all(a.strip().startswith("for: ") for a, b in zip(shipped, run, strict=True) if a != b)
