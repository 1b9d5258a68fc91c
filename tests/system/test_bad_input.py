"""What goes wrong is said clearly, within its stated time, and the store goes on working."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from weightdepot import (
    Consumer,
    ControllerUnavailable,
    IndexUnavailable,
    InvalidRequest,
    LayoutError,
    MemberConflict,
    Producer,
    PublishAborted,
    Shard,
    StaleGroup,
    StoreFull,
    Timeouts,
    UnknownModel,
    VersionNotNewer,
    WaitTimeout,
)
from weightdepot.store.index import EmbeddedRedis

from .harness import QUICK, Server, free_controller_url, together

FAST = Timeouts(join=2, publish=2, seal=2, update=2, call=2, member=2, lease=2)


def weights(
    value: float = 0.0, columns: int = 4, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    return {"a.weight": torch.full((8, columns), value, dtype=dtype), "b.bias": torch.full((3,), value)}


def producer(controller: str, model: str, **options: Any) -> Producer:
    return Producer(controller, model=model, **{"weights": weights(1.0), "timeouts": FAST, **options})


def consumer(controller: str, model: str, **options: Any) -> Consumer:
    return Consumer(controller, model=model, **{"weights": weights(), "timeouts": FAST, **options})


class Within:
    """Fails when the block takes longer than `seconds`, plus what a busy machine may add."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __enter__(self) -> None:
        self.begun = time.monotonic()

    def __exit__(self, *_: object) -> None:
        assert time.monotonic() - self.begun < self.seconds + 5


def test_a_controller_that_is_not_there_is_named_with_what_to_do() -> None:
    url = free_controller_url()
    for make in (producer, consumer):
        with Within(FAST.join), pytest.raises(ControllerUnavailable, match="weightdepot serve") as caught:
            make(url, "policy")
        assert url in str(caught.value)


@pytest.mark.parametrize("url", ["", "controller", "ftp://controller:8300", "http://"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises((InvalidRequest, ControllerUnavailable)):
        producer(url, "policy")


@pytest.mark.parametrize("name", ["", "a/b", "a b", "x" * 200, "../up"])
def test_a_wrong_model_name_is_refused_and_says_what_is_allowed(controller: str, name: str) -> None:
    for make in (producer, consumer):
        with pytest.raises(InvalidRequest, match="name"):
            make(controller, name)


def test_a_model_that_nobody_publishes_is_a_bounded_wait_that_says_so(controller: str, model: str) -> None:
    with consumer(controller, model) as reader:
        with Within(FAST.update), pytest.raises((WaitTimeout, UnknownModel), match=model):
            reader.update()
        with producer(controller, model) as writer:
            writer.publish(3, wait="ready")
            assert reader.update() == 3


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 1), (1, 1), (0, 0), (5, 4)])
def test_a_rank_outside_its_world_is_refused(controller: str, model: str, rank: int, world_size: int) -> None:
    for make in (producer, consumer):
        with pytest.raises(InvalidRequest, match="rank"):
            make(controller, model, rank=rank, world_size=world_size)


@pytest.mark.parametrize("version", [-1, 1.5, "3", True, None])
def test_a_version_that_is_no_whole_number_is_refused(controller: str, model: str, version: object) -> None:
    with producer(controller, model) as writer:
        with pytest.raises(InvalidRequest, match="whole numbers"):
            writer.publish(version, wait="ready")  # type: ignore[arg-type]
        assert writer.publish(1, wait="ready").version == 1


def test_a_version_that_is_not_newer_is_refused_and_nothing_changes(controller: str, model: str) -> None:
    with producer(controller, model) as writer, consumer(controller, model) as reader:
        writer.publish(5, wait="ready")
        for old in (5, 4, 0):
            with pytest.raises(VersionNotNewer, match=model):
                writer.publish(old)
        assert reader.update() == 5
        writer.publish(6, wait="ready")
        assert reader.update() == 6


@pytest.mark.parametrize(
    ("held", "reason"),
    [
        (weights(columns=5), r"wanted as float32 \[8, 5\]"),
        (weights(dtype=torch.bfloat16), r"wanted as bfloat16 \[8, 4\]"),
        ({**weights(), "c.weight": torch.zeros(2)}, "no producer rank publishes it"),
    ],
)
def test_weights_that_do_not_fit_are_named_before_a_byte_moves(
    controller: str, model: str, held: dict[str, torch.Tensor], reason: str
) -> None:
    before = {name: t.clone() for name, t in held.items()}
    with producer(controller, model) as writer:
        writer.publish(1, wait="ready")
        with consumer(controller, model, weights=held, group="wrong") as reader:
            with pytest.raises(LayoutError, match=reason) as caught:
                reader.update()
            assert {f.tensor for f in caught.value.faults} <= held.keys()
            assert all(torch.equal(held[name], t) for name, t in before.items())
        with consumer(controller, model, group="right") as reader:
            writer.publish(2, wait="ready")
            assert reader.update() == 2


