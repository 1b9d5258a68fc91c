"""Random pairs of layouts, through real producers, consumers, controller, index and transports: what arrives
equals what a full gather and a reload would give, bit for bit."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weightdepot import Consumer, Producer
from weightdepot.store.weights import Mapped

from ..store.strategies import Checkpoint, Rank, checkpoints, filled, groups, load, same_bits
from .harness import QUICK, together

_numbers = itertools.count()


def mapped(rank: Rank) -> Mapped:
    return Mapped(rank.layout, lambda: rank.buffers)


def renewed(checkpoint: Checkpoint, seed: int) -> Checkpoint:
    return {name: filled(tuple(t.shape), t.dtype, seed + i) for i, (name, t) in enumerate(checkpoint.items())}


def exchange(controller: str, transport: str, data: st.DataObject) -> None:
    checkpoint = data.draw(checkpoints())
    producing = data.draw(groups(checkpoint, complete=True))
    consuming = [data.draw(groups(checkpoint, complete=False)) for _ in range(2)]
    late = data.draw(groups(checkpoint, complete=False))
    model = f"any-{transport}-{next(_numbers)}"
    options: dict[str, Any] = {"model": model, "transport": transport, "timeouts": QUICK}
    with contextlib.ExitStack() as stack:
        producers = together(
            *[
                lambda r=r, rank=rank: Producer(
                    controller, weights=mapped(rank), rank=r, world_size=len(producing), **options
                )
                for r, rank in enumerate(producing)
            ]
        )
        for p in producers:
            stack.enter_context(p)

        def join(group: str, ranks: list[Rank]) -> list[Consumer]:
            joined = together(
                *[
                    lambda r=r, rank=rank: Consumer(
                        controller,
                        weights=mapped(rank),
                        group=group,
                        rank=r,
                        world_size=len(ranks),
                        **options,
                    )
                    for r, rank in enumerate(ranks)
                ]
            )
            for c in joined:
                stack.enter_context(c)
            return joined

        members = [(c, r) for i, g in enumerate(consuming) for c, r in zip(join(f"g{i}", g), g, strict=True)]
        for version in (1, 2, 3):
            if version == 3:  # a group that comes when versions were cut without it
                late_members = list(zip(join("late", late), late, strict=True))
                compare(late_members, checkpoint, 2)
                members += late_members
            checkpoint = renewed(checkpoint, data.draw(st.integers(0, 1 << 20)))
            for rank in producing:
                load(rank, checkpoint)
            together(*[lambda p=p, v=version: p.publish(v, wait="ready") for p in producers])
            compare(members, checkpoint, version)
            for consumer, rank in members:
                last = consumer.last
                assert last is not None
                assert last.moved == last.needed
                assert not rank.buffers or {t.split("/")[0] for t in last.transports} <= {transport}


def compare(members: list[tuple[Consumer, Rank]], checkpoint: Checkpoint, version: int) -> None:
    assert together(*[lambda c=c: c.update() for c, _ in members]) == [version] * len(members)
    for _, rank in members:
        expected = Rank(rank.builder, {name: torch.zeros_like(b) for name, b in rank.buffers.items()})
        load(expected, checkpoint)
        for name, buffer in rank.buffers.items():
            assert same_bits(buffer, expected.buffers[name]), name


@settings(max_examples=12, deadline=None, suppress_health_check=[*HealthCheck])
@given(st.data())
def test_any_layout_to_any_layout_over_shared_memory(controller: str, data: st.DataObject) -> None:
    exchange(controller, "shm", data)


@pytest.mark.mooncake
@settings(max_examples=3, deadline=None, suppress_health_check=[*HealthCheck])
@given(st.data())
def test_any_layout_to_any_layout_over_mooncake(controller: str, data: st.DataObject) -> None:
    exchange(controller, "mooncake", data)


@settings(max_examples=5, deadline=None, suppress_health_check=[*HealthCheck])
@given(st.data())
def test_any_layout_to_any_layout_over_tcp(controller: str, data: st.DataObject) -> None:
    exchange(controller, "tcp", data)
