"""A producer rank's place in its model: taken when it starts, and taken again, with all that is still in its
memory, when the controller has forgotten it."""

from __future__ import annotations

import threading
import time

from weightdepot.api.client import ControllerClient
from weightdepot.api.membership import take_rank
from weightdepot.store.errors import MemberConflict, WeightDepotError
from weightdepot.store.hosts import this_process
from weightdepot.store.index.records import Held, Joined
from weightdepot.store.layout import Layout
from weightdepot.store.tiling import Tiling
from weightdepot.store.timeouts import Timeouts

RETRY = 0.1  # seconds between two looks at whether the other ranks have announced their parts


class Seat:
    """Call `take`, then make the Membership with `retake` as its `rejoin`. `hold` what was sealed, and `drop`
    a slot before it is written; `restored` before a version is opened."""

    def __init__(
        self,
        client: ControllerClient,
        model: str,
        rank: int,
        world_size: int,
        retention: int,
        layout: Layout,
        session: str,
        timeouts: Timeouts,
        yields: bool = False,
    ) -> None:
        """session: of this start; the later ones are `<session>.<n>`, see `slots.start_of`."""
        self._client, self._model, self._timeouts = client, model, timeouts
        self._rank, self._world_size, self._retention = rank, world_size, retention
        self._layout, self._yields = layout, yields
        self._start = session
        self._joins = 0
        self.latest: int | None = None
        """The newest version that readers could have when this rank joined, or that it sealed since."""
        self.highest: int | None = None
        """The highest version that was ever ready when this rank joined, or that it sealed since."""
        self._lock = threading.Lock()
        self._held: dict[int, Held] = {}  # slot -> the part in it
        self._tilings: dict[str, bytes] = {}  # kept by rank 0 alone, for the index keeps them for all
        self._missing: set[int] = set()  # announced, and not ready: other ranks have yet to announce theirs
        self._restored: set[int] = set()  # announced, and ready
        self._patience = 0.0  # until when they are waited for, by the monotonic clock

    def take(self) -> None:
        """Join. Raises MemberConflict when a living process has this rank, or the ranks disagree
        on what they are."""
        _, joined = self._join()
        self._joins += 1
        self.latest, self.highest = joined.latest, joined.highest

    def retake(self) -> str | None:
        """Join anew, as another session, and announce what is held; None when a living process has this rank
        by now."""
        try:
            session, joined = self._join()
        except MemberConflict as conflict:
            if "process" in conflict.details:
                return None
            raise  # the other ranks joined as another number of ranks, for now
        with self._lock:
            held = tuple(sorted(self._held.values(), key=lambda h: h.version))
            if self._rank == 0:  # without its tiling nobody could read a version
                held = tuple(h for h in held if h.tiling in self._tilings)
            tilings = {h.tiling: self._tilings[h.tiling] for h in held if h.tiling in self._tilings}
        for name, content in tilings.items():
            self._client.put_tiling(
                self._model, name, Tiling.from_bytes(content), timeout=self._timeouts.call
            )
        ready = self._announce(session, held)
        known = joined.latest  # an index that knows what this rank has, has not lost it
        with self._lock:
            self._restored = set(ready)
            self._missing = {h.version for h in held if known is None or h.version > known} - set(ready)
            # the others come with their next heartbeat, if they come
            self._patience = time.monotonic() + 2 * self._timeouts.member
        self._joins += 1
        return session

    def _join(self) -> tuple[str, Joined]:
        # The same session until all was answered: one whose answer was lost is not in its own way.
        session = self._start if self._joins == 0 else f"{self._start}.{self._joins}"
        self._client.put_layout(self._layout, timeout=self._timeouts.join)
        joined = take_rank(
            lambda replace: self._client.join_producer(
                self._model,
                rank=self._rank,
                world_size=self._world_size,
                session=session,
                layout=self._layout.digest,
                process=this_process(),
                retention=self._retention,
                ttl=self._timeouts.member,
                replace=replace,
                yields=self._yields,
                timeout=self._timeouts.join,
            ),
            self._timeouts.join,
        )
        return session, joined

    def _announce(self, session: str, held: tuple[Held, ...]) -> tuple[int, ...]:
        return self._client.announce(
            self._model,
            rank=self._rank,
            world_size=self._world_size,
            session=session,
            retention=self._retention,
            held=held,
            highest=self.highest,
            timeout=self._timeouts.call,
        )

    def restored(self, session: str, deadline: float) -> None:
        """After a `retake`: wait, for a short time, until what this rank has announced is ready again, for as
        long as it is not, its slots look free.

        deadline: of the monotonic clock. What does not come back, because another rank has it no more, is
        given up.
        """
        while True:
            with self._lock:
                held = tuple(h for h in self._held.values() if h.version in self._missing)
                patience = min(self._patience, deadline)
            if not held:
                return
            left = patience - time.monotonic()
            ready = set(self._announce(session, held))
            with self._lock:
                self._restored |= ready
                self._missing -= ready
                if left <= 0:
                    self._missing.clear()
                waits = bool(self._missing)
            if waits:
                time.sleep(min(RETRY, left))

    def came_back(self, version: int) -> bool:
        """Whether a version that was announced is ready, now that `restored` has returned."""
        with self._lock:
            return version in self._restored

    def published(self, version: int) -> None:
        self.latest = self.highest = version

    def hold(self, held: Held) -> None:
        with self._lock:
            self._held[held.slot] = held

    def drop(self, slot: int) -> None:
        """What is in this slot is not to be announced (any more)."""
        with self._lock:
            self._held.pop(slot, None)

    def keep_tiling(self, name: str) -> None:
        """Fetch what an index would need to know again: once for each tiling, and by rank 0 alone."""
        if self._rank != 0:
            return
        with self._lock:
            used = {h.tiling for h in self._held.values()}
            self._tilings = {n: content for n, content in self._tilings.items() if n in used or n == name}
            if name in self._tilings:
                return
        try:
            content = self._client.tiling(self._model, name, timeout=self._timeouts.call).to_bytes()
        except WeightDepotError:
            return  # the next publish tries it again
        with self._lock:
            self._tilings[name] = content
