"""A model filled twice, by an engine's own loader and by weightdepot from tiles: what engines share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import torch
from safetensors.torch import load_file
from torch import nn

from weightdepot.store.layout import Layout
from weightdepot.store.moving import Scatter, check_buffers, fill, pack
from weightdepot.store.planning import make_packing, make_plan
from weightdepot.store.tiling import make_tiling
from weightdepot.store.tracing import Trace
from weightdepot.store.weights import Shard, layout_of, local_buffers


@dataclass(frozen=True)
class Filled:
    trace: Trace
    different: tuple[str, ...]  # parameters and buffers whose bits are not those of the engine's own loading


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for file in directory.glob("*.safetensors"):
        weights.update(load_file(file))
    return weights


def deliver(weights: dict[str, torch.Tensor], layout: Layout, buffers: dict[str, torch.Tensor]) -> None:
    """Publish `weights` from two ranks that hold each half of every tensor's rows, and pull them."""
    ranks = [{name: _rows(w, half) for name, w in weights.items()} for half in (0, 1)]
    layouts = [layout_of(shards) for shards in ranks]
    tiling = make_tiling(layouts, [layout])
    slots = []
    for number, shards in enumerate(ranks):
        source = tiling.source_tiling(number)
        slot = torch.zeros(max(source.slot_nbytes, 1), dtype=torch.uint8)
        pack(source, make_packing(source, layouts[number]), layouts[number], local_buffers(shards), slot)
        slots.append(slot)
    plan = make_plan(tiling, layout)
    check_buffers(layout, buffers)
    scatter = Scatter(plan, layout, buffers)
    for read, (source, at) in enumerate(zip(plan.source.tolist(), plan.offset.tolist(), strict=True)):
        scatter.write(range(read, read + 1), slots[source], [at])
    fill(layout.fills, buffers)


def _rows(weight: torch.Tensor, half: int) -> Shard:
    if not weight.dim():
        return Shard(weight, (), ())
    middle = weight.shape[0] // 2
    local = weight[middle:] if half else weight[:middle]
    return Shard(local, tuple(weight.shape), ((middle if half else 0), *(0,) * (weight.dim() - 1)))


def scribble(module: nn.Module) -> None:
    """The same random elements in the same tensors, in whichever order they come."""
    with torch.no_grad():
        for name, tensor in tensors_of(module).items():
            generator = torch.Generator().manual_seed(crc32(name.encode()))
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) * 100)


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: t.detach()
        for name, t in (*module.named_buffers(), *module.named_parameters(remove_duplicate=False))
    }


def different(a: nn.Module, b: nn.Module) -> tuple[str, ...]:
    first, second = tensors_of(a), tensors_of(b)
    return tuple(
        name
        for name in {**first, **second}
        if name not in first or name not in second or not _same_bits(first[name], second[name])
    )


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.shape, a.stride(), a.dtype) != (b.shape, b.stride(), b.dtype):
        return False
    return torch.equal(
        a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
    )
