"""One rank's place in its group, taken when it starts, and again when the controller has forgotten it."""

from __future__ import annotations

import time

from weightdepot.api.client import ControllerClient
from weightdepot.api.membership import Membership, new_session, take_rank
from weightdepot.store.errors import MemberConflict
from weightdepot.store.hosts import this_process
from weightdepot.store.layout import Layout
from weightdepot.store.timeouts import Timeouts


class Seat:
    """Call `take`, then make the Membership with `retake` as its `rejoin`; `register` a layout when it is
    known."""

    def __init__(
        self,
        client: ControllerClient,
        model: str,
        group: str,
        rank: int,
        world_size: int,
        timeouts: Timeouts,
        layout: Layout | None,
    ) -> None:
        """layout: None when it is not known yet."""
        self._client, self._model, self._group, self._timeouts = client, model, group, timeouts
        self._rank, self._world_size = rank, world_size
        self._layout = layout
        self._next = new_session()

    def take(self) -> str:
        """Join; the session. Raises MemberConflict when a living process has this rank."""
        # The same session until the join was answered: one whose answer was lost is not in its own way.
        session, layout = self._next, self._layout
        if layout is not None:
            self._client.put_layout(layout, timeout=self._timeouts.join)
        take_rank(
            lambda replace: self._client.join_consumer(
                self._model,
                self._group,
                rank=self._rank,
                world_size=self._world_size,
                session=session,
                layout=layout.digest if layout else "",
                process=this_process(),
                ttl=self._timeouts.member,
                replace=replace,
                timeout=self._timeouts.join,
            ),
            self._timeouts.join,
        )
        self._next = new_session()
        return session

    def retake(self) -> str | None:
        """Join anew, as another session; None when a living process has this rank by now."""
        try:
            return self.take()
        except MemberConflict as conflict:
            if "process" in conflict.details:
                return None
            raise  # the others of the group are of another number of ranks, for now

    def register(self, layout: Layout, membership: Membership) -> None:
        """Make known what this rank needs."""
        self._layout = layout  # first, so that a `retake` in this instant brings it along
        self._client.put_layout(layout, timeout=self._timeouts.join)
        membership.asking(
            lambda session: self._client.set_layout(
                self._model,
                self._group,
                rank=self._rank,
                session=session,
                layout=layout.digest,
                timeout=self._timeouts.call,
            ),
            time.monotonic() + self._timeouts.call,
        )
