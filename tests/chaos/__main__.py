"""Processes are killed and stopped at random instants, and nothing is lost, torn or waits for ever.

    python -m tests.chaos --faults 200 --seed 1

Two trainer ranks publish, a rollout group of two ranks and one of a single rank update and look at every
element; two controllers serve them on one Redis. Each fault is SIGKILL, or SIGSTOP for longer than a lease,
to one of these eight processes, which comes back. The seed says which fault comes when. Ends with 1 where
something that must hold did not.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console

from .plan import faults
from .report import as_json, musts, show
from .run import GROUPS, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause", type=float, default=2.0, help="seconds between two faults, on average")
    parser.add_argument("--between", type=float, default=0.3, help="seconds between two versions, at most")
    parser.add_argument("--transport", choices=("auto", "shm", "mooncake"), default="auto")
    parser.add_argument("--logs", type=Path, help="a folder for what the processes say")
    parser.add_argument("--json", action="store_true", help="one JSON value instead of tables")
    parser.add_argument("--quiet", action="store_true", help="do not say each fault as it comes")
    a = parser.parse_args()
    console = Console(stderr=True)

    def say(text: str) -> None:
        if not a.quiet:
            console.print(text, highlight=False)

    plan = faults(a.faults, a.seed, a.pause)
    outcome = run(plan, a.seed, transport=a.transport, pause=a.between, keep=a.logs, say=say)
    ledger = outcome.ledger
    found = musts(ledger, outcome.apart, outcome.failures, outcome.converged, len(GROUPS))
    if a.json:
        settings = {"faults": a.faults, "pause": a.pause, "between": a.between, "transport": a.transport}
        print(
            json.dumps(as_json(ledger, found, outcome.failures, a.seed, outcome.seconds, settings), indent=1)
        )
    else:
        show(Console(), ledger, found, a.seed, outcome.seconds)
    late = [
        f"{c.who}: {c.call} took {c.seconds:.1f} s, its bound is {c.bound:g} s ({c.error or 'no error'})"
        for c in ledger.calls
        if c.late
    ]
    for text in [*ledger.torn, *outcome.apart, *ledger.lost, *late, *outcome.failures]:
        console.print(text, style="bold", highlight=False)
    return 0 if all(must.ok for must in found) else 1


if __name__ == "__main__":
    sys.exit(main())
