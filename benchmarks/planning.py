"""What planning costs at the size of the largest models, and how it grows; what it moves, and from whom.

    python benchmarks/planning.py [--json] [--check] [--charts FOLDER] [--only SECTION ...]

Seconds are CPU time of this process, on one thread. Sections:
trillion  Kimi-K2's shape: 256 trainer ranks to 128 rollout ranks (32 distinct layouts, 4 engines): the
          tiling, one rank's plan, all of them; the memory that it took; bytes in and out of each rank
joining   one more engine of another tensor parallelism joins: the tiling anew, beside from scratch
growth    a smaller model, its tensors and its ranks (trainers, and the parallelism of the engine) times 2,
          4, 8 and 16
fuzz      random layouts: bytes moved over bytes needed, and how evenly replicated sources serve
"""

from __future__ import annotations

import random
import resource
import sys
import time
from collections import Counter
from dataclasses import replace

import numpy as np
from common import Measure, chart, measure, options, report, say
from planning_shapes import DTYPE, Shape

from weightdepot.store.geometry import Box, contiguous_strides
from weightdepot.store.layout import Layout, LayoutBuilder
from weightdepot.store.planning import make_plan
from weightdepot.store.tiling import TilingMaker, make_tiling

GROWTH = (1, 2, 4, 8, 16)
SMALL = Shape(layers=6, experts=256, trainers=16, rows=4, engine=8, tp=4, engines=1)
LAYOUTS = 60  # random ones of the fuzz section


def trillion(shape: Shape) -> list[Measure]:
    tensors = shape.tensors()
    say(
        f"{len(tensors):,} tensors, {shape.trainers} trainer and {shape.engines * shape.engine} rollout ranks"
    )
    trainers = [shape.trainer(tensors, rank) for rank in range(shape.trainers)]
    rollouts = [shape.rollout(tensors, rank) for rank in range(shape.engine)]
    begun = time.process_time()
    tiling = make_tiling(trainers, rollouts)
    tiled = time.process_time()
    one: list[float] = []
    out: Counter[int] = Counter()
    into, needed = [], []
    for layout in rollouts:
        before = time.process_time()
        plan = make_plan(tiling, layout)
        one.append(time.process_time() - before)
        into.append(plan.moved_nbytes)
        needed.append(plan.needed_nbytes)
        served = np.bincount(plan.source, weights=plan.nbytes, minlength=shape.trainers)
        out.update({rank: int(n) * shape.engines for rank, n in enumerate(served.tolist())})
    planned = time.process_time()
    total = sum(into) * shape.engines
    # engines alike have the same plans: each distinct layout is planned once, as the controller does
    return [
        measure("trillion: the tiling", tiled - begun, "s"),
        measure("trillion: one rank's plan", max(one), "s", limit=0.5),
        measure("trillion: all of it", planned - begun, "s", limit=20),
        measure("trillion: memory", _peak_gib(), "GiB", limit=4),
        measure("trillion: tiles", len(tiling.boxes), "tiles"),
        measure("trillion: into a rank, moved", max(into) / 1e9, "GB", baseline=max(needed) / 1e9, limit=1.0),
        measure(
            "trillion: out of the busiest trainer", max(out.values()) / 1e9, "GB",
            baseline=total / shape.trainers / 1e9,
        ),
        measure("trillion: out of the idlest trainer", min(out.values()) / 1e9, "GB"),
    ]  # fmt: skip


