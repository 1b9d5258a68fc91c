"""What the product packs and scatters: the bytes of a reload, whichever way a row is moved."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weightdepot.store import devices, moving, streams
from weightdepot.store.moving import Scatter, fill, pack
from weightdepot.store.planning import make_packing, make_plan
from weightdepot.store.remembered import Remembered
from weightdepot.store.tiling import make_tiling
from weightdepot.store.weights import Shard, layout_of, local_buffers

from .strategies import checkpoints, groups, load, same_bits

WAYS: dict[str, dict[str, int | None]] = {
    "as-shipped": {},
    "every-row-is-long": {"SHORTEST": 1},
    "several-threads": {"SHORTEST": 1, "SHARE": 1},
    "without-the-extension": {"_streams": None},
}


@contextmanager
def way(name: str) -> Iterator[None]:
    with ExitStack() as stack:
        for what, value in WAYS[name].items():
            stack.enter_context(mock.patch.object(streams, what, value))
        yield


@pytest.mark.parametrize("name", WAYS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_what_is_packed_and_scattered_equals_a_reload(name: str, data: st.DataObject) -> None:
    with way(name):
        _packed_and_scattered(data)


def _packed_and_scattered(data: st.DataObject) -> None:
    checkpoint = data.draw(checkpoints())
    producers = data.draw(groups(checkpoint, complete=True))
    consumers = data.draw(groups(checkpoint, complete=False))
    for rank in producers:
        load(rank, checkpoint)
    tiling = make_tiling([p.layout for p in producers], [c.layout for c in consumers])
    slots = []
    for number, rank in enumerate(producers):
        source = tiling.source_tiling(number)
        # after what somebody else keeps there, as memory of a mapping may begin anywhere
        slot = torch.full((source.slot_nbytes + 64,), 0xAB, dtype=torch.uint8)[64:]
        packing = make_packing(source, rank.layout)
        for _ in range(2):  # the second time from what was kept
            pack(source, packing, rank.layout, rank.buffers, slot)
        slots.append(slot)
    for rank in consumers:
        plan = make_plan(tiling, rank.layout)
        expected = {name: buffer.clone() for name, buffer in rank.buffers.items()}
        scatter = Scatter(plan, rank.layout, rank.buffers)
        for read, (number, at) in enumerate(zip(plan.source.tolist(), plan.offset.tolist(), strict=True)):
            scatter.write(range(read, read + 1), slots[number], [at])
        fill(rank.layout.fills, rank.buffers)
        got, rank.buffers = rank.buffers, expected
        load(rank, checkpoint)
        for name, buffer in got.items():
            assert same_bits(buffer, rank.buffers[name]), name


@pytest.mark.parametrize("columns", [[2048, 2048], [2048, 4096, 2048]], ids=["halves", "uneven"])
@pytest.mark.parametrize("before", [0, 3], ids=["alone", "behind-a-small-tensor"])
def test_rows_are_taken_in_the_order_of_the_buffer_and_arrive(columns: list[int], before: int) -> None:
    whole = torch.randn(64, sum(columns)).to(torch.bfloat16)
    weights = {"w": whole, **({"bias": torch.randn(before)} if before else {})}
    readers = []
    first = 0
    for width in columns:
        piece = torch.empty(64, width, dtype=torch.bfloat16)
        readers.append(layout_of({"w": Shard(piece, tuple(whole.shape), (0, first))}))
        first += width
    layout = layout_of(weights)
    tiling = make_tiling([layout], readers)
    source = tiling.source_tiling(0)
    packing = make_packing(source, layout)
    kept = moving._Packing(source, packing, layout)
    assert len(kept._direct.copies) == len(columns), "these do not need torch"
    slot = torch.zeros(source.slot_nbytes, dtype=torch.uint8)
    pack(source, packing, layout, local_buffers(weights), slot)
    for i in range(len(source)):
        if source.tensors[source.boxes.tensor[i]].name != "w":
            continue
        row, column = source.boxes.offset[i].tolist()[-2:]
        rows, width = source.boxes.shape[i].tolist()[-2:]
        at = int(source.offset[i])
        tile = slot[at : at + int(source.nbytes[i])].view(torch.bfloat16).view(rows, width)
        assert torch.equal(tile, whole[row : row + rows, column : column + width])


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_through_a_device_s_memory_the_same_arrives(data: st.DataObject) -> None:
    """With host memory in the place of a device's: what is staged, where, and in which order."""
    checkpoint = data.draw(checkpoints())
    producers = data.draw(groups(checkpoint, complete=True))
    consumers = data.draw(groups(checkpoint, complete=False))
    chunk = data.draw(st.sampled_from([1, 64, 1000, 1 << 20]))
    for rank in producers:
        load(rank, checkpoint)
    tiling = make_tiling([p.layout for p in producers], [c.layout for c in consumers])
    for number, rank in enumerate(producers):
        source = tiling.source_tiling(number)
        packing = make_packing(source, rank.layout)
        plain, staged = (torch.zeros(source.slot_nbytes, dtype=torch.uint8) for _ in range(2))
        pack(source, packing, rank.layout, rank.buffers, plain)
        elsewhere = data.draw(st.sets(st.sampled_from(sorted(rank.buffers)))) if rank.buffers else set()
        pointers = {rank.buffers[name].data_ptr() for name in elsewhere}
        with (
            mock.patch.object(devices, "on_host", lambda t, away=pointers: t.data_ptr() not in away),
            mock.patch.object(devices, "CHUNK", chunk),
        ):
            pack(source, packing, rank.layout, rank.buffers, staged)
        assert torch.equal(staged, plain)
        for reader in consumers:
            plan = make_plan(tiling, reader.layout)
            got = []
            for away in (False, True):
                buffers = {name: buffer.clone() for name, buffer in reader.buffers.items()}
                with mock.patch.object(devices, "on_host", lambda _, away=away: not away):
                    scatter = Scatter(plan, reader.layout, buffers)
                    for read in np.flatnonzero(plan.source == number).tolist():
                        scatter.write(range(read, read + 1), plain, [int(plan.offset[read])])
                got.append(buffers)
            assert all(same_bits(got[0][name], got[1][name]) for name in got[0])


