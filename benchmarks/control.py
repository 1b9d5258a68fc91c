"""What the controller costs: how soon 64 waiting consumers know of a version, and how often it is called.

    python benchmarks/control.py [--json] [--check] [--samples N] [--only SECTION ...]

A real controller in a process of its own, on a Redis of its own. Sections:
knowing  64 consumers wait for the next version with HTTP long polls: 8 processes of 8 threads each, each
         thread with a client of its own. From the instant of the last seal, by the index's clock, to the
         instant at which each of them has the answer; over `--samples` versions. Beside it: one Redis round
         trip.
calls    control calls of one publish and of one update, for 10 and for 10,000 tensors, counted in the
         controller's access log. Heartbeats, which come by time, are not counted.
latest   GET /v1/models/{model}/versions/latest: how long one takes, one after another on one connection, and
         how many a second for 4 processes at once. Beside it: `/v1/health`, which asks no index.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
import numpy as np
import redis
import torch
from common import Measure, measure, options, report, say

from weightdepot import Consumer, Producer
from weightdepot.api.client import ControllerClient
from weightdepot.store.errors import WaitTimeout
from weightdepot.store.index.embedded import EmbeddedRedis

PROCESSES, THREADS = 8, 8
SIZES = (10, 10_000)
VERSIONS = 5
ASKED = 2000
ASKERS = 4
ASKING_S = 3.0
# of its own: the memory of a dead trainer is claimed by whoever publishes the same model on this host
MODEL = "benchmark-control"
MS = 1e3

# The answer within about a millisecond, the interpreter and one Redis round trip included.
LATEST_MS = 2.0

_LINE = re.compile(r'"(GET|POST|PUT|DELETE) (/v1/\S+) HTTP')


@contextlib.contextmanager
def controller(redis_url: str, log: Path) -> Iterator[str]:
    """A controller whose access log goes to `log`, unless that is the null device."""
    level = "warning" if log == Path("/dev/null") else "debug"
    command = [sys.executable, "-m", "weightdepot.api", "serve", "--port", "0", "--redis-url", redis_url]
    with log.open("ab") as errors:
        process = subprocess.Popen(
            [*command, "--log-level", level], stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.wait(20)
        if process.stdout is not None:
            process.stdout.close()


def wait_for_versions(url: str, pipe: Connection) -> None:
    """A process of THREADS waiting consumers: for each version it sends their delays, in seconds."""
    delays: list[float] = []
    lock, met = threading.Lock(), threading.Barrier(THREADS + 1)

    def consumer() -> None:
        with ControllerClient(url) as client:
            wanted = 0
            while True:
                try:
                    found = client.latest(MODEL, min_version=wanted, timeout=60)
                except WaitTimeout:
                    continue
                known = time.time()
                assert found.ready is not None
                wanted = found.version + 1
                with lock:
                    delays.append(known - found.ready)
                met.wait()

    for _ in range(THREADS):
        threading.Thread(target=consumer, daemon=True).start()
    while True:
        met.wait()
        with lock:
            pipe.send(list(delays))
            delays.clear()


def knowing(url: str, redis_url: str, samples: int) -> list[Measure]:
    context = mp.get_context("spawn")
    weights = {"w": torch.zeros(4)}
    delays: list[float] = []
    trips: list[float] = []
    with Producer(url, model=MODEL, weights=weights) as producer, redis.Redis.from_url(redis_url) as index:
        producer.publish(0, wait="ready")
        pipes, processes = [], []
        for _ in range(PROCESSES):
            mine, theirs = context.Pipe()
            pipes.append(mine)
            processes.append(context.Process(target=wait_for_versions, args=(url, theirs), daemon=True))
            processes[-1].start()
        try:
            for pipe in pipes:
                pipe.recv()  # version 0: all are there
            for version in range(1, samples + 1):
                time.sleep(0.3)  # until all wait again
                begun = time.perf_counter()
                index.ping()
                trips.append(time.perf_counter() - begun)
                producer.publish(version, wait="ready")
                for pipe in pipes:
                    delays += pipe.recv()
        finally:
            for process in processes:
                process.kill()
                process.join()
    assert len(delays) == samples * PROCESSES * THREADS
    trip = statistics.median(trips) * MS
    middle, late = np.quantile(delays, [0.5, 0.99]) * MS
    return [
        measure("redis_round_trip", trip, "ms"),
        measure("knowing_64_median", float(middle), "ms", baseline=trip),
        measure("knowing_64_p99", float(late), "ms", baseline=trip),
    ]


def requests(log: Path, begin: int) -> Counter[str]:
    """What was asked of the controller since its log was `begin` bytes long, without heartbeats."""
    time.sleep(0.3)  # an answer may arrive before its line is written
    text = log.read_bytes()[begin:].decode()
    return Counter(f"{m} {p}" for m, p in _LINE.findall(text) if not p.endswith("/heartbeat"))


def count_calls(url: str, log: Path, tensors: int) -> tuple[float, float]:
    """Calls of one publish (until the version is ready) and of one update: means of the steady state."""
    model = f"calls-{tensors}"

    def names() -> dict[str, torch.Tensor]:
        return {f"layer.{i}.weight": torch.zeros(2, 2) for i in range(tensors)}

    published = updated = 0
    with (
        Producer(url, model=model, weights=names()) as producer,
        Consumer(url, model=model, weights=names()) as consumer,
    ):
        for version in range(VERSIONS + 2):
            begin = log.stat().st_size
            producer.publish(version, wait="ready")
            producing = requests(log, begin).total()
            begin = log.stat().st_size
            consumer.update()
            consuming = requests(log, begin).total()
            if version >= 2:  # the first ones also fetch tables and plans, which are kept
                published += producing
                updated += consuming
    return published / VERSIONS, updated / VERSIONS


def calls(redis_url: str) -> list[Measure]:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "access.log"
        log.touch()
        with controller(redis_url, log) as url:
            found = {tensors: count_calls(url, log, tensors) for tensors in SIZES}
    few, many = (found[tensors] for tensors in SIZES)
    return [
        measure(f"calls_{what}_{SIZES[1]}_tensors", many[i], "calls", baseline=few[i], limit=1.0)
        for i, what in enumerate(("publish", "update"))
    ]


def ask_for(url: str, seconds: float, pipe: Connection) -> None:
    count = 0
    with httpx.Client(base_url=url) as client:
        pipe.send("ready")
        pipe.recv()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            client.get(f"/v1/models/{MODEL}/versions/latest").raise_for_status()
            count += 1
    pipe.send(count)


def latest(url: str) -> list[Measure]:
    def seconds(client: httpx.Client, path: str) -> float:
        begun = time.perf_counter()
        client.get(path).raise_for_status()
        return time.perf_counter() - begun

    with (
        Producer(url, model=MODEL, weights={"w": torch.zeros(4)}) as producer,
        httpx.Client(base_url=url) as client,
    ):
        producer.publish((producer.highest or 0) + 1, wait="ready")
        paths = {"latest": f"/v1/models/{MODEL}/versions/latest", "health": "/v1/health"}
        taken: dict[str, list[float]] = {name: [] for name in paths}
        for _ in range(ASKED):
            for name, path in paths.items():
                taken[name].append(seconds(client, path))
        context = mp.get_context("spawn")
        pipes, processes = [], []
        for _ in range(ASKERS):
            mine, theirs = context.Pipe()
            pipes.append(mine)
            processes.append(context.Process(target=ask_for, args=(url, ASKING_S, theirs)))
            processes[-1].start()
        for pipe in pipes:
            pipe.recv()
        for pipe in pipes:
            pipe.send("go")
        rate = sum(pipe.recv() for pipe in pipes) / ASKING_S
        for process in processes:
            process.join()
    middle = statistics.median(taken["latest"]) * MS
    late = float(np.quantile(taken["latest"], 0.99)) * MS
    bare = statistics.median(taken["health"]) * MS
    return [
        measure("health_median", bare, "ms"),
        measure("latest_median", middle, "ms", limit=LATEST_MS),
        measure("latest_p99", late, "ms"),
        measure("latest_rate", rate, "requests/s"),
    ]


def main() -> int:
    chosen = options(__doc__, samples=20, sections=("knowing", "calls", "latest"))
    found: list[Measure] = []
    with EmbeddedRedis() as embedded:
        if "calls" in chosen.only:
            say("counting calls")
            found += calls(embedded.url)
        with controller(embedded.url, Path("/dev/null")) as url:
            if "knowing" in chosen.only:
                say("64 consumers wait")
                found += knowing(url, embedded.url, chosen.samples)
            if "latest" in chosen.only:
                say("asking for the latest version")
                found += latest(url)
    return report(found, chosen)


if __name__ == "__main__":
    sys.exit(main())
