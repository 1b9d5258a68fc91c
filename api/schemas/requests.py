"""Bodies of requests. All that a caller may say is named and limited here; the rest is refused."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from weightdepot.api.names import MAX_INTEGER, check_name
from weightdepot.api.schemas.fields import (
    LAYOUT,
    MAX_RETENTION,
    PROCESS,
    SESSION,
    TILING,
    Attempt,
    Base64,
    Bytes,
    Digest,
    Endpoints,
    GroupName,
    Lag,
    OptionalDigest,
    PartDigest,
    Rank,
    RoundNumber,
    Seconds,
    Session,
    Slot,
    Stats,
    TagName,
    Text,
    TilingId,
    VersionNumber,
    WorldSize,
)
from weightdepot.api.settings import DEFAULT_LEASE_TTL, DEFAULT_MEMBER_TTL, DEFAULT_SEAL_TIMEOUT
from weightdepot.store.index.records import Mode

MAX_HELD = 1024  # versions that one rank announces at once


class Request(BaseModel):
    """A request. Unknown fields are refused: a misspelt one would silently do nothing."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Process(Request):
    """Where a member runs."""

    model_config = ConfigDict(extra="forbid", frozen=True, from_attributes=True)

    host: Annotated[
        str, Field(max_length=512, description="Equal if and only if two members share a kernel.")
    ]
    pid: Annotated[int, Field(ge=0, le=MAX_INTEGER, strict=True)]
    started: Annotated[int, Field(ge=0, le=MAX_INTEGER, strict=True, description="Clock ticks after boot.")]


class _Join(Request):
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
    def _in_world(self) -> _Join:
        if self.rank >= self.world_size:
            raise ValueError(f"rank {self.rank} is outside a world of {self.world_size}")
        if self.replace:
            check_name("session", self.replace)
        return self


class ProducerIn(_Join):
    """One trainer rank says that it is here."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "rank": 0, "world_size": 8, "session": SESSION, "layout": LAYOUT,
                    "process": PROCESS, "retention": 2, "ttl": 15.0,
                }
            ]
        }
    )  # fmt: skip

    layout: Digest
    retention: Annotated[
        int, Field(ge=2, le=MAX_RETENTION, strict=True, description="Slots, hence versions held at once.")
    ] = 2
    yields: Annotated[
        bool, Field(strict=True, description="Give way to any producer that does not (an import).")
    ] = False


class ConsumerIn(_Join):
    """One rank of a consumer group says that it is here; its layout may follow."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"rank": 0, "world_size": 2, "session": SESSION, "layout": LAYOUT, "process": PROCESS}
            ]
        }
    )

    layout: OptionalDigest = ""
    observer: Annotated[bool, Field(strict=True, description="Nobody waits for this group (an export).")] = (
        False
    )


class LayoutChange(Request):
    model_config = ConfigDict(json_schema_extra={"examples": [{"session": SESSION, "layout": LAYOUT}]})

    session: Session
    layout: Digest


class HeldRound(Request):
    group: GroupName
    round: RoundNumber


class HeartbeatIn(Request):
    """Renews a membership, and the leases of the rounds that this member is in."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"ttl": 15.0, "rounds": [{"group": "rollout-0", "round": 12}]}]}
    )

    ttl: Seconds = DEFAULT_MEMBER_TTL
    lease_ttl: Seconds = DEFAULT_LEASE_TTL
    rounds: Annotated[tuple[HeldRound, ...], Field(max_length=1024)] = ()


class OpenIn(Request):
    """One producer rank asks for a slot to write a version into."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"version": 137, "rank": 0, "session": SESSION}]}
    )

    version: VersionNumber
    rank: Rank
    session: Session
    seal_timeout: Annotated[
        Seconds, Field(description="Seconds from the opening to the last seal; then the version aborts.")
    ] = DEFAULT_SEAL_TIMEOUT
    live: Annotated[
        bool, Field(strict=True, description="Readers read the weights in place; it takes no slot.")
    ] = False


