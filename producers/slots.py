"""One producer rank's memory: a segment for each slot that was granted, made ahead where that is possible."""

from __future__ import annotations

import threading
from collections.abc import Collection

from weightdepot.store.errors import StoreFull, TransportUnavailable
from weightdepot.store.index.records import Grant
from weightdepot.store.layout import Layout
from weightdepot.store.segments import Segment, remove_orphans
from weightdepot.store.transports.select import Transports

ABANDONED = 3600.0  # seconds; memory of dead processes that no successor of theirs has claimed since
ALIGNING = 64 << 10  # bytes; more than what alignment adds to a slot, in all but odd cases


def start_of(session: str) -> str:
    """The session that a process began with. When it joins anew it is known by another, `<start>.<n>`; its
    memory bears the first one, whatever happens."""
    return session.partition(".")[0]


def expected_nbytes(layout: Layout, world_size: int, checkpoint_nbytes: int) -> int:
    """About how large this rank's slots will be, before anything was published.

    A rank whose part of the checkpoint is about its share holds it alone, and stores all of it. One that
    holds more has copies of what others hold too, and stores about its share. A wrong guess costs time, and
    nothing else.
    """
    own = layout.nbytes
    share = -(-checkpoint_nbytes // world_size)
    nbytes = own if own <= 1.3 * share else int(1.1 * share)
    return nbytes + ALIGNING


class Slots:
    """`take` what was granted; `prepare` memory in another thread before it is.

    One segment more than there are slots is kept, where there is room: a version is packed into it while its
    slot is still being asked for (`borrow`). It is then that slot's memory (`put`), and what the slot had
    before, which the grant says that nobody needs, is the next to be borrowed.
    """

    def __init__(self, owner: str, session: str, transports: Transports) -> None:
        """owner: the hash of run, model and rank. session: that of this process's start."""
        self._owner, self._session, self._transports = owner, session, transports
        self._making = threading.Lock()  # who needs memory that is just being made had better wait for it
        self._slots: dict[int, Segment] = {}
        self._spare: list[Segment] = []
        self._closed = False

    def prepare(self, nbytes: int, count: int) -> None:
        """Have `count` segments in all, the new ones of this size: the pages of a new one cost more than what
        is written into them. Where there is no room, `take` will say so when it is needed. What is spare
        beyond the count is given back."""
        while True:
            with self._making:
                while self._spare and len(self._slots) + len(self._spare) > count:
                    self._give_back(self._spare.pop())
                if self._closed or len(self._slots) + len(self._spare) >= count:
                    return
                try:
                    self._spare.append(Segment.create(nbytes, self._owner, self._session))
                except (StoreFull, TransportUnavailable):
                    return

    def take(self, grant: Grant, nbytes: int) -> Segment:
        """The memory of the granted slot: nobody reads it now, and nobody will before the seal.

        Raises StoreFull when there is no room for it.
        """
        with self._making:
            self._keep(grant.slots)
            segment = self._slots.get(grant.slot)
            if segment is None or segment.nbytes < nbytes:
                if segment is not None:
                    self._give_back(self._slots.pop(grant.slot))
                segment = self._slots[grant.slot] = self._new(grant, nbytes)
            return segment

    def borrow(self, nbytes: int) -> Segment | None:
        """Memory of no slot, for a version that has none yet; `put` it, or give it `back`. None: there is
        none of this size."""
        with self._making:
            found = next((s for s in self._spare if s.nbytes >= nbytes), None)
            if found is not None:
                self._spare.remove(found)
            return found

    def back(self, segment: Segment) -> None:
        with self._making:
            if self._closed:
                segment.close()
            else:
                self._spare.append(segment)

    def put(self, grant: Grant, segment: Segment) -> None:
        """Borrowed memory becomes that of the granted slot."""
        with self._making:
            self._keep(grant.slots)
            before = self._slots.pop(grant.slot, None)
            self._slots[grant.slot] = segment
            if before is not None:
                self._spare.append(before)

    def _keep(self, slots: Collection[int]) -> None:
        """Give back the memory of all others: a pin that has ended needs its slot no more."""
        for slot in [s for s in self._slots if slots and s not in slots]:
            self._give_back(self._slots.pop(slot))

    def tidy(self, grant: Grant) -> None:
        """Remove what others left long ago, and predecessors once no version that lives is in it."""
        remove_orphans(None, older_than_s=ABANDONED)
        keep = {self._session, *map(start_of, grant.keep_sessions)}
        remove_orphans(self._owner, keep_sessions=keep)

    def _new(self, grant: Grant, nbytes: int) -> Segment:
        self.tidy(grant)
        while self._spare:
            segment = self._spare.pop()
            if segment.nbytes >= nbytes:
                return segment
            self._give_back(segment)
        return Segment.create(nbytes, self._owner, self._session)

    def _give_back(self, segment: Segment) -> None:
        self._transports.withdraw(segment)
        segment.close()

    def close(self) -> None:
        """Unlink all of it: versions that are only here are gone. Does not wait for readers."""
        with self._making:
            self._closed = True
            for segment in (*self._slots.values(), *self._spare):
                segment.close()
            self._slots.clear()
            self._spare.clear()
