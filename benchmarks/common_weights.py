"""The ranks that transfer benchmarks are made of: trainers split by rows, rollouts by columns."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from weightdepot import Consumer, Producer, Shard


@dataclass(frozen=True)
class Model:
    """Tensors of one shape, bfloat16; producers hold them by rows, consumers by columns."""

    tensors: int = 32
    rows: int = 4096
    columns: int = 4096
    producers: int = 2
    consumers: int = 2

    @property
    def nbytes(self) -> int:
        return self.tensors * self.rows * self.columns * 2

    @property
    def names(self) -> list[str]:
        return [f"layers.{i}.weight" for i in range(self.tensors)]

    def content(self, tensor: int, version: int, first: int, rows: int) -> torch.Tensor:
        """(rows, columns): rows `first` on of this tensor in this version. Every element depends on its row
        and column, on the tensor and on the version, and is exact in bfloat16."""
        row = (torch.arange(first, first + rows) * 31 + 7 * tensor + 11 * version) % 61
        column = torch.arange(self.columns) * 17 % 61
        return row.to(torch.bfloat16)[:, None] + column.to(torch.bfloat16)[None, :]


class Trainer:
    def __init__(self, rank: int, *, url: str, transport: str = "auto") -> None:
        self.rank = rank
        self._options: dict[str, Any] = {"controller": url, "transport": transport}
        self.producer: Producer | None = None

    def build(self, model: Model) -> None:
        self.leave()
        self.model = model
        self.rows = model.rows // model.producers
        self.first = self.rank * self.rows
        shape = (self.rows, model.columns)
        self.held = [torch.zeros(shape, dtype=torch.bfloat16) for _ in model.names]
        # written to once, so that its pages are there
        self.scratch = [torch.full(shape, 1.0, dtype=torch.bfloat16) for _ in model.names]

    def join(self, name: str) -> None:
        self.leave()
        shape = (self.model.rows, self.model.columns)
        weights = {
            n: Shard(t, shape, (self.first, 0)) for n, t in zip(self.model.names, self.held, strict=True)
        }
        self.producer = Producer(
            weights=weights, model=name, rank=self.rank, world_size=self.model.producers, **self._options
        )

    def step(self, version: int) -> None:
        """What the optimizer does: every element changes."""
        for i, t in enumerate(self.held):
            t.copy_(self.model.content(i, version, self.first, self.rows))

    def copy(self) -> None:
        """The baseline: the same bytes, to private memory that is there already."""
        for to, held in zip(self.scratch, self.held, strict=True):
            to.copy_(held)

    def publish(self, version: int) -> tuple[float, float]:
        """Seconds until the weights may be overwritten, and until this rank's part is sealed: the version is
        ready when the last one is."""
        assert self.producer is not None
        begun = time.perf_counter()
        published = self.producer.publish(version)
        returned = time.perf_counter() - begun
        published.sealed.result(60)
        return returned, time.perf_counter() - begun

    def leave(self) -> None:
        if self.producer is not None:
            self.producer.close()
            self.producer = None

    close = leave


class Rollout:
    """Two groups over the same weights: one that compares digests, and one that does not."""

    def __init__(self, rank: int, *, url: str, transport: str = "auto") -> None:
        self.rank = rank
        self._options: dict[str, Any] = {"controller": url, "transport": transport}
        self.consumers: dict[bool, Consumer] = {}

    def build(self, model: Model, name: str) -> None:
        self.leave()
        self.model = model
        self.columns = model.columns // model.consumers
        self.first = self.rank * self.columns
        shape = (model.rows, self.columns)
        self.held = [torch.zeros(shape, dtype=torch.bfloat16) for _ in model.names]
        self.scratch = [torch.full(shape, 1.0, dtype=torch.bfloat16) for _ in model.names]
        full = (model.rows, model.columns)
        weights = {n: Shard(t, full, (0, self.first)) for n, t in zip(model.names, self.held, strict=True)}
        for verify in (True, False):
            self.consumers[verify] = Consumer(
                model=name,
                weights=weights,
                group="checked" if verify else "trusting",
                rank=self.rank,
                world_size=model.consumers,
                verify=verify,
                **self._options,
            )

    def copy(self) -> None:
        for to, held in zip(self.scratch, self.held, strict=True):
            to.copy_(held)

    def update(self, version: int, verify: bool) -> float:
        """Seconds of the pull alone; those of the whole call are taken around it."""
        consumer = self.consumers[verify]
        got = consumer.update(min_version=version)
        assert got == version, f"version {got} instead of {version}"
        assert consumer.last is not None
        assert consumer.last.moved == consumer.last.needed == self.model.nbytes // self.model.consumers
        return consumer.last.pull

    def compare(self, version: int) -> None:
        """Every element is the published one."""
        for i, t in enumerate(self.held):
            wanted = self.model.content(i, version, 0, self.model.rows)
            assert torch.equal(t, wanted[:, self.first : self.first + self.columns]), (
                f"tensor {i} of version {version} is not what was published"
            )

    def leave(self) -> None:
        for consumer in self.consumers.values():
            consumer.close()
        self.consumers.clear()

    close = leave
