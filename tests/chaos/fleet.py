"""The processes of a run: each one can be killed or stopped at any instant, and comes back."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ..system.harness import ROOT, Redis, Server

COMES_BACK_S = 60.0  # a process that was started again and does not answer within this is an error


class Victim(Protocol):
    name: str

    def kill(self) -> None: ...
    def stop(self) -> None: ...
    def resume(self) -> None: ...
    def start(self) -> None: ...


class Life:
    """One start of a worker, until its death."""

    def __init__(self, arguments: list[str], log: Path, hear: Callable[[dict[str, Any]], None]) -> None:
        code = (
            "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); "
            "runpy.run_module('tests.chaos.worker', run_name='__main__', alter_sys=True)"
        )
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, str(ROOT), *arguments],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip
        self.joined = threading.Event()
        self.answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self._hear = hear
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not line.endswith("\n"):
                break  # it was killed in the middle of a word
            said = json.loads(line)
            self._hear(said)
            self.answers.put(said)
            if said.get("joined"):
                self.joined.set()
        self.process.wait()
        self._hear({"ended": time.monotonic()})
        self.answers.put({"died": True})

    def tell(self, line: str) -> None:
        """To a process that has just died it says nothing: its `died` is among the answers."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):  # it is dead, or buried already
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def bury(self) -> None:
        """Returns when all that it said was heard, before its successor says something."""
        self.process.wait()
        self._reader.join()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):  # what was still to be said to it
                stream.close()


class Worker:
    """A producer or consumer rank of `worker.py`. What it says goes to `hear`, with its name."""

    def __init__(self, name: str, arguments: list[str], log: Path, hear: Callable[[str, Any], None]) -> None:
        self.name, self._arguments, self._log = name, arguments, log
        self._hear = partial(hear, name)
        self.crashes: list[str] = []
        self.start()

    def start(self) -> None:
        self.life = Life(self._arguments, self._log, self._hear)

    def kill(self) -> None:
        self._note_crash()
        self.life.process.kill()
        self.life.bury()

    def stop(self) -> None:
        self.life.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.life.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """A clean end, or the hard one where that takes too long."""
        self._note_crash()
        self.resume()
        self.life.tell("exit")
        try:
            self.life.process.wait(20)
        except subprocess.TimeoutExpired:
            self.crashes.append(f"{self.name} did not end when it was told to")
            self.life.process.kill()
        self.life.bury()

    def _note_crash(self) -> None:
        status = self.life.process.poll()
        if status is not None:
            self.crashes.append(f"{self.name} ended by itself with {status}, see {self._log}")


class Controller:
    """`weightdepot serve` on the common Redis, always at the same port. Its supervisor starts it again for as
    long as it does not come up (it refuses to without its Redis)."""

    def __init__(self, name: str, redis_url: str, log: Path) -> None:
        self.name, self._redis_url, self._log = name, redis_url, log
        self._server = Server("--port", "0", "--redis-url", redis_url, log=log)
        self.url = self._server.url
        self._port = self.url.rsplit(":", 1)[1]
        self.error = ""

    def start(self) -> None:
        deadline = time.monotonic() + COMES_BACK_S
        while True:
            try:
                self._server = Server("--port", self._port, "--redis-url", self._redis_url, log=self._log)
                return
            except RuntimeError as error:
                if time.monotonic() > deadline:
                    self.error = f"{self.name} did not come back: {error}"
                    return
                time.sleep(0.3)

    def kill(self) -> None:
        self._server.kill()

    def stop(self) -> None:
        self._server.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._server.signal(signal.SIGCONT)

    def end(self) -> None:
        self.resume()
        self._server.stop()


class Index:
    """The Redis that both controllers use."""

    def __init__(self, name: str, data: Path) -> None:
        self.name = name
        self.redis = Redis(data)

    def start(self) -> None:
        self.redis.start()

    def kill(self) -> None:
        self.redis.kill()

    def stop(self) -> None:
        self.redis.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.redis.signal(signal.SIGCONT)

    def end(self) -> None:
        self.redis.stop()
