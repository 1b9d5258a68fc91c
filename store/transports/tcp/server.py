"""The thread that serves segments over sockets."""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass, field

from weightdepot.store.errors import TransportUnavailable
from weightdepot.store.segments import Segment
from weightdepot.store.transports.base import Range
from weightdepot.store.transports.tcp import frames

logger = logging.getLogger(__name__)

MAX_READERS = 256
"""Connections at a time; further ones are closed at once, and the reader is told that it was refused."""
HELLO_S = 10.0  # a connection that has not said who it is by then is closed
STALLED_S = 120.0  # one whose reader takes nothing for so long, too
SEND = 1 << 22  # bytes handed to the kernel in one call
_ROUND_S = 2.0  # seconds between looks at who has stalled

_live: weakref.WeakSet[Server] = weakref.WeakSet()


@dataclass
class Served:
    """A segment that may be read by whoever knows the token."""

    fd: int
    nbytes: int
    key: bytes
    token: bytes


@dataclass
class _Reader:
    connection: socket.socket
    touched: float
    arrived: bytearray = field(default_factory=bytearray)
    segment: Served | None = None
    ranges: deque[Range] = field(default_factory=deque)
    sent: int = 0  # bytes of the first of `ranges`
    writing: bool = False
    welcomed: bool = False


