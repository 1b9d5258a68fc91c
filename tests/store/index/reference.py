"""What the index must do, as plain Python: no Redis, no clock, no scripts. Time passes by saying so.

Operations answer the same outcomes as tuples: ("error", slug), ("wait", reason), or what was given.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Outcome = tuple[Any, ...]
REMEMBERED = 16


def error(slug: str) -> Outcome:
    return ("error", slug)


def wait(reason: str) -> Outcome:
    return ("wait", reason)


@dataclass
class Publish:
    """A version and what became of it."""

    state: str
    slot: int
    tiling: str
    incarnation: int
    expect: dict[int, str]
    granted: set[int] = field(default_factory=set)
    sealed: dict[int, str] = field(default_factory=dict)
    overdue: bool = False
    leases: set[tuple[str, int]] = field(default_factory=set)  # live ones

    @property
    def living(self) -> bool:
        return self.state in ("open", "ready", "retired")


@dataclass
class Rank:
    """One rank of a group."""

    session: str
    held: int | None = None
    begun: int = 0
    done: int = 0
    aim: int | None = None  # of the round that it began; None: nothing to move
    staged: int = 0  # the round whose version it has read whole

    @property
    def in_flight(self) -> bool:
        return self.begun > self.done and self.aim is not None and self.aim != self.held


@dataclass
class Band:
    """A consumer group."""

    size: int
    ranks: dict[int, Rank] = field(default_factory=dict)
    target: int | None = None
    moving: bool = False
    noop: bool = True
    failed: bool = False  # its last round failed, and it is not whole since
    last: int | None = None  # what it held as a whole last
    base: int | None = None  # the newest ready version when the group was made
    outcomes: dict[int, tuple[str, int | None]] = field(default_factory=dict)

    def unharmed(self) -> bool:
        """No rank lost what it held, or is on its way from it."""
        touched = any(r.held is not None or r.in_flight for r in self.ranks.values())
        return self.whole_at() is not None or (not touched and self.last is None)

    def whole_at(self) -> int | None:
        held = {(r.held if not r.in_flight else None) for r in self.ranks.values()}
        return held.pop() if len(self.ranks) == self.size and len(held) == 1 else None

    def all_staged(self, round: int) -> bool:
        return all(r in self.ranks for r in range(self.size)) and all(
            r.done >= round or r.staged == round for r in self.ranks.values()
        )

    def pending(self, round: int) -> list[int]:
        return [k for k, r in sorted(self.ranks.items()) if r.done < round]

    @property
    def state(self) -> str:
        if self.moving:
            return "moving"
        if self.failed:
            return "half"
        return "empty" if self.whole_at() is None else "whole"


class Reference:
    def __init__(self) -> None:
        self.size = self.retention = self.incarnation = 0
        self.producers: dict[int, str] = {}
        self.layouts: dict[str, str] = {}
        self.sessions: set[str] = set()  # that hold a rank of anything
        self.dead: set[str] = set()  # of these
        self.long_dead: set[str] = set()  # of these
        self.versions: dict[int, Publish] = {}
        self.highest: int | None = None
        self.groups: dict[str, Band] = {}
        self.rounds: dict[str, int] = {}
        self.pins: set[int] = set()
        self.tags: dict[str, int] = {}
        self.hold_at: int | None = None
        self.bounded: int | None = None  # max_lag
        self.published: list[int] = []

    # -- what is kept ----------------------------------------------------------------------------------

    @property
    def protected(self) -> set[int]:
        return self.pins | set(self.tags.values()) | ({self.hold_at} if self.hold_at is not None else set())

    @property
    def window(self) -> int:
        return self.retention if self.bounded is None else max(self.retention, self.bounded + 2)

    def lag(self, band: Band) -> int:
        since = band.last if band.last is not None else band.base
        return len([v for v in self.published if since is None or v > since])

    def live(self, band: Band) -> bool:
        return all(r in band.ranks and self.alive(band.ranks[r].session) for r in range(band.size))

    def close(self, n: int, state: str) -> None:
        self.versions[n].state = state
        self.pins.discard(n)
        self.tags = {name: v for name, v in self.tags.items() if v != n}
        if self.hold_at == n:
            self.hold_at = None

    def keep(self, n: int, how: str) -> Outcome:
        self.abort_overdue()
        v = self.versions.get(n)
        if v is None or v.state != "ready":
            return error("version-gone")
        if how == "pin":
            self.pins.add(n)
        elif how == "hold":
            self.hold_at = n
        else:
            self.tags[how] = n
        return (v.state,)

    def unpin(self, n: int) -> Outcome:
        self.abort_overdue()
        if n not in self.versions:
            return error("version-gone")
        self.pins.discard(n)
        return (self.versions[n].state,)

    def withdraw(self, n: int, session: str) -> Outcome:
        v = self.versions.get(n)
        if v is None:
            return error("version-gone")
        if session not in v.expect.values():
            return error("member-conflict")
        if v.state == "open":
            self.close(n, "aborted")
        elif v.state in ("ready", "retired"):
            v.leases.clear()
            self.close(n, "freed")
        return (v.state,)

    # -- members -------------------------------------------------------------------------------------

    def alive(self, session: str | None) -> bool:
        return session in self.sessions and session not in self.dead

    def renew(self, session: str) -> None:
        self.sessions.add(session)
        self.dead.discard(session)
        self.long_dead.discard(session)

    def drop(self, session: str) -> None:
        self.renew(session)
        self.sessions.discard(session)

    def kill(self, session: str, long: bool) -> None:
        """Dead from now on, or for so long already that a sweep forgets it."""
        self.dead.add(session)
        self.long_dead.discard(session)
        if long:
            self.long_dead.add(session)

    def heartbeat(self, session: str, rounds: list[tuple[str, int]]) -> Outcome:
        if session not in self.sessions:
            return (False, tuple(r for _, r in rounds))
        self.renew(session)
        lost = []
        for name, number in rounds:
            band = self.groups.get(name)
            mine = [r for r in band.ranks.values() if r.session == session] if band else []
            if not band or not mine or mine[0].begun != number:
                lost.append(number)
                continue
            rank = mine[0]
            needed = rank.done < number or (band.moving and self.rounds[name] == number)
            kept = rank.staged == number or rank.aim is None or (name, number) in self.leases_of(rank.aim)
            if needed and not kept:
                lost.append(number)
        return (True, tuple(lost))

    def join_producer(
        self, rank: int, size: int, session: str, layout: str, retention: int, replace: str
    ) -> Outcome:
        holder = self.producers.get(rank)
        others = [s for r, s in self.producers.items() if r != rank and self.alive(s)]
        if others and (size, retention) != (self.size, self.retention):
            return error("member-conflict")
        if holder not in (None, session, replace) and self.alive(holder):
            return error("member-conflict")
        changed = False
        if size != self.size:
            for s in self.producers.values():
                self.drop(s)
            self.producers.clear()
            holder, changed = None, True
        elif retention != self.retention:
            changed = True
        if changed:
            self.new_incarnation()
        self.size, self.retention = size, retention
        if holder == session:
            if self.layouts[session] != layout:
                self.new_incarnation()
        elif holder is not None:
            self.drop(holder)
            self.new_incarnation()
        self.producers[rank] = session
        self.layouts[session] = layout
        self.renew(session)
        return (self.incarnation, self.size, self.latest, self.highest)

    def leases_of(self, n: int) -> set[tuple[str, int]]:
        """Live ones; none of a version that is forgotten."""
        return self.versions[n].leases if n in self.versions else set()

    def new_incarnation(self) -> None:
        self.incarnation += 1
        if self.open is not None:
            self.close(self.open, "aborted")

    def leave(self, session: str, memory_gone: bool = True) -> None:
        if session not in self.sessions:  # replaced before: the memory that it still had goes now
            for n, v in self.versions.items():
                if v.state in ("ready", "retired") and session in v.expect.values():
                    self.close(n, "freed")
            return
        for rank, holder in list(self.producers.items()):
            if holder == session:
                del self.producers[rank]
                self.drop(session)
                self.new_incarnation()
                for n, v in self.versions.items():
                    if memory_gone and v.living and v.expect.get(rank) == session:
                        self.close(n, "freed")
        for name, band in list(self.groups.items()):
            for rank, member in list(band.ranks.items()):
                if member.session == session:
                    self.vacate(name, rank)
                    if not band.ranks:
                        del self.groups[name]

    # -- versions ------------------------------------------------------------------------------------

    @property
    def latest(self) -> int | None:
        return max((n for n, v in self.versions.items() if v.state == "ready"), default=None)

    @property
    def open(self) -> int | None:
        return next((n for n, v in self.versions.items() if v.state == "open"), None)

    def abort_overdue(self) -> None:
        for n, v in self.versions.items():
            dead = any(r not in v.sealed and not self.alive(s) for r, s in v.expect.items())
            if v.state == "open" and (v.overdue or dead):
                self.close(n, "aborted")

    def free_idle(self) -> None:
        for n, v in self.versions.items():
            if v.state == "retired" and not v.leases:
                self.close(n, "freed")

    def forget(self) -> None:
        closed = sorted(n for n, v in self.versions.items() if not v.living)
        for n in closed[: max(0, len(closed) - REMEMBERED)]:
            if not self.versions[n].leases:
                del self.versions[n]

    def free_slot(self) -> int | None:
        used = {v.slot for v in self.versions.values() if v.living or v.leases}
        kept = [n for n in self.protected if self.versions[n].state in ("ready", "retired")]
        return next((s for s in range(self.window + len(kept)) if s not in used), None)

    def grant(self, n: int, rank: int) -> Outcome:
        self.versions[n].granted.add(rank)
        kept = [
            v
            for v in self.versions.values()
            if v.state in ("ready", "retired") or (v.state == "freed" and v.leases)
        ]
        keep = frozenset(v.expect[rank] for v in kept if rank in v.expect)
        return (n, self.versions[n].slot, self.versions[n].tiling, self.incarnation, keep)

    def open_version(self, n: int, rank: int, session: str, tiling: str, incarnation: int) -> Outcome:
        if self.producers.get(rank) != session:
            return error("member-conflict")
        self.renew(session)
        if incarnation != self.incarnation:
            return wait("ranks")
        self.abort_overdue()
        if self.open == n:
            return error("version-not-newer") if rank in self.versions[n].sealed else self.grant(n, rank)
        if self.highest is not None and n <= self.highest:
            return error("version-not-newer")
        if not all(self.alive(self.producers.get(r)) for r in range(self.size)):
            return wait("ranks")
        if self.open is not None:
            return wait("open-version")
        if self.bounded is not None:
            late = [b for b in self.groups.values() if self.live(b) and self.lag(b) > self.bounded]
            if late:
                return wait("lag")
        self.free_idle()
        if self.free_slot() is None:
            safe = self.protected
            ready = sorted(k for k, v in self.versions.items() if v.state == "ready" and k not in safe)
            for k in ready[: -(self.window - 1)]:
                self.versions[k].state = "retired"
            self.free_idle()
        slot = self.free_slot()
        if slot is None:
            return wait("slot")
        self.forget()
        self.versions[n] = Publish("open", slot, tiling, self.incarnation, dict(self.producers))
        return self.grant(n, rank)

    def seal(self, n: int, rank: int, session: str, digest: str) -> Outcome:
        self.abort_overdue()
        v = self.versions.get(n)
        if v is None:
            return error("version-gone")
        if v.state == "aborted":
            return error("publish-aborted")
        if v.expect.get(rank) != session:
            return error("member-conflict")
        if rank in v.sealed:
            return (v.state,) if v.sealed[rank] == digest else error("version-not-newer")
        if rank not in v.granted:
            return error("publish-aborted")
        self.renew(session)
        v.sealed[rank] = digest
        if len(v.sealed) == len(v.expect):
            v.state, self.highest = "ready", n
            self.published.append(n)
        return (v.state,)

    def abort(self, n: int, session: str) -> Outcome:
        self.abort_overdue()
        v = self.versions.get(n)
        if v is None:
            return error("version-gone")
        ranks = [r for r, s in v.expect.items() if s == session]
        if not ranks:
            return error("member-conflict")
        if v.state == "open" and ranks[0] in v.granted:
            self.close(n, "aborted")
        return (v.state,)

    def report_lost(self, n: int, rank: int) -> Outcome:
        v = self.versions.get(n)
        if v is None:
            return error("version-gone")
        if rank not in v.expect:
            return error("invalid-request")
        session = v.expect[rank]
        if v.state in ("ready", "retired") and not (
            self.producers.get(rank) == session and self.alive(session)
        ):
            self.close(n, "freed")
        return (v.state,)

    # -- rounds --------------------------------------------------------------------------------------

    def join_consumer(self, name: str, rank: int, size: int, session: str, replace: str) -> Outcome:
        band = self.groups.get(name)
        holder = band.ranks[rank].session if band and rank in band.ranks else None
        others = [m.session for r, m in band.ranks.items() if r != rank] if band else []
        if band and band.size != size and any(map(self.alive, others)):
            return error("member-conflict")
        if holder not in (None, session, replace) and self.alive(holder):
            return error("member-conflict")
        if band and band.size != size:
            for r in list(band.ranks):
                self.vacate(name, r)
            band = holder = None
        if band is None:
            band = self.groups[name] = Band(size, base=self.latest)
            self.rounds.setdefault(name, 0)
        if holder != session:
            if holder is not None:
                self.vacate(name, rank)
            band.ranks[rank] = Rank(session)
        self.renew(session)
        return (self.incarnation, size, self.latest, self.highest)

    def vacate(self, name: str, rank: int) -> None:
        band = self.groups[name]
        member = band.ranks.pop(rank)
        self.drop(member.session)
        if band.moving:
            self.fail(name)
        elif any(r.held is not None for r in band.ranks.values()):
            band.failed = True
        self.release(name, member.begun, member.aim)

    def release(self, name: str, number: int, version: int | None) -> None:
        """The group's lease ends once the round is over and nobody reads any more."""
        band = self.groups[name]
        if version is None or (band.moving and self.rounds[name] == number):
            return
        if any(r.begun == number and r.done < number and r.staged != number for r in band.ranks.values()):
            return
        if version in self.versions:
            self.versions[version].leases.discard((name, number))
            self.free_idle()

    def fail(self, name: str) -> None:
        band = self.groups[name]
        band.moving, band.failed = False, band.failed or not band.unharmed()
        band.outcomes[self.rounds[name]] = ("half", band.target)
        if not band.noop:
            self.release(name, self.rounds[name], band.target)

    def settle(self, name: str) -> None:
        """A round fails when a rank dies that did not finish it, or when the lease runs out."""
        band = self.groups[name]
        if not band.moving:
            return
        number = self.rounds[name]
        died = any(not self.alive(band.ranks[r].session) for r in band.pending(number))
        expired = not band.noop and (name, number) not in self.leases_of(band.target or 0)
        if died or (expired and not band.all_staged(number)):
            self.fail(name)

    def begin_round(
        self,
        name: str,
        rank: int,
        session: str,
        minimum: int,
        exact: int | None = None,
        max_lag: int | None = None,
    ) -> Outcome:
        band = self.groups.get(name)
        if band is None:
            return error("unknown-model")
        if rank not in band.ranks or band.ranks[rank].session != session:
            return error("member-conflict")
        self.renew(session)
        self.settle(name)
        me = band.ranks[rank]
        if me.begun > me.done and not (band.moving and self.rounds[name] == me.begun):
            if me.in_flight:
                me.held = None
            me.done = me.begun
            self.release(name, me.begun, me.aim)
        number = self.rounds[name]
        lost = not band.noop and (name, number) not in self.leases_of(band.target or 0)
        if band.moving and me.staged == number and me.done < number and lost:
            me.held, me.done = None, number
            self.fail(name)
        if band.moving:
            if me.done >= self.rounds[name]:
                return wait("group")
            if exact is not None and exact != band.target:
                return error("stale-group")
            if minimum > (band.target or 0):
                return error("stale-group")
        else:
            if not all(r in band.ranks and self.alive(band.ranks[r].session) for r in range(band.size)):
                return wait("group")
            have = band.whole_at()
            newest = self.latest if self.hold_at is None else self.hold_at
            fresh = have is not None and have >= minimum and max_lag is not None
            if exact is not None:
                known = self.versions.get(exact)
                if have == exact:
                    band.target, band.noop = exact, True
                elif known and known.state == "ready":
                    band.target, band.noop = exact, False
                elif (known and known.state in ("retired", "freed")) or (
                    self.highest is not None and exact <= self.highest
                ):
                    return error("version-gone")
                else:
                    return wait("version")
            elif fresh and len([v for v in self.published if v > (have or 0)]) <= (max_lag or 0):
                band.target, band.noop = have, True
            elif self.hold_at is not None:
                if minimum > self.hold_at:
                    return wait("version")
                band.target, band.noop = self.hold_at, have == self.hold_at
            elif have is not None and have >= minimum and (newest is None or newest <= have):
                band.target, band.noop = have, True
            elif newest is not None and newest >= minimum:
                band.target, band.noop = newest, False
            else:
                return wait("version")
            self.rounds[name] += 1
            band.moving = True
        number, target = self.rounds[name], band.target or 0
        me.begun, me.aim, me.staged = number, None if band.noop else target, 0
        if not band.noop:
            self.versions[target].leases.add((name, number))
        return (number, target, me.held, not band.noop)

    def stage_round(self, name: str, rank: int, session: str, number: int) -> Outcome:
        band = self.groups.get(name)
        if band is None:
            return error("unknown-model")
        if rank not in band.ranks or band.ranks[rank].session != session:
            return error("member-conflict")
        self.renew(session)
        self.settle(name)
        me = band.ranks[rank]
        if me.begun != number:
            return error("invalid-request")
        if me.aim is None or me.done >= number or me.staged == number:
            return ("staged",)
        if (name, number) not in self.leases_of(me.aim):
            return error("lease-lost")
        me.staged = number
        if band.moving and self.rounds[name] == number:
            if band.all_staged(number):
                self.versions[me.aim].leases.discard((name, number))
                self.free_idle()
        else:
            self.release(name, number, me.aim)
        return ("staged",)

    def finish_round(
        self, name: str, rank: int, session: str, number: int, failed: bool, torn: bool = True
    ) -> Outcome:
        band = self.groups.get(name)
        if band is None:
            return error("unknown-model")
        if rank not in band.ranks or band.ranks[rank].session != session:
            return error("member-conflict")
        self.renew(session)
        self.settle(name)
        me = band.ranks[rank]
        if me.begun != number:
            return error("invalid-request")
        if me.done >= number:
            if not failed and me.aim is not None and me.held != me.aim:
                return error("lease-lost")
            return self.round_status(name, number)
        reading = me.in_flight
        safe = me.staged == number or (name, number) in self.leases_of(me.aim or 0)
        lost = not failed and reading and not safe
        me.done, me.staged = number, 0
        if failed or lost:
            if torn or lost:
                me.held = None
            if band.moving and self.rounds[name] == number:
                self.fail(name)
            elif not band.moving:
                band.failed = band.failed or not band.unharmed()
        elif reading:
            me.held = me.aim
        self.settle_whole(name)
        self.release(name, number, me.aim)
        return error("lease-lost") if lost else self.round_status(name, number)

    def settle_whole(self, name: str) -> None:
        band, number = self.groups[name], self.rounds[name]
        have = band.whole_at()
        if have is None or (band.moving and band.pending(number)):
            return
        if band.moving or band.failed or band.last != have:
            band.last = have
            if band.target == have:
                band.outcomes[number] = ("whole", have)
            band.moving = band.failed = False
            if not band.noop:
                self.release(name, number, band.target)

    def round_status(self, name: str, number: int) -> Outcome:
        band = self.groups.get(name)
        if band is None:
            return error("unknown-model")
        self.settle(name)
        if band.moving and self.rounds[name] == number:
            return ("moving", band.target)
        return band.outcomes.get(number) or error("invalid-request")

    # -- due -----------------------------------------------------------------------------------------

    def end_lease(self, n: int, lease: tuple[str, int]) -> None:
        self.versions[n].leases.discard(lease)

    def settle_all(self) -> None:
        for name in self.groups:
            self.settle(name)

    def sweep(self) -> None:
        self.abort_overdue()
        self.settle_all()
        for session in list(self.long_dead):
            self.leave(session, memory_gone=False)
        self.free_idle()
        self.forget()