def test_producer_ranks_that_disagree_on_a_shape_are_told_which(controller: str, model: str) -> None:
    with (
        producer(controller, model, rank=0, world_size=2) as first,
        producer(controller, model, rank=1, world_size=2, weights=weights(columns=5)),
        pytest.raises(LayoutError, match=r"a\.weight"),
    ):
        first.publish(1)


def test_producer_ranks_that_leave_a_gap_are_told_which_tensor(controller: str, model: str) -> None:
    half = {"w": Shard(torch.zeros(4, 4), (10, 4), (0, 0))}
    other = {"w": Shard(torch.zeros(4, 4), (10, 4), (4, 0))}
    with (
        producer(controller, model, rank=0, world_size=2, weights=half) as first,
        producer(controller, model, rank=1, world_size=2, weights=other),
        pytest.raises(LayoutError, match="w: no rank holds some of its"),
    ):
        first.publish(1)


def test_weights_that_changed_their_form_are_refused_before_a_version_is_begun(
    controller: str, model: str
) -> None:
    held = weights(1.0)
    with producer(controller, model, weights=held) as writer, consumer(controller, model) as reader:
        writer.publish(1, wait="ready")
        kept = held["a.weight"]
        held["a.weight"] = torch.zeros(9, 4)
        with pytest.raises(LayoutError, match=r"a\.weight"):
            writer.publish(2, wait="ready")
        held["a.weight"] = kept
        writer.publish(2, wait="ready")
        assert reader.update() == 2


def test_a_second_producer_with_the_same_rank_is_refused_and_the_first_goes_on(
    controller: str, model: str
) -> None:
    with producer(controller, model) as writer, consumer(controller, model) as reader:
        with Within(FAST.join), pytest.raises(MemberConflict, match="rank 0"):
            producer(controller, model)
        with pytest.raises(MemberConflict, match="rank 0"):
            consumer(controller, model)
        with pytest.raises(MemberConflict, match="one of 2"):
            producer(controller, model, rank=1, world_size=2)
        writer.publish(1, wait="ready")
        assert reader.update() == 1


def test_a_rank_that_never_comes_is_named(controller: str, model: str) -> None:
    with (
        producer(controller, model, rank=0, world_size=3) as first,
        Within(FAST.publish),
        pytest.raises(WaitTimeout, match=r"rank"),
    ):
        first.publish(1)


def test_a_rank_that_never_seals_is_named_and_the_version_is_aborted(controller: str, model: str) -> None:
    with (
        producer(controller, model, rank=0, world_size=2) as first,
        producer(controller, model, rank=1, world_size=2) as second,
        consumer(controller, model) as reader,
    ):
        together(lambda: first.publish(1), lambda: second.publish(1))
        assert reader.update() == 1
        with Within(FAST.publish), pytest.raises(PublishAborted, match=r"1"):
            first.publish(2, wait="ready")
        assert reader.update() == 1
        together(lambda: first.publish(3, timeout=10, wait="ready"), lambda: second.publish(3, timeout=10))
        assert reader.update() == 3


def test_a_store_whose_slots_are_leased_says_by_whom(controller: str, model: str) -> None:
    """A reader of two ranks, one of which never finishes, holds the version that both were given."""
    slow = Timeouts(join=2, publish=2, seal=2, update=30, call=2, member=30, lease=30)
    with (
        producer(controller, model) as writer,
        consumer(controller, model, group="slow", rank=0, world_size=2, timeouts=slow) as rank0,
        consumer(controller, model, group="slow", rank=1, world_size=2, timeouts=slow),
    ):
        writer.publish(1, wait="ready")
        with pytest.raises(StaleGroup, match="rank"):
            rank0.update(timeout=1)
        writer.publish(2, wait="ready")
        with Within(FAST.publish), pytest.raises(StoreFull, match="slow"):
            writer.publish(3, wait="ready")


