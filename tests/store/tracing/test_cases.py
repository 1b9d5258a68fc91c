"""Failures that users of such systems met (CASES.md), as far as they are a loader's. Others are beside the
tests of what they are about: 15, 16, 19, 22, 23, 24 in test_loaders; 15, 16, 20, 21, 23 in test_export."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from weightdepot.store.errors import LayoutError
from weightdepot.store.tracing import trace_load

from .execution import checkpoint, compare, parameter, specs, values

Weights = Iterable[tuple[str, Tensor]]
Params = Mapping[str, Any]


def load_all(params: Params, weights: Weights) -> None:
    for name, w in weights:
        assert params[name].shape == w.shape, f"{name} is {list(w.shape)}, not {list(params[name].shape)}"
        params[name].data.copy_(w)


def test_case_14_a_routers_bias_that_is_not_exported_is_named() -> None:
    shapes: dict[str, tuple[int, ...]] = {"router.weight": (4, 8), "router.bias": (4,)}
    params = {n: parameter(*s) for n, s in shapes.items()}
    with pytest.raises(LayoutError) as caught:
        trace_load(lambda w: load_all(params, w), specs(checkpoint({"router.weight": (4, 8)})), params)
    assert [f.tensor for f in caught.value.faults] == ["router.bias"]


def fp8(shape: tuple[int, ...], seed: int) -> Tensor:
    return values(shape, torch.float32, seed).to(torch.float8_e4m3fn)


def test_case_17_fp8_weights_and_scales_pass_and_a_missing_or_other_scale_is_named() -> None:
    weights = {"w": fp8((8, 4), 1), "w_scale": values((2, 1), torch.float32, 2)}
    params = {"w": parameter(8, 4, dtype=torch.float8_e4m3fn), "w_scale": parameter(2, 1)}
    assert set(compare(load_all, weights, params).trace.tiers.values()) == {"traced"}
    for scale, reason in ((None, "not filled"), ((1, 2), "w_scale is [1, 2], not [2, 1]")):
        published = {"w": weights["w"]}
        if scale:
            published["w_scale"] = values(scale, torch.float32, 3)
        with pytest.raises(LayoutError) as caught:
            trace_load(lambda w: load_all(params, w), specs(published), params)
        assert {f.tensor for f in caught.value.faults} == {"w_scale"}
        assert reason in str(caught.value)
    # bits of fp8 are not numbers of another type
    with pytest.raises(LayoutError, match=r"'w'"):
        trace_load(
            lambda ws: [params["w"].copy_(w.view(torch.uint8)) for _, w in ws],
            specs({"w": weights["w"]}),
            {"w": params["w"]},
            whole=False,
        )


BLOCK = 4


@pytest.mark.parametrize("rank", [0, 1])
def test_case_18_a_shard_that_cuts_a_quantization_block_is_requantized_by_the_loader(rank: int) -> None:
    """6 of 12 rows are one and a half blocks: the loader dequantizes and quantizes anew, with its own scales;
    the result is the loader's, in every update."""

    def load(params: Params, weights: Weights) -> None:
        held = dict(weights)
        if "w" not in held:
            return
        wide = held["w"].float() * held["scale"].repeat_interleave(BLOCK, 0)[:12]
        mine = wide.narrow(0, rank * 6, 6)
        scales = torch.stack([part.abs().amax() / 448 for part in torch.split(mine, BLOCK)])[:, None]
        params["scale"].data.copy_(scales)
        params["w"].data.copy_(mine / scales.repeat_interleave(BLOCK, 0)[:6])

    weights = {"w": fp8((12, 4), 1), "scale": values((3, 1), torch.float32, 2).abs()}
    params = {"w": parameter(6, 4, dtype=torch.float8_e4m3fn), "scale": parameter(2, 1)}
    trace = compare(load, weights, params).trace
    assert trace.whole == ("w", "scale")
    assert not len(trace.layout.table)


def test_case_25_experts_that_moved_have_another_layout() -> None:
    weights = checkpoint({f"experts.{e}": (6, 4) for e in range(8)})

    def traced(owned: list[int]) -> str:
        params = {"w": parameter(4, 6, 4)}

        def load(params: Params, weights: Weights) -> None:
            for name, w in weights:
                if (e := int(name.split(".")[1])) in owned:
                    params["w"].data[owned.index(e)].copy_(w)

        return compare(load, weights, params).trace.layout.digest

    assert len({traced([0, 1, 2, 3]), traced([4, 5, 6, 7]), traced([1, 0, 2, 3])}) == 3
    assert traced([0, 1, 2, 3]) == traced([0, 1, 2, 3])


def test_case_26_a_fully_trained_module_that_is_not_in_an_adapters_payload_is_named() -> None:
    """An adapter's loader with the modules that its configuration names, and a checkpoint without one."""
    shapes: dict[str, tuple[int, ...]] = {"q.lora_A": (2, 8), "q.lora_B": (8, 2), "score": (3, 8)}
    params = {n: parameter(*s) for n, s in shapes.items()}
    payload = checkpoint({n: s for n, s in shapes.items() if n != "score"})
    with pytest.raises(LayoutError) as caught:
        trace_load(lambda w: load_all(params, w), specs(payload), params)
    assert [f.tensor for f in caught.value.faults] == ["score"]
