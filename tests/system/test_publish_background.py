"""The trainer is free when its weights are copied; digests and the seal follow, and their faults are told."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from weightdepot import Consumer, Producer, Shard, Timeouts
from weightdepot.api.client import ControllerClient
from weightdepot.producers import sealing
from weightdepot.store.digests import digest_tiles
from weightdepot.store.errors import (
    InvalidRequest,
    LayoutError,
    PublishAborted,
    WaitTimeout,
    WeightDepotError,
)
from weightdepot.store.index.records import VersionState

from .fleet import full, holds, ranks, trainer
from .harness import QUICK, eventually, together

SHORT = Timeouts(join=20, publish=2, seal=20, update=20, call=5, member=2, lease=4)


class Gate:
    """Holds up the digests of rank 0, where it is shut, until it is opened."""

    def __init__(self, digest: Callable[..., Any]) -> None:
        self._digest = digest
        self.thread = ""  # the name of the thread that is held up; "": none is
        self.reached, self._open = threading.Event(), threading.Event()

    def __call__(self, *arguments: Any) -> Any:
        if self.thread == threading.current_thread().name:
            self.reached.set()
            assert self._open.wait(60)
        return self._digest(*arguments)

    def shut(self, model: str) -> None:
        self.thread = f"weightdepot-seal-{model}-0"

    def open(self) -> None:
        self.thread = ""
        self._open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(digest_tiles)
    monkeypatch.setattr(sealing, "digest_tiles", gate)
    yield gate
    gate.open()


def weights_of(producer: Producer) -> dict[str, torch.Tensor]:
    held: Any = producer._weights
    return {n: w.local if isinstance(w, Shard) else w for n, w in held.items()}


def half(rank: int, value: float) -> dict[str, Shard]:
    """Rows of `w (8, 6)`."""
    return {"w": Shard(torch.full((4, 6), float(value)), (8, 6), (4 * rank, 0))}


def test_the_weights_may_be_overwritten_when_publish_returns(
    controller: str, model: str, gate: Gate, producer: Producer
) -> None:
    with ranks(controller, model, 1) as (reader,):
        gate.shut(model)
        weights_of(producer)["w"].fill_(1)
        done = producer.publish(1)
        weights_of(producer)["w"].fill_(99)
        assert gate.reached.wait(20)
        assert not done.sealed.done()
        with pytest.raises(WaitTimeout):
            reader.update(timeout=0.2)
        gate.open()
        assert reader.update(min_version=1) == 1
        assert holds(reader) == 1
        assert done.sealed.result(20).version == 1


def test_the_next_publish_waits_for_the_one_before_and_says_so_when_its_time_is_up(
    model: str, gate: Gate, producer: Producer
) -> None:
    gate.shut(model)
    done = producer.publish(1)
    with pytest.raises(WaitTimeout, match=r"version 1 .* still on its way"):
        producer.publish(2, timeout=0.3)
    with pytest.raises(WaitTimeout, match="version 1"):
        producer.flush(timeout=0.1)
    assert (producer.latest, producer.highest) == (1, 1)
    gate.open()
    assert producer.publish(2, wait="ready").version == 2
    assert done.sealed.result(0).version == 1
    assert producer.highest == 2


def test_a_call_from_another_thread_in_the_middle_of_a_publish_is_refused(
    model: str, gate: Gate, producer: Producer
) -> None:
    gate.shut(model)
    caught: Future[WeightDepotError | None] = Future()

    def other() -> None:
        assert gate.reached.wait(20)
        try:
            producer.publish(2)
            caught.set_result(None)
        except WeightDepotError as error:
            caught.set_result(error)
        finally:
            gate.open()

    thread = threading.Thread(target=other)
    thread.start()
    producer.publish(1, wait="ready")
    thread.join(20)
    assert isinstance(caught.result(0), InvalidRequest)


def test_what_fails_in_the_background_is_raised_by_the_next_call_and_by_the_handle(
    controller: str, model: str, gate: Gate
) -> None:
    """Rank 1 leaves before rank 0 has sealed, and nobody takes its place in time."""
    first = Producer(controller, model=model, weights=half(0, 1), world_size=2, timeouts=SHORT)
    second = Producer(controller, model=model, weights=half(1, 1), rank=1, world_size=2, timeouts=SHORT)
    with first:
        gate.shut(model)
        done, _ = together(lambda: first.publish(1), lambda: second.publish(1))
        second.close()
        gate.open()
        error = done.sealed.exception(20)
        assert isinstance(error, (WaitTimeout, PublishAborted))
        assert "version 1" in str(error)
        with pytest.raises(type(error), match=r"(?s)version 1.*Version 2 was not begun: publish it again"):
            first.publish(2)
        assert first.highest is None
        first.flush()  # it was said once
        with Producer(
            controller, model=model, weights=half(1, 1), rank=1, world_size=2, timeouts=QUICK
        ) as again:
            together(lambda: first.publish(2, timeout=20, wait="ready"), lambda: again.publish(2))


def test_close_waits_for_what_is_being_sealed_for_a_stated_time_and_logs_what_failed(
    controller: str, model: str, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    hasty = replace(QUICK, call=0.5)
    with trainer(controller, model, timeouts=hasty) as producer, caplog.at_level(logging.WARNING):
        gate.shut(model)
        done = producer.publish(1)
        producer.close()
        gate.open()
        assert isinstance(done.sealed.exception(20), WeightDepotError)
    assert "version 1" in caplog.text
    with trainer(controller, model) as producer:
        done = producer.publish(1)
        producer.close()
        with pytest.raises(InvalidRequest, match="closed"):
            producer.flush()
        assert done.sealed.result(0).version == 1


def test_an_aborted_publish_is_tried_again_with_the_bytes_that_were_copied(
    controller: str, model: str, gate: Gate
) -> None:
    """Rank 1 is replaced while rank 0 takes its digests; rank 0's weights are others by then."""
    options: dict[str, Any] = {"model": model, "world_size": 2, "timeouts": QUICK}
    with (
        Producer(controller, weights=half(0, 5), **options) as first,
        ranks(controller, model, 1) as (reader,),
    ):
        second = Producer(controller, weights=half(1, 5), rank=1, **options)
        gate.shut(model)
        done, _ = together(lambda: first.publish(5), lambda: second.publish(5))
        weights_of(first)["w"].fill_(99)
        second.close()
        with (
            Producer(controller, weights=half(1, 5), rank=1, **options) as again,
            ControllerClient(controller) as client,
        ):
            assert client.version(model, 5).state is VersionState.ABORTED
            gate.open()
            again.publish(5, wait="ready")
            assert done.sealed.result(20).version == 5
            assert reader.update() == 5
            assert holds(reader) == 5


