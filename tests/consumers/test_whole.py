"""Loaders that compute with the weights, over a real controller, producer and consumer: after each update the
parameters are, bit for bit, what the loader makes of the published checkpoint."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weightdepot import Consumer, Producer
from weightdepot.consumers.target import target_of
from weightdepot.consumers.whole import PREFIX, with_whole
from weightdepot.store.dtypes import dtype_name
from weightdepot.store.errors import LayoutError
from weightdepot.store.layout import TensorSpec
from weightdepot.store.tracing import coverage, trace_load

from ..store.strategies import filled, same_bits
from ..system.harness import QUICK

_numbers = itertools.count()
Weights = Iterable[tuple[str, Tensor]]
Parameters = Mapping[str, Tensor]

SHAPES: dict[str, tuple[int, ...]] = {
    "q": (4, 8), "k": (2, 8), "norm": (8,), "A_log": (6,), "flipped": (5, 3), "gate": (3, 8), "up": (3, 8),
}  # fmt: skip


def parameters() -> dict[str, Tensor]:
    shapes = {"qk": (6, 8), "norm": (8,), "A": (6,), "flipped": (5, 3), "gate_up": (7, 8)}
    return {name: torch.full(shape, 7.0) for name, shape in shapes.items()}


def load(params: Parameters, weights: Weights, kept: list[Tensor] | None = None) -> None:
    """A norm's `1 + w` (gemma), `-exp(A)` on the parameter (mamba2), a scaled gate beside a plain up and a
    padding row, indices, and in-place work on what was given."""
    for name, w in weights:
        if name == "q":
            params["qk"][:4].copy_(w)
        elif name == "k":
            params["qk"][4:].copy_(w)
        elif name == "norm":
            params["norm"].copy_(w.add_(1))
        elif name == "A_log":
            params["A"].copy_(w)
            params["A"].copy_(-torch.exp(params["A"]))
        elif name == "flipped":
            params["flipped"].copy_(w[torch.tensor([4, 2, 0, 1, 3])])
        elif name == "gate":
            params["gate_up"][:3].copy_(w * 0.5)
            params["gate_up"][6].fill_(0)
        else:
            params["gate_up"][3:6].copy_(w)
        if kept is not None:
            kept.append(w)


def specs(weights: Mapping[str, Tensor]) -> list[TensorSpec]:
    return [TensorSpec(n, tuple(w.shape), dtype_name(w.dtype)) for n, w in weights.items()]


def checkpoint(seed: int = 0) -> dict[str, Tensor]:
    return {n: filled(s, torch.float32, seed + i) for i, (n, s) in enumerate(SHAPES.items())}


Load = Callable[[Weights], Any]


@contextlib.contextmanager
def exchange(
    controller: str, weights: Any, load_weights: Load, published: Mapping[str, Tensor]
) -> Iterator[tuple[Producer, Consumer]]:
    options: dict[str, Any] = {"model": f"whole-{next(_numbers)}", "transport": "shm", "timeouts": QUICK}
    with (
        Producer(controller, weights=dict(published), **options) as producer,
        Consumer(controller, weights=weights, load_weights=load_weights, **options) as consumer,
    ):
        yield producer, consumer


def renew(published: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    for name, w in checkpoint(seed).items():
        published[name].copy_(w)
    return {name: w.clone() for name, w in published.items()}


def check(params: Parameters, weights: Mapping[str, Tensor]) -> None:
    expected = parameters()
    load(expected, ((n, w.clone()) for n, w in weights.items()))
    for name, p in params.items():
        assert same_bits(p, expected[name]), name


def test_the_result_of_every_update_is_the_loaders_own(controller: str) -> None:
    """Three versions in a row; the third one prefetched."""
    params, published = parameters(), checkpoint()
    kept: list[Tensor] = []
    with exchange(controller, params, lambda w: load(params, w, kept), published) as (producer, consumer):
        kept.clear()
        for version in (1, 2, 3):
            weights = renew(published, 100 * version)
            producer.publish(version, wait="ready")
            if version == 3:
                assert consumer.prefetch().result(20) == 3
            assert consumer.update() == version
            check(params, weights)
        layout = consumer.layout
    assert layout is not None
    whole = {b.name for b in layout.buffers if b.name.startswith(PREFIX)}
    assert whole == {PREFIX + name for name in ("norm", "A_log", "gate")}


def test_what_a_loader_keeps_or_changes_is_its_own(controller: str) -> None:
    """Tensors that it kept stay as they are in later updates, and writing to them changes nothing."""
    params, published = parameters(), checkpoint()
    kept: list[Tensor] = []
    with exchange(controller, params, lambda w: load(params, w, kept), published) as (producer, consumer):
        renew(published, 1)
        producer.publish(1, wait="ready")
        consumer.update()
        real = [t for t in kept if t.device.type == "cpu"]
        assert len(real) == 3
        before = [t.clone() for t in real]
        weights = renew(published, 2)
        producer.publish(2, wait="ready")
        consumer.update()
        assert all(same_bits(a, b) for a, b in zip(real, before, strict=True))
        for t in kept:
            if t.device.type == "cpu":
                t.fill_(float("nan"))
        check(params, weights)
        weights = renew(published, 3)
        producer.publish(3, wait="ready")
        consumer.update()
        check(params, weights)


def test_a_modules_loader_goes_through_its_live_parameters(controller: str) -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.Linear(4, 3)

        def load_weights(self, weights: Weights) -> None:
            for name, w in weights:
                with torch.no_grad():
                    self.get_parameter(name).copy_(w * w.abs().sum() if name == "norm.weight" else w)

    module = Norm()
    published = {"norm.weight": filled((3, 4), torch.float32, 1), "norm.bias": filled((3,), torch.float32, 2)}
    weight = module.norm.weight
    with exchange(controller, module, module.load_weights, published) as (producer, consumer):
        producer.publish(1, wait="ready")
        consumer.update()
    assert module.norm.weight is weight
    assert same_bits(weight.detach(), published["norm.weight"] * published["norm.weight"].abs().sum())
    assert same_bits(module.norm.bias.detach(), published["norm.bias"])


def test_a_loader_that_fails_in_an_update_is_named_and_the_next_update_mends_it(controller: str) -> None:
    params, published = parameters(), checkpoint()
    broken = [False]

    def failing(weights: Weights) -> None:
        for name, w in weights:
            if name == "A_log" and broken[0]:
                raise ArithmeticError("no logarithm today")
            load(params, [(name, w)])

    with exchange(controller, params, failing, published) as (producer, consumer):
        renew(published, 5)
        producer.publish(1, wait="ready")
        consumer.prepare()
        broken[0] = True
        with pytest.raises(LayoutError, match="A_log: ArithmeticError: no logarithm today"):
            consumer.update()
        assert consumer.version is None
        broken[0] = False
        weights = renew(published, 6)
        producer.publish(2, wait="ready")
        assert consumer.update() == 2
        check(params, weights)


def test_a_loader_that_cannot_be_called_with_some_of_the_tensors_is_refused_by_name() -> None:
    params = parameters()

    def strict(weights: Weights) -> None:
        held = dict(weights)
        load(params, [(name, held[name]) for name in SHAPES])

    with pytest.raises(LayoutError, match=r"(?s)KeyError: 'q', when it is called again .*'norm'") as caught:
        target_of(params, strict, specs(checkpoint()), ())
    assert all("norm" in f.tensor for f in caught.value.faults)


def test_the_layout_of_whole_tensors_covers_what_it_fills_and_the_parameters_the_rest() -> None:
    params = parameters()
    trace = trace_load(lambda w: load(params, w), specs(checkpoint()), params)
    assert trace.whole == ("norm", "A_log", "gate")
    assert set(trace.whole_parameters) == {"norm", "A", "gate_up"}
    layout = with_whole(trace)
    assert {b.name for b in layout.buffers} == {
        "qk", "flipped", "gate_up", "whole:norm", "whole:A_log", "whole:gate",
    }  # fmt: skip
    left = coverage(layout, optional=trace.whole_parameters)
    assert [(x.parameter, [b.offset for b in x.boxes]) for x in left] == [("gate_up", [(0, 0), (6, 0)])]
    report = trace.report()
    assert "traced: 3 tensors" in report
    assert "probed: 1 tensor" in report
    assert "whole: 3 tensors, 152 bytes" in report
