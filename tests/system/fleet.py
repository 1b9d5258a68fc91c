"""Trainers and rollouts inside the test's own process: one tensor, each element of which is its version."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from weightdepot import Consumer, Producer

from .harness import QUICK

N = 6
NBYTES = 8 * N * 4


def full(value: float) -> torch.Tensor:
    return torch.full((8, N), float(value))


def publish(producer: Producer, *versions: int) -> None:
    weights: Any = producer._weights
    for version in versions:
        weights["w"].fill_(version)
        producer.publish(version, wait="ready")


@contextlib.contextmanager
def trainer(controller: str, model: str, **options: Any) -> Iterator[Producer]:
    options = {"timeouts": QUICK, "weights": {"w": full(0)}, **options}
    with Producer(controller, model=model, **options) as producer:
        yield producer


@contextlib.contextmanager
def ranks(controller: str, model: str, n: int, **options: Any) -> Iterator[list[Consumer]]:
    """A group of `n` ranks that each hold the whole tensor. An option that is a list has one for each."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                Consumer(
                    controller,
                    model=model,
                    weights={"w": full(-1)},
                    rank=r,
                    world_size=n,
                    **{
                        "timeouts": QUICK,
                        **{k: v[r] if isinstance(v, list) else v for k, v in options.items()},
                    },
                )
            )
            for r in range(n)
        ]


def holds(consumer: Consumer) -> float | None:
    """What its weights are; None for a mixture."""
    weights: Any = consumer._weights
    values = weights["w"].unique()
    return float(values.item()) if len(values) == 1 else None
