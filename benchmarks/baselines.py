"""The same resharding, done as it is done elsewhere: from the trainer's step to weights in place.

    python benchmarks/baselines.py [--json] [--check]

512 MiB in 16 bf16 tensors; two trainer ranks hold them by rows, two engines of two ranks each by columns. Six
processes of one thread on this machine, all begun together; the time is that of the last rank to have its
weights, every way in its turn, the median of the samples. What each way brings is compared, every element.

    gather and broadcast   each tensor is gathered in full from the trainers and broadcast to every rollout
                           rank over gloo, which takes its columns
    safetensors            the first trainer gathers the model and saves it to a memory file system; each
                           rollout rank reads its columns from the file
    full copy              the trainers write the model to shared memory; each rollout rank copies all of it
                           and takes its columns
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from common import Measure, Samples, measure, options, report, say
from common_ranks import Crew, controller
from common_weights import Model
from safetensors import safe_open
from safetensors.torch import save_file

from weightdepot import Consumer, Producer, Shard
from weightdepot.store.hosts import SHM_DIRECTORY

MODEL = Model(tensors=16)
TRAINERS, ENGINES, TP = 2, 2, 2
WAYS = ("weightdepot", "gather and broadcast", "safetensors", "full copy")
LIMITS = {"gather and broadcast": 4.0}


class Rank:
    """Ranks 0 and 1 train, the others roll out."""

    def __init__(self, rank: int, *, url: str, folder: str) -> None:
        self.rank, self.trains = rank, rank < TRAINERS
        self.folder = Path(folder)
        world = TRAINERS + ENGINES * TP
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world
        )
        self.trainers = dist.new_group(list(range(TRAINERS)))
        self.fanout = dist.new_group([0, *range(TRAINERS, world)])
        self.rows, self.columns = MODEL.rows // TRAINERS, MODEL.columns // TP
        self.first = rank * self.rows if self.trains else (rank - TRAINERS) % TP * self.columns
        shape = (self.rows, MODEL.columns) if self.trains else (MODEL.rows, self.columns)
        self.held = [torch.zeros(shape, dtype=torch.bfloat16) for _ in MODEL.names]
        self.full = torch.zeros(MODEL.rows, MODEL.columns, dtype=torch.bfloat16)
        self.staged = [torch.full_like(self.full, 1.0) for _ in MODEL.names]
        whole = (MODEL.rows, MODEL.columns)
        start = (self.first, 0) if self.trains else (0, self.first)
        weights = {n: Shard(t, whole, start) for n, t in zip(MODEL.names, self.held, strict=True)}
        if self.trains:
            self.producer = Producer(
                url, model="policy", weights=weights, rank=rank, world_size=TRAINERS, transport="shm"
            )
        else:
            engine, place = divmod(rank - TRAINERS, TP)
            self.consumer = Consumer(
                url,
                model="policy",
                weights=weights,
                group=f"engine-{engine}",
                rank=place,
                world_size=TP,
                transport="shm",
            )
        self.shared = torch.from_file(
            f"{folder}/shared", shared=True, size=MODEL.nbytes // 2, dtype=torch.bfloat16
        ).view(MODEL.tensors, *self.full.shape)
        if self.trains:
            self.shared[:, self.first : self.first + self.rows] = 0

    def step(self, version: int) -> None:
        if self.trains:
            for i, t in enumerate(self.held):
                t.copy_(MODEL.content(i, version, self.first, self.rows))

    def compare(self, version: int) -> None:
        if not self.trains:
            for i, t in enumerate(self.held):
                whole = MODEL.content(i, version, 0, MODEL.rows)
                assert torch.equal(t, self.mine(whole)), f"tensor {i} is not that of version {version}"
                t.zero_()  # so that the next way must bring it again

    def mine(self, whole: torch.Tensor) -> torch.Tensor:
        return whole[:, self.first : self.first + self.columns]

    # -- the ways; each returns when this rank is through, on the clock that all processes share -----------

    def weightdepot(self, version: int) -> float:
        if self.trains:
            self.producer.publish(version)
        else:
            assert self.consumer.update(min_version=version) == version
        return time.monotonic()

    def gather(self, shard: torch.Tensor) -> None:
        """One tensor, in full, on the first trainer."""
        parts = list(self.full.split(self.rows)) if self.rank == 0 else None
        dist.gather(shard, parts, dst=0, group=self.trainers)

    def gather_and_broadcast(self, version: int) -> float:  # noqa: ARG002 - every way is told
        for held in self.held:
            if self.trains:
                self.gather(held)
            if self.rank == 0 or not self.trains:
                dist.broadcast(self.full, src=0, group=self.fanout)
            if not self.trains:
                held.copy_(self.mine(self.full))
        return time.monotonic()

    def safetensors(self, version: int) -> float:
        path = self.folder / f"{version}.safetensors"
        if self.trains:
            for held, staged in zip(self.held, self.staged, strict=True):
                self.gather(held)
                staged.copy_(self.full)
            if self.rank == 0:
                save_file(dict(zip(MODEL.names, self.staged, strict=True)), path)
        dist.barrier()
        if not self.trains:
            with safe_open(path, "pt") as file:
                for name, held in zip(MODEL.names, self.held, strict=True):
                    held.copy_(file.get_slice(name)[:, self.first : self.first + self.columns])
        end = time.monotonic()
        dist.barrier()
        if self.rank == 0:
            path.unlink()
        return end

    def full_copy(self, version: int) -> float:  # noqa: ARG002 - every way is told
        if self.trains:
            for held, shared in zip(self.held, self.shared, strict=True):
                shared[self.first : self.first + self.rows].copy_(held)
        dist.barrier()
        if not self.trains:
            for held, staged, shared in zip(self.held, self.staged, self.shared, strict=True):
                held.copy_(self.mine(staged.copy_(shared)))
        return time.monotonic()

    def close(self) -> None:
        (self.producer if self.trains else self.consumer).close()
        dist.destroy_process_group()


def run(ranks: Crew, samples: int) -> Samples:
    found = Samples()
    version = 0
    for turn in range(samples + 2):  # in the first two, memory, plans and connections are made
        for way in WAYS:
            version += 1
            ranks.call("step", version)
            begun = time.monotonic()
            ends = ranks.ask(way.replace(" ", "_"), version)
            if turn > 1:
                found.add(way, max(ends) - begun)
            ranks.call("compare", version)
    return found


def main() -> int:
    chosen = options(__doc__)
    if importlib.util.find_spec("torchstore") is None:
        say("TorchStore is not installed, and left out")
    else:
        say("TorchStore is installed, but needs a Monarch mesh of its own: it is left out")
    folder = tempfile.mkdtemp(prefix="benchmark-", dir=SHM_DIRECTORY)
    try:
        with controller() as url, Crew(Rank, TRAINERS + ENGINES * TP, url=url, folder=folder) as ranks:
            samples = run(ranks, chosen.samples)
    finally:
        shutil.rmtree(folder)
    ours = samples.median("weightdepot")
    measures = [measure(f"{MODEL.nbytes >> 20} MiB by weightdepot, step to applied", ours * 1e3, "ms")]
    for way in WAYS[1:]:
        factor = samples.ratio(way, "weightdepot")
        limit = LIMITS.get(way)
        ok = None if limit is None else factor >= limit
        measures.append(Measure(f"by {way}", samples.median(way) * 1e3, "ms", ours * 1e3, factor, limit, ok))
    return report(measures, chosen)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    sys.exit(main())
