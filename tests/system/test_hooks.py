"""Hooks around new weights: each is given the version, at the right moment, and may refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from weightdepot import Consumer, Producer
from weightdepot.api.client import ControllerClient
from weightdepot.consumers.hooks import nothing
from weightdepot.store.errors import StaleGroup

from .fleet import holds, publish, ranks
from .harness import together

Log = list[tuple[str, int]]


def logging(log: Log, **more: Callable[[int], None]) -> dict[str, Any]:
    def hook(name: str) -> Callable[[int], None]:
        def called(version: int) -> None:
            log.append((name, version))
            more.get(name, nothing)(version)

        return called

    return {name: hook(name) for name in ("before_write", "before_serve", "after_serve")}


def test_case_13_a_version_counts_as_applied_only_when_its_caches_were_flushed(
    controller: str, model: str, producer: Producer
) -> None:
    """While the hook runs, the weights are the new ones, and the controller still says the old version."""
    log: Log = []
    seen: list[Any] = []
    consumers: list[Consumer] = []
    with ControllerClient(controller) as client:

        def flush(version: int) -> None:
            group = client.group(model, "rollout")
            pending = client.applied(model, version, timeout=0).pending
            seen.append((holds(consumers[0]), group.members[0].version, group.version, pending))

        with ranks(controller, model, 1, **logging(log, before_serve=flush)) as [consumer]:
            consumers.append(consumer)
            for version in (1, 2):
                publish(producer, version)
                assert consumer.update() == version
                assert client.applied(model, version, timeout=0).applied == ("rollout",)
            assert consumer.update() == 2  # nothing new: nothing is called
    assert seen == [(1, None, None, ("rollout",)), (2, 1, None, ("rollout",))]
    names = ("before_write", "before_serve", "after_serve")
    assert log == [(name, version) for version in (1, 2) for name in names]


def test_what_refuses_before_new_weights_serve_fails_the_round_and_marks_the_group(
    controller: str, model: str, producer: Producer
) -> None:
    log: Log = []
    refusing = [True]

    def refuse(version: int) -> None:
        if refusing[0]:
            raise OSError(f"no cache for {version}")

    with (
        ranks(controller, model, 2, **logging(log, before_serve=refuse)) as [one, two],
        ControllerClient(controller) as client,
    ):
        publish(producer, 1)
        with pytest.raises(OSError, match="no cache for 1"):
            together(one.update, two.update)
        group = client.group(model, "rollout")
        assert (group.state.value, group.version) == ("half", None)
        assert "no cache for 1" in group.error
        assert one.version is None
        with pytest.raises(StaleGroup), one.generation():
            pass
        refusing[0] = False
        log.clear()
        assert together(one.update, two.update) == [1, 1]
        assert sorted(log) == [(n, 1) for n in ("after_serve", "before_serve", "before_write") for _ in "12"]
        assert client.group(model, "rollout").version == 1


def test_what_refuses_before_anything_is_written_leaves_the_old_version_serving(
    controller: str, model: str, producer: Producer
) -> None:
    log: Log = []

    def refuse(version: int) -> None:
        if version == 2:
            raise OSError("busy")

    for how in ("update", "prefetch"):
        group = f"group-{how}"
        with (
            ranks(controller, model, 1, group=group, **logging(log, before_write=refuse)) as [consumer],
            ControllerClient(controller) as client,
        ):
            if how == "update":
                publish(producer, 1)
                consumer.update()
                publish(producer, 2)
            else:
                consumer.update(version=1)
                consumer.prefetch().result(20)
            with pytest.raises(OSError, match="busy"):
                consumer.update()
            assert consumer.version == 1 == holds(consumer)
            found = client.group(model, group)
            assert (found.state.value, found.version) == ("whole", 1)
            with consumer.generation() as g:
                pass
            assert g.end == 1


def test_a_prefetch_calls_nothing_until_it_is_applied(
    controller: str, model: str, producer: Producer
) -> None:
    log: Log = []
    with ranks(controller, model, 1, **logging(log)) as [consumer]:
        staged = consumer.prefetch()
        publish(producer, 1)
        assert staged.result(20) == 1
        assert log == []
        consumer.apply()
        assert log == [(name, 1) for name in ("before_write", "before_serve", "after_serve")]


def test_after_serve_waits_for_the_whole_group(controller: str, model: str, producer: Producer) -> None:
    logs: list[Log] = [[], []]
    refusing = [True]

    def refuse(_: int) -> None:
        if refusing[0]:
            raise OSError("no")

    hooks = [logging(logs[0]), logging(logs[1], before_serve=refuse)]
    options = {name: [h[name] for h in hooks] for name in hooks[0]}
    with ranks(controller, model, 2, **options) as [one, two]:
        publish(producer, 1)
        with pytest.raises((OSError, StaleGroup)):
            together(one.update, two.update)
        assert logs[0] == [("before_write", 1), ("before_serve", 1)]
        refusing[0] = False
        assert together(one.update, two.update) == [1, 1]
        # rank 0 had the weights already; now all of them serve
        assert logs[0][2:] == [("after_serve", 1)]
        assert logs[1][-1] == ("after_serve", 1)
