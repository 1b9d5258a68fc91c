"""Tiling and planning: what a plan moves is what a reload would give, once, from balanced sources."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weightdepot.store.errors import LayoutError
from weightdepot.store.geometry import Box
from weightdepot.store.layout import Layout
from weightdepot.store.planning import Copies, Plan, make_packing, make_plan
from weightdepot.store.tiling import SourceTiling, Tiling, make_tiling, tiling_id

from .strategies import Checkpoint, Rank, checkpoints, filled, groups, load, same_bits

SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def execute(copies: Copies, rank: Rank, tiles: list[torch.Tensor], to_tiles: bool) -> None:
    """The plainest reading of a table of copies, independent of the one that the product runs."""
    for i in range(len(copies)):
        tile = tiles[copies.tile[i]]
        name = rank.layout.buffers[copies.buffer[i]].name
        shape = copies.shape[i].tolist()
        here = rank.buffers[name].as_strided(shape, copies.strides[i].tolist(), int(copies.start[i]))
        start = tile.storage_offset() + int(copies.tile_start[i])
        there = tile.as_strided(shape, copies.tile_strides[i].tolist(), start)
        (there.copy_(here) if to_tiles else here.copy_(there))


def publish(tiling: Tiling, ranks: list[Rank], checkpoint: Checkpoint) -> list[torch.Tensor]:
    """Each producer's slot, packed."""
    slots = []
    for r, rank in enumerate(ranks):
        source = SourceTiling.from_bytes(tiling.source_tiling(r).to_bytes())
        slot = torch.zeros(source.slot_nbytes, dtype=torch.uint8)
        tiles = [
            slot[o : o + n].view(checkpoint[source.tensors[t].name].dtype)
            for o, n, t in zip(source.offset, source.nbytes, source.boxes.tensor, strict=True)
        ]
        execute(make_packing(source, rank.layout), rank, tiles, to_tiles=True)
        slots.append(slot)
    return slots


def pull(plan: Plan, rank: Rank, slots: list[torch.Tensor], checkpoint: Checkpoint) -> None:
    tiles = [
        slots[s][o : o + n].view(checkpoint[plan.tensors[t]].dtype)
        for s, o, n, t in zip(plan.source, plan.offset, plan.nbytes, plan.tensor, strict=True)
    ]
    execute(plan.copies, rank, tiles, to_tiles=False)


@SETTINGS
@given(st.data())
def test_what_arrives_equals_a_reload_for_any_pair_of_layouts(data: st.DataObject) -> None:
    checkpoint = data.draw(checkpoints())
    producers = data.draw(groups(checkpoint, complete=True))
    consumers = data.draw(groups(checkpoint, complete=False))
    late = data.draw(groups(checkpoint, complete=False))
    for rank in producers:
        load(rank, checkpoint)
    tiling = make_tiling([p.layout for p in producers], [c.layout for c in consumers])
    tiling = Tiling.from_bytes(tiling.to_bytes())
    slots = publish(tiling, producers, checkpoint)
    for rank in (*consumers, *late):
        plan = Plan.from_bytes(make_plan(tiling, rank.layout).to_bytes())
        expected = {name: buffer.clone() for name, buffer in rank.buffers.items()}
        pull(plan, rank, slots, checkpoint)
        got = rank.buffers
        rank.buffers = expected
        load(rank, checkpoint)
        for name, buffer in got.items():
            assert same_bits(buffer, rank.buffers[name]), name
        if rank in consumers:
            assert plan.moved_nbytes == plan.needed_nbytes
            assert len(np.unique(np.stack([plan.source, plan.offset]), axis=1)[0]) == len(plan.source)


@SETTINGS
@given(st.data())
def test_tiles_are_disjoint_cover_the_checkpoint_and_never_overlap_in_a_slot(data: st.DataObject) -> None:
    checkpoint = data.draw(checkpoints())
    producers = data.draw(groups(checkpoint, complete=True))
    consumers = data.draw(groups(checkpoint, complete=False))
    tiling = make_tiling([p.layout for p in producers], [c.layout for c in consumers])
    counts = {name: torch.zeros(t.shape, dtype=torch.int32) for name, t in checkpoint.items()}
    for tensor, offset, shape in zip(
        tiling.boxes.tensor, tiling.boxes.offset, tiling.boxes.shape, strict=True
    ):
        part = counts[tiling.tensors[tensor].name]
        for dim in range(part.dim()):
            part = part.narrow(dim, int(offset[dim]), int(shape[dim]))
        part += 1
    assert all(bool((c == 1).all()) for c in counts.values())
    for rank in range(tiling.world_size):
        source = tiling.source_tiling(rank)
        assert (source.offset[1:] >= (source.offset + source.nbytes)[:-1]).all()
        itemsize = np.array([checkpoint[source.tensors[t].name].itemsize for t in source.boxes.tensor])
        assert (source.offset % np.maximum(itemsize, 1) == 0).all()


def split(shape: tuple[int, int], dim: int, parts: int) -> list[Layout]:
    whole, ranks = filled(shape, torch.bfloat16, 0), []
    for r in range(parts):
        a, b = shape[dim] * r // parts, shape[dim] * (r + 1) // parts
        rank = Rank()
        offset = (a, 0) if dim == 0 else (0, a)
        rank.hold("w", whole, Box(offset, (b - a, shape[1]) if dim == 0 else (shape[0], b - a)), "plain")
        ranks.append(rank.layout)
    return ranks


