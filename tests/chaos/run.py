"""One run: everything starts, publishes and updates; faults come as planned; then all must be well again."""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import itertools
import os
import queue
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightdepot.api.client import ControllerClient
from weightdepot.api.settings import DEFAULT_RUN
from weightdepot.store.errors import WeightDepotError
from weightdepot.store.index.records import GroupState
from weightdepot.store.segments import remove_orphans

from ..system.harness import eventually
from .fleet import COMES_BACK_S, Controller, Index, Life, Victim, Worker
from .ledger import Ledger
from .plan import CONSUMERS, CONTROLLERS, INDEX, PRODUCERS, TIMES, Fault

GROUPS = (("pair-0", "pair-1"), ("single-0",))
LOOK_S = 0.2  # seconds between two looks at what the controllers say
START_S = 90.0
LAST_TRIES = 3  # versions after the last fault: what was under way may still fail, then all is well


@dataclass
class Outcome:
    ledger: Ledger
    apart: list[str]
    failures: list[str]
    converged: int
    """Groups that hold the last version, some time after the last fault."""
    seconds: float


class Trainer:
    """What a training loop does: all ranks publish the same versions, and go on past what there is."""

    def __init__(self, ranks: list[Worker], seed: int, pause: float) -> None:
        self._ranks, self._rng, self._pause = ranks, random.Random(seed), pause
        self._ending = threading.Event()
        self.version = 0
        self.error = ""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with ThreadPoolExecutor(len(self._ranks)) as pool:
                while not self._ending.is_set():
                    self._step(pool, self._rng.choice(("packed", "ready")))
                    self._ending.wait(self._rng.uniform(0, self._pause))
                for _ in range(LAST_TRIES):
                    if self._step(pool, "ready"):
                        return
                self.error = f"{LAST_TRIES} versions after the last fault, none of them could be published"
        except Exception as error:  # noqa: BLE001  said at the end of the run, which it must not end silently
            self.error = f"the training loop failed: {error!r}"

    def _step(self, pool: ThreadPoolExecutor, wait: str) -> bool:
        """Whether every rank has published."""
        published = threading.Event()
        said = list(pool.map(lambda rank: self._publish(rank, self.version, wait, published), self._ranks))
        self.version = max(self.version, *(highest for highest, _ in said)) + 1
        return all(done for _, done in said)

    def _publish(self, rank: Worker, version: int, wait: str, published: threading.Event) -> tuple[int, bool]:
        """The highest version that this rank knows of then, and whether it has published `version`. A rank
        that is killed before any other was through tries the same version again when it is back."""
        while True:
            life = rank.life
            answer = self._offer(life, rank.name, version, wait)
            if not answer.get("died"):
                done = answer.get("call") == "publish" and "error" not in answer
                if done:
                    published.set()
                return max(version, answer.get("highest") or version), done
            if published.is_set():
                return version, False
            eventually(lambda dead=life: rank.life is not dead, COMES_BACK_S)  # type: ignore[misc]

    def _offer(self, life: Life, name: str, version: int, wait: str) -> dict[str, Any]:
        """What a publish came to, or what the rank said of a higher version when it joined, or its death."""
        deadline = time.monotonic() + COMES_BACK_S
        while not life.joined.wait(0.1):
            if life.process.poll() is not None:
                return {"died": True}
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} did not join in {COMES_BACK_S:g} s")
        for answer in _drained(life.answers):
            if answer.get("died") or (answer.get("highest") or -1) >= version:
                return answer
        life.tell(f"publish {version} {wait}")
        return _answer(life)

    def end(self) -> None:
        self._ending.set()
        self._thread.join(2 * COMES_BACK_S + 60)
        if self._thread.is_alive():
            self.error = "the training loop did not end"


