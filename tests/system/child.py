"""A producer or consumer in a process of its own, told what to do by lines on its standard input.

    producer: publish N [WISH=VALUE ...] | exit
    consumer: update [MIN] [WISH=VALUE ...] | prefetch [WISH=VALUE ...] | apply | exit
              (a WISH is an argument of that method: version=3, version=best, max_lag=1, timeout=2.5)

Each command is answered by one line of JSON. `--halt STAGE` makes the process stop (and say so) when it comes
to that stage for the second time, so that a test can kill it exactly there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from weightdepot import Consumer, Producer, Shard, WeightDepotError
from weightdepot.api.client import ControllerClient
from weightdepot.consumers import updating as updating_module
from weightdepot.producers import publishing as publishing_module
from weightdepot.producers import sealing as sealing_module

from .harness import QUICK

ROWS, COLUMNS, TENSORS = 64, 48, 5


def whole(version: int, tensor: int) -> torch.Tensor:
    """What tensor number `tensor` is in `version`: every element says which version it is of."""
    base = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
    return base + 10_000 * version + 1_000_000 * tensor


def version_of(tensors: list[torch.Tensor]) -> int | None:
    """The one version that these tensors are of; None for a mixture, or for none."""
    smallest = tensors[0].min().item()
    version = round(smallest / 10_000) if smallest == smallest // 1 else -1
    return version if all(torch.equal(t, whole(version, i)) for i, t in enumerate(tensors)) else None


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def halting(function: Callable[..., Any], stage: str, before: bool, seconds: float) -> Callable[..., Any]:
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if before and calls == 2:
            say(halted=stage)
            time.sleep(seconds)
        result = function(*args, **kwargs)
        if not before and calls == 2:
            say(halted=stage)
            time.sleep(seconds)
        return result

    return wrapped


STAGES: dict[str, tuple[Any, str, bool]] = {
    "opened": (ControllerClient, "open_version", False),
    "packing": (publishing_module, "pack", False),
    "digested": (sealing_module, "digest_tiles", False),
    "sealing": (ControllerClient, "seal", True),
    "sealed": (ControllerClient, "seal", False),
    "begun": (ControllerClient, "begin_round", False),
    "pulled": (updating_module, "pull", False),
    "staged": (ControllerClient, "stage_round", False),
    "finishing": (ControllerClient, "finish_round", True),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("producer", "consumer"))
    parser.add_argument("--controller", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--group", default="rollout")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--zero-copy", type=int, default=0)
    parser.add_argument("--halt", choices=tuple(STAGES))
    parser.add_argument("--halt-seconds", type=float, default=600)
    a = parser.parse_args()
    torch.set_num_threads(1)
    if a.halt:
        owner, name, before = STAGES[a.halt]
        setattr(owner, name, halting(getattr(owner, name), a.halt, before, a.halt_seconds))
    options: dict[str, Any] = {
        "model": a.model,
        "rank": a.rank,
        "world_size": a.world_size,
        "transport": a.transport,
    }
    try:
        if a.role == "producer":
            rows = ROWS // a.world_size
            first = a.rank * rows
            held = [torch.zeros(rows, COLUMNS) for _ in range(TENSORS)]
            weights = {f"t{i}": Shard(t, (ROWS, COLUMNS), (first, 0)) for i, t in enumerate(held)}
            options |= {"zero_copy": bool(a.zero_copy), "timeouts": QUICK}
            with Producer(a.controller, weights=weights, **options) as producer:
                say(joined=True, latest=producer.latest)
                for line in sys.stdin:
                    if line.strip() == "exit":
                        break
                    _, step, *wishes = line.split()
                    version = int(step)
                    for i, t in enumerate(held):
                        t.copy_(whole(version, i)[first : first + rows])
                    answer(partial(publish, producer, version, *wishes))
        else:
            got = [torch.full((ROWS, COLUMNS), float("nan")) for _ in range(TENSORS)]
            named = {f"t{i}": t for i, t in enumerate(got)}
            with Consumer(a.controller, weights=named, group=a.group, timeouts=QUICK, **options) as consumer:
                say(joined=True)
                for line in sys.stdin:
                    if line.strip() == "exit":
                        break
                    answer(
                        partial(consume, consumer, *line.split()),
                        seen=lambda: version_of(got),
                        held=lambda: consumer.version,
                    )
    except WeightDepotError as error:
        say(error=type(error).__name__, message=str(error))
        sys.exit(1)


def publish(producer: Producer, version: int, *words: str) -> int:
    done = producer.publish(version, **wishes_of(words))
    producer.flush()  # digests and the seal follow in the background
    return done.version


def wishes_of(words: Sequence[str]) -> dict[str, Any]:
    wishes: dict[str, Any] = {}
    for word in words:
        name, _, value = word.rpartition("=")
        wishes[name or "min_version"] = number(value)
    return wishes


def consume(consumer: Consumer, method: str, *words: str) -> int:
    wishes = wishes_of(words)
    if method == "prefetch":
        return consumer.prefetch(**wishes).result(QUICK.update)
    return consumer.apply() if method == "apply" else consumer.update(**wishes)


def number(text: str) -> int | float | str:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def nothing() -> int | None:
    return None


def answer(
    call: Callable[[], int],
    seen: Callable[[], int | None] = nothing,
    held: Callable[[], int | None] = nothing,
) -> None:
    begun = time.monotonic()
    try:
        version = call()
        say(version=version, seen=seen(), seconds=time.monotonic() - begun)
    except WeightDepotError as error:
        seconds = time.monotonic() - begun
        say(error=type(error).__name__, message=str(error), seconds=seconds, held=held(), seen=seen())


if __name__ == "__main__":
    main()
