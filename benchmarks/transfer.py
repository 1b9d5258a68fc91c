"""How long publishing and pulling take, beside a plain copy of the same bytes by as many processes at once.

    python benchmarks/transfer.py [--json] [--check] [--charts FOLDER] [--only SECTION ...]

1 GiB in 32 bf16 tensors, two trainer ranks that hold them by rows, two rollout ranks by columns, one thread
each, and a controller. All figures of a section are taken in turns, in one run; each is the median of its
samples, and a ratio the median of the ratios within each turn. Sections: shm, first, tcp, mooncake, slices,
growth.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from common import Measure, Options, Samples, chart, measure, options, report, say
from common_ranks import Crew, controller
from common_raw import RawReader, RawServer
from common_weights import Model, Rollout, Trainer

from weightdepot.store.segments import Segment
from weightdepot.store.transports.base import Range
from weightdepot.store.transports.select import Transports

FULL = Model()
GROWTH = (1, 2, 4, 8, 16)
SLICES = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20]
STEP_S = 2.0
MS = 1e3


class Pair:
    """Two trainers and two rollouts of one model, and the versions that they exchange."""

    def __init__(self, url: str, transport: str) -> None:
        self.trainers = Crew(Trainer, 2, url=url, transport=transport)
        self.rollouts = Crew(Rollout, 2, url=url, transport=transport)
        self.version = 0

    def build(self, model: Model, name: str) -> None:
        self.model, self.version = model, 0
        self.trainers.call("build", model)
        self.trainers.call("join", name)
        self.rollouts.call("build", model, name)

    def turn(self, samples: Samples) -> None:
        """One version, from step to applied, with a plain copy before each half of it."""
        self.version += 1
        self.trainers.call("step", self.version)
        samples.add("copy", self.trainers.call("copy"))
        took = self.trainers.ask("publish", self.version)
        samples.add("returned", max(returned for returned, _ in took))
        samples.add("ready", max(ready for _, ready in took))
        for verify, name in ((True, "checked"), (False, "trusting")):
            samples.add(f"copy {name}", self.rollouts.call("copy"))
            found = self.rollouts.each("update", self.version, verify)
            samples.add(f"pull {name}", max(pull for _, pull in found))
            samples.add(f"update {name}", max(seconds for seconds, _ in found))

    def compare(self) -> None:
        self.rollouts.call("compare", self.version)

    def close(self) -> None:
        self.rollouts.close()
        self.trainers.close()


@contextmanager
def pair(transport: str) -> Iterator[Pair]:
    with controller() as url:
        made = Pair(url, transport)
        try:
            yield made
        finally:
            made.close()


def shm(chosen: Options) -> list[Measure]:
    samples = Samples()
    with pair("shm") as ranks:
        ranks.build(FULL, "policy")
        for _ in range(3):  # the memory of both slots, the plans, and the readers' mappings are made
            ranks.turn(Samples())
        for _ in range(chosen.samples):
            ranks.turn(samples)
        ranks.compare()
    rows = [
        ("publish returns", "returned", "copy", 1.15),
        ("version ready", "ready", "copy", 1.8),
        ("pull, digests checked", "pull checked", "copy checked", 1.7),
        ("pull, not checked", "pull trusting", "copy trusting", 1.3),
        ("update, digests checked", "update checked", "copy checked", None),
    ]
    return [against(f"shm: {label}", samples, name, base, limit) for label, name, base, limit in rows]


def against(label: str, samples: Samples, name: str, base: str, limit: float | None) -> Measure:
    """As `measure`, with the ratio taken within each turn."""
    ratio = samples.ratio(name, base)
    ok = None if limit is None else ratio <= limit
    return Measure(label, samples.median(name) * MS, "ms", samples.median(base) * MS, ratio, limit, ok)


def first(chosen: Options) -> list[Measure]:
    """Each time a trainer that has just come. It makes a step of `STEP_S` before each publish, as trainers
    do; the memory of its slots is made meanwhile."""
    firsts, later = [], []
    with controller() as url, Crew(Trainer, 2, url=url, transport="shm") as trainers:
        trainers.call("build", FULL)
        for k in range(max(5, chosen.samples)):
            trainers.call("join", f"policy-{k}")
            for version in range(4):
                trainers.call("step", version)
                time.sleep(STEP_S)
                took = max(returned for returned, _ in trainers.ask("publish", version))
                (later if version else firsts).append(took)
    middle = statistics.median(later)
    value = statistics.median(firsts)
    return [measure("shm: first publish", value * MS, "ms", baseline=middle * MS, limit=4)]


def tcp(chosen: Options) -> list[Measure]:
    samples = over("tcp", chosen)
    return wire("tcp", samples, None)


def mooncake(chosen: Options) -> list[Measure]:
    samples = over("mooncake", chosen)
    raw = samples.median("engine")
    sockets = samples.median("sockets")
    return [
        *wire("mooncake/tcp", samples, 0.85),
        measure("plain sockets, raw", speed(sockets), "GB/s", baseline=speed(raw)),
    ]


def speed(seconds: float) -> float:
    return FULL.nbytes / seconds / 1e9


def wire(label: str, samples: Samples, limit: float | None) -> list[Measure]:
    """Pulls against what the same wire carries raw, as speeds."""
    base = "engine" if label.startswith("mooncake") else "sockets"
    found = []
    for name, text in (("checked", "digests checked"), ("trusting", "not checked")):
        ratio = samples.ratio(base, f"pull {name}")
        ok = None if limit is None else ratio >= limit
        value, baseline = speed(samples.median(f"pull {name}")), speed(samples.median(base))
        found.append(Measure(f"{label}: pull, {text}", value, "GB/s", baseline, ratio, limit, ok))
    return found


def over(transport: str, chosen: Options) -> Samples:
    """Pulls over a transport, and raw reads of the same bytes by as many processes, in turns."""
    samples = Samples()
    half = FULL.nbytes // 2
    with pair(transport) as ranks, Crew(RawServer, 2, nbytes=half) as servers:
        addresses = servers.ask("address")
        with Crew(RawReader, 2, servers=addresses, nbytes=half) as readers:
            ranks.build(FULL, "policy")
            for turn in range(chosen.samples + 2):
                into = samples if turn > 1 else Samples()
                into.add("engine", readers.call("read_engine"))
                into.add("sockets", readers.call("read_sockets"))
                ranks.turn(into)
            readers.call("check")
            ranks.compare()
    return samples


class SliceServer:
    def __init__(self, rank: int, *, transport: str) -> None:  # noqa: ARG002 - the rank that every crew gives
        self.transports = Transports(transport, host="127.0.0.1")  # type: ignore[arg-type]
        self.segment = Segment.create(11 * SLICES[-1], "benchmark", f"slices-{transport}-{time.time_ns()}")
        self.segment.tensor.fill_(7)

    def address(self) -> object:
        return self.transports.serve(self.segment), self.segment.nbytes

    def close(self) -> None:
        self.transports.close()
        self.segment.close()


def slices(chosen: Options) -> list[Measure]:
    """Ten slices of one size that lie apart, read from one source and copied to their place."""
    found: list[Measure] = []
    drawn: dict[str, list[float]] = {}
    into = torch.zeros(10 * SLICES[-1], dtype=torch.uint8)
    torch.set_num_threads(1)
    for transport in ("shm", "tcp", "mooncake"):
        took: dict[int, list[float]] = {size: [] for size in SLICES}
        with Crew(SliceServer, 1, transport=transport) as server, Transports(transport) as transports:
            (endpoints, nbytes), *_ = server.ask("address")
            with transports.reach(endpoints, nbytes) as source:
                for _ in range(chosen.samples + 2):
                    for size in SLICES:
                        ranges = [Range(k * (size + 4096), size) for k in range(10)]
                        begun = time.perf_counter()
                        for k, memory in source.fetch(ranges, time.monotonic() + 60):
                            into[k * size : (k + 1) * size].copy_(memory)
                        took[size].append((time.perf_counter() - begun) / 10)
                    assert bool((into == 7).all())
        each = [statistics.median(took[size][2:]) for size in SLICES]
        speeds = [size / seconds / 1e9 for size, seconds in zip(SLICES, each, strict=True)]
        drawn[transport] = speeds
        for size, seconds in zip(SLICES, each, strict=True):
            found.append(measure(f"{transport}: a slice of {size >> 10} KiB", seconds * 1e6, "µs"))
        found.append(measure(f"{transport}: half of the best speed at", half_size(speeds) / 1024, "KiB"))
    if chosen.charts:
        chart(
            chosen.charts / "slices.png",
            "Ten slices from one source",
            [size / 1024 for size in SLICES],
            drawn,
            xlabel="KiB of a slice",
            ylabel="GB/s",
        )
    return found


def half_size(speeds: list[float]) -> float:
    """Bytes at which half of the best speed is reached, between the sizes that were measured; the smallest of
    them when it is that fast already."""
    half = max(speeds) / 2
    for k, speed in enumerate(speeds):
        if speed >= half:
            if k == 0:
                return SLICES[0]
            share = (half - speeds[k - 1]) / (speed - speeds[k - 1])
            return SLICES[k - 1] + share * (SLICES[k] - SLICES[k - 1])
    raise AssertionError("the best is at least half of itself")


def growth(chosen: Options) -> list[Measure]:
    """Each line grows one thing: the bytes of 32 tensors from 64 MiB on, or the tensors that 256 MiB are cut
    into from 32 on."""
    lines = {
        "bytes": [Model(rows=2048, columns=512 * n) for n in GROWTH],
        "tensors": [Model(tensors=32 * n, rows=2048, columns=2048 // n) for n in GROWTH],
    }
    found: list[Measure] = []
    with pair("shm") as ranks:
        for what, models in lines.items():
            times: dict[str, list[float]] = {"publish": [], "pull": []}
            for k, model in enumerate(models):
                samples = Samples()
                ranks.build(model, f"{what}-{k}")
                for turn in range(chosen.samples + 3):
                    ranks.turn(samples if turn > 2 else Samples())
                ranks.compare()
                times["publish"].append(samples.median("returned") * MS)
                times["pull"].append(samples.median("pull checked") * MS)
            for name, line in times.items():
                found.append(
                    measure(
                        f"shm: {name}, {GROWTH[-1]} times the {what}",
                        line[-1],
                        "ms",
                        baseline=line[0] * GROWTH[-1],
                        limit=1.0,
                    )
                )
            if chosen.charts:
                chart(
                    chosen.charts / f"growth-{what}.png",
                    f"Publish and pull as the {what} grow",
                    GROWTH,
                    times,
                    xlabel=f"{what}, times {'64 MiB' if what == 'bytes' else '32 in 256 MiB'}",
                    ylabel="ms",
                    diagonal=True,
                )
    return found


SECTIONS = {"shm": shm, "first": first, "tcp": tcp, "mooncake": mooncake, "slices": slices, "growth": growth}


def main() -> int:
    chosen = options(__doc__, sections=list(SECTIONS))
    found: list[Measure] = []
    for name in chosen.only:
        say(f"{name} ...")
        found += SECTIONS[name](chosen)
    return report(found, chosen)


if __name__ == "__main__":
    sys.exit(main())
