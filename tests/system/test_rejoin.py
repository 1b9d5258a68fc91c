"""A rollout rank that the controller has forgotten joins anew by itself; one that was replaced does not."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from weightdepot import Timeouts
from weightdepot.api.client import ControllerClient
from weightdepot.store.errors import MemberConflict, WeightDepotError

from .fleet import holds, publish, ranks, trainer
from .harness import QUICK, Child, Server, eventually, free_controller_url, together

Restart = Callable[[], None]

PATIENT = Timeouts(join=20, publish=20, seal=20, update=20, call=10, member=20, lease=40)  # beats each 5 s


@pytest.fixture
def own() -> Iterator[tuple[str, Restart]]:
    """A controller whose index is in memory alone, and how to lose it: killed, and started anew."""
    url = free_controller_url()
    port = url.rpartition(":")[2]
    with ExitStack() as stack:
        servers = [Server("--port", port)]

        def stop() -> None:
            servers[-1].stop()

        def restart() -> None:
            stop()
            servers.append(Server("--port", port))

        stack.callback(stop)

        yield url, restart


def holders(client: ControllerClient, model: str) -> dict[int, bool]:
    try:
        return {m.rank: m.alive for m in client.group(model, "rollout").members}
    except WeightDepotError:
        return {}


def test_ranks_that_a_new_index_does_not_know_join_it_and_serve_on(
    own: tuple[str, Restart], model: str
) -> None:
    controller, restart = own
    with ranks(controller, model, 2) as [one, two], ControllerClient(controller) as client:
        with trainer(controller, model) as producer:
            publish(producer, 1)
            assert together(one.update, two.update) == [1, 1]
        restart()
        eventually(lambda: holders(client, model) == {0: True, 1: True})
        with one.generation() as g:
            assert (one.version, two.version) == (1, 1)
        assert g.end == 1
        with trainer(controller, model) as producer:
            publish(producer, 2)
            assert together(one.update, two.update) == [2, 2]
            assert holds(one) == holds(two) == 2
            tiling = client.version(model, 2).tiling
            assert one.layout is not None
            assert client.plan(model, tiling, one.layout.digest).moved_nbytes == 192, "its layout is known"


def test_an_update_that_finds_itself_forgotten_waits_until_it_has_joined_anew(
    own: tuple[str, Restart], model: str
) -> None:
    """Long before the next heartbeat would have noticed."""
    controller, restart = own
    with ranks(controller, model, 1, timeouts=PATIENT) as [consumer]:
        with trainer(controller, model) as producer:
            publish(producer, 1)
            consumer.update()
        restart()
        got: list[int] = []
        updates = threading.Thread(target=lambda: got.append(consumer.update()))
        updates.start()
        with trainer(controller, model) as producer:
            publish(producer, 2)
            updates.join(20)
            assert got == [2]
            assert holds(consumer) == 2


def test_what_was_staged_before_the_index_was_lost_is_discarded(own: tuple[str, Restart], model: str) -> None:
    controller, restart = own
    with ranks(controller, model, 1) as [consumer]:
        with trainer(controller, model) as producer:
            publish(producer, 1)
            assert consumer.prefetch().result(20) == 1
        restart()
        with trainer(controller, model) as producer:
            publish(producer, 5)
            assert consumer.apply() == 5 == holds(consumer)
            assert consumer.last is not None
            assert not consumer.last.prefetched


def test_what_was_staged_by_a_rank_whose_claim_has_ended_is_read_anew(controller: str, model: str) -> None:
    """The weights must not stay at a version that the controller does not know them to hold."""
    with (
        ControllerClient(controller) as client,
        trainer(controller, model) as producer,
        ranks(controller, model, 1, timeouts=PATIENT) as [consumer],
    ):
        publish(producer, 1)
        assert consumer.prefetch().result(20) == 1
        [member] = client.group(model, "rollout").members
        client.leave(model, member.session, timeout=10)
        assert consumer.apply() == 1 == holds(consumer)
        assert client.group(model, "rollout").version == 1
        publish(producer, 2)
        assert consumer.prefetch().result(20) == 2
        assert consumer.apply() == 2 == holds(consumer)


def test_an_index_that_is_lost_while_a_rank_reads_fails_that_update_at_most(
    own: tuple[str, Restart], model: str
) -> None:
    controller, restart = own
    lose = [True]

    def losing(_: int) -> None:
        if lose[0]:
            lose[0] = False
            restart()

    with ranks(controller, model, 1, before_serve=losing) as [consumer]:
        with trainer(controller, model) as producer:
            publish(producer, 1)
            with pytest.raises(WeightDepotError, match=r"lost its state|forgotten"):
                consumer.update()
            assert consumer.version is None, "nobody has confirmed that the lease lived"
        with trainer(controller, model) as producer:
            publish(producer, 2)
            assert consumer.update() == 2 == holds(consumer)


def test_a_rank_that_was_stopped_and_replaced_does_not_take_its_place_back(
    start: Callable[..., Child], controller: str, model: str
) -> None:
    producer, old = start("producer"), start("consumer")
    assert producer.ask("publish 1")["version"] == 1
    assert old.ask("update")["seen"] == 1
    old.signal(signal.SIGSTOP)
    with ControllerClient(controller) as client:
        eventually(lambda: not client.group(model, "rollout").members[0].alive)
    new = start("consumer")
    assert new.ask("update")["seen"] == 1
    old.signal(signal.SIGCONT)
    answer: dict[str, Any] = old.ask("update")
    assert answer["error"] == MemberConflict.__name__
    assert producer.ask("publish 2")["version"] == 2
    assert new.ask("update")["seen"] == 2


def test_closing_a_rank_that_was_forgotten_is_quiet(own: tuple[str, Restart], model: str) -> None:
    controller, restart = own
    with ranks(controller, model, 1, timeouts=QUICK), trainer(controller, model) as producer:
        publish(producer, 1)
        restart()
