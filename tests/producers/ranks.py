"""Real trainer ranks in processes of their own, which publish to a real controller.

A rank's program is a module of this folder with a function `main(rank: Rank)`. It publishes what it likes,
and then stays until it is told to go, since versions live in its memory.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch

ROOT = Path(__file__).parents[2]
_numbers = itertools.count()


class Rank:
    """What a rank's program has in hand."""

    def __init__(self, rank: int, world_size: int, controller: str, folder: Path) -> None:
        self.rank, self.world_size, self.controller, self.folder = rank, world_size, controller, folder
        self.producers = contextlib.ExitStack()
        self.refused: dict[str, str] = {}
        self.stated: dict[str, list[str]] = {}

    def join(self) -> None:
        """The default process group, over gloo."""
        meet = f"file://{self.folder / f'meet-{self.world_size}'}"
        torch.distributed.init_process_group(
            "gloo",
            init_method=meet,
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=60),
        )

    def producer(self, model: str, weights: Any, **options: Any) -> Any:
        from weightdepot import Producer

        made = Producer(
            self.controller,
            model=model,
            weights=weights,
            rank=self.rank,
            world_size=self.world_size,
            transport="shm",
            **options,
        )
        self.stated[model] = [t.name for t in made.layout.tensors]
        return self.producers.enter_context(made)

    def publish(self, model: str, weights: Any, version: int = 1, **options: Any) -> Any:
        producer = self.producer(model, weights, **options)
        producer.publish(version, timeout=60)
        return producer

    def refuse(self, what: str, error: BaseException) -> None:
        self.refused[what] = f"{type(error).__name__}: {error}"

    def save(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        """What readers should get, as the framework itself gathers it; the first rank's counts."""
        if self.rank == 0:
            from safetensors.torch import save_file

            path = self.folder / name
            path.mkdir()
            save_file(
                {n: t.detach().contiguous().clone() for n, t in tensors.items()}, path / "x.safetensors"
            )


def run() -> None:
    program, rank, world_size, controller, folder = sys.argv[1:6]
    torch.set_num_threads(1)
    mine = Rank(int(rank), int(world_size), controller, Path(folder))
    try:
        importlib.import_module(f"tests.producers.{program}").main(mine)
        sys.stderr.flush()
        print("READY " + json.dumps({"refused": mine.refused, "stated": mine.stated}), flush=True)
        sys.stdin.readline()
        mine.producers.close()
    except BaseException:  # noqa: BLE001 - said, and the process ends
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # the frameworks' own threads and groups are not waited for


@dataclass
class Said:
    refused: list[dict[str, str]]
    """For each rank: what was refused, and how."""
    stated: dict[str, set[str]]
    """For each model: the tensors that its ranks publish together."""

    def add(self, line: dict[str, Any]) -> None:
        self.refused.append(line["refused"])
        for model, names in line["stated"].items():
            self.stated.setdefault(model, set()).update(names)


@contextlib.contextmanager
def ranks(
    program: str, world_size: int, controller: str, folder: Path, timeout: float = 240, **environment: str
) -> Iterator[Said]:
    """Start them, wait until all have published, and give what they say; end them afterwards."""
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from tests.producers.ranks import run; run()"
    settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    logs = [(folder / f"{program}-{r}.log").open("w") for r in range(world_size)]
    children = [
        subprocess.Popen(
            [
                sys.executable, "-W", "ignore", "-c", code, str(ROOT), program, str(r), str(world_size),
                controller, str(folder),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=logs[r],
            text=True,
            env={**os.environ, **settings, "LOCAL_RANK": str(r), **environment},
        )
        for r in range(world_size)
    ]  # fmt: skip
    # one that hangs is ended, so that reading what it says ends too
    alarm = threading.Timer(timeout, _kill, [children])
    alarm.start()
    try:
        said = Said([], {})
        for r, child in enumerate(children):
            line = _ready(child.stdout)
            assert line, (
                f"rank {r} of {program} ended:\n{(folder / f'{program}-{r}.log').read_text()[-4000:]}"
            )
            said.add(json.loads(line))
        yield said
    finally:
        alarm.cancel()
        for child in children:
            with contextlib.suppress(OSError):
                child.communicate("go\n", timeout=20)
        for child, log in zip(children, logs, strict=True):
            child.kill()
            child.wait()
            log.close()


def _kill(children: list[subprocess.Popen[str]]) -> None:
    for child in children:
        child.kill()


def _ready(stream: IO[str] | None) -> str:
    assert stream is not None
    for line in stream:  # frameworks print
        if line.startswith("READY "):
            return line.removeprefix("READY ")
    return ""


def pulled(
    controller: str, model: str, expected: dict[str, torch.Tensor], version: int = 1
) -> dict[str, torch.Tensor]:
    """What a reader of these names and forms gets."""
    from weightdepot import Consumer

    got = {name: torch.empty_like(t) for name, t in expected.items()}
    with Consumer(
        controller, model=model, weights=got, group=f"reader-{next(_numbers)}", rank=0, world_size=1
    ) as consumer:
        assert consumer.update(min_version=version, timeout=30) == version
    return got


def different(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    return [
        name
        for name, t in expected.items()
        if not torch.equal(got[name].contiguous().view(torch.uint8), t.contiguous().view(torch.uint8))
    ]