class Server:
    """Listens from the start. One thread does everything, so that nothing here grows with the readers.

    Within a process that computes, the thread needs the interpreter for some microseconds for each `SEND`.
    """

    def __init__(self, host: str) -> None:
        self._listener = _listen(host)
        self.port: int = self._listener.getsockname()[1]
        self._served: dict[bytes, Served] = {}
        self._lock = threading.Lock()
        self._readers: dict[int, _Reader] = {}
        self._gone: deque[Served] = deque()
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        for end in (self._listener, self._wake, self._woken):
            end.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        _live.add(self)
        self._thread = threading.Thread(target=self._run, name="weightdepot-tcp", daemon=True)
        self._thread.start()

    def add(self, segment: Segment) -> Served:
        # opened anew: the segment's own file carries its lock
        fd = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        served = Served(
            fd,
            segment.nbytes,
            secrets.token_bytes(frames.KEY_BYTES),
            secrets.token_bytes(frames.TOKEN_BYTES),
        )
        with self._lock:
            self._served[served.key] = served
        return served

    def remove(self, served: Served) -> None:
        """Who reads it is cut off."""
        with self._lock:
            if self._served.pop(served.key, None) is None:
                return
            self._gone.append(served)
        self._nudge()

    def close(self) -> None:
        """Cut everybody off. May be called more than once."""
        with self._lock:
            self._closed = True
        self._nudge()
        self._thread.join(10.0)

    def forget_in_child(self) -> None:
        """After a fork: our copies of its sockets would keep readers waiting for a dead parent."""
        for held in (self._listener, self._wake, self._woken):
            held.close()
        for reader in self._readers.values():
            reader.connection.close()

    # -- in the thread -----------------------------------------------------------------------------------

    def _nudge(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake; closed: it has ended
            self._wake.send(b"\0")

    def _run(self) -> None:
        try:
            look = time.monotonic() + _ROUND_S
            while not self._closed:
                for key, _ in self._selector.select(_ROUND_S):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is self._woken:
                        with contextlib.suppress(BlockingIOError):
                            self._woken.recv(4096)
                    else:
                        self._serve(key.data)
                self._forget()
                if time.monotonic() >= look:
                    self._drop_stalled()
                    look = time.monotonic() + _ROUND_S
        finally:
            for reader in list(self._readers.values()):
                self._drop(reader)
            with self._lock:
                left = [*self._served.values(), *self._gone]
                self._served.clear()
                self._gone.clear()
            for served in left:
                os.close(served.fd)
            self._selector.close()
            for held in (self._listener, self._wake, self._woken):
                held.close()

    def _forget(self) -> None:
        while True:
            with self._lock:
                if not self._gone:
                    return
                served = self._gone.popleft()
            for reader in [r for r in self._readers.values() if r.segment is served]:
                self._drop(reader)
            os.close(served.fd)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # it went away before it was accepted, or no file is free
            logger.warning("a reader could not be accepted: %s", error)
            return
        if len(self._readers) >= MAX_READERS:
            with contextlib.suppress(OSError):
                connection.send(frames.REFUSED)
            connection.close()
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reader = _Reader(connection, time.monotonic())
        self._readers[connection.fileno()] = reader
        self._selector.register(connection, selectors.EVENT_READ, reader)

    def _serve(self, reader: _Reader) -> None:
        try:
            if not reader.writing:
                data = reader.connection.recv(1 << 16)
                if not data:
                    self._drop(reader)
                    return
                reader.arrived += data
            self._go_on(reader)
        except BlockingIOError:
            pass
        except (OSError, ValueError) as error:
            logger.debug("a reader is cut off: %s", error)
            self._drop(reader)

    def _go_on(self, reader: _Reader) -> None:
        """Answer as far as what has arrived, and the socket, allow."""
        if reader.segment is None and not self._greet(reader):
            return
        assert reader.segment is not None
        if not reader.ranges:
            found = frames.parse_request(reader.arrived)
            if found is None:
                self._want(reader, writing=False)
                return
            ranges, size = found
            del reader.arrived[:size]
            if any(r.stop > reader.segment.nbytes for r in ranges):
                raise ValueError("a range outside the segment")
            reader.ranges.extend(r for r in ranges if r.nbytes)
            self._want(reader, writing=True)
        # One call, then the others' turn.
        if reader.ranges:
            self._send(reader, reader.segment)
        if not reader.ranges:
            self._want(reader, writing=bool(reader.arrived))

    def _greet(self, reader: _Reader) -> bool:
        if len(reader.arrived) < frames.HELLO.size:
            return False
        magic, key, token = frames.HELLO.unpack_from(reader.arrived)
        del reader.arrived[: frames.HELLO.size]
        with self._lock:
            served = self._served.get(key)
        # One answer for all reasons: nobody learns here which keys there are.
        if magic != frames.MAGIC or served is None or not hmac.compare_digest(served.token, token):
            reader.connection.send(frames.REFUSED)
            self._drop(reader)
            return False
        reader.connection.send(frames.WELCOME)
        reader.segment = served
        reader.touched = time.monotonic()
        return True

    def _send(self, reader: _Reader, served: Served) -> None:
        wanted = reader.ranges[0]
        count = os.sendfile(
            reader.connection.fileno(),
            served.fd,
            wanted.offset + reader.sent,
            min(SEND, wanted.nbytes - reader.sent),
        )
        if count == 0:
            raise OSError("the segment's file is shorter than it was")
        reader.touched = time.monotonic()
        reader.sent += count
        if reader.sent == wanted.nbytes:
            reader.ranges.popleft()
            reader.sent = 0

    def _want(self, reader: _Reader, writing: bool) -> None:
        if reader.writing != writing:
            reader.writing = writing
            event = selectors.EVENT_WRITE if writing else selectors.EVENT_READ
            self._selector.modify(reader.connection, event, reader)

    def _drop_stalled(self) -> None:
        now = time.monotonic()
        for reader in list(self._readers.values()):
            limit = HELLO_S if reader.segment is None else STALLED_S
            if now - reader.touched > limit:
                self._drop(reader)

    def _drop(self, reader: _Reader) -> None:
        if self._readers.pop(reader.connection.fileno(), None) is not None:
            self._selector.unregister(reader.connection)
            reader.connection.close()


def _listen(host: str) -> socket.socket:
    """On the address that peers are told, or, where that is another machine's (a load balancer, a container's
    host), on all of them."""
    reason = ""
    for address in (host, ""):
        try:
            found = socket.getaddrinfo(address or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            return socket.create_server((address, 0), family=found[0][0], backlog=MAX_READERS)
        except OSError as error:
            reason = str(error)
    raise TransportUnavailable(f"no socket can be opened to serve from: {reason}")


def _after_fork_in_child() -> None:
    for server in list(_live):
        server.forget_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
