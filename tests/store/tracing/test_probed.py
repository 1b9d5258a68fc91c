"""Operations that move values in a way that is no view: the map is read back from labels, and is exact."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from weightdepot.store.layout import TensorSpec
from weightdepot.store.tracing import trace_load
from weightdepot.store.tracing.lattice import TooIrregular
from weightdepot.store.tracing.runs import runs_of

from .execution import checkpoint, compare, parameter, values

Weights = Iterable[tuple[str, Tensor]]
Params = Mapping[str, Any]

MASK = torch.tensor([[True, False, False, True], [False, True, True, False]] * 2)
ROWS = torch.tensor([3, 1, 2, 0])

TAKEN: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "index_select": (lambda w: w.index_select(0, ROWS), 4),
    "a list of rows": (lambda w: w[[3, 1, 2, 0]], 4),
    "a list of columns": (lambda w: w[:, [3, 1, 2, 0]], 4),
    "rows in one run": (lambda w: w[torch.arange(1, 4)], 1),
    "rows in two runs": (lambda w: w[torch.tensor([2, 3, 0, 1])], 2),
    "a mask of rows": (lambda w: w[torch.tensor([False, True, True, True])], 1),
    "a mask of elements": (lambda w: w[MASK], 8),
    "masked_select": (lambda w: torch.masked_select(w, MASK), 8),
    "pairs of indices": (lambda w: w[ROWS, torch.arange(4)], 4),
    "gather": (lambda w: w.gather(1, ROWS.expand(4, 4)), 4),
    "take_along_dim": (lambda w: torch.take_along_dim(w, ROWS[:, None], 0), 4),
    "take": (lambda w: w.take(torch.tensor([0, 5, 10, 15])), 4),
    "embedding": (lambda w: torch.nn.functional.embedding(ROWS, w), 4),
    "flip of rows": (lambda w: w.flip(0), 4),
    "flip of all": (lambda w: w.flip(0, 1), 16),
    "roll": (lambda w: w.roll(1, 0), 2),
    "rot90": (lambda w: w.rot90(), 4),
    "tril": (lambda w: w.tril(), 8),
    "where, with another number": (lambda w: torch.where(MASK, w, 3.0), 8),
    "where, with itself": (lambda w: torch.where(MASK, w, w.t()), 12),
    "masked_fill": (lambda w: w.masked_fill(MASK, -1), 8),
    "index_fill": (lambda w: w.index_fill(0, torch.tensor([1]), 2.5), 3),
    "index_put": (lambda w: w.index_put((torch.tensor([0, 2]),), w[1]), 4),
    "slice_scatter": (lambda w: w.slice_scatter(w[:2].clone(), 0, 2, 4), 2),
    "select_scatter": (lambda w: w.select_scatter(w[0].clone(), 1, 3), 7),
    "scatter": (lambda w: w.scatter(0, ROWS.expand(4, 4).t().contiguous(), w), 4),
    "pixel_shuffle": (lambda w: torch.pixel_shuffle(w.view(4, 2, 2), 2), 8),
    "diag_embed": (lambda w: torch.diag_embed(w[0]), 4),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("case", TAKEN)
def test_elements_that_are_picked_are_probed_exactly(case: str, dtype: torch.dtype) -> None:
    """The number of placements is the least that it takes, or near it; index tensors may be on meta."""
    take, most = TAKEN[case]
    weights = {"w": values((4, 4), dtype, 5)}

    def load(params: Params, weights: Weights) -> None:
        for name, w in weights:
            params[name].data.copy_(take(w))

    shape = tuple(take(weights["w"]).shape)
    trace = compare(load, weights, {"w": parameter(*shape, dtype=dtype)}).trace
    assert trace.tier("w") == "probed"
    assert len(trace.layout.table) <= most


PUT: dict[str, Callable[[Tensor, Tensor], object]] = {
    "p[rows] = w": lambda p, w: p.__setitem__(ROWS, w),
    "p[list] = w": lambda p, w: p.__setitem__([3, 0], w[:2]),
    "p[:, list] = w": lambda p, w: p.__setitem__((slice(None), [3, 0]), w[:, :2]),
    "p[mask] = w": lambda p, w: p.__setitem__(torch.tensor([True, False, True, True]), w[:3]),
    "p[mask] = one row": lambda p, w: p.__setitem__(torch.tensor([True, False, True, True]), w[0]),
    "p[mask] = one element": lambda p, w: p.__setitem__(MASK, w[0, 0]),
    "p[pairs] = a row": lambda p, w: p.__setitem__((ROWS, torch.arange(4)), w[0]),
    "index_copy_": lambda p, w: p.index_copy_(1, ROWS, w),
    "masked_scatter_": lambda p, w: p.masked_scatter_(MASK, w),
    "scatter_": lambda p, w: p.scatter_(0, ROWS.expand(4, 4), w),
    "put_": lambda p, w: p.put_(torch.tensor([0, 5]), w[0, :2]),
}


@pytest.mark.parametrize("case", PUT)
@pytest.mark.parametrize("filled", [True, False])
def test_elements_that_are_put_somewhere_are_probed_exactly(case: str, filled: bool) -> None:
    """What is put is a map, what was there before stays: another tensor's elements, or nothing."""

    def load(params: Params, weights: Weights) -> None:
        for name, w in weights:
            if name == "below":
                params["p"].data.copy_(w)
            else:
                PUT[case](params["p"].data, w)

    shapes: dict[str, tuple[int, ...]] = {"below": (4, 4), "w": (4, 4)} if filled else {"w": (4, 4)}
    trace = compare(load, checkpoint(shapes), {"p": parameter(4, 4)}, optional=("*",)).trace
    assert trace.tier("w") == "probed"


