"""Ranks of FSDP2: dense models, stacked experts in uneven shards, adapters."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from weightdepot.producers.peft import peft_adapter, peft_merged

from .checkpoints import lora_of
from .ranks import Rank


def loaded(rank: Rank, kind: str) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        rank.folder / kind, dtype=torch.float32, attn_implementation="eager"
    )


def sharded(model: Any, rank: Rank) -> Any:
    mesh = init_device_mesh("cpu", (rank.world_size,))
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    for layer in inner.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main(rank: Rank) -> None:
    rank.join()
    rank.publish("fsdp2-dense", sharded(loaded(rank, "qwen3"), rank))
    model = sharded(loaded(rank, "qwen3_moe"), rank)
    experts = model.model.layers[0].mlp.experts.gate_up_proj
    assert isinstance(experts, DTensor)
    assert tuple(experts.shape) == (5, 24, 32)
    assert tuple(experts.to_local().shape) == ((3, 24, 32) if rank.rank == 0 else (2, 24, 32))
    rank.publish("fsdp2-moe", model)
    rank.publish("fsdp2-moe-bf16", model, dtype=torch.bfloat16)
    # flat shards end inside an expert
    flat = FullyShardedDataParallel(
        loaded(rank, "qwen3_moe"), device_id=torch.device("cpu"), use_orig_params=True
    )
    rank.publish("fsdp1-moe", flat)
    try:
        import peft  # noqa: F401 - only whether it is there
    except ImportError:
        return
    tuned = sharded(lora_of(loaded(rank, "qwen3")), rank)
    rank.publish("fsdp2-adapter", peft_adapter(tuned))
    merged = peft_merged(tuned)
    producer = rank.producer("fsdp2-merged", merged)
    try:
        producer.publish(1, timeout=60)
    except ValueError as error:
        rank.refuse("unmerged", error)
    tuned.merge_adapter()
    producer.publish(1, timeout=60)
    tuned.unmerge_adapter()
