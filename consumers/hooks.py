"""What an engine wants to be told around new weights, each time with the version."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Hook = Callable[[int], None]


def nothing(_: int) -> None:
    """For a hook that is not wanted."""


@dataclass(frozen=True)
class Hooks:
    """Called by each rank, in this order, in the thread that updates.

    An exception in the first fails the round with nothing written; in the second it marks the group, since
    the weights are new and what depends on them is not; in the third it changes nothing any more.
    """

    before_write: Hook = nothing
    """Before the first byte is written into the weights. Not called where nothing is written."""
    before_serve: Hook = nothing
    """The weights are whole, and do not count as applied until it returns: flush or salt caches here."""
    after_serve: Hook = nothing
    """The whole group serves this version."""
