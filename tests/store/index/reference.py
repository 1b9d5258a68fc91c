"""What the index must do, as plain Python: no Redis, no clock, no scripts. Time passes by saying so."""

from __future__ import annotations

from .reference_rounds import Rounds
from .reference_state import Outcome, error
from .reference_versions import Versions


class Reference(Versions, Rounds):
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
        self,
        rank: int,
        size: int,
        session: str,
        layout: str,
        retention: int,
        replace: str = "",
        yields: bool = False,
    ) -> Outcome:
        def holds(s: str | None) -> bool:
            return self.alive(s) and (yields or s not in self.yielding)

        holder = self.producers.get(rank)
        others = [s for r, s in self.producers.items() if r != rank and holds(s)]
        if others and (size, retention) != (self.size, self.retention):
            return error("member-conflict")
        if holder not in (None, session, replace) and holds(holder):
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
        if yields:
            self.yielding.add(session)
        return (self.incarnation, self.size, self.latest, self.highest)

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

    # -- due -----------------------------------------------------------------------------------------

    def end_lease(self, n: int, lease: tuple[str, int]) -> None:
        self.versions[n].leases.discard(lease)

    def sweep(self) -> None:
        self.abort_overdue()
        self.settle_all()
        for session in list(self.long_dead):
            self.leave(session, memory_gone=False)
        self.free_idle()
        self.forget()
