"""An engine's process, seen from outside."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Literal

from weightdepot.store.errors import TransportUnavailable
from weightdepot.store.transports.mooncake import process

Protocol = Literal["tcp", "rdma"]

START_S = 30.0  # importing the engine takes 0.2 s; a loaded machine may need many times that

# Set where the user has not. Slices of this size were fastest over TCP. MC_DISABLE_METACACHE is not among
# them: it makes every entry of a batch pay a handshake (220 µs). A peer that came back on its old port is
# told by its card instead, and read with a new engine.
_DEFAULTS = {
    "MC_LOG_LEVEL": "ERROR",
    "MC_TCP_SLICE_SIZE": str(128 << 10),
}


class EngineDied(Exception):
    """The process ended, or never started. Not for users: mapped by whoever asked."""


class EngineRefused(Exception):
    """It answered that it cannot do what was asked."""


class EngineOverdue(Exception):
    """No answer by the deadline. The engine is of no more use: kill it."""


def rdma_devices() -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(os.listdir("/sys/class/infiniband"))
    return []


def resolve(protocol: str) -> Protocol:
    """What "auto" means here: RDMA if there is a device for it, else TCP. Never one in place of the other."""
    if protocol == "auto":
        return "rdma" if rdma_devices() else "tcp"
    if protocol == "rdma":
        if not rdma_devices():
            raise TransportUnavailable("RDMA was asked for, but this machine has no device for it")
        return "rdma"
    if protocol == "tcp":
        return "tcp"
    raise TransportUnavailable(f'no such protocol: {protocol!r} (one of "auto", "tcp", "rdma")')


def check_installed() -> None:
    """Raise TransportUnavailable when the library is not there. Whether it loads, its process will say."""
    if importlib.util.find_spec("mooncake") is None:
        raise TransportUnavailable(f"the Mooncake engine is not installed: {process.INSTALL}")


class EngineProcess:
    """Starts at once, and is asked by one thread at a time. Killed when it is collected, at the latest."""

    def __init__(self, host: str, protocol: Protocol, call_bytes: int) -> None:
        check_installed()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `kill`
        self._hello: dict[str, Any] | None = None
        self._owner = os.getpid()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._socket, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * process.MAX_MESSAGE)
        arguments = [theirs.fileno(), os.getpid(), host, protocol, call_bytes]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, process.__file__, *map(str, arguments)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=_environment(protocol),
                start_new_session=True,  # the terminal's signals are ours to act on
            )
        self.pid = self._process.pid
        self._finalizer = weakref.finalize(self, _end, self._process, self._socket, self._log, os.getpid())
        # Not when the interpreter ends: that would wake daemon threads that wait for an answer, and one that
        # then lets go of a tensor aborts us. It sees our end of the socket close, and ends by itself.
        self._finalizer.atexit = False

    @property
    def alive(self) -> bool:
        return self._finalizer.alive and self._process.poll() is None

    def hello(self, deadline: float) -> dict[str, Any]:
        """Wait until it is ready; the port of its handshake.

        Raises TransportUnavailable when the engine cannot run here, EngineOverdue at the deadline.
        """
        if self._hello is None:
            try:
                self._hello = self.receive(deadline)
            except (EngineDied, EngineRefused) as error:
                raise TransportUnavailable(f"Mooncake cannot be used here: {error}") from error
        return self._hello

    def send(self, op: str, fds: Sequence[int] = (), **arguments: Any) -> None:
        """Ask for something; `receive` gives the answer. Raises EngineDied."""
        message = json.dumps({"op": op, "with": arguments}, separators=(",", ":")).encode()
        try:
            socket.send_fds(self._socket, [message], list(fds))
        except OSError as error:
            raise EngineDied(self._last_words(str(error))) from error

    def receive(self, deadline: float) -> Any:
        """The answer. Raises EngineDied, EngineOverdue, EngineRefused."""
        try:
            # A tenth of a millisecond: what has been answered already is taken, however late it is.
            self._socket.settimeout(max(1e-4, deadline - time.monotonic()))
            message = self._socket.recv(process.MAX_MESSAGE)
        except TimeoutError as error:
            raise EngineOverdue from error
        except OSError as error:
            raise EngineDied(self._last_words(str(error))) from error
        if not message:
            raise EngineDied(self._last_words("its process ended"))
        reply = json.loads(message)
        if "error" in reply:
            raise EngineRefused(reply["error"])
        return reply["ok"]

    def call(self, op: str, deadline: float, fds: Sequence[int] = (), **arguments: Any) -> Any:
        self.send(op, fds, **arguments)
        return self.receive(deadline)

    def kill(self) -> None:
        """It is gone when this returns, with everything that it was doing. May be called more than once."""
        self._finalizer()

    def interrupt(self) -> None:
        """Kill it under a thread that may wait for its answer, which then gets EngineDied and cleans up."""
        if self._finalizer.alive and os.getpid() == self._owner:
            self._process.kill()

    def last_log(self) -> str:
        """The last line that the engine wrote, for a message; empty when it wrote none."""
        try:
            size = os.fstat(self._log.fileno()).st_size
            text = os.pread(self._log.fileno(), 2000, max(0, size - 2000)).decode(errors="replace")
        except (OSError, ValueError):
            return ""
        lines = [line for line in text.splitlines() if line.strip()]
        # glog's prefix ("E1201 02:56:04.9 6797 file.cpp:1098] ") says nothing to a user.
        return lines[-1].rpartition("] ")[2] if lines else ""

    def _last_words(self, otherwise: str) -> str:
        return self.last_log() or otherwise


def _environment(protocol: Protocol) -> dict[str, str]:
    env = dict(os.environ)
    for name, value in _DEFAULTS.items():
        env.setdefault(name, value)
    # The engine takes the protocol's name for a hint only; with these it does what was asked or fails.
    env.pop("MC_FORCE_TCP", None)
    env.pop("MC_FORCE_HCA", None)
    env["MC_FORCE_HCA" if protocol == "rdma" else "MC_FORCE_TCP"] = "1"
    # It only ever touches host memory; a CUDA context would cost each process some hundred MiB of the device.
    env["CUDA_VISIBLE_DEVICES"] = ""
    env["PYTHONPATH"] = os.pathsep.join(str(Path(p or ".").absolute()) for p in sys.path)
    return env


def _end(process: subprocess.Popen[bytes], connection: socket.socket, log: IO[bytes], owner: int) -> None:
    if os.getpid() != owner:
        return  # in a forked child: it is not ours to end
    process.kill()
    connection.close()
    log.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5.0)
