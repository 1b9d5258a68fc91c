"""weightdepot: versioned weights from trainers to rollout workers.

Trainers publish with `Producer`, rollout workers pull exactly the slices that their layout needs with
`Consumer`; a controller (`weightdepot serve`) keeps track of the versions.
"""

from weightdepot.consumers import Consumer, Updated
from weightdepot.producers import Producer, Published
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
    "Consumer",
    "ControllerUnavailable",
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
