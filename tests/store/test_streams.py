"""Streamed copies: the same as torch's, whatever the shapes, and never outside of a tensor's memory."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightdepot.consumers.staging import Placing
from weightdepot.store import streams
from weightdepot.store.streams import Memories, Strided
from weightdepot.store.weights import layout_of

built = pytest.mark.skipif(not streams.available(), reason="the extension was not built")
HEADERS = Path(sysconfig.get_path("include")) / "Python.h"


@pytest.mark.skipif(
    shutil.which("cc") is None or not HEADERS.exists(), reason="nothing to build the extension with"
)
def test_the_extension_was_built_where_it_can_be() -> None:
    assert streams.available(), "pip install -e . has built nothing: see what it says with --verbose"


SIZES = st.sampled_from([1, 2, 3, 5, 31, 64, 65, 130, 257, 1000])


@st.composite
def regions(draw: st.DrawFn) -> tuple[tuple[int, ...], list[int], list[int]]:
    """A shape, and strides of two regions of it, in which no two elements lie at one place."""
    shape = tuple(draw(st.lists(SIZES, min_size=0, max_size=3)))
    while int(np.prod(shape)) > 200_000:
        shape = shape[1:]
    both = []
    for _ in range(2):
        order = draw(st.permutations(range(len(shape)))) if draw(st.booleans()) else range(len(shape))
        step, strides = 1, [0] * len(shape)
        for dim in reversed(list(order)):
            strides[dim] = step
            step = step * shape[dim] + draw(st.integers(0, 70))
        both.append(strides)
    return shape, both[0], both[1]


@built
@settings(max_examples=150, deadline=None)
@given(st.lists(regions(), min_size=1, max_size=5), st.sampled_from([1, 2, 3, 8]), st.data())
def test_any_strided_copies_are_what_torch_copies(
    wanted: list[Any], itemsize: int, data: st.DataObject
) -> None:
    """itemsize 3: no type has it, but bytes do not care."""
    dims = max(len(shape) for shape, _, _ in wanted)

    def padded(values: Any, fill: int) -> list[int]:
        return [fill] * (dims - len(values)) + list(values)

    shape = np.array([padded(n, 1) for n, _, _ in wanted], dtype=np.int64).reshape(len(wanted), dims)
    to, source = (
        np.array([padded(w[k], 0) for w in wanted], dtype=np.int64).reshape(len(wanted), dims) for k in (1, 2)
    )
    table = Strided(shape, np.full(len(wanted), itemsize, dtype=np.int64), to, source)
    room = [int(reach.sum()) for reach in (table.reach_to, table.reach_source)]
    offset = [data.draw(st.integers(0, 70)) for _ in range(2)]
    into = torch.full((room[0] + offset[0],), 0xAB, dtype=torch.uint8)
    out_of = torch.randint(0, 256, (room[1] + offset[1],), dtype=torch.uint8)
    expected = into.clone()
    starts = [
        offset[k] + np.concatenate(([0], np.cumsum(reach)[:-1])).astype(np.int64)
        for k, reach in enumerate((table.reach_to, table.reach_source))
    ]
    for i, (n, a, b) in enumerate(wanted):
        views = [
            memory.as_strided((*n, itemsize), [*(s * itemsize for s in strides), 1], int(starts[k][i]))
            for k, (memory, strides) in enumerate(((expected, a), (out_of, b)))
        ]
        views[0].copy_(views[1])
    which = np.zeros(len(wanted), dtype=np.int64)
    order = np.arange(len(wanted))
    if data.draw(st.booleans()):
        table, order = table.by_rows(which, starts[1])
    with mock.patch.object(streams, "SHARE", data.draw(st.sampled_from([1, streams.SHARE]))):
        table.copy(
            Memories([into]).at(which, starts[0][order], table.reach_to),
            Memories([out_of]).at(which, starts[1][order], table.reach_source),
        )
    assert torch.equal(into, expected)


@built
@pytest.mark.parametrize("threads", [1, 3])
def test_a_large_copy_is_shared_among_torch_s_threads(threads: int) -> None:
    """In one piece, in a few and in many; of a length that no thread's share is a multiple of."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in (1, 3, 1000):
            columns = (3 * streams.SHARE + 12345) // rows
            source = torch.randint(0, 256, (rows, columns + 7), dtype=torch.uint8)
            into = torch.zeros(rows, columns, dtype=torch.uint8)
            table = Strided(
                np.array([[rows, columns]]),
                np.array([1]),
                np.array([[columns, 1]]),
                np.array([[columns + 7, 1]]),
            )
            none = np.zeros(1, dtype=np.int64)
            table.copy(
                Memories([into]).at(none, none, table.reach_to),
                Memories([source]).at(none, none, table.reach_source),
            )
            assert torch.equal(into, source[:, :columns])
    finally:
        torch.set_num_threads(before)


@built
def test_a_part_of_a_table_is_copied_alone() -> None:
    shape = np.array([[64], [100], [80]])
    strides = np.array([[1], [1], [1]])
    table = Strided(shape, np.array([4, 4, 4]), strides, strides)
    source = torch.arange(244, dtype=torch.int32)
    into = torch.zeros(244, dtype=torch.int32)
    which, start = np.zeros(2, dtype=np.int64), np.array([256, 656])
    to, from_ = (Memories([m]).at(which, start, table.reach_to[1:]) for m in (into, source))
    table.copy(to, from_, first=1)
    assert torch.equal(into[64:], source[64:])
    assert not into[:64].any()


@pytest.mark.parametrize(("start", "reach"), [(-1, 8), (0, 41), (36, 8)])
def test_no_copy_leads_outside_of_a_tensor_s_memory(start: int, reach: int) -> None:
    memory = torch.zeros(20, dtype=torch.int32)[10:]
    places = Memories([memory])
    fine = places.at(np.array([0]), np.array([32]), np.array([8]))
    assert fine.tolist() == [memory.data_ptr() + 32]
    with pytest.raises(ValueError, match="outside"):
        places.at(np.array([0]), np.array([start]), np.array([reach]))


def test_what_is_not_as_it_lies_in_memory_is_left_to_torch() -> None:
    class Wrapped(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
            raise AssertionError

    class Named(torch.nn.Parameter):
        """As vLLM's: another class over the same memory."""

    plain = torch.zeros(3)
    values = torch.ones(3, dtype=torch.complex64)
    assert streams.ordinary([plain, torch.nn.Parameter(plain), Named(plain)])
    assert not streams.ordinary([plain, values.conj()])
    assert not streams.ordinary([values.conj().imag])
    assert not streams.ordinary([torch.zeros(3, device="meta")])
    assert not streams.ordinary([torch.zeros(3).as_subclass(Wrapped)])


@built
def test_autograd_hears_of_weights_that_were_overwritten() -> None:
    """Else a backward over what was saved before would be wrong in silence."""
    weight = torch.nn.Parameter(torch.ones(256))
    layout = layout_of({"w": weight})
    loss = (weight * weight).sum()
    Placing(layout)({"w": torch.full((256,), 2.0)}, {"w": weight.data})
    with torch.no_grad():
        assert bool((weight == 2).all())
    Placing(layout)({"w": torch.full((256,), 3.0)}, {"w": weight})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("length", [4, 256], ids=["by-torch", "streamed"])
def test_weights_of_inference_mode_are_written_too(length: int) -> None:
    with torch.inference_mode():
        weight = torch.ones(length)
    Placing(layout_of({"w": weight}))({"w": torch.full((length,), 2.0)}, {"w": weight})
    assert bool((weight == 2).all())
