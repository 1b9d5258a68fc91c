"""What the index holds and answers, as frozen values.

Times are Unix seconds of the *index's* clock (Redis `TIME`), so that hosts need not agree on the hour.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple


class VersionState(str, Enum):
    """`open` to `ready` to `retired` to `freed`, or `open` to `aborted`; never back."""

    OPEN = "open"
    READY = "ready"
    RETIRED = "retired"  # gives no new leases; freed when the last lease is gone
    FREED = "freed"
    ABORTED = "aborted"


class Mode(str, Enum):
    """What `publish` waits for, and what rollouts may lag behind by."""

    SYNC = "sync"  # a publish ends when every live group has applied the version
    ASYNC = "async"  # a publish ends when the weights may be overwritten
    BOUNDED = "bounded"  # as async, but a publish waits while a live group lags more than `max_lag`


@dataclass(frozen=True)
class Policy:
    """How a model's versions are synchronized; set per model, changeable at any time.

    Lag is counted in *published versions*: how many ready versions are newer than what a group holds.
    """

    mode: Mode = Mode.ASYNC
    max_lag: int = 1


class GroupState(str, Enum):
    EMPTY = "empty"  # holds no version yet
    WHOLE = "whole"  # every rank holds the same version
    MOVING = "moving"  # a round is under way
    HALF = "half"  # a round failed: serve nothing until a whole version is in


@dataclass(frozen=True)
class Process:
    """Where a member runs; lets a successor on the same host see that it is dead before its lease ends."""

    host: str  # boot id and name of the host: equal if and only if the two share a kernel
    pid: int
    started: int  # clock ticks after boot (field 22 of /proc/PID/stat), so that reused pids differ


@dataclass(frozen=True)
class Member:
    """One producer rank, or one rank of a consumer group."""

    rank: int
    session: str  # unique to one start of one process
    layout: str  # digest of its layout; empty until it has one
    process: Process
    joined: float
    alive: bool  # whether its membership has been renewed in time
    expires_in: float  # seconds until it counts as dead; negative when it does already
    version: int | None = None  # consumers: what its parameters hold; None when unknown or torn
    staged: int | None = None  # consumers: a version that is read, and waits to be put in place
    # consumers: figures of its last update, as it reported them (seconds, bytes; `transports` is text)
    stats: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """What one producer rank contributes to one version."""

    rank: int
    session: str
    # How peers reach its slot: transport name -> plain data that only that transport understands.
    endpoints: dict[str, dict[str, Any]]
    nbytes: int
    digests: str  # hex xxh3-128 of the tile digests, in the order of the rank's tile table
    # figures of this rank's publish, as it reported them (seconds, bytes)
    stats: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Version:
    model: str
    version: int
    state: VersionState
    slot: int
    tiling: str
    incarnation: int
    world_size: int
    opened: float
    ready: float | None  # when the last part was sealed
    sealed: tuple[int, ...]  # ranks, rising
    missing: tuple[int, ...]  # ranks that have not sealed
    nbytes: int  # of the sealed parts
    reason: str = ""  # why it was aborted or freed
    leases: tuple[str, ...] = ()  # live holders, as "group/round"
    attempt: str = ""  # unique to one opening of this version: a number that is tried again has another
    live: bool = False  # read in place, from the trainer's own parameters: it occupies no slot (slot -1)
    pinned: bool = False  # never retired
    tags: tuple[str, ...] = ()  # names that point to it; a tagged version is never retired either


@dataclass(frozen=True)
class Model:
    name: str
    incarnation: int
    world_size: int
    retention: int
    latest: int | None  # newest ready version
    producers: tuple[Member, ...]
    # The versions that still matter: open, ready, retired, and the last few freed or aborted.
    versions: tuple[Version, ...]
    highest: int | None = None  # the highest version that was ever ready
    current: int | None = None  # what groups that ask for the newest are given: `latest`, unless held
    held: bool = False  # whether an operator holds the model at `current`
    policy: Policy = Policy()
    tags: dict[str, int] = field(default_factory=dict)
    membership: int = 0  # rises when a member joins, leaves, or states another layout
    aborted: int = 0  # versions that were ever aborted, also those that are no more remembered

    @property
    def window(self) -> int:
        """Slots that versions rotate through: more than the retention where readers may lag further."""
        bounded = self.policy.mode is Mode.BOUNDED
        return max(self.retention, self.policy.max_lag + 2) if bounded else self.retention


@dataclass(frozen=True)
class Group:
    model: str
    group: str
    world_size: int
    state: GroupState
    version: int | None  # what every rank holds; None unless the group is whole
    target: int | None  # what the round under way moves to
    round: int
    members: tuple[Member, ...]
    missing: tuple[int, ...]  # ranks that never joined
    pending: tuple[int, ...]  # ranks that have not finished the round under way
    error: str = ""  # what failed, and on which rank, when the state is `half`
    live: bool = False  # every rank has joined and is alive: only such groups are waited for
    last: int | None = None  # the version that it held as a whole last, also while it is not whole
    lag: int = 0  # versions published since `last` (or, where there is none, since the group came)
    leased: tuple[int, ...] = ()  # versions that it holds leases on

    def is_fresh(self, max_lag: int) -> bool:
        """Whether what it serves is whole, and at most `max_lag` published versions behind. A move that is
        under way is no hindrance: until new weights are written the old ones serve."""
        whole = self.state in (GroupState.WHOLE, GroupState.MOVING) and not self.error
        return whole and self.last is not None and self.lag <= max_lag


@dataclass(frozen=True)
class Joined:
    incarnation: int
    world_size: int
    latest: int | None  # newest ready version, so that a restarted trainer can resume past it
    highest: int | None  # the highest version ever made ready: the next must be above it


@dataclass(frozen=True)
class Grant:
    """A slot to write a version into. The same for every rank of that version."""

    version: int
    slot: int
    tiling: str
    incarnation: int
    # Sessions of this rank whose memory is still part of a ready or retired version.
    keep_sessions: tuple[str, ...] = ()
    attempt: str = ""
    policy: Policy = Policy()
    # Slots that are in use or will be: this rank's memory of any other slot may be given back.
    slots: tuple[int, ...] = ()


@dataclass(frozen=True)
class Held:
    """A part of a sealed version that is still in its producer's memory, announced to an index that has
    lost its state. `part` and `digests` as they were sealed."""

    version: int
    attempt: str
    slot: int
    tiling: str
    part: Part
    digests: bytes  # its tile digests


@dataclass(frozen=True)
class Applied:
    """Which consumer groups have applied a version (or a newer one)."""

    version: int
    state: VersionState
    applied: tuple[str, ...]  # live groups that hold it, or a newer one, as a whole
    pending: tuple[str, ...]  # live groups that do not
    held: int | None = None  # the version that the model is held at, if it is


@dataclass(frozen=True)
class Convergence:
    """Whether every live group serves the model's current version."""

    model: str
    current: int | None
    held: bool
    converged: bool  # there is a current version and at least one live group, and none is behind
    at: tuple[str, ...]  # live groups that hold it as a whole
    behind: tuple[str, ...]  # live groups that do not
    absent: tuple[str, ...]  # groups of which a rank is missing or dead


