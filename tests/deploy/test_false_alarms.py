"""What looks like trouble and is none, in a real Prometheus; and trouble that hides behind what is none."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from weightdepot import StoreFull
from weightdepot.api.client import ControllerClient

from ..api.helpers import Trainer, join_group
from ..system.fleet import publish, ranks, trainer
from ..system.harness import eventually, together
from .prometheus import Prometheus, needs_prometheus

pytestmark = [needs_prometheus, pytest.mark.slow]

PATIENCE = 3.0  # seconds; a multiple of what the rules' conditions must last here


def stays_quiet(prometheus: Prometheus, alert: str, **labels: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        assert not prometheus.fires(alert, **labels)
        time.sleep(0.1)


def seen(prometheus: Prometheus, expression: str) -> None:
    eventually(lambda: bool(prometheus.query(expression)))


def test_a_trainer_that_ended_is_not_missing(prometheus: Prometheus, controller: str, model: str) -> None:
    with trainer(controller, model) as producer:
        publish(producer, 1)
        seen(prometheus, f'weightdepot_producers_alive{{model="{model}"}} == 1')
    seen(prometheus, f'weightdepot_producers_alive{{model="{model}"}} == 0')
    stays_quiet(prometheus, "WeightdepotProducersMissing", model=model)


def test_groups_of_a_model_that_is_held_do_not_lag(
    prometheus: Prometheus, controller: str, model: str
) -> None:
    with (
        trainer(controller, model) as producer,
        ranks(controller, model, 1) as [consumer],
        ControllerClient(controller) as client,
    ):
        publish(producer, 1)
        client.hold(model, 1)
        consumer.update()
        publish(producer, 2, 3, 4, 5, 6)
        seen(prometheus, f'weightdepot_group_lag{{model="{model}"}} == 5')
        stays_quiet(prometheus, "WeightdepotGroupLags", model=model)
        client.release(model)
        eventually(lambda: prometheus.fires("WeightdepotGroupLags", model=model, group="rollout"))


def test_a_publish_that_gets_its_slot_late_has_found_one(
    prometheus: Prometheus, controller: str, model: str
) -> None:
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
        late = threading.Timer(PATIENCE, go_on.set)
        late.start()
        begun = time.monotonic()
        publish(producer, 3)
        assert time.monotonic() - begun > PATIENCE / 2, "it had to wait"
        seen(prometheus, f'max_over_time(weightdepot_opening_wait_seconds{{model="{model}"}}[1m]) > 1')
        stays_quiet(prometheus, "WeightdepotNoFreeSlot", model=model)


def test_readers_that_take_turns_are_not_stuck(prometheus: Prometheus, controller: str, model: str) -> None:
    """A slow engine is always at a version that is retired: another one each time."""
    with ControllerClient(controller) as client:
        producers = Trainer(client, model).join_all()
        sessions = {group: join_group(client, model, group)[0] for group in ("a", "b")}

        def begin(group: str) -> int:
            return client.begin_round(model, group, rank=0, session=sessions[group], timeout=5).round

        def finish(group: str, number: int) -> None:
            client.finish_round(
                model, group, rank=0, session=sessions[group], round=number, stats={}, timeout=5
            )

        producers.publish(1)
        reading = {"a": begin("a")}
        deadline = time.monotonic() + 2 * PATIENCE
        version, turn = 1, "a"
        while time.monotonic() < deadline:
            version += 1
            producers.publish(version)
            follower = "b" if turn == "a" else "a"
            reading[follower] = begin(follower)
            # the next version wants the slot of the one that is read
            with pytest.raises(StoreFull):
                producers.open(version + 1, timeout=0)
            seen(prometheus, f'weightdepot_leases{{model="{model}",state="retired"}} == 1')
            time.sleep(0.5)
            assert not prometheus.fires("WeightdepotStuckReader", model=model)
            finish(turn, reading.pop(turn))
            turn = follower


def test_a_group_that_fails_again_and_again_is_half_way_all_the_while(
    prometheus: Prometheus, controller: str, model: str
) -> None:
    """Each attempt to mend it is a round under way: that must not begin the patience of the alert anew."""
    broken = [False]

    def before_serve(_: int) -> None:
        if broken[0]:
            time.sleep(0.6)
            raise RuntimeError("the engine has gone")

    hooks = [lambda _: None, before_serve]
    with (
        trainer(controller, model) as producer,
        ranks(controller, model, 2, before_serve=hooks) as [one, two],
    ):
        publish(producer, 1)
        together(one.update, two.update)
        publish(producer, 2)
        broken[0] = True
        deadline = time.monotonic() + 10
        while not prometheus.fires("WeightdepotGroupHalf", model=model, group="rollout"):
            assert time.monotonic() < deadline, "it never fired"
            with pytest.raises(Exception, match="engine has gone"):
                together(one.update, two.update)
        broken[0] = False
        together(one.update, two.update)
        eventually(lambda: not prometheus.fires("WeightdepotGroupHalf", model=model))