def test_numbers_that_are_put_into_chosen_elements_are_fills() -> None:
    def load(params: Params, weights: Weights) -> None:
        for name, w in weights:
            p = params[name].data
            p.copy_(w)
            p[MASK] = 0
            p.masked_fill_(torch.tensor([[True], [False], [False], [False]]), 2)

    layout = compare(load, checkpoint({"w": (4, 4)}), {"w": parameter(4, 4)}).trace.layout
    assert {f.value for f in layout.fills} == {0.0, 2.0}


def test_llama4_picks_the_experts_of_its_rank_by_indices() -> None:
    """`w[local_experts]`, with the indices found by counting on the tensor's own device."""
    weights = checkpoint({"gate_up": (8, 6, 10), "down": (8, 5, 6)})

    def load(params: Params, weights: Weights) -> None:
        for name, w in weights:
            expert_map = torch.full((8,), -1, dtype=torch.int32, device=w.device)
            expert_map[4:] = torch.arange(4, device=w.device, dtype=torch.int32)
            local = (expert_map != -1).nonzero().flatten()
            params[name].data.copy_(w[local].transpose(-1, -2))

    params = {"gate_up": parameter(4, 10, 6), "down": parameter(4, 6, 5)}
    trace = compare(load, weights, params).trace
    assert len(trace.layout.table) == 2


def test_dimensions_that_pass_through_are_not_probed() -> None:
    """Experts of terabytes are picked in milliseconds, and their shards put in their places."""
    tensors = [TensorSpec("w", (64, 1 << 19, 1 << 14), "bfloat16")]
    p = torch.empty(8, 1 << 19, 1 << 12, dtype=torch.bfloat16, device="meta")
    order = torch.tensor([60, 3, 4, 7, 9, 2, 1, 0])

    def load(weights: Weights) -> None:
        for _, w in weights:
            p[torch.arange(8).flip(0)] = w[order][:, :, 1 << 12 : 1 << 13]

    start = time.process_time()
    trace = trace_load(load, tensors, {"p": p})
    assert trace.tier("w") == "probed"
    assert len(trace.layout.table) <= 8
    assert time.process_time() - start < 1


BY_VALUE: dict[str, Callable[[Tensor], Tensor]] = {
    "sort": lambda w: w.sort(0).values,
    "argsort": lambda w: w.gather(0, w.argsort(0)),
    "a mask of values": lambda w: torch.where(w > 0, w, 0),
    "an in-place mask of values": lambda w: w.masked_fill_(w < 0, 0),
    "clamp": lambda w: w.clamp(-1, 1),
}