def test_a_dead_index_is_a_clear_error_and_all_goes_on_when_it_is_back(tmp_path: Path) -> None:
    index = EmbeddedRedis(data_dir=tmp_path)
    index.start()
    port = index.port
    server = Server("--port", "0", "--redis-url", index.url)
    try:
        with (
            producer(server.url, "policy", timeouts=QUICK) as writer,
            consumer(server.url, "policy", timeouts=QUICK) as reader,
        ):
            writer.publish(1, wait="ready")
            assert reader.update() == 1
            os.kill(index.pid, signal.SIGKILL)
            with Within(2), pytest.raises(IndexUnavailable):
                writer.publish(2, timeout=2)
            with Within(2), pytest.raises(IndexUnavailable):
                reader.update(min_version=2, timeout=2)
            index.stop()
            index = EmbeddedRedis(port=port, data_dir=tmp_path)
            index.start()
            assert writer.publish(2, wait="ready").version == 2
            assert reader.update(min_version=2) == 2
    finally:
        server.stop()
        index.stop()


def test_a_transport_that_cannot_work_here_is_refused_by_name(controller: str, model: str) -> None:
    with pytest.raises(InvalidRequest, match="carrier-pigeon"):
        producer(controller, model, transport="carrier-pigeon")


def test_closing_twice_and_using_what_is_closed_are_both_harmless(controller: str, model: str) -> None:
    writer, reader = producer(controller, model), consumer(controller, model)
    writer.publish(1, wait="ready")
    for thing in (reader, writer):
        thing.close()
        thing.close()
    with pytest.raises(InvalidRequest, match="closed"):
        writer.publish(2, wait="ready")
    with pytest.raises(InvalidRequest, match="closed"):
        reader.update()


def test_weights_that_share_memory_are_refused_since_one_would_overwrite_the_other(
    controller: str, model: str
) -> None:
    line, square = torch.zeros(10), torch.zeros(4, 6)
    for held in (
        {"a": line[:6], "b": line[4:]},
        {"a": line, "b": line},
        {"a": square[:, :4], "b": square[:, 3:]},
    ):
        with pytest.raises(LayoutError, match="shares memory with 'a'"):
            consumer(controller, model, weights=held)
    apart = {"a": square[:, :3], "b": square[:, 3:]}
    with producer(controller, model, weights={n: torch.ones(4, 3) for n in apart}) as writer:
        writer.publish(1, wait="ready")
        with consumer(controller, model, weights=apart) as reader:
            assert reader.update() == 1
    assert square.eq(1).all()


def test_a_poll_without_time_leaves_the_weights_as_they_are(controller: str, model: str) -> None:
    held = weights()
    with producer(controller, model) as writer, consumer(controller, model, weights=held) as reader:
        writer.publish(1, wait="ready")
        reader.update()
        writer.publish(2, wait="ready")
        with pytest.raises(WaitTimeout):
            reader.update(timeout=0)
        assert reader.version == 1
        assert held["a.weight"].eq(1).all()
        for wrong in (-1, float("nan"), float("inf"), "5"):
            with pytest.raises(InvalidRequest, match="timeout"):
                reader.update(timeout=wrong)  # type: ignore[arg-type]
        assert reader.update() == 2


def test_a_slow_rank_does_not_cost_the_others_their_lease(controller: str, model: str) -> None:
    """It comes after the lease would have ended, and within the time that an update may take."""
    patient = Timeouts(join=10, publish=10, seal=10, update=20, call=5, member=2, lease=1)
    with (
        producer(controller, model) as writer,
        consumer(controller, model, rank=0, world_size=2, timeouts=patient) as first,
        consumer(controller, model, rank=1, world_size=2, timeouts=patient) as second,
    ):
        writer.publish(1, wait="ready")

        def late() -> int:
            time.sleep(3)
            return second.update()

        assert together(first.update, late) == [1, 1]


def test_a_controller_that_forgot_everything_is_joined_anew_by_both_sides(model: str) -> None:
    server = Server("--port", "0")
    port = server.url.rsplit(":", 1)[1]
    try:
        with producer(server.url, model, timeouts=QUICK) as writer, consumer(server.url, model) as reader:
            writer.publish(1, wait="ready")
            assert reader.update() == 1
            server.kill()
            server = Server("--port", port)
            writer.publish(2, wait="ready")
            assert reader.update(min_version=2, timeout=20) == 2
    finally:
        server.stop()


def test_a_restarted_trainer_resumes_past_versions_whose_memory_is_gone(controller: str, model: str) -> None:
    with producer(controller, model) as writer:
        writer.publish(3, wait="ready")
    with producer(controller, model) as writer:
        assert writer.latest is None
        assert writer.highest == 3
        writer.publish(writer.highest + 1, wait="ready")


def test_a_forked_child_can_neither_publish_nor_sign_off_for_its_parent(controller: str, model: str) -> None:
    with producer(controller, model) as writer, consumer(controller, model) as reader:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                writer.publish(1, wait="ready")
            except InvalidRequest:
                reader.close()
                writer.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        writer.publish(1, wait="ready")
        assert reader.update() == 1
