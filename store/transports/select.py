"""Which transport carries what: the best that both sides have, chosen per peer."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, get_args

from typing_extensions import Self

from weightdepot.store.errors import InvalidRequest, SourceLost, TransportUnavailable
from weightdepot.store.hosts import SHM_DIRECTORY
from weightdepot.store.segments import Segment
from weightdepot.store.transports.base import Source, Transport
from weightdepot.store.transports.mooncake.engines import rdma_devices
from weightdepot.store.transports.mooncake.transport import MooncakeTransport
from weightdepot.store.transports.shm import ShmTransport
from weightdepot.store.transports.tcp.transport import TcpTransport

_TELLING = 1 << 20  # bytes; less says more about the calls than about the transport

Allowed = Literal["auto", "shm", "tcp", "mooncake"]


class Transports:
    """All transports that this process may use, best first: `shm`; `mooncake` where there is RDMA; `tcp`.

    Over TCP plain sockets carry nearly twice what the engine does (docs/performance.md), so that it is used
    there only where it is asked for by name.

    allowed: "auto", or the name of the only one to use.
    host: the address that peers reach this machine at.
    protocol: see `MooncakeTransport`. directory: see `ShmTransport`.
    transports: use these instead, in this order (tests, wrappers).

    Used as the transports are: `serve`, `reach`, `withdraw`, `close`, from several threads.
    """

    def __init__(
        self,
        allowed: Allowed = "auto",
        *,
        host: str | None = None,
        protocol: str = "auto",
        directory: str | os.PathLike[str] = SHM_DIRECTORY,
        transports: Sequence[Transport] | None = None,
    ) -> None:
        self.allowed = allowed
        self._lock = threading.Lock()
        self._rates: dict[str, float] = {}  # bytes a second, by what was really in use
        self.unavailable: dict[str, str] = {}
        """Why a transport that was tried is not in use here: its name -> the reason."""
        if transports is not None:
            self._all = list(transports)
            return
        if allowed not in get_args(Allowed):
            one_of = ", ".join(f'"{name}"' for name in get_args(Allowed))
            raise InvalidRequest(f"no such transport: {allowed!r} (one of {one_of})")
        self._all = []
        if allowed in ("auto", "shm"):
            self._all.append(ShmTransport(directory))
        if allowed == "auto" and protocol == "auto" and not rdma_devices():
            self.unavailable["mooncake"] = "no RDMA device is here, and over TCP plain sockets are faster"
        elif allowed in ("auto", "mooncake"):
            try:
                self._all.append(MooncakeTransport(host=host, protocol=protocol))
            except TransportUnavailable as error:
                if allowed == "mooncake":
                    raise
                self.unavailable["mooncake"] = error.message
        if allowed in ("auto", "tcp"):
            self._all.append(TcpTransport(host=host))

    def serve(self, segment: Segment) -> dict[str, dict[str, Any]]:
        """Name of each transport that works here -> its endpoint.

        Raises TransportUnavailable, with every reason, when none does.
        """
        endpoints = {}
        for transport in self._all:
            try:
                endpoints[transport.name] = transport.serve(segment)
            except TransportUnavailable as error:
                self.unavailable[transport.name] = error.message
        if not endpoints:
            reasons = dict(self.unavailable)
            raise TransportUnavailable(
                f"no transport can serve {segment.path}: {_listed(reasons)}", reasons=reasons
            )
        return endpoints

    def withdraw(self, segment: Segment) -> None:
        for transport in self._all:
            transport.withdraw(segment)

    def reach(self, endpoints: Mapping[str, Mapping[str, Any]], nbytes: int) -> Source:
        """A source over the best transport that both sides have; its `transport` says which it is.

        Raises TransportUnavailable with every reason, or SourceLost when one of them would do but the
        segment is known to be gone.
        """
        present = {transport.name for transport in self._all}
        reasons = {name: why for name, why in self.unavailable.items() if name not in present}
        lost = False
        for transport in self._all:
            endpoint = endpoints.get(transport.name)
            if endpoint is None:
                reasons[transport.name] = "the peer does not serve over it"
                continue
            try:
                return transport.reach(endpoint, nbytes)
            except TransportUnavailable as error:
                reasons[transport.name] = error.message
            except SourceLost as error:
                reasons[transport.name] = error.message
                lost = True
        text = f"no transport reaches the segment (allowed: {self.allowed}): {_listed(reasons)}"
        if lost:
            raise SourceLost(text, reasons=reasons)
        raise TransportUnavailable(text, reasons=reasons)

    def observed(self, transport: str, nbytes: int, seconds: float) -> None:
        """What a read from one source took: later ones are predicted from it."""
        if nbytes >= _TELLING and seconds > 0:
            with self._lock:
                before = self._rates.get(transport)
                rate = nbytes / seconds
                self._rates[transport] = rate if before is None else (before + rate) / 2

    def predict(self, transport: str, nbytes: int) -> float | None:
        """Seconds that so many bytes from one source will take, judged by earlier reads over this transport
        (the last ones count most); None while there was none."""
        with self._lock:
            rate = self._rates.get(transport)
        return None if rate is None else nbytes / rate

    def close(self) -> None:
        for transport in self._all:
            transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _listed(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items()) or "none is allowed"
