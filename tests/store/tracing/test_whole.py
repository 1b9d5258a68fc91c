"""What a layout cannot say goes through the loader at each update, and the result is the loader's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from weightdepot.store.errors import LayoutError
from weightdepot.store.tracing import trace_load
from weightdepot.store.tracing.recorder import fingerprint

from .execution import Loader, bits, checkpoint, compare, parameter, specs, values

Weights = Iterable[tuple[str, Tensor]]
Params = Mapping[str, Any]

ARITHMETIC: dict[str, Callable[[Tensor, Any], object]] = {
    "1 + w (a norm's)": lambda w, p: p.data.copy_(1 + w),
    "-exp(w) (mamba's)": lambda w, p: p.data.copy_(-torch.exp(w.float())),
    "w.mul_(2)": lambda w, p: p.data.copy_(w.mul_(2)),
    "a copy, then -exp(p) on the parameter (mamba2's)": lambda w, p: (
        p.data.copy_(w),
        p.copy_(-torch.exp(p)),
    ),
    "p.mul_(2)": lambda w, p: (p.data.copy_(w), p.mul_(2)),
    "p.add_(w) on zeros": lambda w, p: (p.data.zero_(), p.data.add_(w)),
    "torch.add(w, w, out=p)": lambda w, p: torch.add(w, w, out=p.data),
    "a product in a temporary": lambda w, p: p.data.copy_(torch.zeros(4, 4).copy_(w) @ w),
    "two casts": lambda w, p: p.data.copy_(w.bfloat16().float()),
    "bits read as numbers": lambda w, p: p.data.copy_(w.view(torch.int32)),
    "bits of another size": lambda w, p: (p.copy_(w), p.data.view(torch.uint8)[..., ::4].fill_(1)),
    "rows from nowhere": lambda w, p: (p.data.copy_(w), p.data[1].copy_(torch.arange(4.0))),
    "all from nowhere": lambda w, p: (p.data.copy_(w), torch.zeros(4, 4, out=p.data)),
    "softmax": lambda w, p: p.data.copy_(w.softmax(0)),
}


@pytest.mark.parametrize("case", ARITHMETIC)
def test_what_is_computed_goes_through_the_loader_and_no_other_tensor_does(case: str) -> None:
    def load(params: Params, weights: Weights) -> None:
        for name, w in weights:
            if name == "plain":
                params[name].data.copy_(w)
            else:
                ARITHMETIC[case](w, params[name])

    weights = checkpoint({"a": (4, 4), "plain": (4, 4), "b": (4, 4)})
    trace = compare(load, weights, {n: parameter(4, 4) for n in weights}).trace
    assert trace.whole == ("a", "b")
    assert trace.whole_parameters == ("a", "b")
    assert dict(trace.tiers) == {"a": "whole", "plain": "traced", "b": "whole"}
    assert [b.name for b in trace.layout.buffers] == ["plain"]
    assert all(trace.reasons.values())


def traced(load: Loader, params: Params, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    return dict(compare(load, checkpoint(shapes), params).trace.tiers)


def test_tensors_that_are_mixed_go_together() -> None:
    def load(params: Params, weights: Weights) -> None:
        held = dict(weights)
        if "a" in held and "b" in held:
            params["ab"].data.copy_(torch.cat([held["a"], held["b"]]) * 0.5)
        if "c" in held:
            params["c"].data.copy_(held["c"])

    params = {"ab": parameter(4, 3), "c": parameter(2, 3)}
    tiers = traced(load, params, dict.fromkeys("abc", (2, 3)))
    assert tiers == {"a": "whole", "b": "whole", "c": "traced"}


def test_a_part_of_a_fused_parameter_goes_through_the_loader_beside_a_traced_part() -> None:
    """Elementwise: a scaled q beside a plain k and a fill of padding."""

    def load(params: Params, weights: Weights) -> None:
        for name, w in weights:
            if name == "q":
                params["qk"].data[:3].copy_(w * 0.5)
            else:
                params["qk"].data[3:5].copy_(w)
                params["qk"].data[5:].zero_()

    trace = compare(load, checkpoint({"q": (3, 4), "k": (2, 4)}), {"qk": parameter(6, 4)}).trace
    assert trace.whole == ("q",)
    assert trace.whole_parameters == ("qk",)
    assert [p.tensor for p in trace.layout.placements()] == ["k"]
    assert len(trace.layout.fills) == 1


def test_an_operation_on_a_parameter_after_each_of_its_shards_takes_all_of_them() -> None:
    """The last shard comes plain out of the loader, but not out of a loader that is given the first alone."""

    def load(params: Params, weights: Weights) -> None:
        for name, w in weights:
            p = params["p"].data
            p[:2].copy_(w) if name == "a" else p[2:].copy_(w)
            if name == "a":
                p.copy_(p.abs())

    assert traced(load, {"p": parameter(4, 3)}, {"a": (2, 3), "b": (2, 3)}) == {"a": "whole", "b": "whole"}


@pytest.mark.parametrize("last", ["a", "b"])
def test_where_the_order_of_a_computed_and_a_plain_tensor_matters_both_go_through_the_loader(
    last: str,
) -> None:
    def load(params: Params, weights: Weights) -> None:
        for name, w in weights:
            if name == "a":
                params["p"].data[1:3].copy_(w * 2)
            else:
                params["p"].data[2:].copy_(w)

    shapes = dict.fromkeys("ab" if last == "b" else "ba", (2, 3))
    trace = compare(load, checkpoint(shapes), {"p": parameter(4, 3)}, optional=("p",)).trace
    if last == "a":  # the loader comes after the layout anyway
        assert trace.whole == ("a",)
    else:
        assert set(trace.whole) == {"a", "b"}
    assert [(x.parameter, [b.shape for b in x.boxes]) for x in trace.left] == [("p", [(1, 3)])]


def test_a_loader_that_clears_everything_first_is_given_what_it_cleared() -> None:
    def load(params: Params, weights: Weights) -> None:
        params["p"].data.zero_()
        for name, w in weights:
            if name == "a":
                params["a"].data.copy_(w + 1)
            else:
                params["p"].data[:2].copy_(w)

    shapes: dict[str, tuple[int, ...]] = {"a": (3,), "b": (2, 3), "c": (2, 3)}
    trace = compare(load, checkpoint(shapes), {"a": parameter(3), "p": parameter(4, 3)}).trace
    assert trace.whole == ("a", "c")  # of b nothing is left


def test_parameters_that_are_tied_by_a_copy_at_the_end() -> None:
    def load(params: Params, weights: Weights) -> None:
        for name, w in weights:
            params[name].data.copy_(w * 2 if name == "norm" else w)
        params["head"].data.copy_(params["embed"].data)

    params = {"embed": parameter(5, 3), "norm": parameter(3), "head": parameter(5, 3)}
    tiers = traced(load, params, {"embed": (5, 3), "norm": (3,)})
    assert tiers["norm"] == "whole"


def test_a_tied_parameter_is_named_under_both_names() -> None:
    one = parameter(3, 2)

    def load(params: Params, weights: Weights) -> None:
        for name, w in weights:
            params[name].data.copy_(w + 1)

    trace = compare(load, checkpoint({"a": (3, 2)}), {"a": one, "b": one}).trace
    assert trace.whole_parameters == ("a", "b")


def test_a_parameter_that_the_loader_makes_out_of_nothing_needs_no_tensor() -> None:
    """A rotary table, computed in each call."""

    def load(params: Params, weights: Weights) -> None:
        params["freq"].data.copy_(1.0 / (10.0 ** (torch.arange(4.0) / 4)))
        for name, w in weights:
            params[name].data.copy_(w)

    trace = compare(load, checkpoint({"w": (2, 2)}), {"freq": parameter(4), "w": parameter(2, 2)}).trace
    assert trace.whole == ()
    assert trace.whole_parameters == ("freq",)
    assert trace.needs_loader


def test_what_depends_on_a_parameters_former_value_is_refused() -> None:
    """An update would find it changed: the loader works once only."""
    weights = checkpoint({"a": (4, 4), "b": (4, 4)})
    for change in (
        lambda w, p: p.data.add_(w),
        lambda w, p: (p.data[:2].copy_(w[:2]), p.data[2:].copy_(p.data[2:].flip(0).clone())),
        lambda w, p: p.data.copy_(torch.where(w > 0, w, p.data)),
    ):
        params = {n: parameter(4, 4) for n in weights}

        def load(weights: Weights, params: Params = params, change: Any = change) -> None:
            for name, w in weights:
                change(w, params[name])

        with pytest.raises(LayoutError) as caught:
            trace_load(load, specs(weights), params)
        assert all("depends on what a parameter held before" in f.reason for f in caught.value.faults)
        assert len(caught.value.faults) == 2


def test_a_buffer_that_no_loader_writes_may_be_computed_with() -> None:
    scale = values((3,), torch.float32, 9)
    p = parameter(3)

    def load(weights: Weights) -> None:
        for _, w in weights:
            p.data.copy_(w * scale)

    trace = trace_load(load, specs(checkpoint({"w": (3,)})), {"p": p}, buffers={"scale": scale})
    assert trace.whole == ("w",)
    assert trace.whole_parameters == ("p",)


def test_a_loader_that_fails_when_called_again_is_named_with_what_it_was_given() -> None:
    params = {n: parameter(2) for n in "ab"}

    def load(weights: Weights) -> None:
        held = dict(weights)
        assert len(held) == 2, "the checkpoint is not complete"
        params["a"].data.copy_(held["a"] * 2)
        params["b"].data.copy_(held["b"])

    with pytest.raises(LayoutError, match=r"(?s)not complete.*, when it is called again .*\('a'\)"):
        trace_load(load, specs(checkpoint({"a": (2,), "b": (2,)})), params)
    trace = trace_load(load, specs(checkpoint({"a": (2,), "b": (2,)})), params, on_fault="keep")
    assert trace.tier("a") == "refused"
    assert not trace.needs_loader
    assert "not complete" in trace.report()


def test_a_loader_that_does_something_else_the_second_time_is_refused() -> None:
    params = {n: parameter(2) for n in "ab"}
    calls = []

    def load(weights: Weights) -> None:
        calls.append(1)
        for name, w in weights:
            params[name].data.copy_(w * 2 if len(calls) == 1 else w)

    with pytest.raises(LayoutError) as caught:
        trace_load(load, specs(checkpoint({"a": (2,), "b": (2,)})), params)
    assert {f.tensor for f in caught.value.faults} == {"a", "b"}
    assert all("second time" in f.reason for f in caught.value.faults)


@pytest.mark.parametrize(
    "compute",
    [
        lambda a, alone: a * (3 if alone else 2),
        lambda a, alone: a.roll(int(alone), 0).exp(),
        lambda a, alone: torch.cat([a, a.flip(0)] if alone else [a, a]).exp()[2:6],
        lambda a, alone: a.cumsum(0)[[3, 2, 1, 0]] if alone else a.cumsum(0),
        lambda a, alone: a * torch.tensor([1.0, 2.0, 3.0, 4.0 + alone])[:, None],
        lambda a, alone: a.exp().bfloat16().float() if alone else a.exp(),
    ],
)
def test_a_loader_that_computes_something_else_alone_is_given_more(
    compute: Callable[[Tensor, bool], Tensor],
) -> None:
    """The same operation on the same tensor is not the same computation."""

    def load(params: Params, weights: Weights) -> None:
        held = dict(weights)
        if "a" in held:
            params["a"].data.copy_(compute(held["a"], "b" not in held))
        if "b" in held:
            params["b"].data.copy_(held["b"])

    weights = checkpoint({"a": (4, 3), "b": (2,)})
    trace = compare(load, weights, {"a": parameter(4, 3), "b": parameter(2)}).trace
    assert trace.whole == ("a", "b")


def test_live_parameters_keep_their_bits_while_the_loader_is_called_again_and_again() -> None:
    weights = checkpoint({"a": (4, 4), "b": (4, 4)})
    params = {n: parameter(4, 4) for n in weights}
    before = {n: bits(p) for n, p in params.items()}

    def load(weights: Weights) -> None:
        for name, w in weights:
            params[name].data.copy_(w)
            params[name].mul_(math.pi)

    trace = trace_load(load, specs(weights), params)
    assert trace.whole == ("a", "b")
    assert {n: bits(p) for n, p in params.items()} == before


def test_the_report_says_for_each_tensor_its_tier_and_why_and_what_is_left_and_unused() -> None:
    params = {"n": parameter(3), "f": parameter(3), "t": parameter(3), "left": parameter(2)}

    def load(weights: Weights) -> None:
        for name, w in weights:
            if name != "u":
                params[name].data.copy_(w + 1 if name == "n" else w.flip(0) if name == "f" else w)

    tensors = specs(checkpoint(dict.fromkeys("nftu", (3,))))
    trace = trace_load(load, tensors, params, optional=("left",))
    report = trace.report(every=True)
    for line in (
        "3 of 4 checkpoint tensors are needed for 3 parameters",
        "traced: 1 tensor",
        "probed: 1 tensor",
        "whole: 1 tensor, 12 bytes, through the loader at each update, into 1 parameters",
        "n: passes through `add`, which may change values on its way into 'n'",
        "unused: 1\n    u",
        "left: [2] is not filled at all",
        "n float32 [3]: whole",
        "f float32 [3]: probed",
        "u float32 [3]: unused",
    ):
        assert line in report, report
    told = trace.to_json()
    assert [t["tier"] for t in told["tensors"]] == ["whole", "probed", "traced", "unused"]
    assert told["unused"] == ["u"]


def test_one_element_with_odd_strides_is_told_apart_by_its_value() -> None:
    one, same, other = torch.arange(4.0)[::2][:1], torch.tensor([0.0]), torch.tensor([1.0])
    assert one.stride() == (2,)
    assert fingerprint(one) == fingerprint(same) != fingerprint(other)
