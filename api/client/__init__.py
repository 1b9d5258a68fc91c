"""What producers and consumers ask of the controller: one method for each operation, typed, and bounded.

Every method takes `timeout` in seconds. Until it is over, a controller that does not answer is asked again
(with pauses that grow to a second), or the next one where several are named; then `ControllerUnavailable`
says where it should be. A method returns at most about a second after its time is up, also when the
controller is stopped and not dead.

A refusal is raised as the error class that the controller names, see weightdepot.store.errors.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import httpx

from weightdepot.api.client.calls import TIMEOUT
from weightdepot.api.client.events import EventCalls
from weightdepot.api.client.members import MemberCalls
from weightdepot.api.client.operations import OperationCalls
from weightdepot.api.client.planning import PlanningCalls
from weightdepot.api.client.rounds import RoundCalls
from weightdepot.api.client.versions import VersionCalls
from weightdepot.api.client.views import ViewCalls
from weightdepot.api.exchange import Exchange, ExchangeTimeouts
from weightdepot.api.settings import DEFAULT_RUN, DEFAULT_URL, ca_here, token_here

__all__ = ["TIMEOUT", "ControllerClient"]


class ControllerClient(
    PlanningCalls, MemberCalls, VersionCalls, RoundCalls, OperationCalls, ViewCalls, EventCalls
):
    """A typed client of one run's controllers. Thread-safe; close it, or use it as a context manager."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        run: str = DEFAULT_RUN,
        *,
        token: str | None = None,
        ca: str | Path | None = None,
        timeouts: ExchangeTimeouts | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Connects lazily. Raises InvalidRequest for what is no URL, no run name, no token, no PEM file.

        url: of one controller, or of several that share an index, with commas between them.
        run: the run that this process belongs to; a controller of another run refuses it.
        token: who this is, where the controller asks; None: that of the environment (WEIGHTDEPOT_TOKEN).
        ca: a PEM file with the authorities (or the certificate itself) that https is checked against; None:
            that of the environment (WEIGHTDEPOT_CA), or else the usual authorities.
        transport: a seam for tests.
        """
        self.run = run
        exchange = Exchange(
            url,
            run,
            timeouts or ExchangeTimeouts(),
            token=token if token is not None else token_here(),
            ca=ca if ca is not None else ca_here(),
            transport=transport,
        )
        super().__init__(exchange)

    @property
    def url(self) -> str:
        return self._http.url

    def close(self) -> None:
        """Ends what other threads wait for, after at most one poll."""
        self._http.close()

    def __enter__(self) -> ControllerClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
