"""Running a loader for real, and carrying out a layout, so that the two can be compared bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weightdepot.store.dtypes import dtype_name, torch_dtype
from weightdepot.store.layout import Layout, TensorSpec
from weightdepot.store.tracing import Left, Trace, coverage, trace_load

Loader = Callable[[Mapping[str, Tensor], Iterable[tuple[str, Tensor]]], Any]


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers without NaN, each of them different where the type allows it."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype.is_floating_point:
        return (torch.rand(shape, generator=generator, dtype=torch.float64) * 8 - 4).to(dtype)
    return torch.randint(0, 127, shape, generator=generator).to(dtype)


def checkpoint(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    return {name: values(shape, dtype, seed + 1) for seed, (name, shape) in enumerate(shapes.items())}


def specs(weights: Mapping[str, Tensor]) -> list[TensorSpec]:
    return [TensorSpec(n, tuple(w.shape), dtype_name(w.dtype)) for n, w in weights.items()]


def bits(tensor: Tensor) -> bytes:
    if not tensor.numel():
        return b""
    # `contiguous` keeps the strides of one element, whatever they are
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
    return bytes(flat.view(torch.uint8).tolist())


def apply(layout: Layout, weights: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
    """The reference: each placement is one strided copy, each fill one strided fill."""
    for buffer in layout.buffers:
        p = parameters[buffer.name]
        assert (tuple(p.shape), p.dtype) == (buffer.shape, torch_dtype(buffer.dtype))
        assert not p.numel() or p.stride() == buffer.strides
    with torch.no_grad():
        for x in layout.placements():
            p = parameters[x.buffer]
            box = tuple(slice(a, b) for a, b in zip(x.box.offset, x.box.stop, strict=True))
            target = torch.as_strided(p, x.box.shape, x.strides, p.storage_offset() + x.offset)
            target.copy_(weights[x.tensor][box])
        for f in layout.fills:
            p = parameters[f.buffer]
            torch.as_strided(p, f.shape, f.strides, p.storage_offset() + f.offset).fill_(f.value)


def deliver(
    trace: Trace, loader: Loader, weights: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
) -> None:
    """An update: the layout first, then the loader with what must go through it, in copies of its own."""
    apply(trace.layout, weights, parameters)
    if trace.needs_loader:
        with torch.no_grad():
            loader(parameters, ((n, weights[n].clone()) for n in trace.whole))


def others(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Another version of a checkpoint."""
    return {n: values(tuple(w.shape), w.dtype, 77 + i) for i, (n, w) in enumerate(weights.items())}


def twins(parameters: Mapping[str, Tensor], device: str | None = None) -> dict[str, Tensor]:
    """Copies with the same strides, attributes and ties."""
    made: dict[int, Tensor] = {}
    for p in parameters.values():
        if id(p) not in made:
            extent = (
                1 + sum((n - 1) * s for n, s in zip(p.shape, p.stride(), strict=True)) if p.numel() else 0
            )
            flat = torch.empty(extent, dtype=p.dtype, device=device or p.device)
            view = torch.as_strided(flat, p.shape, p.stride())
            if device != "meta":
                view.copy_(p.detach())
            twin = (
                torch.nn.Parameter(view, requires_grad=False) if isinstance(p, torch.nn.Parameter) else view
            )
            twin.__dict__.update(p.__dict__)
            made[id(p)] = twin
    return {n: made[id(p)] for n, p in parameters.items()}


def holes(left: Iterable[Left], aside: Iterable[str] = ()) -> dict[str, list[bool]]:
    """Which elements are left, whichever boxes say so; not of the parameters that are set aside."""
    found = {}
    for x in left:
        if x.parameter in aside:
            continue
        mask = torch.full(x.shape, x.whole)
        for box in x.boxes:
            part = mask[tuple(slice(a, b) for a, b in zip(box.offset, box.stop, strict=True))]
            assert not part.any(), "boxes overlap"
            part.fill_(True)
        found[x.parameter] = mask.reshape(-1).tolist()
    return found


@dataclass
class Compared:
    trace: Trace
    loaded: dict[str, Tensor] = field(default_factory=dict)


def compare(
    loader: Loader,
    weights: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
    optional: Iterable[str] = (),
    live: bool = True,
) -> Compared:
    """Trace the loader over live and over meta parameters, run it for real, carry out the trace: all agree,
    for a first version and for a second one after it.

    Asserts also that tracing changed no parameter, and that the layout covers what it must.
    """
    before = {n: bits(p) for n, p in parameters.items()}
    identity = {n: (id(p), p.data_ptr(), p.shape, p.stride()) for n, p in parameters.items()}
    meta = twins(parameters, "meta")
    traces = [trace_load(lambda w: loader(meta, w), specs(weights), meta, optional=tuple(optional))]
    if live:
        traces.append(
            trace_load(lambda w: loader(parameters, w), specs(weights), parameters, optional=tuple(optional))
        )
        assert traces[0].layout == traces[1].layout
        assert {n: bits(p) for n, p in parameters.items()} == before
        assert {n: (id(p), p.data_ptr(), p.shape, p.stride()) for n, p in parameters.items()} == identity
    trace = traces[0]
    aside = trace.whole_parameters
    assert [t.whole for t in traces] == [trace.whole] * len(traces)
    assert holes(coverage(trace.layout, optional=(*optional, *aside)), aside) == holes(trace.left, aside)
    really, traced = twins(parameters), twins(parameters)
    with torch.no_grad():
        loader(really, ((n, w.clone()) for n, w in weights.items()))
    deliver(trace, loader, others(weights), traced)
    deliver(trace, loader, weights, traced)
    for name in parameters:
        assert bits(really[name]) == bits(traced[name]), f"{name} differs\n{trace.report()}"
    return Compared(trace, really)


def parameter(*shape: int, dtype: torch.dtype = torch.float32, **attributes: Any) -> torch.nn.Parameter:
    """A live parameter with values of its own, so that what is left unfilled shows."""
    p = torch.nn.Parameter(values(shape, dtype, math.prod(shape) + 1000), requires_grad=False)
    for name, value in attributes.items():
        setattr(p, name, value)
    return p
