"""A process's claim on a rank: taking it, keeping it alive from the background, and giving it back."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from typing import TypeVar

from weightdepot.api.client import ControllerClient
from weightdepot.store.errors import InvalidRequest, MemberConflict, UnknownModel, WeightDepotError
from weightdepot.store.hosts import is_dead
from weightdepot.store.index.records import Process
from weightdepot.store.timeouts import Timeouts

T = TypeVar("T")

RETRY = 0.5  # seconds to the next heartbeat where one failed


def new_session() -> str:
    """Names one start of one member; never used again."""
    return uuid.uuid4().hex


def check_rank(model: str, rank: int, world_size: int) -> None:
    """Raises InvalidRequest for what cannot be a rank of a world."""
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (rank, world_size))
    if not whole or world_size < 1 or not 0 <= rank < world_size:
        raise InvalidRequest(
            f"rank {rank!r} of {world_size!r}: ranks are whole numbers from 0 to world_size - 1", model=model
        )


def forgotten(error: UnknownModel, advice: str) -> UnknownModel:
    """What a member is told that the controller does not know, although it had joined."""
    return UnknownModel(
        f"{error.message}. This rank had joined: the controller has lost its state (was it started "
        f"anew without --data-dir?). {advice}",
        **error.details,
    )


def take_rank(join: Callable[[str], T], timeout: float) -> T:
    """Call `join(replace)` until the rank is ours.

    A rank is held by one living process. When the holder is a process of this host that has died, its claim
    is taken over at once; when it is elsewhere, its claim ends by itself, and is waited for.
    Raises MemberConflict when the holder lives, or the time is up.
    """
    deadline = time.monotonic() + timeout
    replace = ""
    while True:
        try:
            return join(replace)
        except MemberConflict as conflict:
            holder = conflict.details
            if "process" not in holder:
                raise  # nobody holds it: the world sizes disagree
            dead = is_dead(Process(**holder["process"]))
            if dead is False:
                raise
            if dead:
                if replace == holder["session"]:
                    raise
                replace = str(holder["session"])
                continue
            # Elsewhere: alive for all we know until its claim runs out, and a living one renews it.
            expires_in = float(holder["expires_in"])
            if time.monotonic() + expires_in > deadline:
                raise
            time.sleep(min(max(expires_in, 0.05), 1.0))


class Membership:
    """Heartbeats from a thread of its own, and what they bring back.

    `watch` names the round whose lease is renewed along. `lost` tells whether that lease, or the rank
    itself, was lost; it is asked by the reader before it believes what it read.

    rejoin: called in that thread when the controller does not know this session any more (its index has lost
    its data, or this rank was away for too long): joins anew, and returns the session to go on with, or None
    to give up, for another living process has the rank. What it raises as a WeightDepotError puts it off to
    the next heartbeat.
    """

    def __init__(
        self,
        client: ControllerClient,
        model: str,
        session: str,
        timeouts: Timeouts,
        rejoin: Callable[[], str | None] | None = None,
    ) -> None:
        self._client, self._model, self._session, self._timeouts = client, model, session, timeouts
        self._rejoin = rejoin
        self._stopping = False
        self._state = threading.Condition()
        # numbers of heartbeats: up to which `renew` wants them at once, the last begun, the last answered
        self._asked_for = self._begun = self._ended = 0
        # (group, round) -> until when its lease is known to live; None: it was lost
        self._rounds: dict[tuple[str, int], float | None] = {}
        self._replaced = False
        self._period = min(timeouts.member, timeouts.lease) / 4
        self._thread = threading.Thread(target=self._run, name=f"weightdepot-{model}", daemon=True)
        self._thread.start()

    @property
    def session(self) -> str:
        """The session that this rank is known by now: another one after each `rejoin`."""
        return self._session

    @property
    def replaced(self) -> bool:
        """Another process has taken this rank."""
        return self._replaced

    def watch(self, group: str, number: int) -> None:
        with self._state:
            self._rounds.setdefault((group, number), time.monotonic() + self._timeouts.lease)

    def unwatch(self, group: str, number: int) -> None:
        with self._state:
            self._rounds.pop((group, number), None)

    def lost(self, group: str, number: int) -> bool:
        """Whether the lease cannot be believed in any more: the controller says that it ran out, or has
        not confirmed a renewal for as long as one lives."""
        with self._state:
            until = self._rounds.get((group, number))
            return self._replaced or until is None or time.monotonic() > until

    def renew(self, session: str, timeout: float) -> bool:
        """For a caller whom the controller refused as unknown, although it had joined as `session`: wait
        until this rank has joined anew (at once where that has happened already).

        True: ask again, with what `session` is now. False: it was replaced, it cannot join anew, it is known
        as it is (so that the refusal had another reason), or `timeout` seconds were not enough.
        """
        with self._state:
            if self._rejoin is None:
                return False
            deadline = time.monotonic() + timeout
            # one that is under way may have been answered before
            self._asked_for = wanted = self._begun + 1
            self._state.notify_all()
            while self._session == session and not self._replaced and not self._stopping:
                left = deadline - time.monotonic()
                if left <= 0 or self._ended >= wanted:
                    break
                self._state.wait(left)
            return self._session != session and not self._replaced

    def asking(self, call: Callable[[str], T], deadline: float) -> T:
        """`call(session)`; once more with the next session, when the controller does not know this one.

        deadline: of the monotonic clock. Raises what `call` raises, when this rank cannot join anew by then.
        """
        while True:
            session = self._session
            try:
                return call(session)
            except (UnknownModel, MemberConflict):
                if not self.renew(session, deadline - time.monotonic()) or time.monotonic() >= deadline:
                    raise

    def _run(self) -> None:
        pause = self._period
        while True:
            with self._state:
                self._state.wait_for(lambda: self._stopping or self._asked_for > self._begun, pause)
                if self._stopping:
                    return
                self._begun += 1
                number, rounds = self._begun, list(self._rounds)
            heard = self._beat(rounds)
            pause = self._period if heard else min(self._period, RETRY)
            if heard:
                with self._state:
                    self._ended = number
                    self._state.notify_all()

    def _beat(self, rounds: list[tuple[str, int]]) -> bool:
        """One heartbeat. Whether the controller answered, and this rank is settled with it."""
        asked = time.monotonic()  # the renewal counts from here at the latest
        try:
            beat = self._client.heartbeat(
                self._model,
                self._session,
                rounds=rounds,
                ttl=self._timeouts.member,
                lease_ttl=self._timeouts.lease,
                timeout=self._timeouts.call,
            )
        except UnknownModel:
            return self._join_anew() if self._rejoin else True
        except WeightDepotError:
            # The controller is away. What matters is checked again where it matters: the controller
            # refuses the seal of a replaced rank, and an applied version whose lease has run out.
            return False
        if not beat.member:
            return self._join_anew()
        with self._state:
            for name in rounds:
                if self._rounds.get(name) is not None:
                    lost = name[1] in beat.lost
                    self._rounds[name] = None if lost else asked + self._timeouts.lease
        return True

    def _join_anew(self) -> bool:
        with self._state:
            self._rounds.clear()  # whatever leases there were, this session holds them no more
        if self._replaced:
            return True
        try:
            session = None if self._rejoin is None else self._rejoin()
        except WeightDepotError:
            return False
        with self._state:
            if session is None:
                self._replaced = True
            else:
                self._session = session
        return True

    def close(self) -> None:
        """Stop renewing and say goodbye. Never raises: a goodbye that is not heard is a death that is
        noticed later."""
        with self._state:
            if self._stopping:
                return
            self._stopping = True
            self._state.notify_all()
        self._thread.join(timeout=self._timeouts.call)
        try:
            self._client.leave(self._model, self._session, timeout=min(self._timeouts.call, 5.0))
        except WeightDepotError:
            return
