"""The index: members, versions, leases and rounds, in Redis."""

from weightdepot.store.index.embedded import EmbeddedRedis
from weightdepot.store.index.index import Index
from weightdepot.store.index.records import (
    Event,
    Grant,
    Group,
    GroupState,
    Heartbeat,
    Joined,
    Member,
    Model,
    Part,
    Process,
    Round,
    RoundStatus,
    Version,
    VersionState,
    Wait,
)

__all__ = [
    "EmbeddedRedis",
    "Event",
    "Grant",
    "Group",
    "GroupState",
    "Heartbeat",
    "Index",
    "Joined",
    "Member",
    "Model",
    "Part",
    "Process",
    "Round",
    "RoundStatus",
    "Version",
    "VersionState",
    "Wait",
]
