"""Publishing without a copy: readers read the trainer's own weights while it waits, and never later."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from weightdepot import Consumer, Producer, Progress, Shard
from weightdepot.api.client import ControllerClient
from weightdepot.store.errors import (
    ControllerUnavailable,
    InvalidRequest,
    LayoutError,
    LeaseLost,
    WaitTimeout,
)
from weightdepot.store.index.records import Version, VersionState

from .fleet import full, holds, ranks, trainer
from .harness import QUICK, Child, eventually, together

Start = Callable[..., Child]


def test_two_ranks_are_read_in_place_by_groups_that_hold_them_otherwise(
    start: Start, controller: str, model: str
) -> None:
    """Real processes, version after version; no slot is ever taken."""
    producers = [start("producer", rank=r, world_size=2, zero_copy=1) for r in range(2)]
    readers = [start("consumer", group="a", rank=r, world_size=2) for r in range(2)]
    readers.append(start("consumer", group="b"))
    for version in (1, 2, 3):
        for p in producers:
            p.tell(f"publish {version}")
        for c in readers:
            c.tell(f"update {version}")
        assert [c.heard()["seen"] for c in readers] == [version] * 3
        assert [p.heard()["version"] for p in producers] == [version] * 2
        with ControllerClient(controller) as client:
            seen = client.version(model, version)
            assert (seen.live, seen.slot) == (True, -1)
            eventually(lambda: client.version(model, version).state is VersionState.FREED)  # noqa: B023


def test_the_weights_keep_their_memory_and_may_change_as_soon_as_publish_returns(
    controller: str, model: str
) -> None:
    whole = torch.arange(48.0).reshape(8, 6)
    columns = {"w": Shard(torch.zeros(8, 2), (8, 6), (0, 3))}
    module = torch.nn.Linear(6, 8, bias=False)
    with torch.no_grad():
        module.weight.copy_(whole)
    weight = module.weight
    with (
        Producer(controller, model=model, weights={"w": weight}, timeouts=QUICK, zero_copy=True) as producer,
        Consumer(controller, model=model, weights=columns, timeouts=QUICK) as reader,
    ):
        assert module.weight is weight
        assert torch.equal(weight, whole)
        for version in (1, 2):
            taken = threading.Thread(target=reader.update, kwargs={"min_version": version})
            taken.start()
            done = producer.publish(version)
            expected = weight.detach().clone()
            with torch.no_grad():
                weight.add_(1000)
            taken.join(20)
            assert (done.applied, done.dropped, done.pack) == (("rollout",), (), 0.0)
            assert torch.equal(columns["w"].local, expected[:, 3:5])
        assert reader.last is not None
        assert reader.last.moved == reader.last.needed
    weight.detach().fill_(5)  # closed, and still the trainer's
    assert module.weight.eq(5).all()


def test_a_publish_whose_readers_are_stopped_takes_its_weights_back_and_they_believe_nothing(
    start: Start, controller: str, model: str
) -> None:
    producer = start("producer", zero_copy=1)
    sleeper = start("consumer", group="sleeper", halt="pulled", halt_seconds=0.5)
    producer.tell("publish 1")
    assert sleeper.ask("update 1")["seen"] == 1
    assert producer.heard()["version"] == 1
    producer.tell("publish 2 timeout=1")
    sleeper.tell("update 2")
    assert sleeper.heard() == {"halted": "pulled"}
    sleeper.signal(signal.SIGSTOP)
    late = producer.heard()
    assert late["error"] == "WaitTimeout"
    assert "sleeper" in late["message"]
    producer.tell("publish 3")  # other weights, in the same memory
    sleeper.signal(signal.SIGCONT)
    woken = sleeper.heard()
    assert woken["error"] in ("LeaseLost", "VersionGone"), woken
    assert woken["held"] is None
    assert sleeper.ask("update 3")["seen"] == 3
    assert producer.heard()["version"] == 3


def test_weights_are_taken_back_also_when_no_controller_hears_of_it(
    controller: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader is in the middle of its copy, and its lease lives."""
    reading, go_on = threading.Event(), threading.Event()
    withdraw, calls = ControllerClient.withdraw, 0

    def unheard(self: ControllerClient, *arguments: Any, **options: Any) -> Version:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ControllerUnavailable("it is away for a moment")
        return withdraw(self, *arguments, **options)

    def stopping(progress: Progress) -> None:
        if progress.phase == "pull" and not reading.is_set():
            reading.set()
            assert go_on.wait(20)

    monkeypatch.setattr(ControllerClient, "withdraw", unheard)
    held = {"w": full(2)}
    with (
        trainer(controller, model, zero_copy=True, weights=held) as producer,
        ranks(controller, model, 1, on_progress=stopping) as (reader,),
        ThreadPoolExecutor(1) as pool,
    ):
        update = pool.submit(reader.update)
        with pytest.raises(WaitTimeout, match="rollout"):
            producer.publish(2, timeout=1.5)
        assert reading.is_set()
        held["w"].fill_(99)
        go_on.set()
        with pytest.raises(LeaseLost, match="taken back"):
            update.result(20)
        assert reader.version is None
        held["w"].fill_(3)
        again = pool.submit(reader.update, min_version=3)
        assert producer.publish(3).applied == ("rollout",)
        assert again.result(20) == 3
        assert holds(reader) == 3
        with ControllerClient(controller) as client:
            assert client.version(model, 2).state is VersionState.FREED


