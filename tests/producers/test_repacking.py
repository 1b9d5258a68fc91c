"""A slot that was filled for one tiling fills a slot of another, without a look at the weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from weightdepot.producers.repacking import pack_again
from weightdepot.store.errors import LayoutError
from weightdepot.store.geometry import Box
from weightdepot.store.layout import Layout
from weightdepot.store.moving import pack
from weightdepot.store.planning import make_packing
from weightdepot.store.tiling import SourceTiling, make_tiling

from ..store.strategies import Rank, checkpoints, groups, load


def packed(rank: Rank, source: SourceTiling) -> torch.Tensor:
    slot = torch.zeros(max(source.slot_nbytes, 1), dtype=torch.uint8)
    pack(source, make_packing(source, rank.layout), rank.layout, rank.buffers, slot)
    return slot


@settings(max_examples=80, deadline=None, suppress_health_check=[*HealthCheck])
@given(st.data())
def test_it_is_what_packing_the_weights_anew_would_give_or_an_error(data: st.DataObject) -> None:
    checkpoint = data.draw(checkpoints())
    producing = data.draw(groups(checkpoint, complete=True))
    readers: list[list[Layout]] = [
        [r.layout for r in data.draw(groups(checkpoint, complete=False))] for _ in range(2)
    ]
    for rank in producing:
        load(rank, checkpoint)
    layouts = [r.layout for r in producing]
    before, after = (make_tiling(layouts, r) for r in (readers[0], [*readers[0], *readers[1]]))
    for number, rank in enumerate(producing):
        old, new = before.source_tiling(number), after.source_tiling(number)
        assume(len(new))
        filled = packed(rank, old)
        slot = torch.zeros(max(new.slot_nbytes, 1), dtype=torch.uint8)
        try:
            pack_again(old, filled, new, slot)
        except LayoutError:
            continue  # another rank stored it: what is not here cannot be brought
        expected = packed(rank, new)
        for at, n in zip(new.offset.tolist(), new.nbytes.tolist(), strict=True):
            assert torch.equal(slot[at : at + n], expected[at : at + n])
        # in place, where the same slot was granted again
        same = torch.zeros(max(new.slot_nbytes, old.slot_nbytes, 1), dtype=torch.uint8)
        same[: len(filled)] = filled
        pack_again(old, same, new, same)
        for at, n in zip(new.offset.tolist(), new.nbytes.tolist(), strict=True):
            assert torch.equal(same[at : at + n], expected[at : at + n])


def test_tiles_that_became_larger_are_named() -> None:
    rank, reader = Rank(), Rank()
    whole = torch.arange(24.0).reshape(4, 6)
    rank.hold("w", whole, Box.whole((4, 6)), "plain")
    reader.hold("w", whole, Box((0, 2), (4, 2)), "plain")
    fine, coarse = (make_tiling([rank.layout], r) for r in ([reader.layout], []))
    source = fine.source_tiling(0)
    with pytest.raises(LayoutError, match="w"):
        pack_again(source, packed(rank, source), coarse.source_tiling(0), torch.zeros(96, dtype=torch.uint8))
