"""Versions, what is kept, and what is announced anew, as plain Python. See reference.py."""

from __future__ import annotations

from .reference_state import Announced, Outcome, Publish, State, error, wait


class Versions(State):
    def free_slot(self) -> int | None:
        used = {v.slot for v in self.versions.values() if v.living or v.leases}
        kept = [n for n in self.protected if self.versions[n].slot >= 0]
        return next((s for s in range(self.window + len(kept)) if s not in used), None)

    def grant(self, n: int, rank: int) -> Outcome:
        self.versions[n].granted.add(rank)
        kept = [
            v
            for v in self.versions.values()
            if v.state in ("ready", "retired") or (v.state == "freed" and v.leases)
        ]
        keep = frozenset(v.expect[rank] for v in kept if rank in v.expect)
        used = {v.slot for v in self.versions.values() if v.living or v.leases}
        slots = frozenset(range(self.window)) | {s for s in used if s >= 0}
        # what this rank is about to write into, and what it may give back, is announced no more
        for parts in self.announced.values():
            if rank in parts and (parts[rank].slot == self.versions[n].slot or parts[rank].slot not in slots):
                del parts[rank]
        return (n, self.versions[n].slot, self.versions[n].tiling, self.incarnation, keep, slots)

    def open_version(
        self, n: int, rank: int, session: str, tiling: str, incarnation: int, in_place: bool = False
    ) -> Outcome:
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
        slot = -1 if in_place else self.free_slot()
        if slot is None:
            moving = [k for k, v in self.versions.items() if v.state == "ready" and v.slot >= 0]
            ready = sorted(k for k in moving if k not in self.protected)
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
            self.published.add(n)
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

    # -- what is kept ----------------------------------------------------------------------------------

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

    # -- what outlives the index -----------------------------------------------------------------------

    def announce(
        self, rank: int, size: int, session: str, parts: dict[int, Announced], highest: int | None
    ) -> Outcome:
        if self.producers.get(rank) != session:
            return error("member-conflict")
        self.renew(session)
        self.rise(highest)
        ready = []
        for n, part in parts.items():
            if n in self.versions:
                if self.versions[n].state == "ready" and self.versions[n].attempt == part.attempt:
                    ready.append(n)
            elif size == self.size:
                self.announced.setdefault(n, {})[rank] = part
                if self.restore(n, part):
                    ready.append(n)
        return ("ready", *ready)

    def rise(self, highest: int | None) -> None:
        """Nothing below what was ever ready can become ready."""
        if highest is not None:
            self.highest = highest if self.highest is None else max(self.highest, highest)
        if self.open is not None and self.highest is not None and self.open <= self.highest:
            self.close(self.open, "aborted")

    def restore(self, n: int, part: Announced) -> bool:
        parts = self.announced[n]
        if {r: p.session for r, p in parts.items()} != self.producers or len(parts) != self.size:
            return False
        if any(
            (p.attempt, p.slot, p.tiling) != (part.attempt, part.slot, part.tiling) for p in parts.values()
        ):
            return False
        if any(v.slot == part.slot and (v.living or v.leases) for v in self.versions.values()):
            return False
        self.versions[n] = Publish(
            "ready", part.slot, part.tiling, self.incarnation, dict(self.producers), part.attempt,
            granted=set(parts), sealed={r: p.digest for r, p in parts.items()},
        )  # fmt: skip
        del self.announced[n]
        self.rise(n)
        self.published.add(n)
        return True
