"""What a publish waits for: by its argument, and by the model's policy, which may change at any time."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from weightdepot import Producer
from weightdepot.api.client import ControllerClient
from weightdepot.store.errors import InvalidRequest, PublishAborted, WaitTimeout
from weightdepot.store.index.records import Mode

from .fleet import publish, ranks, trainer
from .harness import Child, together

Start = Callable[..., Child]


def test_applied_waits_until_every_live_group_holds_the_version(
    controller: str, model: str, producer: Producer
) -> None:
    with (
        ranks(controller, model, 2, group="one") as one,
        ranks(controller, model, 1, group="two") as (two,),
        ThreadPoolExecutor(1) as pool,
    ):
        published = pool.submit(producer.publish, 1, wait="applied")
        together(*[c.update for c in one])
        with pytest.raises(concurrent.futures.TimeoutError):
            published.result(0.5)
        two.update()
        done = published.result(20)
        assert (set(done.applied), done.dropped) == ({"one", "two"}, ())


def test_applied_without_readers_is_ready(producer: Producer) -> None:
    done = producer.publish(1, wait="applied")
    assert (done.applied, done.dropped) == ((), ())


def test_a_group_that_does_not_come_is_named_and_the_version_stays_ready(
    controller: str, model: str, producer: Producer
) -> None:
    with ranks(controller, model, 1, group="idle") as (reader,):
        with pytest.raises(WaitTimeout, match=r"idle did not\. The version stays ready") as caught:
            producer.publish(1, timeout=1, wait="applied")
        assert caught.value.details["pending"] == ["idle"]
        assert reader.update() == 1
        assert producer.publish(2).version == 2


def test_case_08_a_reader_that_is_killed_is_waited_for_no_longer_and_named(
    start: Start, controller: str, model: str, producer: Producer
) -> None:
    with ranks(controller, model, 1, group="other") as (other,), ThreadPoolExecutor(1) as pool:
        victim = start("consumer", group="victim")
        published = pool.submit(producer.publish, 1, wait="applied")
        other.update()
        with pytest.raises(concurrent.futures.TimeoutError):
            published.result(0.5)
        victim.kill()
        done = published.result(30)
        assert (done.applied, done.dropped) == (("other",), ("victim",))


def test_in_mode_sync_a_publish_waits_unless_it_says_otherwise(
    controller: str, model: str, producer: Producer
) -> None:
    with (
        ranks(controller, model, 1) as (reader,),
        ControllerClient(controller) as client,
    ):
        publish(producer, 1)
        reader.update()
        client.set_policy(model, mode=Mode.SYNC)
        with pytest.raises(WaitTimeout, match="rollout"):
            producer.publish(2, timeout=1)
        assert producer.publish(3, wait="packed").applied == ()
        producer.flush()
        taken = threading.Timer(0.3, reader.update)
        taken.start()
        assert producer.publish(4).applied == ("rollout",)
        taken.join()
        client.set_policy(model, mode=Mode.ASYNC)
        assert producer.publish(5, timeout=1).applied == ()


def test_in_mode_bounded_a_publish_waits_for_the_group_that_lags_too_far(
    controller: str, model: str, producer: Producer
) -> None:
    with (
        ranks(controller, model, 1, group="slow") as (reader,),
        ControllerClient(controller) as client,
    ):
        publish(producer, 1)
        reader.update()
        client.set_policy(model, mode=Mode.BOUNDED, max_lag=2)
        publish(producer, 2, 3, 4)
        with pytest.raises(WaitTimeout, match="slow") as caught:
            producer.publish(5, timeout=1)
        assert caught.value.details["reason"] == "lag"
        assert caught.value.details["groups"] == {"slow": 3}
        assert reader.update() == 4
        publish(producer, 5, 6, 7)
        client.set_policy(model, mode=Mode.ASYNC)
        publish(producer, *range(8, 12))
        assert reader.update() == 11


def test_while_the_model_is_held_a_wait_for_its_readers_says_so(
    controller: str, model: str, producer: Producer
) -> None:
    with (
        ranks(controller, model, 1) as (reader,),
        ControllerClient(controller) as client,
    ):
        publish(producer, 1)
        reader.update()
        client.hold(model, 1)
        with pytest.raises(WaitTimeout, match="held at version 1"):
            producer.publish(2, timeout=1, wait="applied")
        assert reader.update() == 1
        client.release(model)
        taken = threading.Timer(0.3, reader.update)
        taken.start()
        assert producer.publish(3, wait="applied").applied == ("rollout",)
        taken.join()


def test_ready_names_the_ranks_that_did_not_come(controller: str, model: str) -> None:
    with (
        trainer(controller, model, world_size=2) as first,
        trainer(controller, model, world_size=2, rank=1),
        pytest.raises(PublishAborted, match=r"\[1\] of 2"),
    ):
        first.publish(1, timeout=1, wait="ready")


@pytest.mark.parametrize("wrong", ["", "sealed", 1, True])
def test_other_things_to_wait_for_are_refused(producer: Producer, wrong: object) -> None:
    with pytest.raises(InvalidRequest, match="wait"):
        producer.publish(1, wait=wrong)  # type: ignore[arg-type]
