"""What a publish may wait for once its own part is sealed: the other ranks, and those who read it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Literal

from weightdepot.api.client import ControllerClient
from weightdepot.producers.opening import LOOK, Cancelled, never
from weightdepot.store.errors import PublishAborted, VersionGone, WaitTimeout
from weightdepot.store.index.records import VersionState

Wait = Literal["packed", "ready", "applied"]


def wait_ready(
    client: ControllerClient,
    model: str,
    version: int,
    deadline: float,
    call: float,
    cancelled: Callable[[], bool] = never,
) -> None:
    """Returns when every rank has sealed its part.

    deadline: of the monotonic clock. call: seconds that one look may take.
    Raises PublishAborted where it was aborted, or is not ready at the deadline.
    """
    while True:
        seen = client.version(model, version, timeout=call)
        if seen.state is VersionState.ABORTED:
            raise PublishAborted(
                f"version {version} of {model!r} was aborted: {seen.reason}", model=model, version=version
            )
        if seen.state is not VersionState.OPEN:
            return
        left = deadline - time.monotonic()
        if left <= 0:
            raise PublishAborted(
                f"version {version} of {model!r} is not ready in time: rank(s) {list(seen.missing)} of "
                f"{seen.world_size} have not sealed their part",
                model=model,
                version=version,
                missing=list(seen.missing),
            )
        _go_on(cancelled, version)
        # wakes when the version is ready; looks again at times, since it may be aborted instead
        with contextlib.suppress(WaitTimeout):
            client.latest(model, min_version=version, timeout=min(left, LOOK))


def wait_applied(
    client: ControllerClient,
    model: str,
    version: int,
    deadline: float,
    cancelled: Callable[[], bool] = never,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns when no live consumer group is without the version: the groups that hold it (or a newer one),
    and those that were waited for until they died or left.

    Raises WaitTimeout at the deadline (of the monotonic clock), naming the groups that are pending, and
    VersionGone when it is freed before.
    """
    begun, wait, awaited = time.monotonic(), 0.0, set[str]()
    while True:
        seen = client.applied(model, version, timeout=wait)
        awaited.update(seen.pending)
        if not seen.pending:
            return seen.applied, tuple(sorted(awaited - set(seen.applied)))
        if seen.state is VersionState.FREED:
            raise VersionGone(
                f"version {version} of {model!r} was freed (another rank has left, or taken it back) before "
                f"{', '.join(seen.pending)} applied it",
                model=model,
                version=version,
                pending=list(seen.pending),
            )
        left = deadline - time.monotonic()
        if left <= 0:
            held = (
                f"; the model is held at version {seen.held}, which they are given until it is released"
                if seen.held is not None and seen.held != version
                else ""
            )
            raise WaitTimeout(
                f"waited {time.monotonic() - begun:.3g} s for consumer groups to apply version {version} of "
                f"{model!r}: {', '.join(seen.pending)} did not{held}. The version stays ready",
                model=model,
                version=version,
                pending=list(seen.pending),
                held=seen.held,
            )
        _go_on(cancelled, version)
        wait = min(left, LOOK)


def _go_on(cancelled: Callable[[], bool], version: int) -> None:
    if cancelled():
        raise Cancelled(f"the publish of version {version} was cancelled")
