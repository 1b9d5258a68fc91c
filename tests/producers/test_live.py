"""Weights that are read where they are: moved into shared memory once, and found there by any reader."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from weightdepot.consumers.live import read_live
from weightdepot.producers.live import LiveWeights, plain_tensors
from weightdepot.store.digests import combine
from weightdepot.store.errors import (
    InvalidRequest,
    LayoutError,
    LeaseLost,
    SourceLost,
    TransportUnavailable,
    WaitTimeout,
)
from weightdepot.store.geometry import Box
from weightdepot.store.index.records import Part
from weightdepot.store.live import WORD_NBYTES, LiveEndpoint, TileTable, set_word
from weightdepot.store.moving import fill
from weightdepot.store.planning import Plan, make_packing, make_plan
from weightdepot.store.segments import Segment
from weightdepot.store.tiling import Tiling, make_tiling
from weightdepot.store.transports.select import Transports
from weightdepot.store.transports.shm import ShmTransport
from weightdepot.store.weights import Mapped, Shard, layout_of

from ..store.strategies import Rank, checkpoints, groups, load, same_bits

_sessions = itertools.count()


class Exposed:
    """One producer rank's weights in a segment of their own, as a part says it."""

    def __init__(self, rank: Rank, number: int, tiling: Tiling) -> None:
        session = f"{os.getpid()}-{next(_sessions)}"
        self.weights = LiveWeights(rank.buffers, rank.layout, "test", session)
        source = tiling.source_tiling(number)
        table = TileTable.of(source, make_packing(source, rank.layout), self.weights.at).to_bytes()
        self.table = Segment.create(len(table), "test", session)
        self.table.tensor.copy_(torch.frombuffer(bytearray(table), dtype=torch.uint8))
        self.word = Segment.create(WORD_NBYTES, "test", session)
        set_word(self.word.tensor, 7)
        shm = ShmTransport()
        endpoint = LiveEndpoint(
            shm.serve(self.weights.segment), shm.serve(self.table), shm.serve(self.word), 7
        )
        empty = combine(np.empty(0, np.uint64))
        self.part = Part(number, session, endpoint.to_plain(), source.payload, empty)

    def close(self) -> None:
        for segment in (self.weights.segment, self.table, self.word):
            segment.close()


def read(exposed: Exposed, plan: Plan, rank: Rank, **changes: Any) -> int:
    with Transports("shm") as transports:
        return read_live(
            **{
                "part": exposed.part,
                "plan": plan,
                "layout": rank.layout,
                "buffers": rank.buffers,
                "transports": transports,
                "deadline": time.monotonic() + 20,
                "model": "policy",
                "version": 3,
                "on_write": lambda: None,
                "on_moved": lambda _: None,
                **changes,
            }
        )


@settings(max_examples=60, deadline=None, suppress_health_check=[*HealthCheck])
@given(st.data())
def test_any_reader_finds_any_slice_in_the_live_weights_and_moves_only_that(data: st.DataObject) -> None:
    checkpoint = data.draw(checkpoints())
    producing = data.draw(groups(checkpoint, complete=True))
    reader = data.draw(groups(checkpoint, complete=False))[0]
    late = data.draw(st.booleans())  # it came when the tiles were cut already
    tiling = make_tiling([r.layout for r in producing], [] if late else [reader.layout])
    for rank in producing:
        load(rank, checkpoint)
    exposed = [Exposed(rank, i, tiling) for i, rank in enumerate(producing)]
    try:
        plan = make_plan(tiling, reader.layout)
        moved = sum(read(exposed[source], plan, reader) for source in plan.sources)
        fill(reader.layout.fills, reader.buffers)
        expected = Rank(reader.builder, {n: torch.zeros_like(b) for n, b in reader.buffers.items()})
        load(expected, checkpoint)
        for name, buffer in reader.buffers.items():
            assert same_bits(buffer, expected.buffers[name]), name
        assert moved == plan.needed_nbytes
    finally:
        for e in exposed:
            e.close()


