"""What the map cannot express is an error that names every tensor and parameter concerned."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from weightdepot.store.errors import InvalidRequest, LayoutError, LayoutFault
from weightdepot.store.layout import TensorSpec
from weightdepot.store.tracing import Trace, trace_load

from .execution import bits, checkpoint, compare, parameter, specs, twins, values

Weights = Iterable[tuple[str, Tensor]]
SHAPES: dict[str, tuple[int, ...]] = {"a": (4, 4), "b": (4, 4)}


def faults(
    change: Callable[[Tensor, Any], object],
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    dtype: torch.dtype = torch.float32,
) -> tuple[LayoutFault, ...]:
    """The faults of a loader that does `change(weight, parameter)` with each weight, live and on meta alike.

    Asserts that the live parameters keep their bits.
    """
    weights = checkpoint(shapes)
    live: dict[str, Any] = {n: parameter(*s, dtype=dtype) for n, s in shapes.items()}
    before = {n: bits(p) for n, p in live.items()}
    found = []
    for parameters in (twins(live, "meta"), live):

        def load(weights: Weights, parameters: Mapping[str, Any] = parameters) -> None:
            for name, w in weights:
                change(w, parameters[name])

        with pytest.raises(LayoutError) as caught:
            trace_load(load, specs(weights), parameters, whole=False)
        found.append(caught.value.faults)
    assert {n: bits(p) for n, p in live.items()} == before
    assert {f.tensor for f in found[0]} == {f.tensor for f in found[1]}
    return found[1]


ARITHMETIC: dict[str, Callable[[Tensor, Any], object]] = {
    "1 + w (a norm's)": lambda w, p: p.data.copy_(1 + w),
    "-exp(w) (mamba's)": lambda w, p: p.data.copy_(-torch.exp(w.float())),
    "w.mul_(2)": lambda w, p: p.data.copy_(w.mul_(2)),
    "a copy, then -exp(p) on the parameter (mamba2's)": lambda w, p: (
        p.data.copy_(w),
        p.copy_(-torch.exp(p)),
    ),
    "p.add_(w)": lambda w, p: (p.data.zero_(), p.data.add_(w)),
    "torch.add(w, w, out=p)": lambda w, p: torch.add(w, w, out=p.data),
    "p.normal_()": lambda w, p: (p.data.copy_(w), p.data.normal_()),
    "a product in a temporary": lambda w, p: p.data.copy_(torch.zeros(4, 4).copy_(w) @ w),
}


@pytest.mark.parametrize("case", ARITHMETIC)
def test_arithmetic_is_refused_where_no_loader_can_run_and_says_tier_3(case: str) -> None:
    found = faults(ARITHMETIC[case])
    assert len(found) == 2
    assert all("tier 3" in f.reason for f in found)
    assert {"'a'" in found[0].reason, "'b'" in found[1].reason} == {True}


VALUES: dict[str, Callable[[Tensor, Any], object]] = {
    "item": lambda w, p: p.data.copy_(w if w[0, 0].item() else -w),
    "tolist": lambda w, p: p.data.copy_(torch.tensor(w.tolist())),
    "if w.any()": lambda w, p: p.data.copy_(w) if w.any() else None,
    "float(w)": lambda w, p: p.data.fill_(float(w[0, 0])),
    "equal": lambda w, p: p.data.copy_(w) if torch.equal(w, w) else None,
    "numpy": lambda w, p: p.data.copy_(torch.from_numpy(w.numpy())),
    "nonzero": lambda w, p: p.data.copy_(w) if len(w.nonzero()) else None,
    "the parameter's own value": lambda w, p: p.data.copy_(w) if p.data.sum().item() > 0 else None,
}


@pytest.mark.parametrize("case", VALUES)
def test_asking_for_a_value_is_refused_for_each_tensor(case: str) -> None:
    """The loader is called again with the tensors after the one at which it failed."""
    found = faults(VALUES[case])
    text = "\n".join(map(str, found))
    assert "a: " in text
    assert "b: " in text


def test_a_scalar_taken_by_item_may_be_filled_in_but_not_computed_with() -> None:
    weights = {"s": values((1,), torch.float32, 1), "t": values((), torch.bfloat16, 2)}

    def load(params: Mapping[str, Any], weights: Weights) -> None:
        for name, w in weights:
            params[name].data.fill_(w.item())

    layout = compare(load, weights, {"s": parameter(3, 2), "t": parameter()}).trace.layout
    assert {p.tensor for p in layout.placements()} == {"s", "t"}
    for use in (
        lambda w, p: p.data.fill_(w.item() * 2),
        lambda w, p: p.data.fill_(w.item()) if w.item() > 0 else None,
        lambda w, p: p.data.fill_(abs(w.item())),
        lambda w, p: p.data.fill_(int(w.item())),
        lambda w, p: p.data.fill_(max(w.item(), 1.0)),
        lambda w, p: p.data.fill_(math.exp(w.item())),
        lambda w, p: p.data.copy_(1 / torch.tensor(w.item())),
        lambda w, p: p.data.copy_(torch.ones(1) * w.item()),
    ):
        found = faults(use, {"s": (1,)})
        assert any("item" in f.reason for f in found)


def test_a_double_cast_that_rounds_is_refused_and_one_that_does_not_is_folded() -> None:
    assert all("cast twice" in f.reason for f in faults(lambda w, p: p.data.copy_(w.bfloat16().float())))
    weights = {"w": values((3, 3), torch.bfloat16, 3)}

    def load(params: Mapping[str, Any], weights: Weights) -> None:
        for name, w in weights:
            params[name].copy_(w.float().double().to(torch.bfloat16).float())

    compare(load, weights, {"w": parameter(3, 3, dtype=torch.float16)})


def test_bits_read_as_another_type_are_refused_unless_they_come_back() -> None:
    found = faults(lambda w, p: p.data.copy_(w.view(torch.int32)))
    assert all("bits" in f.reason for f in found)
    found = faults(lambda w, p: p.data.view(torch.uint8)[..., ::4].fill_(1))
    assert found
    found = faults(lambda w, p: p.data.copy_(w.view(torch.int16)[:, :4]), dtype=torch.int16)
    assert all("size" in f.reason for f in found)
    weights = {"w": values((3, 3), torch.float32, 3).to(torch.float8_e4m3fn)}

    def load(params: Mapping[str, Any], weights: Weights) -> None:
        for name, w in weights:
            padded = torch.zeros(4, 4, dtype=torch.uint8)
            padded[:3, :3] = w.view(torch.uint8)
            params[name].data.view(torch.uint8).copy_(padded)

    trace = trace_load(
        lambda w: load(p, w), specs(weights), p := {"w": parameter(4, 4).data.to(torch.float8_e4m3fn)}
    )
    assert [f.value for f in trace.layout.fills] == [0.0] * len(trace.layout.fills)


def test_a_write_from_nowhere_is_noticed() -> None:
    found = faults(lambda w, p: (p.data.copy_(w), p.data[1].copy_(torch.arange(4.0))))
    assert [f.tensor for f in found] == ["a", "b"]
    assert all("nothing recorded" in f.reason for f in found)


def test_a_write_into_a_tensor_that_is_no_parameter_is_noticed_and_not_done() -> None:
    elsewhere = torch.ones(4, 4)
    found = faults(lambda w, p: elsewhere.copy_(w))
    assert [f.tensor for f in found if "neither a parameter" in f.reason] == ["a", "b"]
    assert elsewhere.eq(1).all()


def test_the_loaders_own_exception_names_the_tensor_that_was_being_loaded() -> None:
    def check(w: Tensor, p: Any) -> None:
        assert w.shape == (3, 3), f"expected (3, 3), got {tuple(w.shape)}"

    found = faults(check)
    raised = [f for f in found if "AssertionError" in f.reason]
    assert [f.tensor for f in raised] == ["a", "b"]
    assert "expected (3, 3), got (4, 4)" in raised[0].reason


def test_a_copy_of_the_wrong_shape_is_torchs_own_error() -> None:
    found = faults(lambda w, p: p.data.copy_(w[:3]))
    assert any("expand" in f.reason or "size" in f.reason for f in found)


def test_all_unfilled_parameters_are_named_wholly_or_by_their_boxes() -> None:
    weights = checkpoint({"a": (4, 4)})
    params = {n: parameter(4, 4) for n in ("a", "b", "c.k_scale", "d.k_scale")}

    def load(weights: Weights) -> None:
        for _, w in weights:
            params["a"].data[:3, 1:].copy_(w[:3, 1:])

    with pytest.raises(LayoutError) as caught:
        trace_load(load, specs(weights), params, optional=("c.k_scale",))
    assert {f.tensor: f.reason for f in caught.value.faults} == {
        "a": "[0:3, 0:1] and 1 more boxes of [4, 4] is not filled by the loader",
        "b": "[4, 4] is not filled at all by the loader",
        "d.k_scale": "[4, 4] is not filled at all by the loader",
    }
    trace = trace_load(load, specs(weights), params, optional=("a", "b", "*.k_scale"))
    assert [x.parameter for x in trace.left] == list(params)
    assert [x.whole for x in trace.left] == [False, True, True, True]


def test_uninitialised_memory_counts_as_unfilled() -> None:
    found = faults(lambda w, p: p.data.copy_(torch.empty(4, 4)))
    assert [f.tensor for f in found] == ["a", "b"]


def test_old_values_moved_within_a_parameter_are_refused() -> None:
    found = faults(lambda w, p: (p.data[:2].copy_(w[:2]), p.data[2:].copy_(p.data[2:].flip(0).clone())))
    assert found
    found = faults(lambda w, p: p.data[:2].copy_(p.data[2:]))
    assert any("old values" in f.reason for f in found)


def test_a_fault_that_is_overwritten_does_not_count() -> None:
    def load(params: Mapping[str, Any], weights: Weights) -> None:
        for name, w in weights:
            params[name].data.copy_(w * 2)
            params[name].data.copy_(w)

    compare(load, checkpoint(SHAPES), {n: parameter(*s) for n, s in SHAPES.items()})


def test_kept_faults_come_with_the_trace_and_name_op_tensor_parameter_and_tier() -> None:
    weights = checkpoint(SHAPES)
    params = {n: parameter(*s) for n, s in SHAPES.items()}

    def load(weights: Weights) -> None:
        for name, w in weights:
            params[name].data.copy_(w if name == "a" else w + 1)

    trace: Trace = trace_load(load, specs(weights), params, on_fault="keep", whole=False)
    assert [(f.op, f.tensors, f.parameter, f.tier) for f in trace.faults] == [("add", ("b",), "b", 3)]
    assert trace.tier("a") == "traced"
    assert trace.tier("b") == "refused"
    assert trace.unused == ()
    assert "passes through `add`" in trace.report()


def test_a_loader_that_swallows_the_exception_does_not_swallow_the_fault() -> None:
    def change(w: Tensor, p: Any) -> None:
        try:
            p.data.copy_(w if w[0, 0].item() else -w)
        except RuntimeError:
            p.data.copy_(w)

    assert [f.tensor for f in faults(change)] == ["a", "b"]


def test_a_parameter_without_a_storage_is_an_invalid_request() -> None:
    with pytest.raises(InvalidRequest, match="'p'"):
        trace_load(lambda w: None, [], {"p": torch.eye(3).to_sparse()})
    with pytest.raises(InvalidRequest, match="share memory"):
        trace_load(lambda w: None, [], {"p": torch.ones(3).expand(2, 3)})


def test_a_checkpoint_that_cannot_be_is_an_invalid_request() -> None:
    tensors = [TensorSpec("a", (1,), "float31"), TensorSpec("b", (1,), "int8"), TensorSpec("b", (2,), "int8")]
    with pytest.raises(InvalidRequest, match=r"'b' is listed 2 times; 'a' has an unknown data type"):
        trace_load(lambda w: None, tensors, {})


def test_writes_by_an_out_argument_are_noticed() -> None:
    found = faults(lambda w, p: (p.data.copy_(w), torch.zeros(4, 4, out=p.data)))
    assert [f.tensor for f in found] == ["a", "b"]


def test_too_irregular_a_map_is_refused_with_the_tensors_name() -> None:
    weights = [TensorSpec("w", (20_000, 2), "float32")]
    p = torch.empty(10_000, 2, device="meta")
    for take in (lambda w: w[::2], lambda w: w[torch.randperm(20_000)[:10_000]]):
        with pytest.raises(LayoutError) as caught:
            trace_load(lambda ws, f=take: [p.copy_(f(w)) for _, w in ws], weights, {"p": p}, whole=False)  # type: ignore[misc]
        assert caught.value.faults[0].tensor == "w"
        assert "boxes" in caught.value.faults[0].reason
