"""The index: members, versions, leases and rounds, in Redis.

`Index` and `EmbeddedRedis` are imported when they are first used: trainers and rollouts need the records
only, and no Redis client.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from weightdepot.store.index.embedded import EmbeddedRedis
    from weightdepot.store.index.index import Index

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

_HOME = {"EmbeddedRedis": "weightdepot.store.index.embedded", "Index": "weightdepot.store.index.index"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