def test_a_publish_that_is_tried_again_in_another_slot_brings_its_bytes_along(
    controller: str, model: str, gate: Gate
) -> None:
    options: dict[str, Any] = {"model": model, "world_size": 2, "timeouts": QUICK, "retention": 3}
    with (
        Producer(controller, weights=half(0, 0), **options) as first,
        ranks(controller, model, 1) as (reader,),
        ControllerClient(controller) as client,
    ):
        second = Producer(controller, weights=half(1, 0), rank=1, **options)

        def publish(version: int) -> None:
            for producer in (first, second):
                weights_of(producer)["w"].fill_(version)
            together(partial(first.publish, version), partial(second.publish, version))

        for version in range(4):  # in slots 0, 1, 2 and 0
            publish(version)
        first.flush()
        gate.shut(model)
        publish(4)
        slot = client.version(model, 4).slot
        weights_of(first)["w"].fill_(99)
        second.close()  # the versions before go with it, and leave their slots
        with Producer(controller, weights=half(1, 4), rank=1, **options) as again:
            gate.open()
            again.publish(4, wait="ready")
            assert client.version(model, 4).slot < slot
            assert reader.update() == 4
            assert holds(reader) == 4


def narrow() -> dict[str, Shard]:
    """Two of the columns of `w (8, 6)`."""
    return {"w": Shard(torch.zeros(8, 2), (8, 6), (0, 2))}


