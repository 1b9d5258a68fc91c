"""One producer rank or one consumer rank, in a process of its own. What each call did is said as JSON.

A producer publishes when it is told to (`publish VERSION WAIT`, on standard input). A consumer updates all
the while, and looks at every element before and after. Both end with `exit` or the end of standard input.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from weightdepot import Consumer, Producer, Shard, WeightDepotError
from weightdepot.store.errors import MemberConflict, UnknownModel

from .content import COLUMNS, ROWS, STEP, TENSORS, base, torn
from .plan import TIMES

ENDED = "exit"

# Answers after which a rank has to take its place anew, as a supervisor would make it do.
OUTSIDE = (MemberConflict, UnknownModel)


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def orders() -> queue.SimpleQueue[str]:
    """Lines of standard input. When the parent is gone, so is this process."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line.strip())
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return lines


def timed(call: str, bound: float, function: Callable[[], Any], **more: Any) -> tuple[Any, Exception | None]:
    """Call it, and say how long it took; what it answered, or the error."""
    begun = time.monotonic()
    answer, error = None, None
    try:
        answer = function()
    except WeightDepotError as raised:
        error = raised
    more["version"] = answer if isinstance(answer, int) else more.get("version")
    if error is not None:
        more |= {"error": type(error).__name__, "message": str(error)}
    say(call=call, bound=bound, begun=begun, ended=time.monotonic(), **more)
    return answer, error


def produce(controller: str, model: str, rank: int, transport: Any) -> None:
    told = orders()
    rows = ROWS // 2
    first = rank * rows
    bases = [base(i)[first : first + rows] for i in range(TENSORS)]
    held = [zero.clone() for zero in bases]
    weights = {f"t{i}": Shard(t, (ROWS, COLUMNS), (first, 0)) for i, t in enumerate(held)}
    while True:
        producer, error = timed(
            "join", TIMES.join,
            lambda: Producer(
                controller, model=model, weights=weights, rank=rank, world_size=2, retention=3,
                transport=transport, timeouts=TIMES,
            ),
        )  # fmt: skip
        if error is not None:
            time.sleep(0.2)
            continue
        with producer:
            say(joined=True, highest=producer.highest)
            while True:
                line = told.get()
                if line == ENDED:
                    return
                _, number, how = line.split()
                wait: Any = how
                version = int(number)
                for t, zero in zip(held, bases, strict=True):
                    torch.add(zero, STEP * version, out=t)
                publish = partial(producer.publish, version, wait=wait)
                _, error = timed("publish", TIMES.publish, publish, wait=how, version=version)
                if isinstance(error, OUTSIDE):
                    break


class Rollout:
    """One consumer rank, and what is known about the elements that it holds."""

    def __init__(
        self, controller: str, model: str, group: str, rank: int, world_size: int, transport: Any
    ) -> None:
        columns = COLUMNS // world_size
        first = rank * columns
        self.bases = [base(i)[:, first : first + columns].contiguous() for i in range(TENSORS)]
        self.held = [torch.full_like(zero, -1) for zero in self.bases]
        self.options: dict[str, Any] = {
            "controller": controller,
            "model": model,
            "weights": {f"t{i}": Shard(t, (ROWS, COLUMNS), (0, first)) for i, t in enumerate(self.held)},
            "group": group,
            "rank": rank,
            "world_size": world_size,
            "transport": transport,
            "timeouts": TIMES,
        }

    def check(self, version: int | None, when: str) -> None:
        fault = "" if version is None else torn(self.held, self.bases, version)
        if fault:
            say(torn=f"{when}: {fault}")

    def serve(self, told: queue.SimpleQueue[str], rng: random.Random) -> None:
        while True:
            consumer, error = timed("join", TIMES.join, lambda: Consumer(**self.options))
            if error is not None:
                time.sleep(0.2)
                continue
            with consumer:
                say(joined=True)
                while error is None or not isinstance(error, OUTSIDE):
                    if not told.empty() and told.get() == ENDED:
                        return
                    error = self.turn(consumer, rng)
                    time.sleep(rng.uniform(0.0, 0.1))

    def turn(self, consumer: Consumer, rng: random.Random) -> Exception | None:
        held = consumer.version
        self.check(held, "before an update")
        how = rng.random()
        if how < 0.3:
            future = consumer.prefetch(timeout=TIMES.update)
            time.sleep(rng.uniform(0.0, 0.3))
            self.check(consumer.version, "while it prefetches")
            version, error = timed("apply", TIMES.update, consumer.apply)
            del future
        elif how < 0.6:
            newer = 0 if held is None else held + 1
            version, error = timed("update", TIMES.update, lambda: consumer.update(newer), min_version=newer)
        else:
            version, error = timed("update", TIMES.update, consumer.update)
        if error is None and consumer.version != version:
            say(torn=f"update answered {version}, and consumer.version is {consumer.version}")
        self.check(consumer.version, f"after {type(error).__name__ if error else 'an update'}")
        return error


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("producer", "consumer"))
    parser.add_argument("--controller", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--group", default="")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--seed", type=int, required=True)
    a = parser.parse_args()
    torch.set_num_threads(1)
    if a.role == "producer":
        produce(a.controller, a.model, a.rank, a.transport)
    else:
        rollout = Rollout(a.controller, a.model, a.group, a.rank, a.world_size, a.transport)
        rollout.serve(orders(), random.Random(a.seed))


if __name__ == "__main__":
    main()
