"""Faults and latency around a real transport, for tests. The transport inside knows nothing of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from weightdepot.store.errors import SourceLost
from weightdepot.store.segments import Segment
from weightdepot.store.transports.base import Range, Source, Transport

Kind = Literal["fail", "delay", "corrupt", "truncate", "drop", "call"]


@dataclass(frozen=True)
class Fault:
    """What happens to the range that is yielded as number `at`.

    Counted from 0 over all that the wrapper has yielded, to all sources and fetches. Each fault happens once.

    fail      SourceLost instead of the range
    delay     the range comes `seconds` later; WaitTimeout when that is past the deadline
    corrupt   its first byte is another
    truncate  its last byte is missing
    drop      the iterator ends without it, and without an error
    call      `action` is called first, whatever it does; then the range comes
    """

    at: int
    kind: Kind
    seconds: float = 0.0
    action: Callable[[], object] | None = None


class FaultyTransport(Transport):
    """`inner` with faults on the reader's side. Name, endpoints and memory are those of `inner`."""

    def __init__(self, inner: Transport, *faults: Fault, latency_s: float = 0.0) -> None:
        self.inner = inner
        self.name = inner.name
        self.latency_s = latency_s
        """Before each range."""
        self._faults = {fault.at: fault for fault in faults}
        self._count = 0
        self._lock = threading.Lock()

    @property
    def yielded(self) -> int:
        """Ranges so far, with those that a fault befell."""
        return self._count

    def serve(self, segment: Segment) -> dict[str, Any]:
        return self.inner.serve(segment)

    def withdraw(self, segment: Segment) -> None:
        self.inner.withdraw(segment)

    def reach(self, endpoint: Mapping[str, Any], nbytes: int) -> Source:
        return _FaultySource(self, self.inner.reach(endpoint, nbytes))

    def close(self) -> None:
        self.inner.close()

    def next_fault(self) -> Fault | None:
        """Counts one range; by the source."""
        with self._lock:
            fault = self._faults.pop(self._count, None)
            self._count += 1
        return fault


class _FaultySource(Source):
    def __init__(self, owner: FaultyTransport, inner: Source) -> None:
        self._owner = owner
        self._inner = inner
        self.transport = inner.transport
        self.peer = inner.peer
        self.nbytes = inner.nbytes
        self.remote = inner.remote

    def fetch(self, ranges: Sequence[Range], deadline: float) -> Iterator[tuple[int, torch.Tensor]]:
        for done, (index, memory) in enumerate(self._inner.fetch(ranges, deadline)):
            fault = self._owner.next_fault()
            kind = fault.kind if fault else None
            wait = self._owner.latency_s + (fault.seconds if fault and kind == "delay" else 0.0)
            if wait:
                time.sleep(max(0.0, min(wait, deadline - time.monotonic())))
                if time.monotonic() >= deadline:
                    raise self.overdue(done, len(ranges))
            if fault and kind == "call" and fault.action:
                fault.action()
            if kind == "fail":
                raise SourceLost(f"{self.peer} is lost, as a test asked for", peer=self.peer)
            if kind == "drop":
                return
            if kind == "corrupt" and memory.numel():
                memory = memory.clone()  # noqa: PLW2901 - what the transport lent us must not be written to
                memory[0] ^= 0xFF
            if kind == "truncate":
                memory = memory[:-1]  # noqa: PLW2901
            yield index, memory

    def close(self) -> None:
        self._inner.close()
