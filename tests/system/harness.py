"""What the tests of whole processes share."""

from __future__ import annotations

import json
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from weightdepot import Timeouts

ROOT = Path(__file__).parents[2]

# Short enough that a test of a time-out is quick, long enough for two busy cores.
QUICK = Timeouts(join=20, publish=20, seal=20, update=20, call=10, member=2, lease=4)


class Server:
    """`weightdepot serve` as a user starts it."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "weightdepot.api", "serve", "--log-level", "warning", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.url = next((word for word in line.split() if word.startswith("http")), "")
        if not self.url:
            self.stop()
            raise RuntimeError(f"the controller said {line!r}")

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


def together(*calls: Callable[[], Any], timeout: float = 60) -> list[Any]:
    """Run the calls at the same time, as ranks do; their results, or the first error in their order."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.result(timeout) for future in futures]


def eventually(check: Callable[[], bool], timeout: float = 20) -> None:
    deadline = time.monotonic() + timeout
    while not check():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


def free_controller_url() -> str:
    """An address at which nobody listens."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{s.getsockname()[1]}"


class Child:
    """A producer or consumer of `child.py`, in a process of its own."""

    def __init__(self, role: str, controller: str, model: str, **options: Any) -> None:
        arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        code = (
            "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); "
            "runpy.run_module('tests.system.child', run_name='__main__', alter_sys=True)"
        )
        self.process = subprocess.Popen(
            [
                sys.executable, "-c", code, str(ROOT), role, "--controller", controller, "--model", model,
                *arguments,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(json.loads(line))

    def heard(self, timeout: float = 60) -> dict[str, Any]:
        """Its next line."""
        try:
            return self._lines.get(timeout=timeout)
        except queue.Empty:
            raise AssertionError(f"it said nothing for {timeout} s (exit: {self.process.poll()})") from None

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def ask(self, line: str, timeout: float = 60) -> dict[str, Any]:
        self.tell(line)
        return self.heard(timeout)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
