"""The process of one engine: carries out what it is asked over a socket, until that closes.

    python process.py FD PARENT HOST PROTOCOL CALL_BYTES

It is run by its path and imports nothing of weightdepot, so that it starts in 0.2 s and stays small.

FD is an inherited SOCK_SEQPACKET socket; one JSON object a message, file descriptors beside it. The first
message is ours and says how the start went; each later one answers a request, {"ok": ...} or {"error": ...}.

    (start)                                     port of the handshake
    map     nbytes, writable, register  + fd    address of the memory here
    unmap   address                             null
    read    session, entries                    0, or what the engine answered instead

An entry is [local address, address at the peer, bytes]. Up to `AHEAD` reads may be asked for before the first
is answered; nothing else may be asked for while an answer to one is due.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

MAX_MESSAGE = 1 << 18  # bytes
MAX_ENTRIES = 1000  # in one call; the engine refuses more than about 2,048
AHEAD = 2  # reads under way at a time: with one, the wire is idle from its last byte to the next one's first

INSTALL = (
    "pip install 'weightdepot[mooncake-cpu]' (weightdepot[mooncake] where CUDA is installed) and "
    "apt install libibverbs1 libnuma1 libcurl4"
)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value


def load_engine() -> Any:
    """The class `TransferEngine`. Raises ImportError, saying what to install."""
    if "MC_LOG_DIR" in os.environ:
        raise ImportError("MC_LOG_DIR is set, with which the engine ends its process when imported: unset it")
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise ImportError(f"the Mooncake engine cannot be loaded ({error}): {INSTALL}") from error
    return TransferEngine


class Worker:
    """Owns the engine and the memory that it may touch."""

    def __init__(self, host: str, protocol: str, call_bytes: int) -> None:
        self.call_bytes = call_bytes
        self.maps: dict[int, tuple[int, bool]] = {}  # address -> bytes, whether they are registered
        self.engine = load_engine()()
        if self.engine.initialize(host, "P2PHANDSHAKE", protocol, "") != 0:
            raise RuntimeError(f"the engine does not start as {protocol} on {host}")

    def hello(self) -> dict[str, Any]:
        return {"port": self.engine.get_rpc_port()}

    def map(self, fd: int, nbytes: int, writable: bool, register: bool) -> int:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        # Staging is made present at once: page by page, within the kernel's receive, takes ten times as long.
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if writable and not register else 0)
        address = _libc.mmap(None, nbytes, protection, flags, fd, 0)
        if address == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), f"{nbytes} bytes cannot be mapped")
        if register and self.engine.register_memory(address, nbytes) != 0:
            _libc.munmap(address, nbytes)
            raise RuntimeError(f"the engine does not register {nbytes} bytes")
        self.maps[address] = (nbytes, register)
        return int(address)

    def unmap(self, address: int) -> None:
        nbytes, registered = self.maps.pop(address)
        if registered:
            self.engine.unregister_memory(address)
        # A peer that is still being answered from here gets an error: the kernel reads this memory, not we.
        _libc.munmap(address, nbytes)

    def begin(self, session: str, entries: list[list[int]]) -> list[int]:
        """The calls that were begun, 0 for one that the engine refused. Their size is bounded, so that the
        engine's own time-out fits each."""
        calls = []
        start = 0
        while start < len(entries):
            stop, nbytes = start, 0
            while stop < len(entries) and stop - start < MAX_ENTRIES:
                nbytes += entries[stop][2]
                if nbytes > self.call_bytes and stop > start:
                    break
                stop += 1
            to, at, sizes = (list(column) for column in zip(*entries[start:stop], strict=True))
            calls.append(int(self.engine.batch_transfer_async_read(session, to, at, sizes)))
            if calls[-1] == 0:
                break
            start = stop
        return calls

    def finish(self, calls: list[int]) -> int:
        """Wait for them all: 0 when everything has arrived."""
        if 0 in calls:  # to ask for the state of such a call would end the process
            return -1
        return int(self.engine.get_batch_transfer_status(calls)) if calls else 0


def _end_with(parent: int) -> None:
    """End when the parent has: a child that it forked may hold the other end of our socket open."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


def main() -> None:
    fd, parent, host, protocol, call_bytes = sys.argv[1:]
    connection = socket.socket(fileno=int(fd))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the parent's to act on
    threading.Thread(target=_end_with, args=(int(parent),), daemon=True).start()
    try:
        worker = Worker(host, protocol, int(call_bytes))
    except (ImportError, RuntimeError) as error:
        connection.send(json.dumps({"error": str(error)}).encode())
        os._exit(1)
    connection.send(json.dumps({"ok": worker.hello()}).encode())
    operations: dict[str, Callable[..., Any]] = {"map": worker.map, "unmap": worker.unmap}
    under_way: deque[list[int]] = deque()
    while True:
        if under_way and (len(under_way) == AHEAD or not select.select([connection], [], [], 0)[0]):
            connection.send(json.dumps({"ok": worker.finish(under_way.popleft())}).encode())
            continue
        message, fds, _, _ = socket.recv_fds(connection, MAX_MESSAGE, 1)
        if not message:
            os._exit(0)  # without the second that the engine's own clean-up takes
        reply: dict[str, Any]
        try:
            request = json.loads(message)
            if request["op"] == "read":
                under_way.append(worker.begin(**request["with"]))
                continue
            received = {"fd": fds[0]} if fds else {}
            reply = {"ok": operations[request["op"]](**request["with"], **received)}
        except (RuntimeError, OSError, ValueError, KeyError, TypeError) as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        finally:
            for received_fd in fds:
                os.close(received_fd)
        connection.send(json.dumps(reply).encode())


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file, whose names are not meant to be imported as top-level modules
    main()
