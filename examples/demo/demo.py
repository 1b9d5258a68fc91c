"""weightdepot's main job, end to end, on this machine.

Starts a controller with its embedded index; two trainer ranks (FSDP2 over gloo) that take real optimizer
steps on a Qwen3 model; a rollout engine of two tensor-parallel ranks with fused parameters, and one of a
single rank in the checkpoint's own layout. Every version that arrives is compared, bit for bit, with the
trainers' full weights. Any difference makes the exit status non-zero.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table
from sizes import SIZES

HERE = Path(__file__).parent
TRAINERS = 2
ENGINES = (("fused-tp2", "fused", 2), ("plain", "plain", 1))  # group, kind, ranks
START = 300.0  # seconds for all processes to import, build and join
STEP = 300.0  # seconds for one version to be trained, published and compared

Message = dict[str, Any]


class Failed(Exception):
    """The demo cannot go on; the message says why."""


@dataclass
class Child:
    """A process whose lines of JSON are put into a common queue."""

    name: str
    process: subprocess.Popen[str]
    log: Path

    @classmethod
    def start(cls, name: str, command: list[str], folder: Path, messages: queue.Queue[Message]) -> Child:
        log = folder / f"{name}.log"
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        with log.open("w") as errors:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
        threading.Thread(target=cls._read, args=(name, process, messages), daemon=True).start()
        return cls(name, process, log)

    @staticmethod
    def _read(name: str, process: subprocess.Popen[str], messages: queue.Queue[Message]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                try:
                    messages.put(json.loads(line))
                except json.JSONDecodeError:
                    messages.put({"kind": "text", "text": line.strip()})
        messages.put({"kind": "ended", "name": name, "status": process.wait()})

    def say(self, word: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(word + "\n")
            self.process.stdin.flush()

    def stop(self, grace: float) -> None:
        try:
            self.process.wait(grace)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()


@dataclass
class Version:
    """What was seen of one version."""

    version: int
    published: dict[int, Message] = field(default_factory=dict)
    updated: dict[tuple[str, int], Message] = field(default_factory=dict)

    @property
    def differences(self) -> list[str]:
        return [f"{g}/{r}: {n}" for (g, r), m in sorted(self.updated.items()) for n in m["differences"]]

    def total(self, what: str) -> int:
        return sum(int(m[what]) for m in self.updated.values())

    @property
    def stall(self) -> float:
        return max(float(m["stall"]) for m in self.published.values())

    def pull(self, group: str) -> float:
        """Seconds of the group's slowest rank."""
        return max(float(m["pull"]) for (g, _), m in self.updated.items() if g == group)

    @property
    def transports(self) -> set[str]:
        return {t for m in self.updated.values() for t in m["transports"]}

    def row(self) -> list[str]:
        pulls = [self.pull(group) for group, _, _ in ENGINES]
        moved = self.total("moved")
        return [
            str(self.version),
            f"{max(float(m['loss']) for m in self.published.values()):.3f}",
            f"{self.stall * 1e3:.0f}",
            " / ".join(f"{p * 1e3:.0f}" for p in pulls),
            f"{self.total('needed') / 1e6:.1f}",
            f"{moved / 1e6:.1f}",
            f"{moved / max(sum(float(m['pull']) for m in self.updated.values()), 1e-9) / 1e9:.2f}",
            ", ".join(sorted({t.split("/")[0] for t in self.transports})),
            "no" if self.differences else "yes",
        ]


def table(versions: list[Version], title: str) -> Table:
    out = Table(
        title=title,
        box=SIMPLE_HEAD,
        pad_edge=False,
        caption="stall: of publish; pull: fused / plain; GB/s: of one rank",
    )
    for name in ("v", "loss", "stall ms", "pull ms", "need MB", "moved MB", "GB/s", "over", "equal"):
        out.add_column(name, justify="right", no_wrap=True)
    for version in versions:
        out.add_row(*version.row(), style="red" if version.differences else None)
    return out


def start_controller(folder: Path) -> tuple[Child, str]:
    """A controller with its embedded index, and the URL at which it answers."""
    said: queue.Queue[Message] = queue.Queue()
    command = [sys.executable, "-m", "weightdepot.api", "serve", "--host", "127.0.0.1", "--port", "0"]
    child = Child.start("controller", command, folder, said)
    try:
        first = said.get(timeout=60)
    except queue.Empty:
        first = {"kind": "nothing"}
    if first["kind"] != "text" or "http" not in first["text"]:
        child.stop(grace=0)
        raise Failed(f"the controller did not start: {first}\n{child.log.read_text()}")
    return child, first["text"].split()[-1]


