"""Consumer groups and their rounds, as plain Python. See reference.py."""

from __future__ import annotations

from .reference_state import Band, Outcome, Rank, State, error, wait


class Rounds(State):
    def join_consumer(
        self, name: str, rank: int, size: int, session: str, replace: str = "", observer: bool = False
    ) -> Outcome:
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
            band = self.groups[name] = Band(size, base=self.latest, observer=observer)
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
        tag: str = "",
    ) -> Outcome:
        band = self.groups.get(name)
        if band is None:
            return error("unknown-model")
        if rank not in band.ranks or band.ranks[rank].session != session:
            return error("member-conflict")
        self.renew(session)
        self.settle(name)
        if tag:
            exact = self.tags.get(tag)
            if exact is None:
                return wait("version")
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
            newest = self.current
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
            elif fresh and self.newer_than(have) <= (max_lag or 0):
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

    # -- who has what --------------------------------------------------------------------------------

    def settle_all(self) -> None:
        for name in self.groups:
            self.settle(name)

    def applied(self, n: int) -> Outcome:
        self.abort_overdue()
        if n not in self.versions or self.versions[n].state == "aborted":
            return error("version-gone")
        self.settle_all()
        live = {name: band for name, band in self.groups.items() if self.live(band)}
        there = {name for name, band in live.items() if band.last is not None and band.last >= n}
        return (self.versions[n].state, there, set(live) - there, self.hold_at)

    def convergence(self) -> Outcome:
        self.settle_all()
        absent = {name for name, band in self.groups.items() if not self.live(band) and not band.observer}
        live = {name: band for name, band in self.groups.items() if self.live(band)}
        at = {
            name
            for name, band in live.items()
            if self.current is not None and band.whole_at() == self.current
        }
        return (self.current, at, set(live) - at, absent)