def test_rows_to_columns_makes_one_tile_for_each_pair() -> None:
    tiling = make_tiling(split((8, 12), 0, 2), split((8, 12), 1, 3))
    assert len(tiling.boxes) == 6
    assert set(map(tuple, tiling.boxes.shape.tolist())) == {(4, 4)}


def test_each_reader_finds_what_it_needs_from_a_source_in_one_run() -> None:
    whole = {f"w{i}": filled((64, 64), torch.bfloat16, i) for i in range(20)}
    producers, consumers = [Rank(), Rank()], [Rank(), Rank()]
    for name, w in whole.items():
        for r in range(2):
            producers[r].hold(name, w, Box((32 * r, 0), (32, 64)), "plain")
            consumers[r].hold(name, w, Box((0, 32 * r), (64, 32)), "plain")
    tiling = make_tiling([p.layout for p in producers], [c.layout for c in consumers])
    for rank in consumers:
        plan = make_plan(tiling, rank.layout)
        for source in plan.sources:
            rows = plan.source == source
            ends = plan.offset[rows] + plan.nbytes[rows]
            assert (ends[:-1] == plan.offset[rows][1:]).all()


def test_case_33_replicated_sources_share_the_load_within_5_percent() -> None:
    whole, producers = {f"w{i}": filled((512 + 7 * i, 640), torch.float32, i) for i in range(9)}, []
    for _ in range(4):
        rank = Rank()
        for name, w in whole.items():
            rank.hold(name, w, Box.whole(w.shape), "plain")
        producers.append(rank.layout)
    tiling = make_tiling(producers, split((512, 640), 1, 2)[:0] or [producers[0]])
    served = np.bincount(tiling.source, weights=tiling.nbytes, minlength=4)
    assert served.sum() == sum(w.nbytes for w in whole.values())
    assert served.max() <= 1.05 * served.mean()


def test_case_14_a_tensor_that_no_rank_holds_in_full_is_named_with_all_others() -> None:
    whole, rank = filled((8, 4), torch.bfloat16, 0), Rank()
    rank.hold("half", whole, Box((0, 0), (4, 4)), "plain")
    rank.hold("full", whole, Box.whole((8, 4)), "plain")
    rank.builder.tensor("router.bias", (4,), "bfloat16")
    with pytest.raises(LayoutError) as caught:
        make_tiling([rank.layout], [])
    assert [f.tensor for f in caught.value.faults] == ["half", "router.bias"]


def test_a_reader_of_unpublished_or_differing_tensors_is_told_all_of_them() -> None:
    producer, reader = Rank(), Rank()
    producer.hold("a", filled((4, 4), torch.bfloat16, 0), Box.whole((4, 4)), "plain")
    reader.hold("a", filled((4, 5), torch.bfloat16, 0), Box.whole((4, 5)), "plain")
    reader.hold("b", filled((2,), torch.float32, 0), Box.whole((2,)), "plain")
    tiling = make_tiling([producer.layout], [reader.layout])
    with pytest.raises(LayoutError) as caught:
        make_plan(tiling, reader.layout)
    assert [f.tensor for f in caught.value.faults] == ["a", "b"]
    assert "bfloat16 [4, 4]" in str(caught.value)


def test_producers_that_disagree_on_a_shape_are_refused() -> None:
    first, second = Rank(), Rank()
    first.hold("a", filled((4, 4), torch.bfloat16, 0), Box.whole((4, 4)), "plain")
    second.hold("a", filled((4, 5), torch.bfloat16, 0), Box.whole((4, 5)), "plain")
    with pytest.raises(LayoutError, match="same checkpoint"):
        make_tiling([first.layout, second.layout], [])


def test_case_22_two_readers_of_the_same_head_each_read_it_once() -> None:
    whole, producer = filled((4, 8), torch.bfloat16, 0), Rank()
    producer.hold("k", whole, Box.whole((4, 8)), "plain")
    readers = []
    for _ in range(2):
        rank = Rank()
        rank.hold("k", whole, Box((0, 0), (2, 8)), "plain")
        readers.append(rank.layout)
    tiling = make_tiling([producer.layout], readers)
    for reader in readers:
        plan = make_plan(tiling, reader)
        assert plan.moved_nbytes == plan.needed_nbytes == 2 * 8 * 2


def test_a_box_placed_twice_is_read_once() -> None:
    whole, producer, reader = filled((4, 8), torch.bfloat16, 0), Rank(), Rank()
    producer.hold("w", whole, Box.whole((4, 8)), "plain")
    reader.hold("w", whole, Box.whole((4, 8)), "plain")
    twin = reader.own("twin", torch.zeros(4, 8, dtype=torch.bfloat16))
    reader.builder.place("w", Box.whole((4, 8)), "twin", 0, twin.stride())
    plan = make_plan(make_tiling([producer.layout], [reader.layout]), reader.layout)
    assert plan.moved_nbytes == plan.needed_nbytes == whole.nbytes
    assert len(plan.copies) == 2


def test_a_tiling_is_named_by_the_layouts_and_not_by_their_order_or_number() -> None:
    assert tiling_id(["a", "b"], ["x", "y", "x"]) == tiling_id(["a", "b"], ["y", "x"])
    assert tiling_id(["a", "b"], ["x"]) != tiling_id(["b", "a"], ["x"])
    assert tiling_id(["a"], ["b"]) != tiling_id(["a", "b"], [])
