"""Answers: the records of the index as the API describes them, each field with what it means."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from weightdepot.api.schemas.fields import LAYOUT, Base64
from weightdepot.api.schemas.requests import Process
from weightdepot.store.index.records import GroupState, Mode, VersionState


class Answer(BaseModel):
    model_config = ConfigDict(from_attributes=True, frozen=True)


class Health(Answer):
    status: Annotated[str, Field(examples=["ok"])]
    run: Annotated[str, Field(examples=["default"])]
    release: Annotated[str, Field(examples=["0.1.0"])]


class Ready(Answer):
    status: Annotated[str, Field(examples=["ready"])]
    run: Annotated[str, Field(examples=["default"])]
    index_seconds: Annotated[float, Field(description="One round trip to the index.", examples=[0.0004])]


class LayoutStored(Answer):
    digest: Annotated[str, Field(examples=[LAYOUT])]
    tensors: Annotated[int, Field(description="Checkpoint tensors that it names.", examples=[291])]
    placements: Annotated[int, Field(examples=[291])]
    nbytes: Annotated[int, Field(description="Bytes that it covers.", examples=[16060522496])]


class Member(Answer):
    rank: int
    session: str
    layout: Annotated[str, Field(description="Digest; empty until it has one.")]
    process: Process
    joined: Annotated[float, Field(description="Unix seconds of the index's clock.")]
    alive: bool
    expires_in: Annotated[float, Field(description="Seconds until it counts as dead; negative when it does.")]
    version: Annotated[int | None, Field(description="Consumers: what its parameters hold.")] = None
    staged: Annotated[
        int | None, Field(description="Consumers: what it has read, and not put in place yet.")
    ] = None
    stats: Annotated[dict[str, Any], Field(description="Consumers: figures of its last update.")] = {}


class Part(Answer):
    rank: int
    session: str
    endpoints: dict[str, dict[str, Any]]
    nbytes: int
    digests: str
    stats: Annotated[dict[str, Any], Field(description="Figures of this rank's publish.")] = {}


class Policy(Answer):
    """How a model's versions are synchronized."""

    mode: Mode = Mode.ASYNC
    max_lag: Annotated[int, Field(description="Published versions; matters in mode `bounded`.")] = 1


class Version(Answer):
    model: Annotated[str, Field(examples=["policy"])]
    version: Annotated[int, Field(examples=[137])]
    state: VersionState
    slot: int
    tiling: str
    incarnation: int
    world_size: int
    opened: float
    ready: Annotated[float | None, Field(description="When the last part was sealed.")]
    sealed: tuple[int, ...]
    missing: tuple[int, ...]
    nbytes: int
    reason: str = ""
    leases: Annotated[tuple[str, ...], Field(description="Live holders, as GROUP/ROUND.")] = ()
    attempt: Annotated[str, Field(description="Unique to one opening of this version.")] = ""
    live: Annotated[bool, Field(description="Read in place, from the trainer's own parameters.")] = False
    pinned: Annotated[bool, Field(description="Never retired.")] = False
    tags: Annotated[tuple[str, ...], Field(description="Names that point to it; it is never retired.")] = ()


class Model(Answer):
    name: Annotated[str, Field(examples=["policy"])]
    incarnation: int
    world_size: int
    retention: int
    latest: Annotated[int | None, Field(description="Newest ready version.")]
    producers: tuple[Member, ...]
    versions: tuple[Version, ...]
    highest: Annotated[int | None, Field(description="Highest version that was ever ready.")] = None
    current: Annotated[
        int | None, Field(description="What groups that ask for the newest are given: `latest`, unless held.")
    ] = None
    held: Annotated[bool, Field(description="An operator holds the model at `current`.")] = False
    policy: Policy = Policy()
    tags: dict[str, int] = {}
    membership: Annotated[
        int, Field(description="Rises when a member joins, leaves, or states another layout.")
    ] = 0
    aborted: Annotated[int, Field(description="Versions that were ever aborted.")] = 0


class Group(Answer):
    model: Annotated[str, Field(examples=["policy"])]
    group: Annotated[str, Field(examples=["rollout-0"])]
    world_size: int
    state: GroupState
    version: Annotated[int | None, Field(description="What every rank holds; null unless it is whole.")]
    target: int | None
    round: int
    members: tuple[Member, ...]
    missing: tuple[int, ...]
    pending: tuple[int, ...]
    error: str = ""
    live: Annotated[bool, Field(description="Every rank has joined and is alive.")] = False
    last: Annotated[int | None, Field(description="What it held as a whole last.")] = None
    lag: Annotated[int, Field(description="Versions published since `last`.")] = 0
    leased: Annotated[tuple[int, ...], Field(description="Versions that it holds leases on.")] = ()


