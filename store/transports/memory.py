"""The protocol within one process, for tests of what stands on it. Zero copy, like `shm`."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from weightdepot.store.errors import InvalidRequest, SourceLost
from weightdepot.store.segments import Segment
from weightdepot.store.transports.base import Range, Source, Transport, fetch_views, field


class MemoryHub:
    """What stands for the network: transports of one hub reach each other."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.served: dict[str, torch.Tensor] = {}


class MemoryTransport(Transport):
    name = "memory"

    def __init__(self, hub: MemoryHub | None = None) -> None:
        self._hub = hub or MemoryHub()
        self._keys: dict[str, str] = {}  # path of a segment -> its key in the hub
        self._closed = False

    def serve(self, segment: Segment) -> dict[str, Any]:
        self._check_open()
        with self._hub.lock:
            key = self._keys.setdefault(segment.path, uuid.uuid4().hex)
            self._hub.served[key] = segment.tensor
        return {"key": key, "nbytes": segment.nbytes}

    def withdraw(self, segment: Segment) -> None:
        with self._hub.lock:
            key = self._keys.pop(segment.path, None)
            if key is not None:
                self._hub.served.pop(key, None)

    def reach(self, endpoint: Mapping[str, Any], nbytes: int) -> Source:
        self._check_open()
        key: str = field(endpoint, "key", str, self.name)
        held: int = field(endpoint, "nbytes", int, self.name)
        if not 0 <= nbytes <= held:
            raise InvalidRequest(f"{nbytes} bytes were asked of a segment of {held}", peer=key)
        return _MemorySource(self._hub, key, nbytes)

    def close(self) -> None:
        self._closed = True
        with self._hub.lock:
            for key in self._keys.values():
                self._hub.served.pop(key, None)
            self._keys.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequest("this transport is closed")


class _MemorySource(Source):
    transport = "memory"
    remote = False

    def __init__(self, hub: MemoryHub, key: str, nbytes: int) -> None:
        self._hub = hub
        self._key = key
        self._closed = False
        self.peer = f"memory {key}"
        self.nbytes = nbytes

    def fetch(self, ranges: Sequence[Range], deadline: float) -> Iterator[tuple[int, torch.Tensor]]:
        if self._closed:
            raise InvalidRequest(f"the source {self.peer} is closed")
        with self._hub.lock:
            memory = self._hub.served.get(self._key)
        if memory is None:
            raise SourceLost(f"{self.peer} was withdrawn", peer=self.peer)
        yield from fetch_views(self, memory, ranges, deadline)

    def close(self) -> None:
        self._closed = True
