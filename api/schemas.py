"""What crosses HTTP as JSON: requests are checked here, answers mirror the records of the index.

The client returns the records themselves (weightdepot.store.index.records); a test keeps the two alike.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)

from weightdepot.api.names import DIGEST_PATTERN, MAX_INTEGER, NAME_PATTERN, check_digest, check_name
from weightdepot.api.settings import DEFAULT_LEASE_TTL, DEFAULT_MEMBER_TTL, DEFAULT_SEAL_TIMEOUT
from weightdepot.store.index.records import GroupState, VersionState

MAX_WORLD = 65536
MAX_RETENTION = 1024
MAX_TTL = 24 * 3600.0
MAX_ENDPOINTS = 64 << 10  # bytes of JSON
MAX_DEPTH = 8
MAX_TEXT = 4096


def _name(what: str) -> AfterValidator:
    return AfterValidator(lambda value: check_name(what, value))


def _digest(what: str, *, optional: bool = False) -> AfterValidator:
    return AfterValidator(lambda value: value if optional and not value else check_digest(what, value))


def _text(pattern: str, example: str) -> WithJsonSchema:
    """Stated for OpenAPI; checked in Python, for the clearer message."""
    return WithJsonSchema({"type": "string", "pattern": pattern, "examples": [example]})


def _depth(value: object) -> int:
    """Levels of nesting; stops counting past what is allowed."""
    level, at = 0, [value]
    while at and level <= MAX_DEPTH:
        level += 1
        inner: list[object] = []
        for item in at:
            if isinstance(item, dict):
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
        at = inner
    return level


def _plain(value: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Refuses what JSON or the index could not give back unchanged: NaN, half surrogates, huge numbers."""
    if _depth(value) > MAX_DEPTH:
        raise ValueError(f"endpoints are nested more than {MAX_DEPTH} deep")
    try:
        size = len(json.dumps(value, allow_nan=False, ensure_ascii=False).encode("utf-8"))
    except ValueError as error:  # NaN and infinities; lone surrogates (UnicodeEncodeError)
        raise ValueError(f"endpoints are not plain JSON: {error}") from error
    if size > MAX_ENDPOINTS:
        raise ValueError(f"endpoints take {size} bytes; at most {MAX_ENDPOINTS} are taken")
    return value


def _base64(value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise ValueError("base64 text is wanted")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"not base64: {error}") from error


def _bounded(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("a finite number is wanted")
    return value


_PROCESS: dict[str, Any] = {"host": "6c1e2f-node-7", "pid": 4242, "started": 118824}
_SESSION = "5f0c1c1e9a0b4c0f8f3f7d2a"
_LAYOUT = "0f343b0931126a20f133d67c2b018a3b"

ModelName = Annotated[str, _name("model"), _text(NAME_PATTERN, "policy")]
GroupName = Annotated[str, _name("group"), _text(NAME_PATTERN, "rollout-0")]
Session = Annotated[str, _name("session"), _text(NAME_PATTERN, _SESSION)]
Digest = Annotated[str, _digest("layout"), _text(DIGEST_PATTERN, _LAYOUT)]
OptionalDigest = Annotated[str, _digest("layout", optional=True), _text(f"^$|{DIGEST_PATTERN}", _LAYOUT)]
TilingId = Annotated[str, _digest("tiling"), _text(DIGEST_PATTERN, "7d1f1c3d1f0b4a6fb1a3c8b0d8b0c5aa")]
PartDigest = Annotated[str, _digest("part"), _text(DIGEST_PATTERN, "99aa06d3014798d86001c324468d497f")]
# strict: neither true nor "1" is a rank in JSON; the path's are text, hence their own
Rank = Annotated[int, Field(ge=0, lt=MAX_WORLD, strict=True, examples=[0])]
PathRank = Annotated[int, Field(ge=0, lt=MAX_WORLD, examples=[0])]
WorldSize = Annotated[int, Field(gt=0, le=MAX_WORLD, strict=True, examples=[8])]
VersionNumber = Annotated[int, Field(ge=0, le=MAX_INTEGER, strict=True, examples=[137])]
PathNumber = Annotated[int, Field(ge=0, le=MAX_INTEGER, examples=[137])]
RoundNumber = Annotated[int, Field(ge=0, le=MAX_INTEGER, strict=True, examples=[12])]
Bytes = Annotated[int, Field(ge=0, le=MAX_INTEGER, strict=True, examples=[16060522496])]
Seconds = Annotated[float, Field(gt=0, le=MAX_TTL), AfterValidator(_bounded)]
Text = Annotated[str, Field(max_length=MAX_TEXT)]
Endpoints = Annotated[dict[str, dict[str, Any]], AfterValidator(_plain)]
Base64 = Annotated[
    bytes,
    BeforeValidator(_base64),
    PlainSerializer(lambda data: base64.b64encode(data).decode("ascii"), return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "contentEncoding": "base64", "examples": ["3q2+7w=="]}),
]


