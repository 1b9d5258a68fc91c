"""Asking for a slot, and knowing how to fill it: what every way to publish begins with."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from weightdepot.api.client import ControllerClient
from weightdepot.api.membership import Membership, forgotten
from weightdepot.producers.announcing import Seat
from weightdepot.store.errors import StoreFull, UnknownModel, WaitTimeout, WeightDepotError
from weightdepot.store.index.records import Grant
from weightdepot.store.layout import Layout
from weightdepot.store.planning import Copies, make_packing
from weightdepot.store.tiling import SourceTiling
from weightdepot.store.timeouts import Timeouts

RETRY = 0.05  # seconds to the next attempt at a version that was aborted
LOOK = 1.0  # seconds between two looks at whether a wait is still wanted


class Cancelled(Exception):
    """The caller gave up; never leaves this package."""


def never() -> bool:
    return False


@dataclass(frozen=True)
class Packing:
    source: SourceTiling
    copies: Copies


class Opening:
    """`open` a version, get its `packing`, and `abort` what came to nothing."""

    def __init__(
        self,
        client: ControllerClient,
        membership: Membership,
        seat: Seat,
        layout: Layout,
        model: str,
        rank: int,
        timeouts: Timeouts,
    ) -> None:
        self._client, self._membership, self._seat, self._layout = client, membership, seat, layout
        self._model, self._rank, self._timeouts = model, rank, timeouts
        self._packings: dict[str, Packing] = {}

    def open(
        self, version: int, deadline: float, *, live: bool = False, cancelled: Callable[[], bool] = never
    ) -> tuple[str, Grant]:
        """A slot for this version, and the session that it was granted to.

        Raises StoreFull or WaitTimeout at the deadline, VersionNotNewer, MemberConflict, LayoutError.
        """
        begun = time.monotonic()

        def attempt(session: str) -> tuple[str, Grant]:
            self._seat.restored(session, deadline)
            while True:
                left = max(deadline - time.monotonic(), 0.0)
                try:
                    return session, self._client.open_version(
                        self._model,
                        version,
                        rank=self._rank,
                        session=session,
                        seal_timeout=self._timeouts.seal,
                        live=live,
                        timeout=left if cancelled is never else min(left, LOOK),
                    )
                except (WaitTimeout, StoreFull) as error:
                    if cancelled():
                        raise Cancelled(f"the publish of version {version} was cancelled") from error
                    if time.monotonic() >= deadline:
                        raise _after(error, time.monotonic() - begun) from error

        try:
            return self._membership.asking(attempt, deadline)
        except UnknownModel as error:
            raise forgotten(error, "It did not come to join anew in time: publish again") from error

    def likely(self) -> Packing | None:
        """How the last version was packed: most probably the next one is, too."""
        return next(reversed(self._packings.values()), None)

    def packing(self, tiling: str) -> Packing:
        found = self._packings.get(tiling)
        if found is None:
            source = self._client.source_tiling(
                self._model, tiling, self._rank, timeout=self._timeouts.publish
            )
            found = Packing(source, make_packing(source, self._layout))
            # one more than the present one is enough: a version that was begun with the former
            while len(self._packings) > 1:
                self._packings.pop(next(iter(self._packings)))
            self._packings[tiling] = found
        return found

    def abort(self, version: int, session: str, reason: str) -> None:
        """Give up a version that is open. Never raises: what led here is what the caller must see."""
        with contextlib.suppress(WeightDepotError):
            self._client.abort(
                self._model, version, session=session, reason=reason, timeout=self._timeouts.call
            )


def _after(error: WaitTimeout | StoreFull, seconds: float) -> WeightDepotError:
    """The same, said of the whole wait, where it was waited in pieces."""
    rest = error.message.partition(" s for ")[2]
    return type(error)(f"waited {seconds:.3g} s for {rest}", **error.details) if rest else error