def test_a_reader_that_is_killed_in_the_middle_is_waited_for_no_longer(
    start: Start, controller: str, model: str
) -> None:
    producer = start("producer", zero_copy=1)
    victim = start("consumer", group="victim", halt="begun")
    other = start("consumer", group="other")
    for c in (victim, other):
        c.tell("update 1")
    producer.tell("publish 1")
    assert [c.heard()["seen"] for c in (victim, other)] == [1, 1]
    assert producer.heard()["version"] == 1
    producer.tell("publish 2")
    victim.tell("update 2")
    assert victim.heard() == {"halted": "begun"}
    victim.kill()
    assert other.ask("update 2")["seen"] == 2
    assert producer.heard()["version"] == 2


def test_a_trainer_that_is_killed_while_it_is_read_is_replaced(
    start: Start, controller: str, model: str
) -> None:
    producer = start("producer", zero_copy=1)
    reader = start("consumer", halt="pulled", halt_seconds=1)
    producer.tell("publish 1")
    assert reader.ask("update 1")["seen"] == 1
    assert producer.heard()["version"] == 1
    producer.tell("publish 2")
    reader.tell("update 2")
    assert reader.heard() == {"halted": "pulled"}
    producer.kill()
    read = reader.heard()
    # what it read is whole: nobody can have changed it
    assert read["seen"] == 2 if "error" not in read else read["held"] in (None, 1)
    successor = start("producer", zero_copy=1)
    successor.tell("publish 3")
    assert reader.ask("update 3")["seen"] == 3
    assert successor.heard()["version"] == 3


def test_without_readers_it_returns_at_once_and_a_late_reader_waits_for_the_next(
    controller: str, model: str
) -> None:
    with trainer(controller, model, zero_copy=True, weights={"w": full(1)}) as producer:
        assert producer.publish(1).applied == ()
        with ranks(controller, model, 1) as (reader,):
            with pytest.raises(WaitTimeout):
                reader.update(timeout=0.3)
            together(lambda: producer.publish(2), lambda: reader.update(min_version=2))
            assert holds(reader) == 1
            together(lambda: producer.publish(3), lambda: reader.prefetch().result(20) and reader.apply())
            assert reader.version == 3


def test_what_cannot_work_without_a_copy_is_refused(controller: str, model: str) -> None:
    with pytest.raises(InvalidRequest, match="shared memory alone"):
        trainer(controller, model, zero_copy=True, transport="mooncake").__enter__()
    with pytest.raises(LayoutError, match="published as bfloat16"):
        trainer(controller, model, zero_copy=True, dtype=torch.bfloat16).__enter__()
    held = {"w": full(1)}
    with trainer(controller, model, zero_copy=True, weights=held) as producer:
        with pytest.raises(InvalidRequest, match="until all have applied"):
            producer.publish(1, wait="packed")
        held["w"] = full(2)
        with pytest.raises(LayoutError, match="w: was bound to other memory"):
            producer.publish(1)
