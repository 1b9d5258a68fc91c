"""How long anything may wait, in seconds: one value with names, never bare numbers."""

from __future__ import annotations

from dataclasses import dataclass, fields

from weightdepot.store.errors import InvalidRequest


@dataclass(frozen=True)
class Timeouts:
    """Every wait of a producer or consumer is bounded by one of these, in seconds."""

    join: float = 60.0
    """To reach the controller, and for a dead predecessor's claim on the rank to end."""
    publish: float = 60.0
    """For the other ranks to be there, an older version to be finished, and a slot to be free."""
    seal: float = 120.0
    """From the first rank's beginning of a version to the last rank's seal; then it is aborted."""
    update: float = 60.0
    """For a version to be ready, pulled, and applied by every rank of the group."""
    call: float = 10.0
    """One exchange with the controller that waits for nothing."""
    member: float = 10.0
    """A member that has not been heard of for so long counts as dead."""
    lease: float = 30.0
    """A reader that has not renewed its lease for so long has lost it."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise InvalidRequest(
                    f"timeouts.{field.name} is {value!r}; it must be a number of seconds above 0"
                )
