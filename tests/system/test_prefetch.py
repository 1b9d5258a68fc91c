"""Prefetch and apply: reading in the background, and only the copy into place at a safe point."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from weightdepot import Consumer, Producer
from weightdepot.api.client import ControllerClient
from weightdepot.store.errors import InvalidRequest, StoreFull, WaitTimeout
from weightdepot.store.geometry import Box
from weightdepot.store.layout import LayoutBuilder
from weightdepot.store.weights import Mapped

from .fleet import NBYTES, N, full, holds, publish, ranks, trainer
from .harness import QUICK, Child, eventually, together

SHORT = replace(QUICK, member=1, lease=1)


def test_what_is_prefetched_changes_nothing_until_apply_which_only_copies(
    controller: str, model: str, producer: Producer
) -> None:
    with ranks(controller, model, 1) as [consumer]:
        future = consumer.prefetch()
        assert consumer.prefetch() is future
        publish(producer, 3)
        assert future.result(20) == 3 == consumer.staged
        assert holds(consumer) == -1
        assert consumer.version is None
        assert consumer.apply() == 3 == consumer.version
        assert holds(consumer) == 3
        last = consumer.last
        assert last is not None
        assert last.prefetched
        assert (last.pull, last.needed, last.moved) == (0, NBYTES, NBYTES)
        assert consumer.staged is None
        publish(producer, 4)
        assert consumer.update() == 4 == holds(consumer)


def test_an_update_ends_a_prefetch_that_waits_and_is_not_held_up_by_it(
    controller: str, model: str, producer: Producer
) -> None:
    with ranks(controller, model, 1) as [consumer]:
        publish(producer, 1)
        consumer.update()
        for _ in range(3):
            future = consumer.prefetch()
            time.sleep(0.1)
            begun = time.monotonic()
            assert consumer.update() == 1
            assert time.monotonic() - begun < 1
            assert future.cancelled()
        publish(producer, 2)
        assert consumer.prefetch().result(20) == 2


def test_ranks_of_which_only_some_prefetch_get_the_same_version(
    controller: str, model: str, producer: Producer
) -> None:
    with ranks(controller, model, 2) as [one, two]:
        first = one.prefetch()
        publish(producer, 1)
        assert first.result(20) == 1
        publish(producer, 2)  # newer, but the round has begun
        assert together(one.apply, two.update) == [1, 1]
        assert one.last is not None
        assert two.last is not None
        assert (one.last.prefetched, two.last.prefetched) == (True, False)
        assert together(one.apply, two.apply) == [2, 2]
        assert holds(one) == holds(two) == 2


def test_a_staged_version_that_is_too_old_is_given_up_by_all_ranks(
    controller: str, model: str, producer: Producer
) -> None:
    with ranks(controller, model, 2) as [one, two]:
        first = one.prefetch()
        publish(producer, 1)
        assert first.result(20) == 1
        publish(producer, 2)
        assert together(lambda: one.update(2), lambda: two.update(min_version=2)) == [2, 2]
        assert holds(one) == holds(two) == 2


def test_a_round_that_another_rank_failed_leaves_the_weights_and_the_next_is_whole(
    controller: str, model: str, producer: Producer
) -> None:
    def refuse(staged: Any) -> None:
        raise RuntimeError("no")

    with ranks(controller, model, 1) as _, contextlib.ExitStack() as stack:
        options: dict[str, Any] = {"model": model, "group": "pair", "world_size": 2, "timeouts": QUICK}
        weights = {"w": full(-1)}
        one = stack.enter_context(Consumer(controller, weights=weights, rank=0, **options))
        two = stack.enter_context(
            Consumer(controller, weights={"w": full(-1)}, rank=1, install=refuse, **options)
        )
        first = one.prefetch()
        publish(producer, 1)
        assert first.result(20) == 1
        with pytest.raises(RuntimeError, match="no"):
            two.update()
        assert two.version is None
        two._updating.install = lambda staged: None
        assert together(one.apply, two.update) == [1, 1]
        assert one.last is not None
        assert not one.last.prefetched, "its round had failed"
        assert holds(one) == 1


def test_what_is_staged_can_be_applied_long_after_its_lease_would_have_ended(
    controller: str, model: str, producer: Producer
) -> None:
    with ranks(controller, model, 1, timeouts=SHORT) as [consumer]:
        first = consumer.prefetch()
        publish(producer, 1)
        assert first.result(20) == 1
        time.sleep(2 * SHORT.lease)
        assert consumer.apply() == 1
        assert consumer.last is not None
        assert consumer.last.prefetched


def test_a_prefetch_that_finds_nothing_in_time_says_so_and_another_can_be_begun(
    controller: str, model: str, producer: Producer
) -> None:
    with ranks(controller, model, 1) as [consumer]:
        with pytest.raises(WaitTimeout, match="at least 5"):
            consumer.prefetch(min_version=5, timeout=0.3).result(20)
        publish(producer, 5)
        assert consumer.prefetch(min_version=5).result(20) == 5
    with pytest.raises(InvalidRequest, match="closed"):
        consumer.prefetch()


def test_what_no_placement_fills_is_not_touched_by_apply(
    controller: str, model: str, producer: Producer
) -> None:
    builder = LayoutBuilder()
    builder.tensor("w", (8, N), "float32")
    builder.buffer("padded", (9, N + 1), (N + 1, 1), "float32")
    builder.place("w", Box((0, 0), (8, N)), "padded", 0, (N + 1, 1))
    mine = torch.full((9, N + 1), 7.0)
    with Consumer(
        controller,
        model=model,
        weights=Mapped(builder.build(), lambda: {"padded": mine}),
        timeouts=QUICK,
    ) as consumer:
        first = consumer.prefetch()
        publish(producer, 2)
        first.result(20)
        consumer.apply()
    assert torch.equal(mine[:8, :N], full(2))
    assert torch.equal(mine[8], torch.full((N + 1,), 7.0))
    assert torch.equal(mine[:, N], torch.full((9,), 7.0))


def test_an_install_function_gets_every_version_from_staging_memory(
    controller: str, model: str, producer: Producer
) -> None:
    seen = []
    with ranks(controller, model, 1, install=lambda staged: seen.append(staged["w"].clone())) as [consumer]:
        publish(producer, 1)
        consumer.update()
        publish(producer, 2)
        consumer.prefetch().result(20)
        consumer.apply()
        assert holds(consumer) == -1, "only the function writes"
    assert [float(w.unique().item()) for w in seen] == [1, 2]


def test_a_source_that_is_gone_fails_the_prefetch_and_the_next_apply_finds_its_own_way(
    controller: str, model: str
) -> None:
    with ranks(controller, model, 1) as [consumer]:
        with trainer(controller, model) as first:
            publish(first, 1)
            consumer.update()
        future = consumer.prefetch()
        with trainer(controller, model) as second:
            publish(second, 2)
            assert future.result(20) == 2
            assert consumer.apply() == 2
        eventually(lambda: consumer.version == 2)


def test_a_trainer_many_versions_ahead_does_not_wait_for_what_is_staged_and_not_applied(
    controller: str, model: str, producer: Producer
) -> None:
    """Two slots, and an engine that comes to its safe point late."""
    with ranks(controller, model, 2) as consumers, ControllerClient(controller) as client:
        staged = [c.prefetch() for c in consumers]
        publish(producer, 1)
        assert [s.result(20) for s in staged] == [1, 1]
        assert client.group(model, "rollout").leased == ()
        assert [m.staged for m in client.group(model, "rollout").members] == [1, 1]
        weights: Any = producer._weights
        for version in range(2, 9):
            weights["w"].fill_(version)
            producer.publish(version, wait="ready", timeout=5)
        assert together(*(c.apply for c in consumers)) == [1, 1]
        assert [holds(c) for c in consumers] == [1, 1]
        assert together(*(c.apply for c in consumers)) == [8, 8]


def test_the_lease_is_kept_until_every_rank_has_staged(
    controller: str, model: str, producer: Producer
) -> None:
    with (
        ranks(controller, model, 2, timeouts=SHORT) as [one, two],
        ControllerClient(controller) as client,
    ):
        first = one.prefetch()
        publish(producer, 1)
        assert first.result(20) == 1
        assert client.group(model, "rollout").leased == (1,)
        time.sleep(2 * SHORT.lease)  # the rank that waits renews it
        publish(producer, 2)
        with pytest.raises(StoreFull, match="rollout"):
            producer.publish(3, timeout=0.5)
        assert two.prefetch().result(20) == 1
        assert client.group(model, "rollout").leased == ()
        publish(producer, 4)
        assert together(one.apply, two.apply) == [1, 1]


def test_an_exact_version_can_be_prefetched_and_another_is_refused_until_it_is_applied(
    controller: str, model: str, producer: Producer
) -> None:
    with ranks(controller, model, 1) as [consumer]:
        publish(producer, 1, 2)
        consumer.update()
        waiting = consumer.prefetch()  # for a newer one
        assert consumer.prefetch(version=1).result(20) == 1 == consumer.staged
        assert waiting.cancelled()
        assert consumer.prefetch(version=1).result(20) == 1
        with pytest.raises(InvalidRequest, match="apply it first"):
            consumer.prefetch(version=2)
        assert consumer.apply() == 1 == holds(consumer)
        assert consumer.prefetch(version=2).result(20) == 2
        assert consumer.apply() == 2 == holds(consumer)


def test_a_prefetch_waits_while_the_model_is_held_at_an_older_version(
    controller: str, model: str, producer: Producer
) -> None:
    with ranks(controller, model, 1) as [consumer], ControllerClient(controller) as client:
        publish(producer, 1, 2)
        consumer.update()
        client.hold(model, 1)
        publish(producer, 3)
        with pytest.raises(WaitTimeout):
            consumer.prefetch(timeout=0.3).result(20)
        assert consumer.update() == 1
        waiting = consumer.prefetch()
        client.release(model)
        assert waiting.result(20) == 3
        assert consumer.apply() == 3 == holds(consumer)


def test_what_was_staged_is_good_though_nobody_renewed_its_lease_since(
    start: Callable[..., Child], controller: str, model: str
) -> None:
    """A process stopped, after it had staged, for longer than leases and memberships live."""
    producer, reader = start("producer"), start("consumer")
    assert producer.ask("publish 1")["version"] == 1
    assert reader.ask("update")["seen"] == 1
    assert producer.ask("publish 2")["version"] == 2
    assert reader.ask("prefetch")["version"] == 2
    reader.signal(signal.SIGSTOP)
    for version in (3, 4, 5, 6):
        assert producer.ask(f"publish {version}")["version"] == version
    time.sleep(1.2 * QUICK.lease)
    reader.signal(signal.SIGCONT)
    woken = reader.ask("apply")
    assert woken.get("seen") in (2, 6), woken
    assert reader.ask("update 6")["seen"] == 6
