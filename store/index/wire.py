"""What the scripts answer (JSON), as typed values, and how these become records."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from weightdepot.store.errors import VersionGone, WeightDepotError, from_problem
from weightdepot.store.index.records import (
    Applied,
    Convergence,
    Event,
    Group,
    GroupState,
    Member,
    Mode,
    Model,
    Part,
    Policy,
    Process,
    Round,
    RoundStatus,
    Version,
    VersionState,
    Wait,
)

T = TypeVar("T")


class _Answer(msgspec.Struct):
    """Every script answers with one of `value`, `wait` (a reason) or `error` (a slug of errors.py)."""

    value: msgspec.Raw = msgspec.Raw()
    wait: str = ""
    error: str = ""
    message: str = ""
    details: dict[str, Any] = {}


_answers = msgspec.json.Decoder(_Answer)


def decode(raw: bytes, type: type[T]) -> T | Wait:
    """The value, or the wait; raises the error that the script answered."""
    answer = _answers.decode(raw)
    if answer.error:
        raise from_problem({"type": answer.error, "detail": answer.message, "details": answer.details})
    if answer.wait:
        return Wait(answer.wait, answer.message, answer.details)
    return msgspec.json.decode(answer.value, type=type)


def event(payload: bytes) -> Event:
    return msgspec.json.decode(payload, type=Event)


# In all of these: Lua cannot tell an empty list from an empty table, so empty lists are left out.


class VersionWire(msgspec.Struct):
    version: int
    state: VersionState
    slot: int
    tiling: str
    incarnation: int
    world_size: int
    opened: float
    nbytes: int
    ready: float | None = None
    reason: str = ""
    sealed: list[int] = []
    leases: list[str] = []
    attempt: str = ""
    live: bool = False
    pinned: bool = False
    tags: list[str] = []

    def record(self, model: str) -> Version:
        sealed = set(self.sealed)
        return Version(
            model=model,
            version=self.version,
            state=self.state,
            slot=self.slot,
            tiling=self.tiling,
            incarnation=self.incarnation,
            world_size=self.world_size,
            opened=self.opened,
            ready=self.ready,
            sealed=tuple(sorted(sealed)),
            missing=tuple(r for r in range(self.world_size) if r not in sealed),
            nbytes=self.nbytes,
            reason=self.reason,
            leases=tuple(sorted(self.leases)),
            attempt=self.attempt,
            live=self.live,
            pinned=self.pinned,
            tags=tuple(sorted(self.tags)),
        )


class _Info(msgspec.Struct):
    """What a session said of itself when it joined; written by the join scripts."""

    process: Process
    joined: float


class MemberWire(msgspec.Struct):
    rank: int
    session: str
    info: str
    layout: str
    expires_in: float
    held: int | None = None
    staged: int | None = None
    stats: str = "{}"  # JSON, as the member sent it

    def record(self) -> Member:
        info = msgspec.json.decode(self.info, type=_Info)
        return Member(
            rank=self.rank,
            session=self.session,
            layout=self.layout,
            process=info.process,
            joined=info.joined,
            alive=self.expires_in > 0,
            expires_in=self.expires_in,
            version=self.held,
            staged=self.staged,
            stats=msgspec.json.decode(self.stats),
        )


class PolicyWire(msgspec.Struct):
    mode: Mode
    max_lag: int

    def record(self) -> Policy:
        return Policy(self.mode, self.max_lag)


class ModelWire(msgspec.Struct):
    incarnation: int
    world_size: int
    retention: int
    membership: int
    latest: int | None = None
    highest: int | None = None
    aborted: int = 0
    hold: int | None = None
    policy: PolicyWire | None = None
    tags: list[str] = []  # name, version, name, version...
    producers: list[MemberWire] = []
    versions: list[VersionWire] = []

    def record(self, model: str) -> Model:
        return Model(
            name=model,
            incarnation=self.incarnation,
            world_size=self.world_size,
            retention=self.retention,
            latest=self.latest,
            producers=tuple(m.record() for m in self.producers),
            versions=tuple(v.record(model) for v in self.versions),
            highest=self.highest,
            aborted=self.aborted,
            current=self.latest if self.hold is None else self.hold,
            held=self.hold is not None,
            policy=self.policy.record() if self.policy else Policy(),
            membership=self.membership,
            tags=dict(sorted(zip(self.tags[::2], map(int, self.tags[1::2]), strict=True))),
        )


class GroupWire(msgspec.Struct):
    group: str
    world_size: int
    state: GroupState
    round: int
    version: int | None = None
    target: int | None = None
    members: list[MemberWire] = []
    pending: list[int] = []
    error: str = ""
    live: bool = False
    last: int | None = None
    lag: int = 0
    leased: list[int] = []

    def record(self, model: str) -> Group:
        joined = {m.rank for m in self.members}
        return Group(
            model=model,
            group=self.group,
            world_size=self.world_size,
            state=self.state,
            version=self.version,
            target=self.target,
            round=self.round,
            members=tuple(m.record() for m in self.members),
            missing=tuple(r for r in range(self.world_size) if r not in joined),
            pending=tuple(self.pending),
            error=self.error,
            live=self.live,
            last=self.last,
            lag=self.lag,
            leased=tuple(self.leased),
        )


class GroupsWire(msgspec.Struct):
    groups: list[GroupWire] = []


class RoundWire(msgspec.Struct):
    round: int
    version: int
    lease_ttl: float
    held: int | None = None
    tiling: str = ""
    parts: list[str] = []  # JSON of Part, as the producers wrote it

    def record(self, group: str) -> Round:
        parts = (msgspec.json.decode(part, type=Part) for part in self.parts)
        return Round(
            group=group,
            round=self.round,
            version=self.version,
            held=self.held,
            tiling=self.tiling,
            parts=tuple(sorted(parts, key=lambda part: part.rank)),
            lease_ttl=self.lease_ttl,
        )


class RoundStatusWire(msgspec.Struct):
    version: int
    state: GroupState
    pending: list[int] = []
    error: str = ""

    def record(self) -> RoundStatus:
        return RoundStatus(self.version, self.state, tuple(self.pending), self.error)


class HeartbeatWire(msgspec.Struct):
    member: bool
    lost: list[int] = []


class SweepWire(msgspec.Struct):
    done: list[str] = []


class AnnouncedWire(msgspec.Struct):
    ready: list[int] = []


class AppliedWire(msgspec.Struct):
    version: int
    state: VersionState
    applied: list[str] = []
    pending: list[str] = []
    held: int | None = None

    def record(self) -> Applied:
        applied, pending = tuple(sorted(self.applied)), tuple(sorted(self.pending))
        return Applied(self.version, self.state, applied, pending, self.held)


class ConvergenceWire(msgspec.Struct):
    held: bool
    current: int | None = None
    at: list[str] = []
    behind: list[str] = []
    absent: list[str] = []

    def record(self, model: str) -> Convergence:
        at, behind, absent = (tuple(sorted(names)) for names in (self.at, self.behind, self.absent))
        converged = self.current is not None and bool(at) and not behind
        return Convergence(model, self.current, self.held, converged, at, behind, absent)


def no_digests(version: Version, ranks: list[int]) -> WeightDepotError:
    """Why some ranks' digests of a version are not there."""
    who = ", ".join(map(str, ranks))
    why = f": {version.reason}" if version.reason else ""
    return VersionGone(
        f"version {version.version} of model {version.model} is {version.state.value}{why}; there are no"
        f" digests of rank {who} (of {version.world_size})",
        model=version.model,
        version=version.version,
        ranks=ranks,
    )
