"""How bytes move: one small protocol, whatever carries them.

A transport serves segments of this process, and reaches segments of others. What it needs to be told about
a segment travels as an *endpoint*: plain JSON data that goes through the index, and that only a transport
of the same name understands.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from typing_extensions import Self

from weightdepot.store.errors import InvalidRequest, WaitTimeout
from weightdepot.store.segments import Segment

# The address of what `fetch` yields and the offset of its range agree modulo this many bytes, so that a
# range whose offset is aligned for a dtype can be viewed as that dtype.
ALIGNMENT = 64


@dataclass(frozen=True)
class Range:
    """Bytes `offset` to `offset + nbytes` (exclusive) of a segment."""

    offset: int
    nbytes: int

    @property
    def stop(self) -> int:
        return self.offset + self.nbytes


class Source(ABC):
    """One segment of a peer, as seen from here. Opened by `Transport.reach`.

    Several threads may fetch from one source at a time, each with an iterator of its own.
    """

    transport: str
    """What is really in use: "shm", "tcp", "mooncake/tcp", "mooncake/rdma", "memory"."""

    peer: str
    """Where the bytes come from, for messages."""

    nbytes: int
    """How much of the segment may be read."""

    remote: bool = True
    """Whether the bytes come over a network, so that several sources are better read at the same time."""

    @abstractmethod
    def fetch(self, ranges: Sequence[Range], deadline: float) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (index into `ranges`, uint8 tensor of exactly that range's bytes), in any order.

        All of them, or an error. Each tensor is valid until the iterator is advanced or closed, belongs to
        the transport, and must not be written to. Its address agrees with the range's offset modulo
        `ALIGNMENT`.
        deadline: a `time.monotonic()` instant. Nothing is waited for past it, whatever the peer does.

        Raises, at the first `next`, InvalidRequest when a range is not within the segment; and, at any,
        SourceLost when the peer is gone, WaitTimeout at the deadline. After either the source may be used
        again: what a failed attempt may still write is never handed out.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop reading. May be called more than once. Later fetches raise InvalidRequest."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def check(self, ranges: Sequence[Range]) -> None:
        """Raise InvalidRequest, naming every range that does not lie within the segment."""
        bad = [r for r in ranges if r.offset < 0 or r.nbytes < 0 or r.stop > self.nbytes]
        if bad:
            shown = ", ".join(f"{r.offset}+{r.nbytes}" for r in bad[:8])
            more = f" and {len(bad) - 8} more" if len(bad) > 8 else ""
            raise InvalidRequest(
                f"outside the {self.nbytes} bytes of {self.peer}: {shown}{more} (as offset+bytes)",
                peer=self.peer,
            )

    def overdue(self, done: int, total: int) -> WaitTimeout:
        """The error for a fetch that reached its deadline."""
        return WaitTimeout(
            f"{self.peer} had sent {done} of {total} ranges over {self.transport} when the time was up: "
            f"it is stopped, overloaded or cut off",
            peer=self.peer,
            transport=self.transport,
            done=done,
            total=total,
        )


class Transport(ABC):
    """One way to move bytes between processes.

    The order of calls, and who makes each:

    1. `serve`     the process that holds the segment, once per segment; the endpoint goes to the index
    2. `reach`     a reader, with the endpoint that it got from the index, as often as it likes
    3. `fetch`     the reader, on the source; any number of times, while it holds a lease on the version
    4. `close`     the reader, on the source
    5. `withdraw`  the holder, before it closes the segment; sources over it then fail, or keep the old bytes
    6. `close`     both, on the transport: what was not withdrawn or closed is

    A transport may be used by several threads. It does not outlive a `fork`: children make their own.
    """

    name: str

    @abstractmethod
    def serve(self, segment: Segment) -> dict[str, Any]:
        """Let peers read the segment; the endpoint. The same answer when it is served already.

        The segment stays the caller's, who keeps it open until `withdraw`.
        Raises TransportUnavailable, with the reason, when this transport cannot work here.
        """

    @abstractmethod
    def withdraw(self, segment: Segment) -> None:
        """No longer. Nothing happens when it is not served."""

    @abstractmethod
    def reach(self, endpoint: Mapping[str, Any], nbytes: int) -> Source:
        """A source over the first `nbytes` of a peer's segment. Does not wait for the peer.

        Raises TransportUnavailable, with the reason, when this transport cannot carry it from here, and
        SourceLost when it could but the segment is known to be gone.
        """

    @abstractmethod
    def close(self) -> None:
        """Bounded, and may be called more than once. Then `serve` and `reach` raise InvalidRequest."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def field(endpoint: Mapping[str, Any], name: str, kind: type[Any], transport: str) -> Any:
    """One field of an endpoint that came from elsewhere; InvalidRequest when missing or of another type."""
    value = endpoint.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise InvalidRequest(f"not an endpoint of {transport}: {name} is {value!r}, not {kind.__name__}")
    return value


def fetch_views(
    source: Source, memory: torch.Tensor, ranges: Sequence[Range], deadline: float
) -> Iterator[tuple[int, torch.Tensor]]:
    """`Source.fetch` where the peer's memory can be looked at directly."""
    source.check(ranges)
    for index, wanted in enumerate(ranges):
        if time.monotonic() > deadline:
            raise source.overdue(index, len(ranges))
        yield index, memory[wanted.offset : wanted.stop]
