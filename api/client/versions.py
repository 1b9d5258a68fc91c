"""Versions: opened, sealed, withdrawn by producers; found by readers."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from weightdepot.api.client.calls import MAX_TEXT, TIMEOUT, Calls
from weightdepot.api.exchange import Deadline
from weightdepot.api.settings import DEFAULT_SEAL_TIMEOUT
from weightdepot.store.index.records import Applied, Grant, Part, Version, Wait


class _GrantOrWait(msgspec.Struct):
    grant: Grant | None = None
    wait: Wait | None = None


class _Digests(msgspec.Struct):
    digests: dict[int, bytes]


class _Versions(msgspec.Struct):
    versions: tuple[Version, ...]


class VersionCalls(Calls):
    """In the order of a version's life."""

    def open_version(
        self,
        model: str,
        version: int,
        *,
        rank: int,
        session: str,
        timeout: float,
        seal_timeout: float = DEFAULT_SEAL_TIMEOUT,
        live: bool = False,
    ) -> Grant:
        """A slot to write `version` into. `live`: none is wanted, readers read the weights in place.

        Waits for missing ranks, for another version that is open, for a slot that no reader holds, and in
        mode `bounded` for groups that lag too much. Raises StoreFull (naming who holds the leases) or
        WaitTimeout when the time is up; VersionNotNewer; MemberConflict when this session was replaced;
        LayoutError.
        """
        body = {
            "version": version, "rank": rank, "session": session, "seal_timeout": seal_timeout, "live": live,
        }  # fmt: skip
        what = f"a slot for version {version} of {model!r}"

        def read(content: bytes) -> Grant | Wait | None:
            answer = self._http.decode(content, _GrantOrWait)
            return answer.grant or answer.wait

        return self._until(f"{self._model(model)}/versions", timeout, what, body, read)

    def seal(
        self, model: str, version: int, part: Part, tile_digests: bytes, *, timeout: float = TIMEOUT
    ) -> Version:
        """This rank's part is written. `tile_digests`: in the order of its tile table; `part.digests` is
        their xxh3-128. Raises PublishAborted when the version is not open any more."""
        body = {
            "session": part.session, "endpoints": part.endpoints, "nbytes": part.nbytes,
            "digests": part.digests, "stats": part.stats, "tile_digests": tile_digests,
        }  # fmt: skip
        path = f"{self._version(model, version)}/parts/{part.rank}"
        return self._ask("POST", path, timeout, Version, body)

    def abort(
        self, model: str, version: int, *, session: str, reason: str, timeout: float = TIMEOUT
    ) -> Version:
        """Give up an open version; what it is now (one that is ready stays so)."""
        return self._end("abort", model, version, session, reason, timeout)

    def withdraw(
        self, model: str, version: int, *, session: str, reason: str, timeout: float = TIMEOUT
    ) -> Version:
        """Take a version back, as a producer of it: its memory is going to change. Readers that are still
        at it lose their lease. May be repeated. Raises MemberConflict, VersionGone."""
        return self._end("withdraw", model, version, session, reason, timeout)

    def _end(self, how: str, model: str, version: int, session: str, reason: str, timeout: float) -> Version:
        body = {"session": session, "reason": reason[:MAX_TEXT]}
        return self._ask("POST", f"{self._version(model, version)}/{how}", timeout, Version, body)

    def report_lost(
        self, model: str, version: int, *, rank: int, reason: str, timeout: float = TIMEOUT
    ) -> Version:
        """Producer rank `rank` cannot be reached; the version is freed if its process is indeed gone."""
        body = {"rank": rank, "reason": reason[:MAX_TEXT]}
        return self._ask("POST", f"{self._version(model, version)}/lost", timeout, Version, body)

    def versions(self, model: str, *, timeout: float = TIMEOUT) -> tuple[Version, ...]:
        """Those that still matter, and the last few that were freed or aborted."""
        return self._ask("GET", f"{self._model(model)}/versions", timeout, _Versions).versions

    def version(self, model: str, version: int, *, timeout: float = TIMEOUT) -> Version:
        """Raises VersionGone for one that is not known (any more)."""
        return self._ask("GET", self._version(model, version), timeout, Version)

    def latest(self, model: str, *, min_version: int = 0, timeout: float) -> Version:
        """The newest ready version, `min_version` or above. Raises WaitTimeout, saying what there is."""
        return self._newest("latest", "a ready version", model, min_version, timeout)

    def current(self, model: str, *, min_version: int = 0, timeout: float) -> Version:
        """What groups that ask for the newest are given: as `latest`, or what the model is held at."""
        return self._newest("current", "a current version", model, min_version, timeout)

    def _newest(self, which: str, what: str, model: str, min_version: int, timeout: float) -> Version:
        at_least = f" (at least {min_version})" if min_version else ""
        content = self._poll(
            "GET",
            f"{self._model(model)}/versions/{which}",
            timeout,
            f"{what} of {model!r}{at_least}",
            params={"min_version": min_version},
        )
        return self._http.decode(content, Version)

    def applied(self, model: str, version: int, *, timeout: float = 0.0) -> Applied:
        """Which live groups hold the version (or a newer one), once none is pending or the time is up: look
        at `pending`. Raises VersionGone for a version that was never ready or is forgotten."""
        path = f"{self._version(model, version)}/applied"
        return self._settled(path, timeout, Applied, lambda seen: not seen.pending)

    def digests(
        self, model: str, version: int, ranks: Iterable[int] | None = None, *, timeout: float = TIMEOUT
    ) -> dict[int, bytes]:
        """The tile digests that these producer ranks sealed (None: all). Raises VersionGone."""
        wanted = None if ranks is None else sorted(set(ranks))
        if wanted == []:
            return {}
        path = f"{self._version(model, version)}/digests"
        params = None if wanted is None else {"ranks": ",".join(map(str, wanted))}
        content = self._http.send("GET", path, Deadline(timeout), params=params)
        return self._http.decode(content, _Digests).digests
