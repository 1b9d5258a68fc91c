"""Tracing a module leaves it as it was, whatever its loader does to it."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weightdepot.store.errors import InvalidRequest, LayoutError
from weightdepot.store.layout import TensorSpec
from weightdepot.store.tracing import trace_module_load

from .execution import apply, bits, checkpoint, specs, values

Weights = Iterable[tuple[str, Tensor]]


class Tiny(nn.Module):
    """A tied embedding, an attribute on a parameter, buffers."""

    running: Tensor
    inv_freq: Tensor

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4, device=device)
        self.head = nn.Linear(4, 6, bias=False, device=device)
        self.head.weight = self.embed.weight
        self.up = nn.Linear(4, 8, device=device)
        self.register_buffer("running", torch.zeros(4, device=device))
        self.register_buffer("inv_freq", torch.ones(2, device=device), persistent=False)
        setattr(self.up.weight, "loader", lambda p, w: p.data.copy_(w))  # noqa: B010

    def load_weights(self, weights: Weights) -> set[str]:
        places: dict[str, Any] = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        for name, w in weights:
            place = places[name]
            getattr(place, "loader", lambda p, w: p.data.copy_(w))(place, w)
        return set(places)


SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (6, 4), "up.weight": (8, 4), "up.bias": (8,), "running": (4,),
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_module_is_traced_and_left_as_it_was(device: str) -> None:
    module = Tiny(device)
    objects = {n: id(p) for n, p in module.named_parameters(remove_duplicate=False)}
    before = {n: bits(t) for n, t in module.state_dict().items()} if device == "cpu" else {}
    trace = trace_module_load(module, specs(checkpoint(SHAPES)))
    assert {n: id(p) for n, p in module.named_parameters(remove_duplicate=False)} == objects
    assert module.head.weight is module.embed.weight
    assert all(p.requires_grad and p.is_leaf for p in module.parameters())
    assert trace.aliases == {"head.weight": "embed.weight"}
    # a buffer that was written is a destination; one that was not is not mentioned
    assert [b.name for b in trace.layout.buffers] == ["embed.weight", "up.weight", "up.bias", "running"]
    if device == "cpu":
        assert {n: bits(t) for n, t in module.state_dict().items()} == before
        weights = checkpoint(SHAPES)
        apply(trace.layout, weights, dict(module.state_dict(keep_vars=True)))
        assert all(bits(module.state_dict()[n]) == bits(w) for n, w in weights.items())


def test_a_parameter_may_be_given_new_data_or_be_replaced_and_is_put_back() -> None:
    class Replacing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(values((2, 3), torch.float32, 1))
            self.b = nn.Parameter(torch.empty(3, 2, device="meta"))

        def load_weights(self, weights: Weights) -> None:
            for name, w in weights:
                if name == "a":
                    self.a = nn.Parameter(w.clone())
                else:
                    self.b.data = w.t()

    module = Replacing()
    a, b, before = module.a, module.b, bits(module.a)
    weights = checkpoint({"a": (2, 3), "b": (2, 3)})
    trace = trace_module_load(module, specs(weights))
    assert module.a is a
    assert module.b is b
    assert bits(a) == before
    assert b.stride() == (2, 1)
    assert {(p.tensor, p.buffer, p.strides) for p in trace.layout.placements()} == {
        ("a", "a", (3, 1)),
        ("b", "b", (1, 2)),
    }


def test_a_module_is_put_back_when_its_loader_raises() -> None:
    module = Tiny()
    parameters = dict(module.named_parameters())

    def load(weights: Weights) -> None:
        module.up.weight = nn.Parameter(torch.zeros(1))
        raise KeyError("no such weight")

    with pytest.raises(LayoutError, match="KeyError"):
        trace_module_load(module, specs(checkpoint(SHAPES)), load_weights=load)
    assert all(dict(module.named_parameters())[n] is p for n, p in parameters.items())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_loaders_may_run_in_inference_mode_and_under_a_default_device(device: str) -> None:
    module = Tiny(device)

    @torch.inference_mode()
    def load(weights: Weights) -> None:
        with torch.device("cpu"):
            for name, w in weights:
                place = module.get_parameter(name)
                buffer = torch.zeros(*w.shape)
                buffer[...] = w.contiguous()
                place.data.copy_(buffer)

    tensors = [t for t in specs(checkpoint(SHAPES)) if t.name != "running"]
    assert len(trace_module_load(module, tensors, load_weights=load).layout.table) == 3


def test_a_loader_with_threads_of_its_own_is_refused_and_changes_nothing() -> None:
    """The mode is not seen in other threads; meta tensors cannot be copied into live parameters there."""
    module = Tiny()
    before = {n: bits(t) for n, t in module.state_dict().items()}

    def load(weights: Weights) -> None:
        with ThreadPoolExecutor(1) as pool:
            for name, w in weights:
                pool.submit(module.get_parameter(name).data.copy_, w).result()

    for live in (module, Tiny("meta")):
        with pytest.raises(LayoutError, match=r"up\.bias"):
            trace_module_load(live, specs(checkpoint(SHAPES))[:3], load_weights=load)
    assert {n: bits(t) for n, t in module.state_dict().items()} == before


def test_a_module_without_a_loader_is_an_invalid_request() -> None:
    with pytest.raises(InvalidRequest, match="Linear"):
        trace_module_load(nn.Linear(2, 2), [])


def test_no_memory_is_needed_for_a_large_model() -> None:
    """A trillion elements are traced on meta; real memory of that size does not exist here."""
    n = 1_000_000
    p = nn.Parameter(torch.empty(n, n, device="meta"))
    module = nn.Module()
    module.register_parameter("w", p)

    def load(weights: Weights) -> None:
        for _, w in weights:
            padded = torch.zeros(n, n, dtype=torch.bfloat16)
            padded[: n // 2] = w.to(torch.bfloat16)
            p.data.copy_(padded)

    trace = trace_module_load(module, [TensorSpec("w", (n // 2, n), "float64")], load_weights=load)
    # float64 to bfloat16 to float32: rounds, and is then cast again
    assert trace.whole == ("w",)
    assert "cast twice" in trace.reasons["w"]


class _WithTable(nn.Module):
    """Which of four experts are held here is a buffer, and the loader looks them up."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(2, 3), requires_grad=False)
        self.register_buffer("table", torch.tensor([-1, 0, -1, 1]))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        table = self.get_buffer("table")
        for name, weight in weights:
            at = int(table[int(name)].item())
            if at >= 0:
                self.w.data[at].copy_(weight)


def test_a_table_that_the_loader_looks_things_up_in_is_read() -> None:
    trace = trace_module_load(_WithTable(), [TensorSpec(str(i), (3,), "float32") for i in range(4)])
    assert trace.unused == ("0", "2")
    assert sorted((p.tensor, p.offset) for p in trace.layout.placements()) == [("1", 0), ("3", 3)]


class _Making(nn.Module):
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, weight in weights:
            self.bias = nn.Parameter(torch.empty(3), requires_grad=False)
            self.bias.data.copy_(weight)


def test_a_parameter_that_only_the_loader_makes_is_not_passed_over_in_silence() -> None:
    module = _Making()
    specs = [TensorSpec("bias", (3,), "float32")]
    with pytest.raises(LayoutError, match="bias: is made by the loader"):
        trace_module_load(module, specs)
    assert not dict(module.named_parameters())
    module.load_weights([("bias", torch.ones(3))])
    assert trace_module_load(module, specs).unused == ()
