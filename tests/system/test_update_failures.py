"""What an update that fails leaves behind: the old version where nothing was written, a marked group else."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from weightdepot import Consumer, Producer, Shard
from weightdepot.api.client import ControllerClient
from weightdepot.store.errors import IntegrityError, SourceLost, StaleGroup
from weightdepot.store.segments import Segment

from .fleet import full, holds, publish, ranks
from .harness import QUICK, together


def memory_of(producer: Producer, controller: str, version: int) -> Segment:
    """Where this rank's part of a version lies."""
    with ControllerClient(controller) as client:
        return producer._slots._slots[client.version(producer.model, version).slot]


def group_of(controller: str, model: str, name: str = "rollout") -> tuple[str, int | None]:
    with ControllerClient(controller) as client:
        group = client.group(model, name)
        return group.state.value, group.version


def test_a_source_that_cannot_be_opened_leaves_the_weights_and_the_group_as_they_were(
    controller: str, model: str, producer: Producer
) -> None:
    with ranks(controller, model, 1, transport="shm") as [consumer]:
        publish(producer, 1)
        consumer.update()
        publish(producer, 2)
        path = Path(memory_of(producer, controller, 2).path)
        away = path.rename(path.with_suffix(".away"))
        try:
            with pytest.raises(SourceLost):
                consumer.update()
        finally:
            away.rename(path)
        assert consumer.version == 1 == holds(consumer)
        assert group_of(controller, model) == ("whole", 1)
        with consumer.generation() as g:
            pass
        assert g.versions == (1,)
        assert consumer.update() == 2 == holds(consumer)


def test_bytes_that_arrive_changed_are_noticed_before_they_are_written(
    controller: str, model: str, producer: Producer
) -> None:
    with ranks(controller, model, 1) as [consumer]:
        publish(producer, 1)
        consumer.update()
        publish(producer, 2)
        slot = memory_of(producer, controller, 2).tensor
        slot[0] ^= 1
        with pytest.raises(IntegrityError):
            consumer.update()
        assert consumer.version == 1 == holds(consumer)
        assert group_of(controller, model) == ("whole", 1)
        slot[0] ^= 1
        assert consumer.update() == 2 == holds(consumer)


def test_a_failure_after_the_first_byte_marks_the_group_until_a_whole_version_is_in(
    controller: str, model: str
) -> None:
    """Two sources: what the first has is written when the bytes of the second turn out to be changed."""
    halves = [torch.zeros(4, 6) for _ in range(2)]
    producers = [
        Producer(
            controller,
            model=model,
            weights={"w": Shard(half, (8, 6), (4 * r, 0))},
            rank=r,
            world_size=2,
            timeouts=QUICK,
        )
        for r, half in enumerate(halves)
    ]

    def publish_both(version: int) -> None:
        for half in halves:
            half.fill_(version)
        together(*(lambda p=p: p.publish(version, wait="ready") for p in producers))

    try:
        with ranks(controller, model, 1) as [consumer]:
            publish_both(1)
            consumer.update()
            publish_both(2)
            slot = memory_of(producers[1], controller, 2).tensor
            slot[0] ^= 1
            with pytest.raises(IntegrityError), consumer.generation():
                consumer.update()
            assert consumer.version is None
            assert group_of(controller, model) == ("half", None)
            with pytest.raises(StaleGroup, match="IntegrityError"), consumer.generation():
                pass
            slot[0] ^= 1
            assert consumer.update() == 2 == holds(consumer) == consumer.version
            assert group_of(controller, model) == ("whole", 2)
    finally:
        for producer in producers:
            producer.close()


def test_a_rank_that_wrote_nothing_keeps_its_version_when_the_round_fails(
    controller: str, model: str, producer: Producer
) -> None:
    failing = [False, False]

    def hook(rank: int) -> Any:
        def before_write(_: int) -> None:
            if failing[rank]:
                raise RuntimeError("not now")

        return before_write

    with ranks(controller, model, 2, before_write=[hook(0), hook(1)]) as [one, two]:
        publish(producer, 1)
        together(one.update, two.update)
        publish(producer, 2)
        failing[1] = True
        with pytest.raises((StaleGroup, RuntimeError)):
            together(one.update, two.update)
        assert two.version == 1 == holds(two)
        assert one.version == holds(one) == 2
        assert group_of(controller, model)[0] == "half"
        failing[1] = False
        assert together(one.update, two.update) == [2, 2]
        assert holds(one) == holds(two) == 2
        # where neither has written, nothing is half-way
        publish(producer, 3)
        failing[:] = [True, True]
        with pytest.raises((StaleGroup, RuntimeError)):
            together(one.update, two.update)
        assert (one.version, two.version) == (2, 2)
        assert group_of(controller, model) == ("whole", 2)


def test_the_controller_shows_what_the_last_update_took(
    controller: str, model: str, producer: Producer
) -> None:
    with ranks(controller, model, 1) as [consumer], ControllerClient(controller) as client:
        publish(producer, 1)
        consumer.update()
        (member,) = client.group(model, "rollout").members
        assert member.stats["moved"] == full(0).nbytes
        assert member.stats["transports"] == "shm"
        assert member.stats["pull"] > 0


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_what_a_read_took_is_told_beside_what_was_expected(
    controller: str, model: str, transport: Literal["shm", "tcp"]
) -> None:
    held, got = ({"w": torch.zeros(1024, 1024)} for _ in range(2))
    with (
        Producer(controller, model=model, weights=held, transport=transport) as source,
        Consumer(controller, model=model, weights=got, group="rollout", transport=transport) as consumer,
        ControllerClient(controller) as client,
    ):
        for version in (1, 2):
            source.publish(version, wait="ready")
            consumer.update()
            last = consumer.last
            assert last is not None
            (read,) = last.sources
            assert (read.rank, read.transport, read.nbytes) == (0, transport, 4 << 20)
            assert last.reading == read.seconds > 0
            assert last.predicted == read.predicted
            if version == 1:
                assert read.predicted is None, "nothing was read before"
                took = read.seconds
        assert read.predicted == pytest.approx(took), "as fast as the time before"
        (member,) = client.group(model, "rollout").members
        assert member.stats["predicted"] == pytest.approx(took)


def test_a_rank_of_which_the_controller_knows_better_takes_it_back_and_moves(
    controller: str, model: str, producer: Producer
) -> None:
    """The group is said to hold what this rank does not: the next update but one is whole again."""
    with ranks(controller, model, 1) as [consumer]:
        publish(producer, 1)
        consumer.update()
        forget(consumer)
        with pytest.raises(StaleGroup, match="reported"):
            consumer.update()
        assert consumer.update() == 1 == consumer.version == holds(consumer)


def forget(consumer: Consumer) -> None:
    weights: Any = consumer._weights
    weights["w"].fill_(-1)
    consumer._updating.version = None