def test_nothing_is_kept_of_buffers_that_their_owner_replaced() -> None:
    layout = layout_of({"w": torch.zeros(256, 4096, dtype=torch.bfloat16)})
    reader = layout_of({"w": torch.zeros(256, 4096, dtype=torch.bfloat16)})
    tiling = make_tiling([layout], [reader])
    source = tiling.source_tiling(0)
    packing = make_packing(source, layout)
    slot = torch.zeros(source.slot_nbytes, dtype=torch.uint8)
    for value in (1.0, 2.0):  # each time another storage
        weights = {"w": torch.full((256, 4096), value, dtype=torch.bfloat16)}
        pack(source, packing, layout, local_buffers(weights), slot)
        assert bool((slot.view(torch.bfloat16) == value).all())
        storage = weakref.ref(weights["w"].untyped_storage())
        del weights
        gc.collect()
        assert storage() is None, "the packing keeps the memory of buffers that are gone"


def test_what_is_remembered_goes_with_what_it_was_made_of() -> None:
    class Table:
        """Neither hashable nor comparable, as tables of arrays are."""

        __hash__ = None  # type: ignore[assignment]

        def __init__(self) -> None:
            self.column = np.arange(3)

    made: list[int] = []
    kept: Remembered[Table, int] = Remembered()
    tables = [Table() for _ in range(5)]

    def make(number: int) -> int:
        made.append(number)
        return number

    for _ in range(3):
        for number, table in enumerate(tables):
            assert kept.of(table, partial(make, number)) == number
    assert made == [0, 1, 2, 3, 4]
    del tables, table
    gc.collect()
    assert len(kept) == 0