class SealIn(Request):
    """One producer rank has written its part; the last one makes the version ready."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "session": SESSION,
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
    stats: Annotated[Stats, Field(description="Figures of this rank's publish: seconds, bytes.")] = {}


class EndIn(Request):
    """A producer rank gives a version up, or takes it back."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"session": SESSION, "reason": "out of memory"}]}
    )

    session: Session
    reason: Text


class LostIn(Request):
    model_config = ConfigDict(json_schema_extra={"examples": [{"rank": 3, "reason": "connection refused"}]})

    rank: Rank
    reason: Text


class RoundIn(Request):
    """One rank of a group asks which version to move to."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"rank": 0, "session": SESSION, "min_version": 137}]}
    )

    rank: Rank
    session: Session
    min_version: VersionNumber = 0
    lease_ttl: Seconds = DEFAULT_LEASE_TTL
    version: Annotated[VersionNumber | None, Field(description="This one and no other.")] = None
    tag: Annotated[TagName | None, Field(description="The version that this name points to.")] = None
    max_lag: Annotated[
        Lag | None, Field(description="Keep what the group holds if it is at most so many versions behind.")
    ] = None

    @model_validator(mode="after")
    def _one_wish(self) -> RoundIn:
        wishes = [name for name in ("version", "tag", "max_lag") if getattr(self, name) is not None]
        if len(wishes) > 1:
            raise ValueError(f"{' and '.join(wishes)} were given: at most one of them says what is wanted")
        return self


class FinishIn(Request):
    """One rank has applied the round's version, or failed to."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"session": SESSION, "error": ""}]})

    session: Session
    error: Annotated[Text, Field(description="Empty: applied.")] = ""
    torn: Annotated[
        bool,
        Field(strict=True, description="After an error: whether anything was written into the weights."),
    ] = True
    stats: Annotated[
        Stats, Field(description="Figures of this rank's update: seconds, bytes, transports.")
    ] = {}


class StagedIn(Request):
    """One rank has read all that it needs of the round's version, and has not applied it yet."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"session": SESSION}]})

    session: Session


class PolicyIn(Request):
    """How a model's versions are synchronized."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"mode": "bounded", "max_lag": 2}]})

    mode: Mode
    max_lag: Annotated[Lag, Field(description="Published versions; matters in mode `bounded`.")] = 1


class VersionIn(Request):
    """The version that is meant."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"version": 120}]})

    version: VersionNumber


class PartIn(Request):
    """A part as it was sealed."""

    rank: Rank
    session: Session
    endpoints: Endpoints
    nbytes: Bytes
    digests: PartDigest
    stats: Stats = {}


class HeldIn(Request):
    """A part that is still in its producer's memory."""

    version: VersionNumber
    attempt: Attempt
    slot: Slot
    tiling: TilingId
    part: PartIn
    digests: Annotated[Base64, Field(description="Its tile digests.")]


class AnnounceIn(Request):
    """What a producer rank still holds, told to an index that may have lost its state."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "session": SESSION,
                    "world_size": 1,
                    "retention": 2,
                    "highest": 137,
                    "held": [
                        {
                            "version": 137,
                            "attempt": "3f9c-2",
                            "slot": 0,
                            "tiling": TILING,
                            "part": {
                                "rank": 0,
                                "session": SESSION,
                                "endpoints": {"shm": {"segment": "wd-1", "offset": 4096}},
                                "nbytes": 16060522496,
                                "digests": "99aa06d3014798d86001c324468d497f",
                            },
                            "digests": "",
                        }
                    ],
                }
            ]
        }
    )

    session: Session
    world_size: WorldSize
    retention: Annotated[int, Field(ge=2, le=MAX_RETENTION, strict=True)]
    held: Annotated[tuple[HeldIn, ...], Field(max_length=MAX_HELD)]
    highest: Annotated[
        VersionNumber | None, Field(description="The highest version that it knows to have been ready.")
    ] = None
