"""What is asked of a model as a whole: modes, pins, tags, hold, and who has applied what."""

from __future__ import annotations

from weightdepot.store.errors import InvalidRequest
from weightdepot.store.index import check, wire
from weightdepot.store.index.asking import Asking
from weightdepot.store.index.records import Applied, Convergence, Mode, Policy, Version, Wait
from weightdepot.store.index.scripts_policy import (
    APPLIED,
    CONVERGENCE,
    HOLD,
    LATEST,
    PIN,
    RELEASE,
    SET_POLICY,
    TAG,
    UNPIN,
    UNTAG,
)

LARGEST_LAG = 1000


class Policies(Asking):
    async def change_policy(self, m: str, policy: Policy) -> None:
        """How versions are synchronized from now on. Raises `UnknownModel`, `InvalidRequest`."""
        lag = policy.max_lag
        if not isinstance(lag, int) or isinstance(lag, bool) or not 0 <= lag <= LARGEST_LAG:
            raise InvalidRequest(f"max_lag {lag!r} of model {m}: whole numbers from 0 to {LARGEST_LAG}")
        await self._ask(SET_POLICY, m, Mode(policy.mode).value, lag, type=bool)

    async def pin(self, m: str, v: int) -> Version:
        """Keeps a ready version for as long as it is pinned, in memory besides that of the retention.

        Raises `VersionGone` for one that is not ready (any more), `InvalidRequest` for too many.
        """
        return (await self._ask(PIN, m, check.version(v), type=wire.VersionWire)).record(m)

    async def unpin(self, m: str, v: int) -> Version:
        """Lets it go: it is retired in its turn. Raises `VersionGone`, `UnknownModel`."""
        return (await self._ask(UNPIN, m, check.version(v), type=wire.VersionWire)).record(m)

    async def tag(self, m: str, name: str, v: int) -> Version:
        """Points a name to a ready version, away from the one that it pointed to, and keeps that version.

        Raises as `pin` does.
        """
        answer = await self._ask(TAG, m, check.version(v), check.name("tag", name), type=wire.VersionWire)
        return answer.record(m)

    async def untag(self, m: str, name: str) -> None:
        """A name that is not there is no error. Raises `UnknownModel`."""
        await self._ask(UNTAG, m, check.name("tag", name), type=bool)

    async def change_hold(self, m: str, v: int | None) -> None:
        """Makes a ready version the one that groups are given who ask for the newest, also where they hold a
        newer one; None: lets go. Raises `VersionGone`, `UnknownModel`."""
        if v is None:
            await self._ask(RELEASE, m, type=bool)
        else:
            await self._ask(HOLD, m, check.version(v), type=bool)

    async def latest(self, m: str, min_version: int = 0, current: bool = False) -> Version | Wait:
        """The newest ready version, `min_version` or above; with `current`, the one that the model is held
        at while it is. One cheap script. Waits for `version`. Raises `UnknownModel`."""
        answer = await self._ask_or_wait(
            LATEST, m, check.version(min_version), "1" if current else "0", type=wire.VersionWire
        )
        return answer if isinstance(answer, Wait) else answer.record(m)

    async def applied(self, m: str, v: int) -> Applied:
        """Which live groups hold this version or a newer one. Raises `VersionGone`, `UnknownModel`."""
        return (await self._ask(APPLIED, m, check.version(v), type=wire.AppliedWire)).record()

    async def convergence(self, m: str) -> Convergence:
        """Whether every live group serves what is current. Raises `UnknownModel`."""
        return (await self._ask(CONVERGENCE, m, type=wire.ConvergenceWire)).record(m)
