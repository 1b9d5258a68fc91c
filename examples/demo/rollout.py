"""One rank of a rollout engine: pulls each version into its own layout, and compares it bit for bit."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from engine import FusedQwen3
from messages import tell, wait_for_word
from safetensors.torch import load_file
from sizes import SIZES
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

import weightdepot


def build(kind: str, size: str, rank: int, world_size: int) -> nn.Module:
    if kind == "fused":
        return FusedQwen3(SIZES[size], rank, world_size)
    model: nn.Module = Qwen3ForCausalLM(Qwen3Config(**SIZES[size].config())).to(torch.bfloat16)
    return model


def differences(model: nn.Module, twin: nn.Module, reference: Path) -> list[str]:
    """Parameters that differ in any bit from a twin which the engine's own loader filled from the file."""
    weights = load_file(reference)
    if isinstance(twin, FusedQwen3):
        for p in twin.parameters():
            p.data.fill_(float("nan"))
        twin.load_weights(weights.items())
    else:
        twin.load_state_dict(weights, strict=True)
    other = dict(twin.named_parameters())
    return [
        name
        for name, p in model.named_parameters()
        if not torch.equal(p.data.view(torch.int16), other[name].data.view(torch.int16))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--controller", "--model", "--size", "--transport", "--references", "--group", "--kind"):
        parser.add_argument(name, required=True)
    for name in ("--rank", "--world-size", "--steps"):
        parser.add_argument(name, type=int, required=True)
    a = parser.parse_args()

    torch.set_num_threads(1)
    model, twin = (build(a.kind, a.size, a.rank, a.world_size) for _ in range(2))
    for p in model.parameters():
        p.data.fill_(float("nan"))  # so that nothing is right by chance
    with weightdepot.Consumer(
        a.controller,
        model=a.model,
        weights=model,
        load_weights=model.load_weights if isinstance(model, FusedQwen3) else None,
        group=a.group,
        rank=a.rank,
        world_size=a.world_size,
        transport=a.transport,
    ) as consumer:
        consumer.prepare()
        tell("ready", group=a.group, rank=a.rank)
        for step in range(1, a.steps + 1):
            version = consumer.update(min_version=step, timeout=300)
            last = consumer.last
            if last is None:
                raise RuntimeError("update returned, but says nothing of what it did")
            tell(
                "updated", group=a.group, rank=a.rank, version=version, pull=last.pull, needed=last.needed,
                moved=last.moved, transports=last.transports,
                differences=differences(model, twin, Path(a.references) / f"{version}.safetensors"),
            )  # fmt: skip
        wait_for_word()


if __name__ == "__main__":
    main()
