"""Layouts of plain modules, of DTensors on real gloo meshes, and of shards stated by hand."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from weightdepot.store.errors import InvalidRequest, LayoutError
from weightdepot.store.layout import Layout
from weightdepot.store.tiling import make_tiling
from weightdepot.store.weights import Shard, layout_of, local_buffers, named_weights

RANK = """
import pickle, sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from weightdepot.store.weights import layout_of, local_buffers
from weightdepot.store.errors import LayoutError

rank, world, rendezvous, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
torch.manual_seed(0)
flat = init_device_mesh("cpu", (world,))
mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))

def whole(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)

weights = {
    "rows10": distribute_tensor(whole(10, 3), flat, [Shard(0)]),           # case 21: uneven
    "rows3": distribute_tensor(whole(3, 5), flat, [Shard(0)]),             # case 21: the last rank has none
    "columns": distribute_tensor(whole(4, 7), flat, [Shard(1)]),
    "both": distribute_tensor(whole(9, 11), mesh, [Shard(0), Shard(1)]),
    "same": distribute_tensor(whole(9, 6), mesh, [Shard(0), Shard(0)]),
    "hybrid": distribute_tensor(whole(9, 7), mesh, [Replicate(), Shard(0)]),
    "everywhere": distribute_tensor(whole(5), flat, [Replicate()]),
    "scalar": distribute_tensor(whole(), flat, [Replicate()]),
    "deep": distribute_tensor(whole(2, 3, 7), flat, [Shard(2)]),
    "plain": whole(6, 2),
}
model = torch.nn.Sequential(torch.nn.Linear(12, 10, bias=False), torch.nn.Linear(10, 6, bias=False)).double()
parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
fully_shard(model, mesh=mesh["dp"])                                        # case 21: over what tp shards too
for name, p in model.named_parameters():
    weights["fsdp_tp." + name] = p
plain = torch.nn.Sequential(torch.nn.Linear(5, 7)).double()
fully_shard(plain, mesh=flat)
before = layout_of(plain).digest
with torch.no_grad():
    plain(torch.ones(2, 5, dtype=torch.float64))
gathered = not isinstance(next(plain.parameters()), DTensor)
assert gathered, "FSDP2 has changed: it reshards after a forward pass without backward"
assert layout_of(plain).digest == before, "an evaluation changed the layout"
full = {n: (w.full_tensor() if isinstance(w, DTensor) else w).detach() for n, w in weights.items()}
layout = layout_of(weights)
local = local_buffers(weights)
try:
    layout_of({"sum": DTensor.from_local(torch.ones(2), flat, [Partial()])})
    partial = ""
except LayoutError as error:
    partial = str(error)
with open(out, "wb") as f:
    pickle.dump((layout.to_bytes(), local, full, partial), f)
dist.destroy_process_group()
"""


def run_ranks(
    world: int, folder: Path
) -> list[tuple[Layout, dict[str, torch.Tensor], dict[str, torch.Tensor], str]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(r), str(world), str(folder / "meet"), str(folder / f"{r}.out")],
            env=environment,
        )
        for r in range(world)
    ]
    try:
        assert [c.wait(90) for c in children] == [0] * world
    finally:
        for c in children:
            c.kill()
    out = []
    for r in range(world):
        data, local, full, partial = pickle.loads((folder / f"{r}.out").read_bytes())
        out.append((Layout.from_bytes(data), local, full, partial))
    return out


def test_case_20_and_21_dtensor_shards_are_where_their_layout_says() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(4, Path(folder))
    seen = {name: torch.zeros(t.shape, dtype=torch.int32) for name, t in ranks[0][2].items()}
    for layout, local, full, partial in ranks:
        assert "partial sum" in partial
        assert {t.name: t.shape for t in layout.tensors} == {n: tuple(t.shape) for n, t in full.items()}
        for p in layout.placements():
            box = tuple(slice(o, o + n) for o, n in zip(p.box.offset, p.box.shape, strict=True))
            buffer = local[p.buffer]
            here = buffer.as_strided(p.box.shape, p.strides, buffer.storage_offset() + p.offset)
            assert torch.equal(here, full[p.tensor][box]), p
            seen[p.tensor][box] += 1
    assert all(bool((count > 0).all()) for count in seen.values())
    assert bool((seen["rows10"] == 1).all())
    assert bool((seen["fsdp_tp.0.weight"] == 1).all())
    assert bool((seen["hybrid"] == 2).all())
    # the last rank holds nothing of three rows over four ranks, and says so by saying nothing
    assert "rows3" not in {p.tensor for p in ranks[3][0].placements()}
    make_tiling([layout for layout, *_ in ranks], [])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("cache", torch.ones(9), persistent=False)


def test_a_module_gives_parameters_and_persistent_buffers_tied_ones_once() -> None:
    assert list(named_weights(Tied())) == ["embed.weight", "scale"]


def test_wrappers_leave_no_trace_in_the_names() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    module.add_module("_orig_mod", nn.Linear(2, 2))
    assert "weight" in named_weights(module)


def test_a_shard_stated_by_hand_lies_where_it_says() -> None:
    layout = layout_of({"w": Shard(torch.zeros(2, 3).t(), (10, 4), (5, 1))})
    (placement,) = layout.placements()
    assert placement.box.offset == (5, 1)
    assert placement.box.shape == (3, 2)
    assert placement.strides == (1, 3)


def test_a_shard_outside_its_tensor_is_refused() -> None:
    with pytest.raises(LayoutError, match="outside the tensor"):
        layout_of({"w": Shard(torch.zeros(4, 4), (6, 4), (3, 0))})


def test_published_data_types_are_those_asked_for_except_where_scales_would_be_needed() -> None:
    weights = {
        "a": torch.zeros(2, dtype=torch.float32),
        "b": torch.zeros(2, dtype=torch.int64),
        "c": torch.zeros(2, dtype=torch.float8_e4m3fn),
    }
    stated = {t.name: t.dtype for t in layout_of(weights, torch.bfloat16).tensors}
    assert stated == {"a": "bfloat16", "b": "int64", "c": "float8_e4m3fn"}


def test_weights_that_are_no_tensors_are_all_named() -> None:
    with pytest.raises(LayoutError) as caught:
        layout_of({"a": np.zeros(3), "b": torch.zeros(2), "c": torch.zeros(2).to_sparse()})  # type: ignore[dict-item]
    assert [f.tensor for f in caught.value.faults] == ["a", "c"]


@pytest.mark.parametrize("weights", [{}, [], nn.Module()])
def test_nothing_to_publish_is_said_at_once(weights: object) -> None:
    with pytest.raises(InvalidRequest):
        layout_of(weights)  # type: ignore[arg-type]


def test_local_buffers_follow_a_parameter_whose_storage_was_replaced() -> None:
    module = nn.Linear(2, 2, bias=False)
    module.weight.data = torch.full((2, 2), 7.0)
    assert local_buffers(module)["weight"][0, 0] == 7