class _In(BaseModel):
    """A request. Unknown fields are refused: a misspelt one would silently do nothing."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class _Out(BaseModel):
    model_config = ConfigDict(from_attributes=True, frozen=True)


class Process(_In):
    """Where a member runs."""

    model_config = ConfigDict(extra="forbid", frozen=True, from_attributes=True)

    host: Annotated[
        str, Field(max_length=512, description="Equal if and only if two members share a kernel.")
    ]
    pid: Annotated[int, Field(ge=0, le=MAX_INTEGER, strict=True)]
    started: Annotated[int, Field(ge=0, le=MAX_INTEGER, strict=True, description="Clock ticks after boot.")]


class _JoinIn(_In):
    rank: Rank
    world_size: WorldSize
    session: Session
    process: Process
    ttl: Annotated[Seconds, Field(description="Seconds without a heartbeat until it counts as dead.")] = (
        DEFAULT_MEMBER_TTL
    )
    replace: Annotated[
        str, Field(max_length=128, description="The session to take this rank from, known to be dead.")
    ] = ""

    @model_validator(mode="after")
    def _in_world(self) -> _JoinIn:
        if self.rank >= self.world_size:
            raise ValueError(f"rank {self.rank} is outside a world of {self.world_size}")
        if self.replace:
            check_name("session", self.replace)
        return self


class ProducerIn(_JoinIn):
    """One trainer rank says that it is here."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "rank": 0, "world_size": 8, "session": _SESSION, "layout": _LAYOUT,
                    "process": _PROCESS, "retention": 2, "ttl": 15.0,
                }
            ]
        }
    )  # fmt: skip

    layout: Digest
    retention: Annotated[
        int, Field(ge=2, le=MAX_RETENTION, strict=True, description="Slots, hence versions held at once.")
    ] = 2


class ConsumerIn(_JoinIn):
    """One rank of a consumer group says that it is here; its layout may follow."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"rank": 0, "world_size": 2, "session": _SESSION, "layout": _LAYOUT, "process": _PROCESS}
            ]
        }
    )

    layout: OptionalDigest = ""


class LayoutChange(_In):
    model_config = ConfigDict(json_schema_extra={"examples": [{"session": _SESSION, "layout": _LAYOUT}]})

    session: Session
    layout: Digest


class HeldRound(_In):
    group: GroupName
    round: RoundNumber


class HeartbeatIn(_In):
    """Renews a membership, and the leases of the rounds that this member is in."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"ttl": 15.0, "rounds": [{"group": "rollout-0", "round": 12}]}]}
    )

    ttl: Seconds = DEFAULT_MEMBER_TTL
    lease_ttl: Seconds = DEFAULT_LEASE_TTL
    rounds: Annotated[tuple[HeldRound, ...], Field(max_length=1024)] = ()


class OpenIn(_In):
    """One producer rank asks for a slot to write a version into."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"version": 137, "rank": 0, "session": _SESSION}]}
    )

    version: VersionNumber
    rank: Rank
    session: Session
    seal_timeout: Annotated[
        Seconds, Field(description="Seconds from the opening to the last seal; then the version aborts.")
    ] = DEFAULT_SEAL_TIMEOUT


class SealIn(_In):
    """One producer rank has written its part; the last one makes the version ready."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "session": _SESSION,
                    "endpoints": {"shm": {"segment": "wd-1", "offset": 4096}},
                    "nbytes": 16060522496,
                    "digests": "99aa06d3014798d86001c324468d497f",
                    "tile_digests": "",
                }
            ]
        }
    )

    session: Session
    endpoints: Annotated[Endpoints, Field(description="How peers reach the slot, by transport.")]
    nbytes: Bytes
    digests: Annotated[PartDigest, Field(description="xxh3-128 of `tile_digests`.")]
    tile_digests: Annotated[Base64, Field(description="Of each tile, in the order of the rank's tile table.")]