class Models(Answer):
    models: Annotated[list[str], Field(examples=[["policy", "reward"]])]


class Versions(Answer):
    versions: tuple[Version, ...]


class Groups(Answer):
    groups: tuple[Group, ...]


class Report(Answer):
    """One model at one moment."""

    model: Model
    groups: tuple[Group, ...]
    troubles: Annotated[tuple[str, ...], Field(description="What is stuck, in words.")]


class Overview(Answer):
    run: str
    models: tuple[Report, ...]


class Joined(Answer):
    incarnation: int
    world_size: int
    latest: Annotated[int | None, Field(description="Newest ready version.")]
    highest: Annotated[int | None, Field(description="The next version must be above it.")]


class Heartbeat(Answer):
    member: Annotated[bool, Field(description="False: this session was replaced or removed.")]
    lost: Annotated[tuple[int, ...], Field(description="Rounds whose lease is gone.")] = ()


class Tensor(Answer):
    name: Annotated[str, Field(examples=["model.embed_tokens.weight"])]
    shape: Annotated[list[int], Field(examples=[[151936, 4096]])]
    dtype: Annotated[str, Field(examples=["bfloat16"])]


class Manifest(Answer):
    tensors: list[Tensor]


class Grant(Answer):
    version: int
    slot: int
    tiling: str
    incarnation: int
    keep_sessions: tuple[str, ...] = ()
    attempt: str = ""
    policy: Policy = Policy()
    slots: Annotated[tuple[int, ...], Field(description="Slots that are in use or will be.")] = ()


class Round(Answer):
    group: str
    round: int
    version: int
    held: int | None
    tiling: str
    parts: tuple[Part, ...]
    lease_ttl: float


class RoundStatus(Answer):
    version: int
    state: GroupState
    pending: tuple[int, ...]
    error: str = ""


class Applied(Answer):
    """Which live consumer groups hold a version (or a newer one) as a whole."""

    version: int
    state: VersionState
    applied: tuple[str, ...]
    pending: tuple[str, ...]
    held: Annotated[int | None, Field(description="The version that the model is held at, if it is.")] = None


class Convergence(Answer):
    """Whether every live group serves the model's current version."""

    model: Annotated[str, Field(examples=["policy"])]
    current: int | None
    held: bool
    converged: bool
    at: Annotated[tuple[str, ...], Field(description="Live groups that hold it as a whole.")]
    behind: Annotated[tuple[str, ...], Field(description="Live groups that do not.")]
    absent: Annotated[tuple[str, ...], Field(description="Groups of which a rank is missing or dead.")]


class Announced(Answer):
    ready: Annotated[tuple[int, ...], Field(description="Announced versions that are ready now.")]


class Event(Answer):
    """The data of a server-sent event."""

    model: Annotated[str, Field(examples=["policy"])]
    kind: Annotated[str, Field(examples=["ready"])]
    version: int | None
    group: str = ""


class Wait(Answer):
    """Not now; ask again."""

    reason: Annotated[str, Field(examples=["slot"])]
    message: Annotated[str, Field(examples=["every slot is leased: rollout-0/12"])]
    details: dict[str, Any] = {}


class GrantOrWait(Answer):
    """Exactly one of the two."""

    grant: Grant | None = None
    wait: Wait | None = None


class RoundOrWait(Answer):
    """Exactly one of the two."""

    round: Round | None = None
    wait: Wait | None = None


class Digests(Answer):
    digests: Annotated[
        dict[int, Base64],
        Field(description="By rank: the tile digests of its part, as base64.", examples=[{"0": "3q2+7w=="}]),
    ]


class Problem(BaseModel):
    """A problem detail (RFC 9457). `type` ends in the name of the error's class."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "type": "https://weightdepot.dev/problems/version-gone",
                    "title": "The version is gone",
                    "status": 410,
                    "detail": "version 137 of 'policy' was freed: a newer one needed its slot",
                    "details": {"model": "policy", "version": 137},
                }
            ]
        }
    )

    type: str
    title: str
    status: int
    detail: str
    details: dict[str, Any] | None = None