class Demo:
    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.messages: queue.Queue[Message] = queue.Queue()
        self.controller: Child | None = None
        self.url = ""  # where the controller answers
        self.children: list[Child] = []
        self.parameters = 0
        self.versions: list[Version] = []

    @property
    def trainers(self) -> list[Child]:
        return [c for c in self.children if c.name.startswith("trainer")]

    def start_controllers(self) -> str:
        """Where they answer."""
        self.controller, url = start_controller(self.folder)
        return url

    def command(self, name: str, command: list[str]) -> list[str]:  # noqa: ARG002
        """How the child of that name is started: here, as it is."""
        return command

    def start(self) -> None:
        self.url = self.start_controllers()
        common = [
            "--controller", self.url, "--model", "policy", "--size", self.options.size, "--steps",
            str(self.options.steps), "--transport", self.options.transport, "--references", str(self.folder),
        ]  # fmt: skip
        for rank in range(TRAINERS):
            self._python(
                f"trainer-{rank}", "trainer.py", *common, "--rank", str(rank), "--world-size", str(TRAINERS),
                "--rendezvous", str(self.folder / "rendezvous"),
            )  # fmt: skip
        for group, kind, ranks in ENGINES:
            for rank in range(ranks):
                self._python(
                    f"{group}-{rank}", "rollout.py", *common, "--rank", str(rank), "--world-size", str(ranks),
                    "--group", group, "--kind", kind,
                )  # fmt: skip

    def _python(self, name: str, script: str, *arguments: str) -> None:
        command = [sys.executable, str(HERE / script), *arguments]
        self.children.append(Child.start(name, self.command(name, command), self.folder, self.messages))

    def _next(self, deadline: float) -> Message:
        try:
            message = self.messages.get(timeout=max(deadline - time.monotonic(), 0.01))
        except queue.Empty:
            raise Failed("a process did not answer in time") from None
        if message["kind"] == "text":  # a library's, not ours
            return self._next(deadline)
        if message["kind"] == "ended":
            raise Failed(f"{message['name']} ended with status {message['status']}")
        return message

    def run(self) -> Iterator[Version]:
        """Start everything, and yield each version when every rank has it."""
        self.start()
        ranks = TRAINERS + sum(n for _, _, n in ENGINES)
        deadline, ready = time.monotonic() + START, 0
        while ready < ranks:
            message = self._next(deadline)
            if message["kind"] == "parameters":
                self.parameters = message["count"]
            ready += message["kind"] == "ready"
        for step in range(1, self.options.steps + 1):
            for trainer in self.trainers:
                trainer.say("go")
            version, deadline = Version(step), time.monotonic() + STEP
            while len(version.published) < TRAINERS or len(version.updated) < ranks - TRAINERS:
                message = self._next(deadline)
                if message["version"] != step:
                    raise Failed(f"{message} came while version {step} was awaited")
                if message["kind"] == "published":
                    version.published[message["rank"]] = message
                else:
                    version.updated[message["group"], message["rank"]] = message
            (self.folder / f"{step}.safetensors").unlink()
            self.versions.append(version)
            yield version

    def stop(self) -> None:
        for child in self.children:
            child.say("end")
        for child in self.children:
            child.stop(grace=20)
        if self.controller is not None:
            self.controller.process.terminate()
            self.controller.stop(grace=20)

    def logs(self) -> str:
        parts = []
        for child in [*self.children, *([self.controller] if self.controller else [])]:
            text = child.log.read_text().strip()
            if text:
                parts.append(f"--- {child.name}\n{text[-3000:]}")
        return "\n".join(parts)

    def summary(self, seconds: float) -> dict[str, Any]:
        needed, moved = (sum(v.total(what) for v in self.versions) for what in ("needed", "moved"))
        return {
            "parameters": self.parameters,
            "versions": len(self.versions),
            "rollout_ranks": sum(n for _, _, n in ENGINES),
            "comparisons": sum(len(v.updated) for v in self.versions),
            "differences": [f"version {v.version}: {d}" for v in self.versions for d in v.differences],
            "bytes_needed": needed,
            "bytes_moved": moved,
            "moved_over_needed": round(moved / needed, 4) if needed else None,
            "publish_stall_ms": [round(v.stall * 1e3, 1) for v in self.versions],
            "pull_ms": [{g: round(v.pull(g) * 1e3, 1) for g, _, _ in ENGINES} for v in self.versions],
            "transports": sorted({t for v in self.versions for t in v.transports}),
            "seconds": round(seconds, 1),
        }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./run demo", description=__doc__)
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps, and so versions (default 6)")
    parser.add_argument("--transport", choices=("auto", "shm", "tcp", "mooncake"), default="auto")
    parser.add_argument("--size", choices=tuple(SIZES), default="100m", help="of the model (default 100m)")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON, and nothing else")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    return options


def show(demo: Demo, console: Console) -> None:
    title = f"Qwen3 ({demo.options.size}), {TRAINERS} FSDP2 trainers, {len(ENGINES)} rollout engines"
    with Live(table([], title), console=console, refresh_per_second=4) as live:
        for _ in demo.run():
            live.update(table(demo.versions, f"{title}, {demo.parameters / 1e6:.0f} M weights"))


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    console = Console(stderr=options.json)
    folder = Path(tempfile.mkdtemp(prefix="weightdepot-demo-"))
    demo, begun = Demo(options, folder), time.monotonic()
    try:
        if options.json:
            for _ in demo.run():
                pass
        else:
            show(demo, console)
    except Failed as error:
        console.print(f"[red]The demo failed: {error}[/red]\n{demo.logs()}", markup=True, highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("Interrupted.")
        return 130
    finally:
        demo.stop()
        shutil.rmtree(folder, ignore_errors=True)
    summary = demo.summary(time.monotonic() - begun)
    bad = bool(summary["differences"]) or summary["bytes_moved"] != summary["bytes_needed"]
    if options.json:
        print(json.dumps(summary, indent=2))
    else:
        console.print(
            f"\n{summary['versions']} versions, {summary['rollout_ranks']} rollout ranks, "
            f"{summary['comparisons']} comparisons, {len(summary['differences'])} differences; "
            f"{summary['bytes_moved'] / 1e6:.1f} MB moved for {summary['bytes_needed'] / 1e6:.1f} MB needed "
            f"over {', '.join(summary['transports'])}; {summary['seconds']} s."
        )
        for difference in summary["differences"]:
            console.print(f"[red]differs: {difference}[/red]")
        console.print(
            "[red]FAILED[/red]" if bad else "[green]Every rank is bit-equal on every version.[/green]"
        )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