def joining(shape: Shape) -> list[Measure]:
    tensors = shape.tensors()
    trainers = [shape.trainer(tensors, rank) for rank in range(shape.trainers)]
    present = [shape.rollout(tensors, rank) for rank in range(shape.engine)]
    other = replace(shape, engine=shape.engine // 2, tp=shape.tp // 2)
    joined = [*present, *(other.rollout(tensors, rank) for rank in range(other.engine))]
    known = {layout.digest: layout for layout in joined}
    maker = TilingMaker(trainers)
    maker.make([layout.digest for layout in present], known.__getitem__)
    begun = time.process_time()
    after = maker.make(list(known), known.__getitem__)
    took = time.process_time() - begun
    begun = time.process_time()
    anew = make_tiling(trainers, joined)
    scratch = time.process_time() - begun
    if after.to_bytes() != anew.to_bytes():
        raise SystemExit("the tiling that was changed is not the one that is made from scratch")
    return [measure("joining: one engine of 16 ranks", took, "s", baseline=scratch, limit=1.0)]


def growth(plot: dict[str, list[float]]) -> list[Measure]:
    """Beside linear growth in the pieces: tiles, and reads of all plans. With more ranks on both sides these
    grow with the product, where one side splits a tensor by rows and the other by columns."""
    found = []
    for what in ("tensors", "ranks"):
        seconds, pieces = [], []
        for factor in GROWTH:
            more = (
                {"layers": SMALL.layers * factor}
                if what == "tensors"
                else {"trainers": SMALL.trainers * factor, "engine": SMALL.engine * factor, "tp": 4 * factor}
            )
            runs = [_all_plans(replace(SMALL, **more)) for _ in range(3)]
            seconds.append(min(took for took, _ in runs))
            pieces.append(runs[0][1])
        plot[what] = seconds
        exponent = float(np.polyfit(np.log(pieces), np.log(seconds), 1)[0])
        found += [
            measure(f"growth: 16 times the {what}, pieces", pieces[-1], "", baseline=pieces[0]),
            measure(f"growth: 16 times the {what}, seconds", seconds[-1], "s", baseline=seconds[0]),
            # 1 is linear; names and arrays beyond the caches cost more
            measure(f"growth: exponent over the pieces, {what}", exponent, "", limit=1.25),
        ]
    return found


def _all_plans(shape: Shape) -> tuple[float, int]:
    """CPU seconds for the tiling and every rank's plan, and the pieces that they name."""
    tensors = shape.tensors()
    trainers = [shape.trainer(tensors, rank) for rank in range(shape.trainers)]
    rollouts = [shape.rollout(tensors, rank) for rank in range(shape.engine)]
    begun = time.process_time()
    tiling = make_tiling(trainers, rollouts)
    plans = [make_plan(tiling, layout) for layout in rollouts]
    took = time.process_time() - begun
    return took, len(tiling.boxes) + sum(len(plan.nbytes) for plan in plans)


def fuzz(seed: int = 0) -> list[Measure]:
    rng = random.Random(seed)
    worst, uneven = 1.0, 1.0
    for _ in range(LAYOUTS):
        shapes = {f"t{i}": tuple(rng.choice((1, 3, 8, 30, 64, 100)) for _ in range(2)) for i in range(6)}
        size = rng.randint(1, 5)
        dim = rng.choice((0, 1))
        producers = [_split(shapes, dim, rank, size) for rank in range(size)]
        replicas = rng.choice((1, 2, 3))
        tiling = make_tiling(producers * replicas, readers := [_random_reader(shapes, rng) for _ in range(4)])
        served = np.zeros(size * replicas)
        for reader in readers:
            plan = make_plan(tiling, reader)
            if plan.needed_nbytes:
                worst = max(worst, plan.moved_nbytes / plan.needed_nbytes)
            served += np.bincount(plan.source, weights=plan.nbytes, minlength=len(served))
    whole = {f"t{i}": (4096, 512) for i in range(8)}
    for replicas in (2, 3, 4, 8):
        everything = _split(whole, 0, 0, 1)
        tiling = make_tiling([everything] * replicas, [everything])
        plan = make_plan(tiling, everything)
        served = np.bincount(plan.source, weights=plan.nbytes, minlength=replicas)
        uneven = max(uneven, float(served.max() / served.mean()))
    return [
        measure(f"fuzz: moved over needed, {LAYOUTS} matrices", worst, "", limit=1.0),
        measure("fuzz: busiest of the replicas over the mean", uneven, "", limit=1.05),
    ]


def _split(shapes: dict[str, tuple[int, ...]], dim: int, rank: int, size: int) -> Layout:
    builder = LayoutBuilder()
    for name, shape in shapes.items():
        first, stop = shape[dim] * rank // size, shape[dim] * (rank + 1) // size
        _place(builder, name, shape, dim, first, stop)
    return builder.build()


def _random_reader(shapes: dict[str, tuple[int, ...]], rng: random.Random) -> Layout:
    builder = LayoutBuilder()
    for name, shape in shapes.items():
        dim = rng.choice((0, 1))
        first = rng.randrange(shape[dim])
        _place(builder, name, shape, dim, first, rng.randint(first + 1, shape[dim]))
    return builder.build()


def _place(
    builder: LayoutBuilder, name: str, shape: tuple[int, ...], dim: int, first: int, stop: int
) -> None:
    if first == stop:
        return
    offset = tuple(first if d == dim else 0 for d in range(len(shape)))
    part = tuple(stop - first if d == dim else n for d, n in enumerate(shape))
    builder.tensor(name, shape, DTYPE)
    builder.buffer(name, part, contiguous_strides(part), DTYPE)
    builder.place(name, Box(offset, part), name, 0, contiguous_strides(part))


def _peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)


def main() -> int:
    chosen = options(__doc__, samples=1, sections=("trillion", "joining", "growth", "fuzz"))
    found: list[Measure] = []
    plot: dict[str, list[float]] = {}
    if "trillion" in chosen.only:
        found += trillion(Shape())
    if "joining" in chosen.only:
        found += joining(replace(Shape(), layers=16))
    if "growth" in chosen.only:
        found += growth(plot)
        if chosen.charts:
            chart(
                chosen.charts / "planning-growth.png", "Planning, all ranks", GROWTH, plot,
                xlabel="times the size", ylabel="CPU seconds",
            )  # fmt: skip
    if "fuzz" in chosen.only:
        found += fuzz()
    return report(found, chosen)


if __name__ == "__main__":
    sys.exit(main())
