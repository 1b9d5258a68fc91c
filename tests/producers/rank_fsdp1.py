"""Ranks of FSDP1: every strategy that gloo carries, nested and not, both ways of keeping parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from .ranks import Rank

CPU = torch.device("cpu")


def wrapped(rank: Rank, kind: str, *, nested: bool = True, **options: Any) -> Any:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        rank.folder / kind, dtype=torch.float32, attn_implementation="eager"
    )
    layer = type(model.model.layers[0])
    policy = ModuleWrapPolicy({layer}) if nested else None
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=CPU, **options)


def step(model: Any, optimizer: Any, seed: int) -> None:
    tokens = torch.randint(0, 101, (1, 6), generator=torch.Generator().manual_seed(seed))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def gathered(model: Any) -> dict[str, torch.Tensor]:
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return {
            n.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for n, p in model.named_parameters()
        }


class Odd(nn.Module):
    """Forms that language models do not have: single elements, memory that is not row-major,
    buffers, ties, a part that is left out of the sharding."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.single = nn.Parameter(torch.randn(1, generator=generator))
        self.conv = nn.Conv2d(3, 5, 2)
        self.conv.weight = nn.Parameter(
            torch.randn(5, 3, 2, 2, generator=generator).to(memory_format=torch.channels_last)
        )
        self.turned = nn.Parameter(torch.randn(4, 7, generator=generator).t())
        self.one = nn.Linear(3, 3, bias=False)
        self.two = nn.Linear(3, 3, bias=False)
        self.two.weight = self.one.weight
        self.apart = nn.Linear(2, 3)
        self.register_buffer("scale", torch.randn(3, generator=generator))
        with torch.no_grad():
            for p in (self.one.weight, *self.apart.parameters(), *self.conv.parameters()):
                p.copy_(torch.randn(p.shape, generator=generator))


def main(rank: Rank) -> None:
    rank.join()
    # a part of the strategies with each way of keeping parameters is enough: they meet in the same handle
    wrapped_with: dict[str, dict[str, Any]] = {
        "full-orig": {"use_orig_params": True},
        "full-flat": {"use_orig_params": False},
        "one-unit": {"use_orig_params": True, "nested": False},
        "grad-op": {"use_orig_params": True, "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
        "grad-op-flat": {"use_orig_params": False, "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
        "no-shard": {"use_orig_params": True, "sharding_strategy": ShardingStrategy.NO_SHARD},
        "mixed": {"use_orig_params": True, "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)},
    }
    if rank.world_size == 4:
        mesh = init_device_mesh("cpu", (2, 2))
        hybrid = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh}
        wrapped_with = {"hybrid": {"use_orig_params": True, **hybrid}}
    for name, options in wrapped_with.items():
        model = wrapped(rank, "qwen3", **options)
        dtype = torch.bfloat16 if name == "mixed" else None
        rank.publish(f"fsdp1-{name}", model, dtype=dtype)
        trained = rank.producer(f"fsdp1-{name}-trained", model, dtype=dtype)
        # after a step and an evaluation, and between forward and backward, while parameters are gathered
        step(model, torch.optim.AdamW(model.parameters(), lr=0.05), rank.rank)
        with torch.no_grad():
            model(input_ids=torch.tensor([[1, 2, 3]]))
        loss = model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss
        trained.publish(1, timeout=60)
        loss.backward()
        whole = gathered(model)
        rank.save(f"fsdp1-{name}-trained", {n: t.to(dtype or t.dtype) for n, t in whole.items()})
        if name in ("full-orig", "no-shard"):
            # an optimizer that gives parameters other memory, where there is any
            for p in model.parameters():
                p.data = p.data * 2
            rank.publish(f"fsdp1-{name}-moved", model)
            rank.save(f"fsdp1-{name}-moved", {n: t * 2 for n, t in whole.items()})
    if rank.world_size == 4:
        return  # of replicas, nothing else is new
    for orig in (True, False):
        odd = Odd()
        expected = {**dict(odd.named_parameters()), **dict(odd.named_buffers())}
        rank.save(f"fsdp1-odd-{orig}", expected)
        sharded = FullyShardedDataParallel(
            odd, device_id=CPU, use_orig_params=orig, ignored_modules=[odd.apart]
        )
        rank.publish(f"fsdp1-odd-{orig}", sharded)
    tied = wrapped(rank, "qwen2-tied", use_orig_params=True)
    rank.publish("fsdp1-tied", tied)
