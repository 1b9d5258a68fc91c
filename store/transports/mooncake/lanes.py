"""Lanes: engines that read, each with staging memory of its own, and the pool that lends them out.

A lane reads for one fetch at a time. A peer that hangs therefore holds up the fetch that asked it, and no
other; at that fetch's deadline the lane's process is killed, and a new lane takes its place.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections.abc import Sequence

import torch

from weightdepot.store.errors import TransportUnavailable, WaitTimeout
from weightdepot.store.transports.base import ALIGNMENT
from weightdepot.store.transports.mooncake.batches import Entry
from weightdepot.store.transports.mooncake.engines import (
    EngineDied,
    EngineOverdue,
    EngineProcess,
    EngineRefused,
    Protocol,
)
from weightdepot.store.transports.mooncake.process import AHEAD

logger = logging.getLogger(__name__)

STALLED_S = 2.0
"""A lane for which nothing has happened for so long does not count against the pool's limit: its peer is
probably stopped, or its reader holds several iterators at a time. Others must not wait for it."""


class Staging:
    """Memory shared with an engine's process, which has no name and goes with the two of us."""

    def __init__(self, engine: EngineProcess, nbytes: int, register: bool, deadline: float) -> None:
        fd = os.memfd_create("weightdepot-staging", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
            self.tensor = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
            self.address: int = engine.call(
                "map", deadline, [fd], nbytes=nbytes, writable=True, register=register
            )  # in the engine's process
        finally:
            os.close(fd)


class Lane:
    """Three parts of staging: two are read into while the third is being emptied.

    After an error of any kind the lane is of no more use, and its staging may still be written to: `kill` it.
    """

    PARTS = AHEAD + 1

    def __init__(self, host: str, protocol: Protocol, part_bytes: int) -> None:
        self.part_bytes = part_bytes
        self.engine = EngineProcess(host, protocol, part_bytes)
        # Over TCP staging is not registered: what is registered, every peer may read and overwrite.
        self._register = protocol == "rdma"
        self._staging: Staging | None = None
        self._due = 0  # answers
        self._touched = time.monotonic()

    def prepare(self, deadline: float) -> None:
        """Wait until the engine is up. Raises TransportUnavailable, or as `finish` does."""
        self._touched = time.monotonic()
        self.engine.hello(deadline)
        if self._staging is None:
            # Each part is followed by room for the peer's card.
            self._staging = self.stage(self.PARTS * (self.part_bytes + ALIGNMENT), deadline)

    def stage(self, nbytes: int, deadline: float) -> Staging:
        return Staging(self.engine, nbytes, self._register, deadline)

    def unstage(self, staging: Staging, deadline: float) -> None:
        self.engine.call("unmap", deadline, address=staging.address)

    def part(self, which: int) -> tuple[torch.Tensor, int]:
        """A part with the room behind it: the memory, and its address in the engine's process."""
        assert self._staging is not None, "prepare was not called"
        size = self.part_bytes + ALIGNMENT
        start = which * size
        return self._staging.tensor[start : start + size], self._staging.address + start

    def begin(self, session: str, base: int, entries: Sequence[Entry], address: int) -> None:
        """Start reading: from `base` at the peer to `address` in the engine's process. At most `AHEAD` reads
        are under way at a time."""
        rows = [(address + e.staging, base + e.source, e.nbytes) for e in entries]
        self._due += 1
        self._touched = time.monotonic()
        self.engine.send("read", session=session, entries=rows)

    def finish(self, deadline: float) -> int:
        """Wait for what was begun first; the engine's answer, 0 when everything has arrived.

        Raises EngineDied, EngineOverdue, EngineRefused.
        """
        result: int = self.engine.receive(deadline)
        self._due -= 1
        self._touched = time.monotonic()
        return result

    @property
    def busy(self) -> bool:
        """Whether an answer is due: nothing else can be asked, and staging is being written to."""
        return self._due > 0

    @property
    def stalled(self) -> bool:
        return time.monotonic() - self._touched > STALLED_S

    def kill(self) -> None:
        """Nothing is written to its staging once this has returned; it is never used again all the same."""
        self.engine.kill()


class LanePool:
    """At most `limit` lanes that make progress, and `hard_limit` in all."""

    def __init__(
        self, host: str, protocol: Protocol, part_bytes: int, limit: int = 4, hard_limit: int = 16
    ) -> None:
        self.host = host
        self.protocol: Protocol = protocol
        self.part_bytes = part_bytes
        self.limit = limit
        self.hard_limit = hard_limit
        self._idle: list[Lane] = []
        self._lent: set[Lane] = set()
        self._changed = threading.Condition()
        self._closed = False
        self._checked = False
        self._unavailable = ""
        self._pid = os.getpid()

    def check(self, deadline: float) -> None:
        """Make sure, once, that engines run here, by starting the first lane.

        Raises TransportUnavailable, and WaitTimeout when it does not start by the deadline.
        """
        with self._changed:
            if self._unavailable:
                raise TransportUnavailable(self._unavailable)
            if self._checked:
                return
        try:
            self.release(self.acquire(deadline), usable=True)
        except TransportUnavailable as error:
            self._unavailable = error.message  # what is missing does not appear while we run
            raise
        self._checked = True

    def acquire(self, deadline: float) -> Lane:
        """A lane that is ready to read. Give it back with `release`.

        Raises WaitTimeout when there is none by the deadline, TransportUnavailable when none can start.
        """
        lane = self._take(deadline)
        try:
            lane.prepare(deadline)
        except BaseException as error:
            self.release(lane, usable=False)
            if isinstance(error, EngineOverdue):
                raise WaitTimeout(
                    "a Mooncake engine did not start in time: the machine is overloaded"
                ) from error
            if isinstance(error, (EngineDied, EngineRefused)):
                raise TransportUnavailable(f"a Mooncake engine failed at its start: {error}") from error
            raise
        return lane

    def release(self, lane: Lane, usable: bool) -> None:
        """usable: everything that was asked has arrived, and nobody looks at its staging any more."""
        with self._changed:
            self._lent.discard(lane)
            keep = usable and not lane.busy and not self._closed and len(self._idle) < self.limit
            if keep:
                self._idle.append(lane)
            self._changed.notify()
        if not keep:
            lane.kill()

    def close(self) -> None:
        """Kill all of them, also those that are reading: their fetches fail."""
        with self._changed:
            self._closed = True
            idle = list(self._idle)
            self._idle.clear()
            for lane in self._lent:
                lane.engine.interrupt()
            self._changed.notify_all()
        for lane in idle:
            lane.kill()

    @property
    def pids(self) -> list[int]:
        """Of the engines' processes."""
        with self._changed:
            return sorted(lane.engine.pid for lane in [*self._idle, *self._lent])

    def _take(self, deadline: float) -> Lane:
        if os.getpid() != self._pid:
            raise TransportUnavailable("this source was made before a fork: make one in the child")
        with self._changed:
            while True:
                if self._closed:
                    raise TransportUnavailable("this transport was closed")
                while self._idle:
                    lane = self._idle.pop()
                    if lane.engine.alive:
                        self._lent.add(lane)
                        return lane
                    logger.warning("an idle Mooncake engine ended by itself: %s", lane.engine.last_log())
                    lane.kill()
                moving = sum(not lane.stalled for lane in self._lent)
                if moving < self.limit and len(self._lent) < self.hard_limit:
                    lane = self._new()
                    self._lent.add(lane)
                    return lane
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise WaitTimeout(
                        f"no Mooncake engine was free in time: {len(self._lent)} are reading, of which "
                        f"{len(self._lent) - moving} wait for peers that do not answer"
                    )
                # Nobody tells us when a lane begins to stall.
                self._changed.wait(min(remaining, 0.25))

    def _new(self) -> Lane:
        return Lane(self.host, self.protocol, self.part_bytes)