def _drained(answers: queue.Queue[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    with contextlib.suppress(queue.Empty):
        while True:
            found.append(answers.get_nowait())
    return found


def _answer(life: Life) -> dict[str, Any]:
    """What a publish came to, or that the process died over it."""
    deadline = time.monotonic() + TIMES.publish + TIMES.seal + COMES_BACK_S
    while True:
        # looked at first: what it said before it died is in the queue by then
        dead = life.process.poll() is not None
        try:
            answer = life.answers.get(timeout=0.5)
        except queue.Empty:
            if dead:  # that it died was heard with an earlier answer
                return {"died": True}
            if time.monotonic() > deadline:
                raise
            continue
        if answer.get("call") == "publish" or answer.get("died"):
            return answer


class Watcher:
    """Asks the controllers in turn what there is, as a dashboard does, and books it."""

    def __init__(self, ledger: Ledger, urls: list[str], model: str) -> None:
        self._ledger, self._model = ledger, model
        self._clients = [ControllerClient(url) for url in urls]
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for client in itertools.cycle(self._clients):
            if self._ending.wait(LOOK_S):
                return
            known = self._ledger.acknowledged
            begun, error = time.monotonic(), ""
            try:
                self._ledger.snapshot(client.model(self._model, timeout=TIMES.call), known)
            except WeightDepotError as raised:
                error = type(raised).__name__
            self._ledger.asked("watcher", "look", TIMES.call, begun, time.monotonic(), error)

    def end(self) -> None:
        self._ending.set()
        self._thread.join()
        for client in self._clients:
            client.close()


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="weightdepot-chaos-", ignore_cleanup_errors=True) as made:
        yield Path(made)


def run(
    plan: list[Fault],
    seed: int,
    *,
    transport: str,
    pause: float,
    keep: Path | None,
    say: Callable[[str], None],
) -> Outcome:
    """pause: seconds of the trainer between two versions, at most. keep: a folder for the logs."""
    with _folder(keep) as folder, contextlib.ExitStack() as stack:
        ledger = Ledger()
        # of its own: the memory of a dead trainer is claimed by whoever publishes the same model on this host
        model = f"chaos-{os.getpid()}-{seed}"
        stack.callback(_clear, model)
        data = folder / "redis"
        data.mkdir(exist_ok=True)
        index = Index(INDEX, data)
        stack.callback(index.end)
        controllers = []
        for name in CONTROLLERS:
            controllers.append(Controller(name, index.redis.url, folder / f"{name}.log"))
            stack.callback(controllers[-1].end)
        workers = {
            name: Worker(
                name, _arguments(name, number, [c.url for c in controllers], model, transport, seed),
                folder / f"{name}.log", ledger.hear,
            )
            for number, name in enumerate((*PRODUCERS, *CONSUMERS))
        }  # fmt: skip
        for worker in workers.values():
            stack.callback(worker.end)
        for worker in workers.values():
            if not worker.life.joined.wait(START_S):
                raise TimeoutError(f"{worker.name} did not join in {START_S:g} s")
        trainer = Trainer([workers[name] for name in PRODUCERS], seed, pause)
        watcher = Watcher(ledger, [c.url for c in controllers], model)
        victims: dict[str, Victim] = {INDEX: index, **{c.name: c for c in controllers}, **workers}
        begun = time.monotonic()
        inject(plan, victims, ledger, say)
        say("the last fault is over: now all must come to the last version")
        trainer.end()
        converged = _converged(controllers[0].url, model, trainer.version - 1)
        seconds = time.monotonic() - begun
        watcher.end()
        stack.close()
        failures = [text for worker in workers.values() for text in worker.crashes]
        failures += [text for text in (trainer.error, *(c.error for c in controllers)) if text]
        return Outcome(ledger, ledger.groups_apart(GROUPS), failures, converged, seconds)


def _clear(model: str) -> None:
    """Remove the memory that killed trainers left: nobody will publish this model again and claim it."""
    for rank in range(len(PRODUCERS)):
        owner = hashlib.blake2b(f"{DEFAULT_RUN}/{model}/{rank}".encode(), digest_size=8).hexdigest()
        remove_orphans(owner)


def _arguments(name: str, number: int, urls: list[str], model: str, transport: str, seed: int) -> list[str]:
    group, rank = name.rsplit("-", 1)
    size = 2 if group == "pair" or name in PRODUCERS else 1
    first = number % len(urls)  # clients go on to the next one when theirs does not answer
    return [
        "producer" if name in PRODUCERS else "consumer",
        f"--controller={','.join(urls[first:] + urls[:first])}", f"--model={model}",
        f"--group={group}", f"--rank={rank}", f"--world-size={size}", f"--transport={transport}",
        f"--seed={seed * 100 + number}",
    ]  # fmt: skip


def inject(plan: list[Fault], victims: dict[str, Victim], ledger: Ledger, say: Callable[[str], None]) -> None:
    """Do it all, and wait until everybody is back."""
    begun = time.monotonic()
    todo: list[tuple[float, int, Fault, bool]] = [(f.at, f.number, f, False) for f in plan]
    heapq.heapify(todo)
    hit: dict[int, float] = {}
    with ThreadPoolExecutor(len(victims)) as pool:
        starting: dict[str, list[object]] = {}
        while todo:
            at, number, fault, back = heapq.heappop(todo)
            time.sleep(max(0.0, begun + at - time.monotonic()))
            victim = victims[fault.victim]
            if back:
                if fault.kind == "stop":
                    # before it goes on: what it says then must be judged with this in mind
                    ledger.stopped(fault.victim, hit[number], time.monotonic())
                    victim.resume()
                else:
                    starting[fault.victim] = [pool.submit(victim.start)]
                continue
            for future in starting.pop(fault.victim, []):
                future.result(COMES_BACK_S + 10)  # type: ignore[attr-defined]
            say(str(fault))
            hit[number] = time.monotonic()
            (victim.kill if fault.kind == "kill" else victim.stop)()
            ledger.done.append(fault)
            heapq.heappush(todo, (time.monotonic() - begun + fault.down, number, fault, True))


def _converged(url: str, model: str, last: int) -> int:
    """How many groups come to `last` (or the newest version, where that was never ready) as a whole."""
    deadline = time.monotonic() + TIMES.update + TIMES.publish + COMES_BACK_S
    with ControllerClient(url) as client:
        while True:
            with contextlib.suppress(WeightDepotError):
                newest = client.model(model, timeout=TIMES.call).latest
                groups = client.groups(model, timeout=TIMES.call)
                there = sum(g.state is GroupState.WHOLE and g.version == newest for g in groups)
                if newest is not None and newest >= last and there == len(GROUPS):
                    return there
                if time.monotonic() > deadline:
                    return there
            if time.monotonic() > deadline:
                return 0
            time.sleep(0.2)
