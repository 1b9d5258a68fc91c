"""Layouts: what is encoded comes back, and what does not hold together is refused with all its faults."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from weightdepot.store import wire
from weightdepot.store.errors import InvalidRequest, LayoutError, WeightDepotError
from weightdepot.store.geometry import Box
from weightdepot.store.layout import Fill, Layout, LayoutBuilder, manifest_of
from weightdepot.store.planning import Plan
from weightdepot.store.tiling import Tiling

from .strategies import checkpoints, groups


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_a_layout_comes_back_from_its_bytes_with_the_same_digest(data: st.DataObject) -> None:
    for rank in data.draw(groups(data.draw(checkpoints()), complete=True)):
        for name in [n for n, b in rank.buffers.items() if b.numel()][:1]:
            rank.builder.fill(Fill(name, 0, (), (), 1.5))
        layout = rank.layout
        again = Layout.from_bytes(layout.to_bytes())
        assert again == layout
        assert again.digest == layout.digest
        assert list(again.placements()) == list(layout.placements())
        assert again.fills == layout.fills


def simple(offset: int = 0, start: int = 0, stride: int = 4) -> LayoutBuilder:
    builder = LayoutBuilder()
    builder.tensor("w", (8, 4), "bfloat16")
    builder.buffer("p", (4, 4), (4, 1), "bfloat16")
    builder.place("w", Box((offset, 0), (4, 4)), "p", start, (stride, 1))
    return builder


def test_any_difference_changes_the_digest() -> None:
    assert simple().build() == simple().build()
    assert simple(offset=4).build() != simple().build()
    assert {simple().build(), simple().build()} == {simple().build()}


@pytest.mark.parametrize(
    ("builder", "reason"),
    [
        (simple(offset=5), "outside the tensor"),
        (simple(start=1), "outside its buffer"),
        (simple(stride=5), "outside its buffer"),
        (simple(stride=1), "overlaps itself"),
    ],
)
def test_a_placement_outside_its_tensor_or_buffer_is_named(builder: LayoutBuilder, reason: str) -> None:
    with pytest.raises(LayoutError, match=reason) as caught:
        builder.build()
    assert caught.value.faults[0].tensor == "w"


def test_all_faults_are_reported_not_the_first() -> None:
    builder = LayoutBuilder()
    for i in range(20):
        builder.tensor(f"w{i}", (2,), "float32")
        builder.buffer(f"p{i}", (1,), (1,), "float32")
        builder.place(f"w{i}", Box((0,), (2,)), f"p{i}", 0, (1,))
    with pytest.raises(LayoutError) as caught:
        builder.build()
    assert len(caught.value.faults) == 20
    assert "and 8 more" in str(caught.value)


def test_case_31_no_bytes_make_decoding_do_more_than_refuse() -> None:
    good = wire.decompress(simple().build().to_bytes(), "layout")
    rng = np.random.default_rng(0)
    for _ in range(400):
        broken = bytearray(good)
        for at in rng.integers(0, len(broken), size=rng.integers(1, 4)):
            broken[at] = rng.integers(0, 256)
        data = wire.compress(bytes(broken))
        for kind in (Layout, Tiling, Plan):
            try:
                kind.from_bytes(data)
            except (InvalidRequest, LayoutError):
                continue
            assert kind is Layout, f"{kind.__name__} took a broken layout"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        zstandard.ZstdCompressor().compress(b"garbage"),
        zstandard.ZstdCompressor().compress(msgspec.msgpack.encode({"kind": "layout"})),
        # a bomb: it states a size beyond the limit
        b"\x28\xb5\x2f\xfd\xe0" + (1 << 50).to_bytes(8, "little") + b"\x01\x00\x00",
        # and one that states none
        zstandard.ZstdCompressor(write_content_size=False).compressobj().flush(),
    ],
)
def test_bytes_that_are_not_a_layout_are_refused(data: bytes) -> None:
    with pytest.raises(WeightDepotError):
        Layout.from_bytes(data)


def test_huge_numbers_do_not_wrap_around_the_checks() -> None:
    builder = LayoutBuilder()
    builder.tensor("w", (1 << 39, 1 << 39), "bfloat16")
    builder.buffer("p", (4,), (1,), "bfloat16")
    builder.place("w", Box((0, 0), (1 << 39, 2)), "p", 0, (1 << 26, 1))
    with pytest.raises(LayoutError, match="outside its buffer"):
        builder.build()


def test_a_manifest_names_every_tensor_that_ranks_state_differently() -> None:
    a, b = LayoutBuilder(), LayoutBuilder()
    for name in ("x", "y", "z"):
        a.tensor(name, (4,), "bfloat16")
    b.tensor("x", (4,), "bfloat16")
    b.tensor("y", (5,), "bfloat16")
    b.tensor("z", (4,), "float32")
    with pytest.raises(LayoutError) as caught:
        manifest_of([a.build(), b.build()])
    assert [f.tensor for f in caught.value.faults] == ["y", "z"]
    assert torch.bfloat16.itemsize * 4 == manifest_of([a.build()])[0].nbytes