class AbortIn(_In):
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"session": _SESSION, "reason": "out of memory"}]}
    )

    session: Session
    reason: Text


class LostIn(_In):
    model_config = ConfigDict(json_schema_extra={"examples": [{"rank": 3, "reason": "connection refused"}]})

    rank: Rank
    reason: Text


class RoundIn(_In):
    """One rank of a group asks which version to move to."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"rank": 0, "session": _SESSION, "min_version": 137}]}
    )

    rank: Rank
    session: Session
    min_version: VersionNumber = 0
    lease_ttl: Seconds = DEFAULT_LEASE_TTL


class FinishIn(_In):
    """One rank has applied the round's version, or failed to."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"session": _SESSION, "error": ""}]})

    session: Session
    error: Annotated[Text, Field(description="Empty: applied.")] = ""


class Health(_Out):
    status: Annotated[str, Field(examples=["ok"])]
    run: Annotated[str, Field(examples=["default"])]
    release: Annotated[str, Field(examples=["0.1.0"])]


class Ready(_Out):
    status: Annotated[str, Field(examples=["ready"])]
    run: Annotated[str, Field(examples=["default"])]
    index_seconds: Annotated[float, Field(description="One round trip to the index.", examples=[0.0004])]


class LayoutStored(_Out):
    digest: Annotated[str, Field(examples=[_LAYOUT])]
    tensors: Annotated[int, Field(description="Checkpoint tensors that it names.", examples=[291])]
    placements: Annotated[int, Field(examples=[291])]
    nbytes: Annotated[int, Field(description="Bytes that it covers.", examples=[16060522496])]


class Member(_Out):
    rank: int
    session: str
    layout: Annotated[str, Field(description="Digest; empty until it has one.")]
    process: Process
    joined: Annotated[float, Field(description="Unix seconds of the index's clock.")]
    alive: bool
    expires_in: Annotated[float, Field(description="Seconds until it counts as dead; negative when it does.")]
    version: Annotated[int | None, Field(description="Consumers: what its parameters hold.")] = None


class Part(_Out):
    rank: int
    session: str
    endpoints: dict[str, dict[str, Any]]
    nbytes: int
    digests: str


class Version(_Out):
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
    leases: tuple[str, ...] = ()


class Model(_Out):
    name: Annotated[str, Field(examples=["policy"])]
    incarnation: int
    world_size: int
    retention: int
    latest: Annotated[int | None, Field(description="Newest ready version.")]
    producers: tuple[Member, ...]
    versions: tuple[Version, ...]


class Group(_Out):
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


class Models(_Out):
    models: Annotated[list[str], Field(examples=[["policy", "reward"]])]


class Versions(_Out):
    versions: tuple[Version, ...]


class Groups(_Out):
    groups: tuple[Group, ...]


class Joined(_Out):
    incarnation: int
    world_size: int
    latest: Annotated[int | None, Field(description="Newest ready version.")]
    highest: Annotated[int | None, Field(description="The next version must be above it.")]


class Heartbeat(_Out):
    member: Annotated[bool, Field(description="False: this session was replaced or removed.")]
    lost: Annotated[tuple[int, ...], Field(description="Rounds whose lease is gone.")] = ()


class Tensor(_Out):
    name: Annotated[str, Field(examples=["model.embed_tokens.weight"])]
    shape: Annotated[list[int], Field(examples=[[151936, 4096]])]
    dtype: Annotated[str, Field(examples=["bfloat16"])]


class Manifest(_Out):
    tensors: list[Tensor]


class Grant(_Out):
    version: int
    slot: int
    tiling: str
    incarnation: int
    keep_sessions: tuple[str, ...] = ()


class Round(_Out):
    group: str
    round: int
    version: int
    held: int | None
    tiling: str
    parts: tuple[Part, ...]
    lease_ttl: float


class RoundStatus(_Out):
    version: int
    state: GroupState
    pending: tuple[int, ...]
    error: str = ""


class Wait(_Out):
    """Not now; ask again."""

    reason: Annotated[str, Field(examples=["slot"])]
    message: Annotated[str, Field(examples=["every slot is leased: rollout-0/12"])]
    details: dict[str, Any] = {}


class GrantOrWait(_Out):
    """Exactly one of the two."""

    grant: Grant | None = None
    wait: Wait | None = None


class RoundOrWait(_Out):
    """Exactly one of the two."""

    round: Round | None = None
    wait: Wait | None = None


class Digests(_Out):
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
