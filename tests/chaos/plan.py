"""Which fault comes when: drawn before anything runs, so that a seed is a sequence of faults."""

from __future__ import annotations

import random
from dataclasses import dataclass

from weightdepot import Timeouts

# Short, so that much happens in some minutes; a stop outlasts a lease and a membership.
TIMES = Timeouts(join=30, publish=20, seal=8, update=10, call=3, member=2, lease=3)

PRODUCERS = ("producer-0", "producer-1")
CONSUMERS = ("pair-0", "pair-1", "single-0")  # group and rank
CONTROLLERS = ("controller-0", "controller-1")
INDEX = "index"
EVERYONE = (*PRODUCERS, *CONSUMERS, *CONTROLLERS, INDEX)

SETTLED = 4.0  # seconds that a process is left alone after it came back


@dataclass(frozen=True)
class Fault:
    """At `at` seconds `victim` gets SIGKILL ("kill") or SIGSTOP ("stop"); `down` seconds later it is back."""

    number: int
    at: float
    victim: str
    kind: str
    down: float

    def __str__(self) -> str:
        return f"{self.number:>4} {self.at:7.1f} s  {self.kind} {self.victim}, back after {self.down:.1f} s"


def faults(count: int, seed: int, pause: float) -> list[Fault]:
    """pause: seconds between two faults, on average."""
    rng = random.Random(seed)
    plan: list[Fault] = []
    busy = dict.fromkeys(EVERYONE, 0.0)
    at = 0.0
    while len(plan) < count:
        at += rng.uniform(0.2, 2 * pause - 0.2)
        at = max(at, min(busy.values()))
        victim = rng.choice([name for name in EVERYONE if busy[name] <= at])
        kind = rng.choice(("kill", "stop"))
        down = rng.uniform(0.0, 1.0) if kind == "kill" else TIMES.lease + rng.uniform(0.5, 2.0)
        plan.append(Fault(len(plan) + 1, at, victim, kind, down))
        busy[victim] = at + down + SETTLED
    return plan