@pytest.fixture
def pair() -> Any:
    writer, reader = Rank(), Rank()
    whole = torch.arange(24.0).reshape(4, 6)
    for rank in (writer, reader):
        rank.hold("w", whole, Box.whole((4, 6)), "plain")
    load(writer, {"w": whole})
    tiling = make_tiling([writer.layout], [reader.layout])
    exposed = Exposed(writer, 0, tiling)
    yield exposed, make_plan(tiling, reader.layout), reader
    exposed.close()


def test_what_was_taken_back_is_not_read(pair: tuple[Exposed, Plan, Rank]) -> None:
    exposed, plan, reader = pair
    written: list[bool] = []
    set_word(exposed.word.tensor, 8)
    with pytest.raises(LeaseLost, match="version 3"):
        read(exposed, plan, reader, on_write=lambda: written.append(True))
    assert not written


def test_what_is_taken_back_while_it_is_read_is_not_believed(pair: tuple[Exposed, Plan, Rank]) -> None:
    exposed, plan, reader = pair
    with pytest.raises(LeaseLost, match="discarded"):
        read(exposed, plan, reader, on_moved=lambda _: set_word(exposed.word.tensor, 0))


def test_a_reader_without_shared_memory_is_told_what_to_do(
    pair: tuple[Exposed, Plan, Rank], tmp_path: Path
) -> None:
    exposed, plan, reader = pair
    elsewhere = Transports("shm", directory=tmp_path)
    with elsewhere, pytest.raises(TransportUnavailable, match="put the reader on the same host"):
        read(exposed, plan, reader, transports=elsewhere)


def test_a_source_that_is_gone_is_named(pair: tuple[Exposed, Plan, Rank]) -> None:
    exposed, plan, reader = pair
    exposed.close()
    with pytest.raises(SourceLost, match="rank 0 of version 3") as caught:
        read(exposed, plan, reader)
    assert caught.value.details["rank"] == 0


def test_a_read_ends_at_its_deadline(pair: tuple[Exposed, Plan, Rank]) -> None:
    exposed, plan, reader = pair
    with pytest.raises(WaitTimeout):
        read(exposed, plan, reader, deadline=time.monotonic() - 1)


def test_the_tensors_stay_the_same_objects_with_the_same_values_and_ties() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    flat = torch.arange(10.0)
    named = {**dict(module.named_parameters()), "low": flat[:6], "high": flat[4:]}
    before = {n: t.detach().clone() for n, t in named.items()}
    strides = {n: t.stride() for n, t in named.items()}
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    live = LiveWeights(named, layout_of(named), "test", f"{os.getpid()}-{next(_sessions)}")
    try:
        assert module[1].weight is module[0].weight is named["0.weight"]
        for name, tensor in named.items():
            assert torch.equal(tensor, before[name])
            assert tensor.stride() == strides[name]
        named["high"][0] = 99
        assert named["low"][4] == 99  # they share memory still
        module(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        live.check({n: t.detach() for n, t in named.items()})
        weight = module[0].weight
        inside = live.segment.address <= weight.data_ptr() < live.segment.address + live.segment.nbytes
        assert inside
        assert not torch.equal(weight, before["0.weight"])
        with pytest.raises(LayoutError, match="low: was bound to other memory"):
            live.check({**named, "low": torch.zeros(6)})
    finally:
        live.segment.close()
    assert torch.equal(named["low"][:4], before["low"][:4])  # closed, and still the caller's


def test_what_cannot_be_moved_is_refused() -> None:
    plain = {"w": torch.zeros(3)}
    with pytest.raises(InvalidRequest, match="zero_copy takes"):
        plain_tensors(Mapped(layout_of(plain), lambda: plain), layout_of(plain))
    with pytest.raises(LayoutError, match=r"w: is torch.float32, and published as bfloat16"):
        plain_tensors(plain, layout_of(plain, torch.bfloat16))
    with pytest.raises(LayoutError, match=r"w: is on meta"):
        plain_tensors({"w": torch.zeros(3, device="meta")}, layout_of(plain))
    shard = Shard(torch.zeros(2), (4,), (2,))
    assert plain_tensors({"w": shard}, layout_of({"w": shard}))["w"] is shard.local