def test_a_publish_that_is_tried_again_for_a_new_reader_is_cut_for_it_from_what_was_copied(
    controller: str, model: str, gate: Gate
) -> None:
    options: dict[str, Any] = {"model": model, "world_size": 2, "timeouts": QUICK}
    whole = torch.arange(48.0).reshape(8, 6)
    rows = [{"w": Shard(whole[a : a + 4].clone(), (8, 6), (a, 0))} for a in (0, 4)]
    with Producer(controller, weights=rows[0], **options) as first:
        second = Producer(controller, weights=rows[1], rank=1, **options)
        gate.shut(model)
        done, _ = together(lambda: first.publish(1), lambda: second.publish(1))
        weights_of(first)["w"].fill_(99)
        second.close()
        held = narrow()
        with (
            Consumer(controller, model=model, weights=held, timeouts=QUICK) as reader,
            Producer(controller, weights=rows[1], rank=1, **options) as again,
        ):
            gate.open()
            again.publish(1, wait="ready")
            assert done.sealed.result(20).version == 1
            assert reader.update() == 1
            assert torch.equal(held["w"].local, whole[:, 2:4])
            assert reader.last is not None
            assert reader.last.moved == reader.last.needed


def test_a_publish_that_would_have_to_read_the_weights_again_fails_and_says_so(
    controller: str, model: str, gate: Gate
) -> None:
    """A reader has gone meanwhile: tiles are larger without it, so what was copied does not do."""
    options: dict[str, Any] = {"model": model, "world_size": 2, "timeouts": QUICK}
    with Producer(controller, weights=half(0, 1), **options) as first:
        second = Producer(controller, weights=half(1, 1), rank=1, **options)
        with Consumer(controller, model=model, weights=narrow(), timeouts=QUICK):
            gate.shut(model)
            done, _ = together(lambda: first.publish(1), lambda: second.publish(1))
        weights_of(first)["w"].fill_(2)
        second.close()
        with (
            Producer(controller, weights=half(1, 2), rank=1, **options) as again,
            ranks(controller, model, 1) as (reader,),
        ):
            gate.open()
            with pytest.raises(PublishAborted, match="publish it again"):
                first.flush()
            assert isinstance(done.sealed.exception(0), PublishAborted)
            together(lambda: first.publish(1, wait="ready"), lambda: again.publish(1))
            assert reader.update() == 1
            assert holds(reader) == 2


def test_weights_without_values_are_named_before_a_version_is_begun(controller: str, model: str) -> None:
    module = torch.nn.Linear(6, 8, bias=False, device="meta")
    with trainer(controller, model, weights=module) as producer:
        with pytest.raises(LayoutError, match=r"weight: is on the meta device"):
            producer.publish(1)
        module.to_empty(device="cpu")
        with torch.no_grad():
            module.weight.fill_(3)
        producer.publish(1, wait="ready")


def test_the_memory_of_the_first_version_is_there_before_it_is_published(controller: str, model: str) -> None:
    for world_size in (1, 2):
        name = f"{model}-{world_size}"
        producers = [
            Producer(
                controller, model=name, rank=r, world_size=world_size, timeouts=QUICK,
                weights={"w": full(1)} if world_size == 1 else half(r, 1),
            )
            for r in range(world_size)
        ]  # fmt: skip
        try:
            eventually(lambda p=producers: all(segments(x) == 1 for x in p))  # type: ignore[misc]
            first = [set(files(p)) for p in producers]
            together(*[partial(p.publish, 1, wait="ready") for p in producers])
            for producer, before in zip(producers, first, strict=True):
                assert before <= set(files(producer))  # it was used
        finally:
            for producer in producers:
                producer.close()


def files(producer: Producer) -> list[str]:
    session = producer._membership.session
    return [f for f in os.listdir("/dev/shm") if f.startswith("weightdepot-") and session in f]


def segments(producer: Producer) -> int:
    return len(files(producer))
