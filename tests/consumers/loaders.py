"""Loaders that `weightdepot layout --loader` is pointed at in tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

Weights = Iterable[tuple[str, torch.Tensor]]


class Fused(nn.Module):
    """Each rank holds its half of the rows of q and k, fused. `spoil` says what is done to the norm."""

    def __init__(self, rank: int, world_size: int, spoil: str = "") -> None:
        super().__init__()
        self.rank, self.rows, self.spoil = rank, 8 // world_size, spoil
        self.layers = nn.ModuleList(nn.Linear(4, 2 * self.rows, bias=False) for _ in range(3))
        self.norm = nn.Parameter(torch.empty(4))

    def load_weights(self, weights: Weights) -> None:
        for name, weight in weights:
            if name == "norm":
                if self.spoil != "asked" or weight.sum().item() > 0:
                    self.norm.data.copy_(weight + 1 if self.spoil == "shifted" else weight)
            elif name.startswith("layers."):
                _, layer, kind, _ = name.split(".")
                part = "qk".index(kind)
                held = self.get_parameter(f"layers.{layer}.weight")
                target = held.data.narrow(0, part * self.rows, self.rows)
                target.copy_(weight.narrow(0, self.rank * self.rows, self.rows))


def fused(rank: int, world_size: int) -> nn.Module:
    return Fused(rank, world_size)


def shifted(rank: int, world_size: int) -> nn.Module:
    return Fused(rank, world_size, "shifted")


def asked(rank: int, world_size: int) -> nn.Module:
    return Fused(rank, world_size, "asked")


def pair() -> tuple[dict[str, torch.Tensor], Any]:
    module = Fused(0, 1)
    return dict(module.named_parameters()), module.load_weights


def nonsense() -> int:
    return 3


NOT_CALLABLE = 3
