"""weightdepot: versioned weights from trainers to rollout workers.

Trainers publish with `Producer`, rollout workers pull exactly the slices that their layout needs with
`Consumer`; a controller (`weightdepot serve`) keeps track of the versions.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightdepot.consumers import AsyncConsumer, Consumer, FromSource, Generation, Updated
    from weightdepot.producers import AsyncProducer, Producer, Published, Sealed
    from weightdepot.store.errors import (
        ControllerUnavailable,
        IndexUnavailable,
        IntegrityError,
        InvalidRequest,
        LayoutError,
        LeaseLost,
        MemberConflict,
        PublishAborted,
        SourceLost,
        StaleGroup,
        StoreFull,
        TransportUnavailable,
        Unauthorized,
        UnknownModel,
        VersionGone,
        VersionNotNewer,
        WaitTimeout,
        WeightDepotError,
    )
    from weightdepot.store.layout import TensorSpec
    from weightdepot.store.progress import Progress, progress_bar
    from weightdepot.store.timeouts import Timeouts
    from weightdepot.store.weights import Shard

__all__ = [
    "AsyncConsumer",
    "AsyncProducer",
    "Consumer",
    "ControllerUnavailable",
    "FromSource",
    "Generation",
    "IndexUnavailable",
    "IntegrityError",
    "InvalidRequest",
    "LayoutError",
    "LeaseLost",
    "MemberConflict",
    "Producer",
    "Progress",
    "PublishAborted",
    "Published",
    "Sealed",
    "Shard",
    "SourceLost",
    "StaleGroup",
    "StoreFull",
    "TensorSpec",
    "Timeouts",
    "TransportUnavailable",
    "Unauthorized",
    "UnknownModel",
    "Updated",
    "VersionGone",
    "VersionNotNewer",
    "WaitTimeout",
    "WeightDepotError",
    "progress_bar",
]

# Where each name lives. They are imported when they are first used: the controller and the command line need
# neither torch nor the transports.
_HOME = {
    "AsyncConsumer": "weightdepot.consumers",
    "Consumer": "weightdepot.consumers",
    "FromSource": "weightdepot.consumers",
    "Generation": "weightdepot.consumers",
    "Updated": "weightdepot.consumers",
    "AsyncProducer": "weightdepot.producers",
    "Producer": "weightdepot.producers",
    "Published": "weightdepot.producers",
    "Sealed": "weightdepot.producers",
    "ControllerUnavailable": "weightdepot.store.errors",
    "IndexUnavailable": "weightdepot.store.errors",
    "IntegrityError": "weightdepot.store.errors",
    "InvalidRequest": "weightdepot.store.errors",
    "LayoutError": "weightdepot.store.errors",
    "LeaseLost": "weightdepot.store.errors",
    "MemberConflict": "weightdepot.store.errors",
    "PublishAborted": "weightdepot.store.errors",
    "SourceLost": "weightdepot.store.errors",
    "StaleGroup": "weightdepot.store.errors",
    "StoreFull": "weightdepot.store.errors",
    "TransportUnavailable": "weightdepot.store.errors",
    "Unauthorized": "weightdepot.store.errors",
    "UnknownModel": "weightdepot.store.errors",
    "VersionGone": "weightdepot.store.errors",
    "VersionNotNewer": "weightdepot.store.errors",
    "WaitTimeout": "weightdepot.store.errors",
    "WeightDepotError": "weightdepot.store.errors",
    "TensorSpec": "weightdepot.store.layout",
    "Progress": "weightdepot.store.progress",
    "progress_bar": "weightdepot.store.progress",
    "Timeouts": "weightdepot.store.timeouts",
    "Shard": "weightdepot.store.weights",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
