"""What trainer and rollout wait in each mode of synchronization, for the same work.

    python benchmarks/modes.py [--json] [--check] [--charts FOLDER]

One trainer and one rollout of 512 MiB on one host, each a process with one thread. Training a step and
generating a batch are both a pause of `WORK_S` seconds, as for a GPU that computes while the host is idle. A
sample is one version; a baseline is a plain copy of the same bytes in the same process, right before. Modes:

sync      publish returns when the rollout has applied it, and the rollout waits for each version
async     publish returns when the weights may be overwritten; the rollout takes the newest after each batch
prefetch  the same, but the rollout reads in the background, and stops for the copy into place alone
bounded   as async, but a publish waits while the rollout lags more than one version
"""

from __future__ import annotations

import sys
import time
from typing import Any

from common import Measure, Samples, measure, options, report, say
from common_ranks import Crew, controller
from common_weights import Model, Trainer

from weightdepot import Consumer
from weightdepot.api.client import ControllerClient
from weightdepot.store.index.records import Mode

MODEL = Model(tensors=16, producers=1, consumers=1)
WORK_S = 0.6  # of a training step, and of a batch
WARM = 2  # versions at the beginning that are not counted
MODES = {"sync": Mode.SYNC, "async": Mode.ASYNC, "prefetch": Mode.ASYNC, "bounded": Mode.BOUNDED}


class Training(Trainer):
    def train(self, count: int) -> list[tuple[float, float]]:
        """Publish so many versions; for each, seconds of a plain copy and of the publish."""
        assert self.producer is not None
        found = []
        for version in range(1, count + 1):
            time.sleep(WORK_S)
            begun = time.perf_counter()
            self.copy()
            copied = time.perf_counter()
            self.producer.publish(version)
            found.append((copied - begun, time.perf_counter() - copied))
        self.producer.flush()
        return found


class Generating:
    def __init__(self, rank: int, *, url: str) -> None:  # noqa: ARG002
        self._url = url
        self.consumer: Consumer | None = None

    def join(self, model: Model, name: str) -> None:
        self.close()
        import torch

        shape = (model.rows, model.columns)
        self.held = [torch.zeros(shape, dtype=torch.bfloat16) for _ in model.names]
        self.scratch = [torch.full(shape, 1.0, dtype=torch.bfloat16) for _ in model.names]
        weights = dict(zip(model.names, self.held, strict=True))
        self.consumer = Consumer(self._url, model=name, weights=weights, group="rollout")

    def generate(self, mode: str, count: int) -> list[tuple[float, float]]:
        """Follow to the last version; for each that was taken, seconds of a plain copy and of the pause."""
        assert self.consumer is not None
        found = []
        while (self.consumer.version or 0) < count:
            held = self.consumer.version or 0
            if mode == "prefetch":
                coming = self.consumer.prefetch()
                while not coming.done():
                    time.sleep(WORK_S / 8)  # it generates on, with the weights that it has
                coming.result()
            time.sleep(WORK_S if mode != "prefetch" else WORK_S / 8)
            begun = time.perf_counter()
            for to, weight in zip(self.scratch, self.held, strict=True):
                to.copy_(weight)
            copied = time.perf_counter()
            if mode == "prefetch":
                version = self.consumer.apply()
            else:
                version = self.consumer.update(min_version=held + 1 if mode == "sync" else None, timeout=60)
            if version != held:
                found.append((copied - begun, time.perf_counter() - copied))
        return found

    def close(self) -> None:
        if self.consumer is not None:
            self.consumer.close()
            self.consumer = None


def play(mode: str, url: str, trainers: Any, rollouts: Any, count: int, samples: Samples) -> None:
    name = f"modes-{mode}"
    trainers.call("build", MODEL)
    trainers.call("join", name)
    rollouts.call("join", MODEL, name)
    with ControllerClient(url) as client:
        client.set_policy(name, mode=MODES[mode], timeout=10)
    trainers.begin("train", count)
    rollouts.begin("generate", mode, count)
    (_, published), (_, applied) = trainers.end()[0], rollouts.end()[0]
    for copied, waited in published[WARM:]:
        samples.add(f"{mode}: trainer copy", copied)
        samples.add(f"{mode}: trainer", waited)
    for copied, waited in applied[1:]:
        samples.add(f"{mode}: rollout copy", copied)
        samples.add(f"{mode}: rollout", waited)
    trainers.call("leave")
    rollouts.call("close")


def draw(path: Any, found: list[Measure]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    width = 0.38
    for i, who in enumerate(("trainer", "rollout")):
        values = [next(m.value for m in found if m.name == f"{mode}: {who} stands still") for mode in MODES]
        axes.bar([x + (i - 0.5) * width for x in range(len(MODES))], values, width, label=who)
    copy = next(m.baseline for m in found if m.name == "async: trainer stands still")
    if copy is not None:
        axes.axhline(copy, linestyle=":", color="gray", label="plain copy")
    axes.set_xticks(range(len(MODES)), list(MODES))
    axes.set(ylabel="ms per version", title="What stands still, and for how long", yscale="log")
    axes.legend(frameon=False)
    path.mkdir(parents=True, exist_ok=True)
    figure.savefig(path / "modes.png", dpi=140)
    plt.close(figure)


def main() -> int:
    chosen = options(__doc__, samples=8)
    samples, count = Samples(), chosen.samples + WARM
    with (
        controller() as url,
        Crew(Training, 1, url=url) as trainers,
        Crew(Generating, 1, url=url) as rollouts,
    ):
        for mode in MODES:
            say(f"{mode}: {count} versions")
            play(mode, url, trainers, rollouts, count, samples)
    found = []
    limits = {"async: trainer": 1.25, "prefetch: trainer": 1.25, "prefetch: rollout": 1.2}
    for mode in MODES:
        for who in ("trainer", "rollout"):
            name = f"{mode}: {who}"
            found.append(
                measure(
                    f"{name} stands still", 1e3 * samples.median(name), "ms",
                    baseline=1e3 * samples.median(f"{name} copy"), limit=limits.get(name),
                )
            )  # fmt: skip
    if chosen.charts:
        draw(chosen.charts, found)
    return report(found, chosen)


if __name__ == "__main__":
    sys.exit(main())
