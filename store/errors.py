"""Every error that weightdepot raises, and its form on the wire.

    WeightDepotError
    ├── InvalidRequest          an argument that can never work: mend the call
    ├── LayoutError             tensors that do not map, each named with the reason
    ├── UnknownModel            nobody has registered this model
    ├── MemberConflict          this rank is held by a live process, or the world sizes disagree
    ├── VersionNotNewer         versions of a model only rise
    ├── VersionGone             freed, aborted, or its memory went with the process that held it
    ├── PublishAborted          a rank died, was replaced or never sealed: nothing was made visible
    ├── StoreFull               no slot is free; says who holds the leases
    ├── LeaseLost               the reader was too late: what it read is discarded
    ├── SourceLost              a source cannot be reached (any more)
    ├── IntegrityError          bytes that arrived are not the bytes that were published
    ├── StaleGroup              a consumer group is half-way between two versions
    ├── TransportUnavailable    the transport asked for cannot work here
    ├── WaitTimeout             what was waited for did not come in the stated time
    ├── ControllerUnavailable   the controller does not answer
    ├── IndexUnavailable        the controller answers, its Redis does not
    └── Unauthorized            no token, a wrong one, or one whose role does not allow this

Over HTTP an error is a problem detail (RFC 9457) whose `type` ends in the class's `slug`;
`from_problem` gives the client the same class back, with the same message and details.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

PROBLEM_BASE = "https://weightdepot.dev/problems/"


class WeightDepotError(Exception):
    """Base of all. `details` is plain JSON data: model, version, rank, tensors... where they are known."""

    slug: ClassVar[str] = "error"
    status: ClassVar[int] = 500
    title: ClassVar[str] = "weightdepot failed"
    # whether the same call may succeed later without anything being mended
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, Any] = {k: v for k, v in details.items() if v is not None}

    def to_problem(self) -> dict[str, Any]:
        """The error as a problem detail (RFC 9457)."""
        return {
            "type": PROBLEM_BASE + self.slug,
            "title": self.title,
            "status": self.status,
            "detail": self.message,
            **({"details": self.details} if self.details else {}),
        }


class InvalidRequest(WeightDepotError, ValueError):
    slug, status, title = "invalid-request", 422, "The request cannot be carried out"


@dataclass(frozen=True)
class LayoutFault:
    """One tensor (or buffer) that does not map, and why."""

    tensor: str
    reason: str

    def __str__(self) -> str:
        return f"{self.tensor}: {self.reason}"


class LayoutError(WeightDepotError):
    """Names all faults, not the first. `faults` holds them; the message shows the first dozen."""

    slug, status, title = "layout", 409, "The layouts do not fit"
    SHOWN: ClassVar[int] = 12

    def __init__(self, message: str, faults: Iterable[LayoutFault] = (), **details: Any) -> None:
        self.faults = tuple(faults)
        shown = [f"  - {fault}" for fault in self.faults[: self.SHOWN]]
        if len(self.faults) > self.SHOWN:
            shown.append(f"  ... and {len(self.faults) - self.SHOWN} more (see .faults)")
        super().__init__("\n".join([message, *shown]), **details)
        if self.faults:
            self.details["faults"] = [{"tensor": f.tensor, "reason": f.reason} for f in self.faults]


class UnknownModel(WeightDepotError):
    slug, status, title = "unknown-model", 404, "No such model"


class MemberConflict(WeightDepotError):
    slug, status, title = "member-conflict", 409, "This rank is taken"


class VersionNotNewer(WeightDepotError):
    slug, status, title = "version-not-newer", 409, "Versions only rise"


class VersionGone(WeightDepotError):
    slug, status, title = "version-gone", 410, "The version is gone"


class PublishAborted(WeightDepotError):
    slug, status, title = "publish-aborted", 409, "The publish was aborted"


class StoreFull(WeightDepotError):
    slug, status, title = "store-full", 503, "No slot is free"
    retryable = True


class LeaseLost(WeightDepotError):
    slug, status, title = "lease-lost", 409, "The lease was lost"
    retryable = True


class SourceLost(WeightDepotError):
    slug, status, title = "source-lost", 503, "A source is lost"
    retryable = True


class IntegrityError(WeightDepotError):
    slug, status, title = "integrity", 502, "The bytes are not those that were published"


class StaleGroup(WeightDepotError):
    slug, status, title = "stale-group", 409, "The group is half-way between versions"
    retryable = True


class TransportUnavailable(WeightDepotError):
    slug, status, title = "transport-unavailable", 503, "The transport cannot work here"


class WaitTimeout(WeightDepotError, TimeoutError):
    slug, status, title = "wait-timeout", 504, "Waited in vain"
    retryable = True


class ControllerUnavailable(WeightDepotError, ConnectionError):
    slug, status, title = "controller-unavailable", 503, "The controller does not answer"
    retryable = True


class IndexUnavailable(WeightDepotError):
    slug, status, title = "index-unavailable", 503, "The index does not answer"
    retryable = True


class Unauthorized(WeightDepotError):
    slug, status, title = "unauthorized", 401, "Not allowed"


_BY_SLUG: dict[str, type[WeightDepotError]] = {
    cls.slug: cls
    for cls in (
        InvalidRequest, UnknownModel, MemberConflict, VersionNotNewer, VersionGone, PublishAborted,
        StoreFull, LeaseLost, SourceLost, IntegrityError, StaleGroup, TransportUnavailable, WaitTimeout,
        ControllerUnavailable, IndexUnavailable, Unauthorized,
    )
}  # fmt: skip


def from_problem(problem: Mapping[str, Any]) -> WeightDepotError:
    """The error that a problem detail describes; a `WeightDepotError` where its type is not ours."""
    slug = str(problem.get("type", "")).rsplit("/", 1)[-1]
    message = str(problem.get("detail") or problem.get("title") or "unknown error")
    raw = problem.get("details")
    details: dict[str, Any] = dict(raw) if isinstance(raw, Mapping) else {}
    if slug == LayoutError.slug:
        faults = [LayoutFault(str(f["tensor"]), str(f["reason"])) for f in details.pop("faults", [])]
        return LayoutError(message.split("\n  - ", 1)[0], faults, **details)
    return _BY_SLUG.get(slug, WeightDepotError)(message, **details)
