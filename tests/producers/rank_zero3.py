"""Ranks of DeepSpeed's ZeRO-3, on the CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from weightdepot.producers.zero3 import zero3_weights
from weightdepot.store.errors import LayoutError

from .ranks import Rank


def engine_of(rank: Rank, kind: str, persistent: int, dtype: torch.dtype = torch.float32) -> Any:
    import deepspeed
    import transformers

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": persistent,
            "stage3_max_live_parameters": 1000,
            "stage3_prefetch_bucket_size": 0,
        },
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    model = transformers.AutoModelForCausalLM.from_pretrained(
        rank.folder / kind, dtype=dtype, attn_implementation="eager"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def gathered(engine: Any) -> dict[str, torch.Tensor]:
    import deepspeed

    parameters = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        return {n: p.detach().clone() for n, p in parameters.items()}


def main(rank: Rank) -> None:
    import deepspeed

    rank.join()
    deepspeed.init_distributed("gloo", dist_init_required=False)
    for name, kind, persistent, dtype in (
        ("partitioned", "qwen3", 0, torch.float32),
        ("persistent", "qwen3", 1000, torch.float32),  # norms and some projections stay gathered
        ("bf16", "qwen2-tied", 100, torch.bfloat16),
    ):
        engine = engine_of(rank, kind, persistent, dtype)
        rank.publish(f"zero3-{name}", engine)
        trained = rank.producer(f"zero3-{name}-trained", engine.module)
        kept = [p for p in engine.module.parameters() if p.ds_persist]
        assert bool(kept) is (persistent > 0)
        tokens = torch.randint(0, 101, (1, 6), generator=torch.Generator().manual_seed(rank.rank))
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        with torch.no_grad():
            engine(input_ids=tokens)
        trained.publish(1, timeout=60)
        rank.save(f"zero3-{name}-trained", gathered(engine))
    refuse(rank, engine)
    # flat shards end inside an expert, and experts are published one by one
    rank.publish("zero3-moe", engine_of(rank, "qwen3_moe", 0))


def refuse(rank: Rank, engine: Any) -> None:
    first, second = list(engine.module.parameters())[:2]
    marks: dict[str, Any] = {
        "quantized": mock.patch.object(first.ds_tensor, "ds_quant_scale", 1, create=True),
        "nvme": mock.patch.object(first.ds_tensor, "status", SimpleNamespace(name="NOT_AVAILABLE")),
        "experts": mock.patch.object(first, "allreduce", False, create=True),
        "otherwise": mock.patch.object(first, "ds_zero_partition_world_size", 1),
    }
    for what, mark in marks.items():
        with mark, mock.patch.object(second.ds_tensor, "ds_quant_scale", 1, create=True):
            try:
                zero3_weights(engine)
            except LayoutError as error:
                rank.refuse(what, error)
