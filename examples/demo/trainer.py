"""One trainer rank: FSDP2 over gloo, real optimizer steps, and a `publish` after each."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from messages import tell, wait_for_word
from safetensors.torch import save_file
from sizes import SIZES
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM

import weightdepot


def build(size: str) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES[size].config())).to(torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def batch(step: int, rank: int, vocab: int) -> torch.Tensor:
    """Counting modulo the vocabulary: something that can be learned."""
    start = torch.arange(2)[:, None] * 37 + step * 101 + rank * 53
    return (start + torch.arange(32)[None, :]) % vocab


def save_reference(model: torch.nn.Module, path: Path, rank: int) -> None:
    """The whole weights of this step, gathered by torch itself: what every rollout is compared with."""
    whole = {}
    for name, p in model.named_parameters():
        full = p.full_tensor() if isinstance(p, DTensor) else p
        if rank == 0:
            whole[name] = full.detach().contiguous()
    if rank == 0:
        save_file(whole, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--controller", "--model", "--size", "--transport", "--rendezvous", "--references"):
        parser.add_argument(name, required=True)
    for name in ("--rank", "--world-size", "--steps"):
        parser.add_argument(name, type=int, required=True)
    a = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{a.rendezvous}", rank=a.rank, world_size=a.world_size
    )
    init_device_mesh("cpu", (a.world_size,))
    model = build(a.size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    tell("parameters", rank=a.rank, count=sum(p.numel() for p in model.parameters()))

    with weightdepot.Producer(
        a.controller,
        model=a.model,
        weights=model,
        rank=a.rank,
        world_size=a.world_size,
        transport=a.transport,
    ) as producer:
        tell("ready", rank=a.rank)
        for step in range(1, a.steps + 1):
            if not wait_for_word():
                break
            begun = time.perf_counter()
            tokens = batch(step, a.rank, model.config.vocab_size)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            trained = time.perf_counter() - begun
            save_reference(model, Path(a.references) / f"{step}.safetensors", a.rank)
            dist.barrier()
            done = producer.publish(step)
            tell(
                "published", rank=a.rank, version=step, loss=loss.item(), step_seconds=trained,
                stall=done.stall, wait=done.wait, pack=done.pack, nbytes=done.nbytes,
            )  # fmt: skip
        wait_for_word()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
