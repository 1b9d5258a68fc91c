"""What one controller process holds while it runs, and the tasks that it runs in the background."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass

from weightdepot.api.access import Access
from weightdepot.api.feed import Feed
from weightdepot.api.metrics import Metrics
from weightdepot.api.planner import Planner
from weightdepot.api.settings import Settings
from weightdepot.api.together import Together
from weightdepot.api.waiting import Waiters
from weightdepot.store.errors import IndexUnavailable, UnknownModel
from weightdepot.store.index.index import Index
from weightdepot.store.index.records import Event, VersionState

log = logging.getLogger("weightdepot.api")

END_ATTEMPTS = 5

KEPT_STATES = (VersionState.OPEN, VersionState.READY, VersionState.RETIRED)


@dataclass(frozen=True)
class Controller:
    """The resources of one application; made and ended by `running`."""

    settings: Settings
    index: Index
    waiters: Waiters
    feed: Feed
    planner: Planner
    access: Access
    metrics: Metrics
    together: Together

    def end_waits(self) -> None:
        """End long polls and streams, whose connections would hold up the end of the process."""
        self.waiters.close()
        self.feed.close()


@contextlib.asynccontextmanager
async def running(
    settings: Settings, index: Index, access: Access, metrics: Metrics
) -> AsyncIterator[Controller]:
    """A controller on `index` (which stays the caller's) with its background tasks."""
    waiters = Waiters(settings.timeouts.recheck)
    feed = Feed(settings.timeouts.keep_alive, settings.limits.backlog, settings.limits.listeners)
    planner = Planner(index, settings)

    def hear(event: Event) -> None:
        if event.kind == "subscribed":
            planner.forget()
        feed.hear(event)

    tasks = [
        asyncio.create_task(_for_ever("events", lambda: waiters.listen(index, hear))),
        asyncio.create_task(_for_ever("sweep", lambda: _sweep(index, settings.timeouts.sweep))),
        asyncio.create_task(_for_ever("tokens", lambda: _reload(access, settings.timeouts.tokens))),
        asyncio.create_task(
            _for_ever("refresh", lambda: _refresh(index, planner, settings.timeouts.blob_ttl / 4))
        ),
    ]
    controller = Controller(settings, index, waiters, feed, planner, access, metrics, Together())
    try:
        yield controller
    finally:
        controller.end_waits()
        await _ended(tasks)
        await planner.close()


async def _ended(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancels until it helped: redis-py loses a cancellation that comes while it connects."""
    for _ in range(END_ATTEMPTS):
        for task in tasks:
            task.cancel()
        _, rest = await asyncio.wait(tasks, timeout=0.2)
        if not rest:
            return
    log.error("a background task does not end: %s", ", ".join(task.get_name() for task in rest))


async def _for_ever(what: str, work: Callable[[], Awaitable[None]]) -> None:
    """`work` again and again: a bug in it must be seen, but must not end it for good."""
    while True:
        try:
            await work()
        except Exception:
            log.exception("the background task %r failed; it goes on in a second", what)
        await asyncio.sleep(1.0)


async def _reload(access: Access, interval: float) -> None:
    """Tokens come and go while it runs."""
    while True:
        await asyncio.sleep(interval)
        access.reload()


async def _sweep(index: Index, interval: float) -> None:
    """Make lazily-due transitions happen when nobody asks. Any number of controllers may do so."""
    reached = True
    while True:
        try:
            for model in await index.models():
                with contextlib.suppress(UnknownModel):  # its last member was forgotten meanwhile
                    for change in await index.sweep(model):
                        log.info("%s: %s", model, change, extra={"model": model})
            if not reached:
                log.info("the index answers again")
            reached = True
        except IndexUnavailable as error:
            if reached:  # once, not every second
                log.error("the index does not answer: %s", error.message)
            reached = False
        await asyncio.sleep(interval)


async def _refresh(index: Index, planner: Planner, interval: float) -> None:
    """Keep the layouts of living members and the tilings of kept versions from ending."""
    while True:
        await asyncio.sleep(interval)
        layouts: set[str] = set()
        tilings: set[str] = set()
        try:
            for name in await index.models():
                try:
                    model, groups = await index.model(name), await index.groups(name)
                except UnknownModel:  # its last member was forgotten meanwhile
                    continue
                members = [*model.producers, *(m for group in groups for m in group.members)]
                layouts |= {member.layout for member in members if member.layout}
                tilings |= {v.tiling for v in model.versions if v.state in KEPT_STATES}
            await planner.refresh(layouts, tilings)
        except IndexUnavailable as error:
            log.warning("layouts were not refreshed: %s", error.message)