@pytest.mark.parametrize("case", BY_VALUE)
def test_an_answer_that_depends_on_values_goes_through_the_loader(case: str) -> None:
    def load(params: Params, weights: Weights) -> None:
        for name, w in weights:
            params[name].data.copy_(BY_VALUE[case](w))

    trace = compare(load, checkpoint({"w": (4, 4)}), {"w": parameter(4, 4)}).trace
    assert trace.whole == ("w",)


def test_what_would_be_too_many_boxes_goes_through_the_loader() -> None:
    order = torch.randperm(10_000, generator=torch.Generator().manual_seed(1))

    def load(params: Params, weights: Weights) -> None:
        for name, w in weights:
            params[name].data.copy_(w[order] if name == "a" else w.flip(0))

    weights = checkpoint({"a": (10_000,), "b": (10_000,)})
    trace = compare(load, weights, {n: parameter(10_000) for n in weights}).trace
    assert trace.whole == ("a", "b")
    assert "more than 4096 boxes" in trace.reasons["a"]
    assert "more than 4096 boxes" in trace.reasons["b"]


def test_what_would_take_too_much_memory_to_probe_goes_through_the_loader() -> None:
    n = 1 << 14
    p = torch.empty(n, n, device="meta")

    def load(weights: Weights) -> None:
        for _, w in weights:
            p.copy_(w.tril())

    trace = trace_load(load, [TensorSpec("w", (n, n), "float32")], {"p": p})
    assert trace.whole == ("w",)
    assert "more than are probed at once" in trace.reasons["w"]


def test_counting_tensors_are_real_and_packed_weights_are_not() -> None:
    """A loader may count on meta; a temporary of packed weights, of whole numbers too, takes no memory."""
    n = 1 << 20
    p = torch.empty(n, n, dtype=torch.int32, device="meta")

    def load(weights: Weights) -> None:
        for _, w in weights:
            rows = torch.zeros(4, dtype=torch.int64, device="meta")
            rows[1:] += torch.arange(1, 4, device="meta")
            assert rows.tolist() == [0, 1, 2, 3]
            packed = torch.zeros(n, n, dtype=torch.int32, device="meta")
            packed[:4] = w[rows]
            p.copy_(packed)

    trace = trace_load(load, [TensorSpec("w", (8, n), "int32")], {"p": p})
    assert trace.tier("w") == "probed"
    assert len(trace.layout.table) == 1


@st.composite
def labels(draw: st.DrawFn) -> Any:
    shape = draw(st.lists(st.integers(1, 6), max_size=3).map(tuple))
    return draw(arrays(np.int64, shape, elements=st.integers(1, 40)))


@settings(max_examples=150)
@given(labels(), st.lists(st.integers(1, 41), max_size=3))
def test_runs_are_disjoint_and_say_every_label(found: Any, cuts: list[int]) -> None:
    bounds = [0, 1, *sorted(cuts), 41]
    again = np.zeros_like(found)
    for run in runs_of(found, bounds):
        box = tuple(slice(o, o + n) for o, n in zip(run.offset, run.shape, strict=True))
        assert not again[box].any()
        said = np.full(run.shape, run.first)
        for dim, step in enumerate(run.steps):
            steps = np.arange(run.shape[dim]) * step
            said += steps.reshape([-1 if d == dim else 1 for d in range(len(run.shape))])
        again[box] = said
        assert len(np.unique(np.searchsorted(bounds, said, side="right"))) == 1
    assert (again == found).all()


def test_runs_find_few_boxes_where_there_are_few_and_give_up_where_there_are_many() -> None:
    grid = np.arange(1, 1 + 600 * 400).reshape(600, 400)
    assert len(runs_of(grid, [0, 1, grid.size + 1])) == 1
    assert len(runs_of(grid.T, [0, 1, grid.size + 1])) == 1
    assert len(runs_of(np.array([[4, 0, 1, 2]]), [0, 9])) == 2
    assert len(runs_of(grid[::-1], [0, 1, grid.size + 1])) == 1
    assert len(runs_of(np.roll(grid, (100, 50), (0, 1)), [0, 1, grid.size + 1])) == 4
    scattered = np.random.default_rng(1).permutation(grid.reshape(-1))
    with pytest.raises(TooIrregular):
        runs_of(scattered, [0, 1, grid.size + 1])
