"""What producers and consumers ask of the controller: one method for each operation, typed, and bounded.

Every method takes `timeout` in seconds. Until it is over, a controller that does not answer is asked again
(with pauses that grow to a second); then `ControllerUnavailable` says where it should be. A method returns
at most a few seconds after its time is up, and only when the controller hangs.

A refusal is raised as the error class that the controller names, see weightdepot.store.errors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import httpx
import msgspec

from weightdepot.api.exchange import Deadline, Exchange, ExchangeTimeouts
from weightdepot.api.names import check_digest, check_name
from weightdepot.api.settings import (
    DEFAULT_LEASE_TTL,
    DEFAULT_MEMBER_TTL,
    DEFAULT_RUN,
    DEFAULT_SEAL_TIMEOUT,
    DEFAULT_URL,
)
from weightdepot.store.errors import StaleGroup, StoreFull, WaitTimeout, WeightDepotError
from weightdepot.store.index.records import (
    Grant,
    Group,
    GroupState,
    Heartbeat,
    Joined,
    Model,
    Part,
    Process,
    Round,
    RoundStatus,
    Version,
    Wait,
)
from weightdepot.store.layout import Layout, TensorSpec
from weightdepot.store.planning import Plan
from weightdepot.store.tiling import SourceTiling

T = TypeVar("T")

TIMEOUT = 30.0  # seconds, of the methods that do not wait for anything but the controller itself

# What a wait becomes when the time is up.
_FITTING: Mapping[str, type[WeightDepotError]] = {"slot": StoreFull, "group": StaleGroup}


class _GrantOrWait(msgspec.Struct):
    grant: Grant | None = None
    wait: Wait | None = None


class _RoundOrWait(msgspec.Struct):
    round: Round | None = None
    wait: Wait | None = None


class _Manifest(msgspec.Struct):
    tensors: tuple[TensorSpec, ...]


class _Digests(msgspec.Struct):
    digests: dict[int, bytes]


class _Models(msgspec.Struct):
    models: tuple[str, ...]


class _Versions(msgspec.Struct):
    versions: tuple[Version, ...]


class _Groups(msgspec.Struct):
    groups: tuple[Group, ...]


class ControllerClient:
    """A typed client of one controller. Thread-safe; close it, or use it as a context manager."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        run: str = DEFAULT_RUN,
        *,
        timeouts: ExchangeTimeouts | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Connects lazily. Raises InvalidRequest for what is no URL or no run name.

        run: the run that this process belongs to; a controller of another run refuses it.
        transport: a seam for tests.
        """
        self.run = run
        self._http = Exchange(url, run, timeouts or ExchangeTimeouts(), transport)

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

    # -- layouts, tilings, plans -------------------------------------------------------------------------

    def put_layout(self, layout: Layout, *, timeout: float = TIMEOUT) -> str:
        """Make a layout known; its digest. Raises LayoutError where it does not hold together."""
        self._http.send("PUT", f"/v1/layouts/{layout.digest}", Deadline(timeout), content=layout.to_bytes())
        return layout.digest

    def manifest(self, model: str, *, timeout: float) -> tuple[TensorSpec, ...]:
        """The checkpoint that is published, once every producer rank has joined.

        Raises WaitTimeout (naming the ranks that are missing), LayoutError where the ranks disagree.
        """
        what = f"the manifest of {model!r}"
        content = self._poll("GET", f"{self._model(model)}/manifest", timeout, what)
        return self._http.decode(content, _Manifest).tensors

    def source_tiling(self, model: str, tiling: str, rank: int, *, timeout: float = TIMEOUT) -> SourceTiling:
        """What producer rank `rank` stores under this tiling. Raises VersionGone for a forgotten tiling."""
        check_digest("tiling", tiling)
        what = f"the tile table of rank {rank} of {model!r}"
        path = f"{self._model(model)}/tilings/{tiling}/sources/{rank}"
        return SourceTiling.from_bytes(self._poll("GET", path, timeout, what))

    def plan(self, model: str, tiling: str, layout: str, *, timeout: float = TIMEOUT) -> Plan:
        """What a rank with this layout reads. Raises LayoutError naming the tensors that do not fit."""
        check_digest("tiling", tiling)
        check_digest("layout", layout)
        path = f"{self._model(model)}/plans/{tiling}/{layout}"
        return Plan.from_bytes(self._poll("GET", path, timeout, f"the plan of a rank of {model!r}"))

    # -- members -----------------------------------------------------------------------------------------

    def join_producer(
        self,
        model: str,
        *,
        rank: int,
        world_size: int,
        session: str,
        layout: str,
        process: Process,
        retention: int = 2,
        ttl: float = DEFAULT_MEMBER_TTL,
        replace: str = "",
        timeout: float = TIMEOUT,
    ) -> Joined:
        """Take producer rank `rank`. `layout`: the digest of one that was put before.

        Raises MemberConflict with the holder in its details (`session`, `process`, `expires_in`) when a
        living session holds the rank; `replace` names the session that is known to be dead.
        """
        body = {
            "rank": rank, "world_size": world_size, "session": session, "layout": layout, "process": process,
            "retention": retention, "ttl": ttl, "replace": replace,
        }  # fmt: skip
        return self._ask("POST", f"{self._model(model)}/producers", timeout, Joined, body)

    def join_consumer(
        self,
        model: str,
        group: str,
        *,
        rank: int,
        world_size: int,
        session: str,
        process: Process,
        layout: str = "",
        ttl: float = DEFAULT_MEMBER_TTL,
        replace: str = "",
        timeout: float = TIMEOUT,
    ) -> Joined:
        """Take rank `rank` of a consumer group. The layout may follow, see `set_layout`."""
        body = {
            "rank": rank, "world_size": world_size, "session": session, "layout": layout, "process": process,
            "ttl": ttl, "replace": replace,
        }  # fmt: skip
        return self._ask("POST", f"{self._group(model, group)}/consumers", timeout, Joined, body)

    def set_layout(
        self, model: str, group: str, *, rank: int, session: str, layout: str, timeout: float = TIMEOUT
    ) -> None:
        """Say what a consumer rank needs. Raises MemberConflict when it was replaced."""
        path = f"{self._group(model, group)}/consumers/{rank}/layout"
        self._http.send("PUT", path, Deadline(timeout), body={"session": session, "layout": layout})

    def leave(self, model: str, session: str, *, timeout: float = TIMEOUT) -> None:
        """A clean goodbye; a session that is not known (any more) is no error."""
        check_name("session", session)
        self._http.send("DELETE", f"{self._model(model)}/members/{session}", Deadline(timeout))

    def heartbeat(
        self,
        model: str,
        session: str,
        *,
        rounds: Sequence[tuple[str, int]] = (),
        ttl: float = DEFAULT_MEMBER_TTL,
        lease_ttl: float = DEFAULT_LEASE_TTL,
        timeout: float = TIMEOUT,
    ) -> Heartbeat:
        """A sign of life. `rounds`: (group, round) whose leases are renewed too, while they still live."""
        check_name("session", session)
        body = {
            "ttl": ttl, "lease_ttl": lease_ttl,
            "rounds": [{"group": group, "round": number} for group, number in rounds],
        }  # fmt: skip
        return self._ask(
            "POST", f"{self._model(model)}/members/{session}/heartbeat", timeout, Heartbeat, body
        )

    # -- versions ----------------------------------------------------------------------------------------

    def open_version(
        self,
        model: str,
        version: int,
        *,
        rank: int,
        session: str,
        timeout: float,
        seal_timeout: float = DEFAULT_SEAL_TIMEOUT,
    ) -> Grant:
        """A slot to write `version` into.

        Waits for missing ranks, for another version that is open, for a slot that no reader holds.
        Raises StoreFull (naming who holds the leases) or WaitTimeout when the time is up;
        VersionNotNewer; MemberConflict when this session was replaced; LayoutError.
        """
        body = {"version": version, "rank": rank, "session": session, "seal_timeout": seal_timeout}
        what = f"a slot for version {version} of {model!r}"
        path = f"{self._model(model)}/versions"

        def read(content: bytes) -> Grant | Wait | None:
            answer = self._http.decode(content, _GrantOrWait)
            return answer.grant or answer.wait

        return self._until(path, timeout, what, body, read)

    def seal(
        self,
        model: str,
        version: int,
        part: Part,
        tile_digests: bytes,
        *,
        timeout: float = TIMEOUT,
    ) -> Version:
        """This rank's part is written. `tile_digests`: in the order of its tile table; `part.digests` is
        their xxh3-128. Raises PublishAborted when the version is not open any more."""
        body = {
            "session": part.session, "endpoints": part.endpoints, "nbytes": part.nbytes,
            "digests": part.digests, "tile_digests": tile_digests,
        }  # fmt: skip
        path = f"{self._model(model)}/versions/{version}/parts/{part.rank}"
        return self._ask("POST", path, timeout, Version, body)

    def abort(
        self, model: str, version: int, *, session: str, reason: str, timeout: float = TIMEOUT
    ) -> Version:
        """Give up an open version; what it is now (one that is ready stays so)."""
        path = f"{self._model(model)}/versions/{version}/abort"
        return self._ask("POST", path, timeout, Version, {"session": session, "reason": reason[:2000]})

    def report_lost(
        self, model: str, version: int, *, rank: int, reason: str, timeout: float = TIMEOUT
    ) -> Version:
        """Producer rank `rank` cannot be reached; the version is freed if its process is indeed gone."""
        path = f"{self._model(model)}/versions/{version}/lost"
        return self._ask("POST", path, timeout, Version, {"rank": rank, "reason": reason[:2000]})

    def versions(self, model: str, *, timeout: float = TIMEOUT) -> tuple[Version, ...]:
        """Those that still matter, and the last few that were freed or aborted."""
        return self._ask("GET", f"{self._model(model)}/versions", timeout, _Versions).versions

    def version(self, model: str, version: int, *, timeout: float = TIMEOUT) -> Version:
        """Raises VersionGone for one that is not known (any more)."""
        return self._ask("GET", f"{self._model(model)}/versions/{version}", timeout, Version)

    def latest(self, model: str, *, min_version: int = 0, timeout: float) -> Version:
        """The newest ready version, `min_version` or above. Raises WaitTimeout, saying what there is."""
        at_least = f" (at least {min_version})" if min_version else ""
        content = self._poll(
            "GET",
            f"{self._model(model)}/versions/latest",
            timeout,
            f"a ready version of {model!r}{at_least}",
            params={"min_version": min_version},
        )
        return self._http.decode(content, Version)

    def digests(
        self, model: str, version: int, ranks: Iterable[int] | None = None, *, timeout: float = TIMEOUT
    ) -> dict[int, bytes]:
        """The tile digests that these producer ranks sealed (None: all). Raises VersionGone."""
        wanted = None if ranks is None else sorted(set(ranks))
        if wanted == []:
            return {}
        path = f"{self._model(model)}/versions/{version}/digests"
        params = None if wanted is None else {"ranks": ",".join(map(str, wanted))}
        content = self._http.send("GET", path, Deadline(timeout), params=params)
        return self._http.decode(content, _Digests).digests

    # -- rounds ------------------------------------------------------------------------------------------

    def begin_round(
        self,
        model: str,
        group: str,
        *,
        rank: int,
        session: str,
        timeout: float,
        min_version: int = 0,
        lease_ttl: float = DEFAULT_LEASE_TTL,
    ) -> Round:
        """What this rank moves to, with a lease on it that heartbeats renew.

        Raises WaitTimeout when no version is new enough in time, StaleGroup when the group's other ranks
        are not there or have not finished the round before, MemberConflict when this rank was replaced.
        """
        body = {"rank": rank, "session": session, "min_version": min_version, "lease_ttl": lease_ttl}
        what = f"a round of group {group!r} of {model!r}"

        def read(content: bytes) -> Round | Wait | None:
            answer = self._http.decode(content, _RoundOrWait)
            return answer.round or answer.wait

        return self._until(f"{self._group(model, group)}/rounds", timeout, what, body, read)

    def finish_round(
        self,
        model: str,
        group: str,
        *,
        rank: int,
        session: str,
        round: int,
        timeout: float,
        error: str = "",
        barrier: bool = True,
    ) -> RoundStatus:
        """Report the round applied, or failed (`error`); then wait for the group's other ranks.

        The status may be `half`: its `error` says which rank failed. `barrier` False: do not wait.
        Raises LeaseLost when the lease ran out (what was read must be discarded), StaleGroup naming the
        ranks that are pending when the time is up.
        """
        deadline = Deadline(timeout)
        path = f"{self._group(model, group)}/rounds/{round}"
        wait = self._wait(deadline) if barrier else 0.0
        content = self._http.send(
            "POST", f"{path}/ranks/{rank}", deadline, body={"session": session, "error": error[:2000]},
            params={"wait": wait}, wait=wait,
        )  # fmt: skip
        while True:
            status = self._http.decode(content, RoundStatus)
            if not barrier or status.state is not GroupState.MOVING:
                return status
            if deadline.passed:
                pending = ", ".join(map(str, status.pending))
                raise StaleGroup(
                    f"group {group!r} of {model!r} is half-way to version {status.version}: ranks {pending} "
                    f"have not finished round {round} within {timeout:g} s",
                    model=model, group=group, version=status.version, pending=list(status.pending),
                )  # fmt: skip
            wait = self._wait(deadline)
            content = self._http.send("GET", path, deadline, params={"wait": wait}, wait=wait)

    # -- what there is -----------------------------------------------------------------------------------

    def ready(self, *, timeout: float = TIMEOUT) -> None:
        """Returns when the controller and its index answer."""
        self._http.send("GET", "/v1/ready", Deadline(timeout))

    def models(self, *, timeout: float = TIMEOUT) -> tuple[str, ...]:
        return self._ask("GET", "/v1/models", timeout, _Models).models

    def model(self, model: str, *, timeout: float = TIMEOUT) -> Model:
        """Raises UnknownModel."""
        return self._ask("GET", self._model(model), timeout, Model)

    def groups(self, model: str, *, timeout: float = TIMEOUT) -> tuple[Group, ...]:
        return self._ask("GET", f"{self._model(model)}/groups", timeout, _Groups).groups

    def group(self, model: str, group: str, *, timeout: float = TIMEOUT) -> Group:
        """Raises UnknownModel where there is no such model or group."""
        return self._ask("GET", self._group(model, group), timeout, Group)

    # -- how each is asked -------------------------------------------------------------------------------

    def _model(self, model: str) -> str:
        return f"/v1/models/{check_name('model', model)}"

    def _group(self, model: str, group: str) -> str:
        return f"{self._model(model)}/groups/{check_name('group', group)}"

    def _ask(self, method: str, path: str, timeout: float, type: type[T], body: Any = None) -> T:
        return self._http.decode(self._http.send(method, path, Deadline(timeout), body=body), type)

    def _wait(self, deadline: Deadline) -> float:
        """Seconds of the next poll: never 0 for a caller who waits, the controller answers that otherwise."""
        shortest = 0.01 if deadline.timeout > 0 else 0.0
        return max(shortest, min(deadline.remaining(), self._http.timeouts.poll))

    def _poll(
        self,
        method: str,
        path: str,
        timeout: float,
        what: str,
        params: Mapping[str, str | int | float] | None = None,
    ) -> bytes:
        """Ask until the controller does not answer `wait-timeout` any more."""
        deadline = Deadline(timeout)
        while True:
            begun, wait = time.monotonic(), self._wait(deadline)
            try:
                return self._http.send(
                    method, path, deadline, params={**(params or {}), "wait": wait}, wait=wait
                )
            except WaitTimeout as error:
                if deadline.passed:
                    message = error.message.split(" s: ", 1)[-1]
                    raise WaitTimeout(
                        f"waited {timeout:g} s for {what}: {message}", **error.details
                    ) from None
            self._breathe(begun, wait, deadline)

    def _until(
        self, path: str, timeout: float, what: str, body: Any, read: Callable[[bytes], T | Wait | None]
    ) -> T:
        """Ask until the answer is no wait; when the time is up, the error that fits what was waited for."""
        deadline = Deadline(timeout)
        while True:
            begun, wait = time.monotonic(), self._wait(deadline)
            answer = read(
                self._http.send("POST", path, deadline, body=body, params={"wait": wait}, wait=wait)
            )
            if answer is None:
                answer = Wait("unknown", "the controller's answer was empty")
            if not isinstance(answer, Wait):
                return answer
            if deadline.passed:
                fitting = _FITTING.get(answer.reason, WaitTimeout)
                raise fitting(
                    f"waited {timeout:g} s for {what}: {answer.message}",
                    **{"reason": answer.reason, **answer.details},
                )
            self._breathe(begun, wait, deadline)

    def _breathe(self, begun: float, wait: float, deadline: Deadline) -> None:
        """A controller that answers before the wait is over (it shuts down) is not asked at full speed."""
        early = wait - (time.monotonic() - begun)
        if early > 0:
            time.sleep(min(early, self._http.timeouts.backoff_first, deadline.remaining()))