@dataclass(frozen=True)
class Wait:
    """Not now: what the caller waits for, said so that a time-out can name it."""

    reason: str  # "ranks" | "open-version" | "slot" | "lag" | "version" | "group"
    message: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Round:
    """What a rank of a group is told to move to. `held` equal to `version`: there is nothing to move."""

    group: str
    round: int
    version: int
    held: int | None
    tiling: str
    parts: tuple[Part, ...]
    lease_ttl: float  # seconds; renewed by heartbeats


@dataclass(frozen=True)
class RoundStatus:
    version: int
    state: GroupState
    pending: tuple[int, ...]
    error: str = ""


@dataclass(frozen=True)
class Heartbeat:
    """`member` False: this session was replaced or removed. `lost`: rounds whose lease is gone."""

    member: bool
    lost: tuple[int, ...] = ()


class Event(NamedTuple):
    """Something changed. Kinds: `member`, `open`, `sealed`, `ready`, `retired`, `freed`, `aborted` (of a
    version), `policy`, `held`, `released`, `pinned`, `unpinned`, `tagged`, `untagged`, `round`, `staged`,
    `applied`, `half` (of a group; the version is the round's target), and `subscribed` with model "", which
    tells a listener that from now on it misses nothing."""

    model: str
    kind: str
    version: int | None
    group: str = ""
