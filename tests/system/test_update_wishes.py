"""Which version an update brings: the current one, an exact or a tagged one, or one that is fresh enough."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from weightdepot import Producer
from weightdepot.api.client import ControllerClient
from weightdepot.store.errors import InvalidRequest, VersionGone, WaitTimeout

from .fleet import full, holds, publish, ranks, trainer
from .harness import together


def test_an_exact_older_version_can_be_had_and_the_next_update_goes_forward_again(
    controller: str, model: str, producer: Producer
) -> None:
    with ranks(controller, model, 2) as [one, two]:
        publish(producer, 1, 2)
        assert together(one.update, two.update) == [2, 2]
        back = [lambda c=c: c.update(version=1) for c in (one, two)]
        assert together(*back) == [1, 1]
        assert holds(one) == holds(two) == 1 == one.version == two.version
        assert together(*back) == [1, 1]
        assert one.last is not None
        assert one.last.moved == 0, "it was held already"
        assert together(one.update, two.update) == [2, 2]
        assert holds(one) == holds(two) == 2


def test_an_exact_version_is_waited_for_and_a_newer_one_will_not_do(
    controller: str, model: str, producer: Producer
) -> None:
    with ranks(controller, model, 1) as [consumer]:
        publish(producer, 1)
        got: list[int] = []
        waits = threading.Thread(target=lambda: got.append(consumer.update(version=3)))
        waits.start()
        publish(producer, 2, 3, 4)
        waits.join(20)
        assert got == [3]
        assert holds(consumer) == 3


def test_an_exact_version_that_is_gone_says_so_and_changes_nothing(
    controller: str, model: str, producer: Producer
) -> None:
    with ranks(controller, model, 1) as [consumer]:
        publish(producer, 1, 2, 3)
        assert consumer.update() == 3
        publish(producer, 4, 5)
        with pytest.raises(VersionGone, match="1"):
            consumer.update(version=1)
        assert consumer.version == 3 == holds(consumer)
        assert consumer.update() == 5


def test_a_tag_names_a_version_that_is_kept(controller: str, model: str, producer: Producer) -> None:
    with ranks(controller, model, 1) as [consumer], ControllerClient(controller) as client:
        publish(producer, 1)
        client.tag(model, "reference", 1)
        publish(producer, 2, 3, 4, 5)
        assert consumer.update() == 5
        assert consumer.update(version="reference") == 1 == holds(consumer)
        client.tag(model, "reference", 5)
        assert consumer.update(version="reference") == 5 == holds(consumer)


def test_what_is_fresh_enough_is_kept(controller: str, model: str) -> None:
    with (
        trainer(controller, model, retention=4) as producer,
        ranks(controller, model, 1) as [consumer],
    ):
        publish(producer, 1)
        assert consumer.update(max_lag=0) == 1
        publish(producer, 2, 3)
        assert consumer.update(max_lag=2) == 1 == holds(consumer)
        assert consumer.update(max_lag=1) == 3 == holds(consumer)


@pytest.mark.parametrize(
    ("wish", "version", "prefetched"),
    [
        ({}, 3, True),
        ({"version": 3}, 3, True),
        ({"min_version": 2}, 3, True),
        ({"max_lag": 1}, 3, True),
        ({"version": 2}, 2, False),
        ({"version": "best"}, 2, False),
        ({"min_version": 4}, 4, False),
        ({"max_lag": 0}, 4, False),
    ],
)
def test_what_is_staged_is_taken_where_it_will_do_and_else_given_up_with_nothing_written(
    controller: str, model: str, wish: dict[str, Any], version: int, prefetched: bool
) -> None:
    with (
        trainer(controller, model, retention=4) as producer,
        ranks(controller, model, 2) as [one, two],
        ControllerClient(controller) as client,
    ):
        publish(producer, 1, 2, 3)
        client.tag(model, "best", 2)
        for staged in [c.prefetch(version=3) for c in (one, two)]:
            assert staged.result(20) == 3
        publish(producer, 4)
        assert together(*(lambda c=c: c.update(**wish) for c in (one, two))) == [version, version]
        for consumer in (one, two):
            assert consumer.version == version == holds(consumer)
            assert consumer.last is not None
            assert consumer.last.prefetched is prefetched


def test_wishes_that_make_no_sense_are_refused_before_anything_is_asked(controller: str, model: str) -> None:
    with ranks(controller, model, 1) as [consumer]:
        for wish in (
            {"version": -1},
            {"version": True},
            {"version": 1.5},
            {"version": ""},
            {"max_lag": -1},
            {"min_version": "3"},
            {"version": 1, "min_version": 1},
            {"version": "best", "max_lag": 1},
        ):
            broken: dict[str, Any] = wish
            with pytest.raises(InvalidRequest):
                consumer.update(**broken)


def test_a_roll_back_reaches_every_rank_and_is_held_until_it_is_released(
    controller: str, model: str, producer: Producer
) -> None:
    with ranks(controller, model, 2) as [one, two], ControllerClient(controller) as client:
        publish(producer, 1, 2)
        assert together(one.update, two.update) == [2, 2]
        client.hold(model, 1)
        assert one.newest() == 1
        assert together(one.update, two.update) == [1, 1]
        assert holds(one) == holds(two) == 1
        publish(producer, 3, 4)
        assert together(one.update, two.update) == [1, 1]
        assert client.convergence(model, timeout=10).converged
        with pytest.raises(WaitTimeout, match="held"):
            together(*(lambda c=c: c.update(4, timeout=0.3) for c in (one, two)))
        client.release(model)
        assert together(one.update, two.update) == [4, 4]
        assert holds(one) == holds(two) == 4


def test_case_03_each_reader_gets_the_bytes_of_the_version_that_it_was_given(
    controller: str, model: str, producer: Producer
) -> None:
    """A reader that is slow is between two versions that are published back to back, and a quick one."""
    entered, go_on = threading.Event(), threading.Event()

    def slow(_: int) -> None:
        entered.set()
        assert go_on.wait(20)

    with (
        ranks(controller, model, 1, group="slow", before_write=slow) as [reader],
        ranks(controller, model, 1, group="quick") as [other],
    ):
        publish(producer, 1)
        got: list[int] = []
        reads = threading.Thread(target=lambda: got.append(reader.update()))
        reads.start()
        assert entered.wait(20)
        publish(producer, 2)  # the other slot
        assert other.update() == 2 == holds(other)
        publishes = threading.Thread(target=lambda: publish(producer, 3))  # the slow reader's own
        publishes.start()
        time.sleep(0.2)
        assert publishes.is_alive(), "the slot that is read was given away"
        go_on.set()
        reads.join(20)
        publishes.join(20)
        assert got == [1]
        assert holds(reader) == 1
        assert reader.update() == 3 == holds(reader)
        assert other.update() == 3 == holds(other)


def test_case_11_a_version_in_which_nothing_changed_is_still_a_version(
    controller: str, model: str, producer: Producer
) -> None:
    served: list[int] = []
    with (
        ranks(controller, model, 1, before_serve=served.append) as [consumer],
        ControllerClient(controller) as client,
    ):
        weights: Any = producer._weights
        weights["w"].copy_(full(7))
        for version in (1, 2):
            producer.publish(version, wait="ready")
            assert consumer.update(version) == version == consumer.version
            assert client.group(model, "rollout").version == version
        assert holds(consumer) == 7
        assert served == [1, 2]
