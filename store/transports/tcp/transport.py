"""The protocol of `transports.base`, over sockets."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from weightdepot.store.errors import InvalidRequest, SourceLost, TransportUnavailable
from weightdepot.store.hosts import default_host
from weightdepot.store.segments import Segment
from weightdepot.store.transports.base import ALIGNMENT, Range, Source, Transport, field
from weightdepot.store.transports.tcp import frames
from weightdepot.store.transports.tcp.server import Served, Server

CONNECT_S = 10.0  # a peer whose machine has not answered by then is not there


class TcpTransport(Transport):
    """A serving thread, started at the first `serve`; and a connection for each fetch.

    host: the address that peers reach this machine at.

    Who reads must know a segment's token, which is in its endpoint. What travels is not encrypted.
    """

    name = "tcp"

    def __init__(self, *, host: str | None = None) -> None:
        self.host = host or default_host()
        self._lock = threading.Lock()
        self._server: Server | None = None
        self._served: dict[str, Served] = {}  # path of a segment -> how it is reached
        self._closed = False
        self._pid = os.getpid()

    def serve(self, segment: Segment) -> dict[str, Any]:
        self._check_open()
        with self._lock:
            if self._server is None:
                self._server = Server(self.host)
            served = self._served.get(segment.path)
            if served is None:
                served = self._served[segment.path] = self._server.add(segment)
            return {
                "host": self.host,
                "port": self._server.port,
                "key": served.key.hex(),
                "token": served.token.hex(),
                "nbytes": served.nbytes,
            }

    def withdraw(self, segment: Segment) -> None:
        with self._lock:
            served = self._served.pop(segment.path, None)
            if served is not None and self._server is not None and os.getpid() == self._pid:
                self._server.remove(served)

    def reach(self, endpoint: Mapping[str, Any], nbytes: int) -> Source:
        self._check_open()
        host: str = field(endpoint, "host", str, self.name)
        port: int = field(endpoint, "port", int, self.name)
        held: int = field(endpoint, "nbytes", int, self.name)
        key, token = (
            _secret(endpoint, name, size)
            for name, size in (("key", frames.KEY_BYTES), ("token", frames.TOKEN_BYTES))
        )
        if not 0 < port < 1 << 16:
            raise InvalidRequest(f"not an endpoint of {self.name}: port is {port}")
        if not 0 <= nbytes <= held:
            raise InvalidRequest(f"{nbytes} bytes were asked of a segment of {held}", peer=f"{host}:{port}")
        return _TcpSource((host, port), key, token, nbytes)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._served.clear()
            server, self._server = self._server, None
        if server is not None and os.getpid() == self._pid:
            server.close()

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequest("this transport is closed")
        if os.getpid() != self._pid:
            raise TransportUnavailable("this transport was made before a fork: make one in the child")


def _secret(endpoint: Mapping[str, Any], name: str, size: int) -> bytes:
    text: str = field(endpoint, name, str, TcpTransport.name)
    with contextlib.suppress(ValueError):
        secret = bytes.fromhex(text)
        if len(secret) == size:
            return secret
    raise InvalidRequest(f"not an endpoint of {TcpTransport.name}: {name} is not {size} bytes in hex")


class _TcpSource(Source):
    transport = "tcp"

    def __init__(self, address: tuple[str, int], key: bytes, token: bytes, nbytes: int) -> None:
        host, port = address
        self.peer = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.nbytes = nbytes
        self._address = address
        self._hello = frames.hello(key, token)
        self._lock = threading.Lock()
        self._reading: set[socket.socket] = set()
        self._closed = False

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for connection in self._reading:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def fetch(self, ranges: Sequence[Range], deadline: float) -> Iterator[tuple[int, torch.Tensor]]:
        if self._closed:
            raise InvalidRequest(f"the source {self.peer} is closed")
        self.check(ranges)
        for index, wanted in enumerate(ranges):
            if wanted.nbytes == 0:
                yield index, torch.empty(0, dtype=torch.uint8)
        order = sorted((i for i, r in enumerate(ranges) if r.nbytes), key=lambda i: ranges[i].offset)
        if not order:
            return
        total, done = len(ranges), len(ranges) - len(order)
        try:
            with self._connect(deadline) as connection:
                largest = max(ranges[i].nbytes for i in order)
                memory, base = _aligned(largest)
                view = memoryview(memory.numpy())  # type: ignore[arg-type]  # numpy 1's arrays are buffers too
                for first in range(0, len(order), frames.MAX_RANGES):
                    batch = order[first : first + frames.MAX_RANGES]
                    asked = frames.request([ranges[i] for i in batch])
                    connection.settimeout(_left(deadline))
                    connection.sendall(asked if first else self._hello + asked)
                    if first == 0:
                        self._welcome(connection)
                    for index in batch:
                        wanted = ranges[index]
                        at = base + wanted.offset % ALIGNMENT
                        self._receive(connection, view[at : at + wanted.nbytes], deadline)
                        yield index, memory[at : at + wanted.nbytes]
                        done += 1
        except TimeoutError as error:
            raise self.overdue(done, total) from error
        except OSError as error:
            raise self._lost(error.strerror or str(error)) from error

    @contextlib.contextmanager
    def _connect(self, deadline: float) -> Iterator[socket.socket]:
        left = _left(deadline)
        try:
            connection = socket.create_connection(self._address, timeout=min(left, CONNECT_S))
        except TimeoutError:
            if left <= CONNECT_S:
                raise
            raise self._lost(f"nobody answered within {CONNECT_S:g} s") from None
        try:
            with self._lock:
                if self._closed:
                    raise self._lost("it was closed here")
                self._reading.add(connection)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield connection
        finally:
            with self._lock:
                self._reading.discard(connection)
            connection.close()

    def _welcome(self, connection: socket.socket) -> None:
        answer = connection.recv(1)
        if answer == frames.REFUSED:
            raise self._lost("it does not serve this segment (any more), or has too many readers")
        if answer != frames.WELCOME:
            raise self._lost("the connection was closed" if not answer else "another program answers there")

    def _receive(self, connection: socket.socket, into: memoryview, deadline: float) -> None:
        at = 0
        while at < len(into):
            connection.settimeout(_left(deadline))
            count = connection.recv_into(into[at:])
            if not count:
                raise self._lost("the connection was closed")
            at += count

    def _lost(self, reason: str) -> SourceLost:
        return SourceLost(
            f"{self.peer} cannot be read over {self.transport}: {reason}",
            peer=self.peer,
            transport=self.transport,
        )


def _left(deadline: float) -> float:
    """Raises TimeoutError when nothing is left."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _aligned(nbytes: int) -> tuple[torch.Tensor, int]:
    """Memory for `nbytes` at any place modulo ALIGNMENT, and where in it the first multiple of that lies."""
    memory = torch.empty(nbytes + 2 * ALIGNMENT, dtype=torch.uint8)
    return memory, -memory.data_ptr() % ALIGNMENT
