"""The protocol of `transports.base`, over Mooncake."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weightdepot.store.errors import InvalidRequest, SourceLost, TransportUnavailable
from weightdepot.store.hosts import default_host
from weightdepot.store.segments import Segment
from weightdepot.store.transports.base import ALIGNMENT, Range, Source, Transport, field
from weightdepot.store.transports.mooncake.batches import Batch, Entry, plan_batches, split
from weightdepot.store.transports.mooncake.engines import (
    START_S,
    EngineDied,
    EngineOverdue,
    EngineProcess,
    EngineRefused,
    Protocol,
    check_installed,
    resolve,
)
from weightdepot.store.transports.mooncake.lanes import Lane, LanePool, Staging
from weightdepot.store.transports.mooncake.process import AHEAD, MAX_ENTRIES

CARD_BYTES = 32
RETRY_S = 1.0
ENTRY_BYTES = 16 << 20  # of one entry: the engine moves several at a time


@dataclass(frozen=True)
class MooncakeEndpoint:
    """What a reader must know. Every start of a serving engine is a new generation."""

    session: str  # host:port of the engine's handshake
    protocol: str
    generation: str  # hex, CARD_BYTES long when decoded
    card: int  # address of the generation in the engine's process: proves who answers
    base: int  # address of the segment in the engine's process
    nbytes: int

    @classmethod
    def parse(cls, endpoint: Mapping[str, Any]) -> MooncakeEndpoint:
        """Raises InvalidRequest when it is none."""
        name = MooncakeTransport.name
        parsed = cls(
            session=field(endpoint, "session", str, name),
            protocol=field(endpoint, "protocol", str, name),
            generation=field(endpoint, "generation", str, name),
            card=field(endpoint, "card", int, name),
            base=field(endpoint, "base", int, name),
            nbytes=field(endpoint, "nbytes", int, name),
        )
        with contextlib.suppress(ValueError):
            if len(bytes.fromhex(parsed.generation)) == CARD_BYTES and parsed.address()[1] > 0:
                return parsed
        raise InvalidRequest(f"not an endpoint of {name}: {dict(endpoint)}")

    def address(self) -> tuple[str, int]:
        host, _, port = self.session.rpartition(":")
        return host.strip("[]"), int(port)


class MooncakeTransport(Transport):
    """One serving engine, started at the first `serve`, and a pool of lanes to read with.

    host: the address that peers reach this machine at.
    protocol: "tcp", "rdma", or "auto" for RDMA if and only if there is a device. Both sides need the same.
    batch_bytes: read at a time. Each lane holds three times that as staging.
    lanes: fetches that read at the same time; more wait for one of them.

    Whoever reaches the ports of the serving engine can read what is served: keep them within the cluster's
    network. Over TCP nobody can write to it, because the engine's process maps it for reading only; over
    RDMA whoever knows the addresses can.
    """

    name = "mooncake"

    def __init__(
        self, *, host: str | None = None, protocol: str = "auto", batch_bytes: int = 32 << 20, lanes: int = 4
    ) -> None:
        self.protocol: Protocol = resolve(protocol)
        self.host = host or default_host()
        self._batch_bytes = -(-batch_bytes // ALIGNMENT) * ALIGNMENT
        self._lanes = LanePool(self.host, self.protocol, self._batch_bytes, limit=lanes)
        self._lock = threading.Lock()  # over the serving engine, which is asked by one thread at a time
        self._engine: EngineProcess | None = None
        self._generation = ""
        self._card = 0
        self._served: dict[str, MooncakeEndpoint] = {}  # path of a segment -> how it is reached
        self._closed = False
        self._pid = os.getpid()

    def serve(self, segment: Segment) -> dict[str, Any]:
        self._check_open()
        deadline = time.monotonic() + START_S
        with self._lock:
            engine = self._serving_engine(deadline)
            endpoint = self._served.get(segment.path)
            if endpoint is None:
                base = self._map(engine, segment, deadline) if segment.nbytes else 0
                endpoint = self._served[segment.path] = MooncakeEndpoint(
                    session=_session(self.host, engine.hello(deadline)["port"]),
                    protocol=self.protocol,
                    generation=self._generation,
                    card=self._card,
                    base=base,
                    nbytes=segment.nbytes,
                )
        return dict(vars(endpoint))

    def withdraw(self, segment: Segment) -> None:
        with self._lock:
            endpoint = self._served.pop(segment.path, None)
            if endpoint is None or not endpoint.nbytes or self._engine is None:
                return
            try:
                self._engine.call("unmap", time.monotonic() + START_S, address=endpoint.base)
            except (EngineDied, EngineOverdue, EngineRefused):
                # It serves nothing then, or must not go on serving this.
                self._engine.kill()

    def reach(self, endpoint: Mapping[str, Any], nbytes: int) -> Source:
        self._check_open()
        parsed = MooncakeEndpoint.parse(endpoint)
        if not 0 <= nbytes <= parsed.nbytes:
            raise InvalidRequest(
                f"{nbytes} bytes were asked of a segment of {parsed.nbytes}", peer=parsed.session
            )
        if parsed.protocol != self.protocol:
            raise TransportUnavailable(
                f"{parsed.session} serves over {parsed.protocol}, and this process reads over {self.protocol}"
            )
        check_installed()
        self._lanes.check(time.monotonic() + START_S)
        return _MooncakeSource(self._lanes, parsed, nbytes, self._batch_bytes)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._served.clear()
            if self._engine is not None:
                self._engine.kill()
        self._lanes.close()

    @property
    def pids(self) -> dict[str, list[int]]:
        """Processes of the engines that serve (one or none) and that read."""
        engine = self._engine
        return {"serving": [engine.pid] if engine is not None else [], "reading": self._lanes.pids}

    def _serving_engine(self, deadline: float) -> EngineProcess:
        """The one there is, or, at first and after it died, a new one of a new generation."""
        if self._engine is not None and self._engine.alive:
            return self._engine
        if self._engine is not None:
            self._engine.kill()
        self._served.clear()
        engine = EngineProcess(self.host, self.protocol, self._batch_bytes)
        try:
            engine.hello(deadline)
            generation = uuid.uuid4().bytes + secrets.token_bytes(CARD_BYTES - 16)
            card = os.memfd_create("weightdepot-card", os.MFD_CLOEXEC)
            try:
                os.write(card, generation)
                os.ftruncate(card, os.sysconf("SC_PAGE_SIZE"))
                self._card = self._share(engine, card, os.sysconf("SC_PAGE_SIZE"), deadline)
            finally:
                os.close(card)
        except BaseException:
            engine.kill()
            raise
        self._engine, self._generation = engine, generation.hex()
        return engine

    def _map(self, engine: EngineProcess, segment: Segment, deadline: float) -> int:
        # Opened anew: the segment's own file carries its lock, which must end with us, not with the engine.
        fd = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return self._share(engine, fd, segment.nbytes, deadline)
        finally:
            os.close(fd)

    def _share(self, engine: EngineProcess, fd: int, nbytes: int, deadline: float) -> int:
        writable = self.protocol == "rdma"  # a device's registration asks for the right to write
        try:
            return int(engine.call("map", deadline, [fd], nbytes=nbytes, writable=writable, register=True))
        except (EngineDied, EngineOverdue, EngineRefused) as error:
            engine.kill()
            raise TransportUnavailable(f"Mooncake cannot serve {nbytes} bytes: {error}") from error

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequest("this transport is closed")
        if os.getpid() != self._pid:
            raise TransportUnavailable("this transport was made before a fork: make one in the child")


class _MooncakeSource(Source):
    def __init__(self, lanes: LanePool, endpoint: MooncakeEndpoint, nbytes: int, batch_bytes: int) -> None:
        self.transport = f"mooncake/{endpoint.protocol}"
        self.peer = endpoint.session
        self.nbytes = nbytes
        self._lanes = lanes
        self._endpoint = endpoint
        self._batch_bytes = batch_bytes
        self._closed = False

    def close(self) -> None:
        self._closed = True

    def fetch(self, ranges: Sequence[Range], deadline: float) -> Iterator[tuple[int, torch.Tensor]]:
        if self._closed:
            raise InvalidRequest(f"the source {self.peer} is closed")
        self.check(ranges)
        done = 0
        for index, wanted in enumerate(ranges):
            if wanted.nbytes == 0:
                yield index, torch.empty(0, dtype=torch.uint8)
                done += 1
        # The card takes an entry of each batch.
        batches = list(plan_batches(ranges, self._batch_bytes, MAX_ENTRIES - 1))
        if batches and time.monotonic() > deadline:
            raise self.overdue(done, len(ranges))
        retried = False
        while batches:
            arrived = 0
            try:
                with contextlib.closing(self._read(batches, deadline)) as reading:
                    for batch, memory in reading:
                        for place in batch.places:
                            yield place.index, memory[place.staging : place.staging + place.nbytes]
                            done += 1
                        arrived += 1
                return
            except EngineOverdue as error:
                raise self.overdue(done, len(ranges)) from error
            except (EngineRefused, EngineDied) as error:
                # The engine may fail a good read once after it has been asked for bad ones, whoever asked. A
                # closed port is certain.
                if retried or deadline - time.monotonic() < 2 * RETRY_S or not self._listens():
                    raise self._lost(str(error)) from error
            batches = batches[arrived:]
            retried = True
            time.sleep(RETRY_S)

    def _read(
        self, batches: Sequence[Batch], deadline: float
    ) -> Generator[tuple[Batch, torch.Tensor], None, None]:
        """Each batch with its memory, which is valid until the next one is asked for.

        Raises EngineRefused (also when another process answers than was meant), EngineDied, EngineOverdue,
        and WaitTimeout when no lane is free in time.
        """
        lane = self._lanes.acquire(deadline)
        clean = False
        try:
            under_way: deque[tuple[Batch, torch.Tensor, Staging | None]] = deque()
            asked = 0
            for done in range(len(batches)):
                asked = self._ask(lane, batches, asked, under_way, deadline)
                batch, memory, extra = under_way.popleft()
                result = lane.finish(deadline)
                if result != 0:
                    raise EngineRefused(lane.engine.last_log() or f"the engine answered {result}")
                self._check_card(memory)
                if extra is None and done + 1 < len(batches):
                    asked = self._ask(lane, batches, asked, under_way, deadline)
                yield batch, memory
                if extra is not None:
                    lane.unstage(extra, deadline)
            clean = True
        finally:
            self._lanes.release(lane, usable=clean)

    def _ask(
        self,
        lane: Lane,
        batches: Sequence[Batch],
        asked: int,
        under_way: deque[tuple[Batch, torch.Tensor, Staging | None]],
        deadline: float,
    ) -> int:
        """Ask for as many batches as may be under way; how many have been asked for then. One that needs
        memory of its own is alone, since memory is asked for, and given up, when no answer is due."""
        while asked < len(batches) and len(under_way) < AHEAD:
            batch = batches[asked]
            alone = batch.nbytes > self._batch_bytes
            if under_way and (alone or under_way[-1][2] is not None):
                break
            under_way.append((batch, *self._begin(lane, batch, asked % Lane.PARTS, deadline)))
            asked += 1
        return asked

    def _begin(
        self, lane: Lane, batch: Batch, part: int, deadline: float
    ) -> tuple[torch.Tensor, Staging | None]:
        """Ask for a batch; the memory that it will arrive in, with the peer's card in its last bytes."""
        extra = None
        if batch.nbytes <= self._batch_bytes:
            memory, address = lane.part(part)
        else:
            size = -(-batch.nbytes // ALIGNMENT) * ALIGNMENT + ALIGNMENT
            extra = lane.stage(size, deadline)
            memory, address = extra.tensor, extra.address
        at = memory.numel() - ALIGNMENT
        memory[at:].zero_()
        card = Entry(self._endpoint.card - self._endpoint.base, at, CARD_BYTES)
        entries = [*split(batch.entries, min(ENTRY_BYTES, self._batch_bytes)), card]
        lane.begin(self._endpoint.session, self._endpoint.base, entries, address)
        return memory, extra

    def _check_card(self, memory: torch.Tensor) -> None:
        at = memory.numel() - ALIGNMENT
        if bytes(memory[at : at + CARD_BYTES].numpy()) != bytes.fromhex(self._endpoint.generation):
            raise EngineRefused("another process answers at its address")

    def _listens(self) -> bool:
        """Whether anybody is at the peer's port still. A closed port is certain at once."""
        try:
            with socket.create_connection(self._endpoint.address(), timeout=RETRY_S / 2):
                return True
        except OSError:
            return False

    def _lost(self, reason: str) -> SourceLost:
        return SourceLost(
            f"{self.peer} cannot be read over {self.transport}: {reason}",
            peer=self.peer,
            transport=self.transport,
        )


def _session(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
