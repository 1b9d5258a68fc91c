"""A short run of the chaos suite; `python -m tests.chaos` is the long one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from weightdepot.store.index.records import Model, Version, VersionState

from .content import base, torn, versions_in
from .ledger import RETENTION, Ledger
from .plan import TIMES, faults
from .report import musts
from .run import GROUPS, run

SEED, FAULTS = 640, 15


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_case_09_nothing_is_lost_torn_or_late_when_processes_are_killed_and_come_back(tmp_path: Path) -> None:
    """Producers, consumers, controllers and the index, each killed or stopped, and back again."""
    plan = faults(FAULTS, SEED, 2.0)
    outcome = run(plan, SEED, transport="auto", pause=0.3, keep=tmp_path, say=lambda _: None)
    ledger = outcome.ledger
    found = musts(ledger, outcome.apart, outcome.failures, outcome.converged, len(GROUPS))
    missed = [must for must in found if not must.ok]
    late = [call for call in ledger.calls if call.late]
    assert not missed, (missed, ledger.torn, outcome.apart, ledger.lost, late, outcome.failures)
    assert ledger.done == plan


def test_a_seed_is_a_sequence_of_faults_and_all_kinds_of_processes_are_hit() -> None:
    assert faults(50, 1, 2.0) == faults(50, 1, 2.0) != faults(50, 2, 2.0)
    assert faults(10, 1, 2.0) == faults(50, 1, 2.0)[:10]
    hit = {(f.victim.rstrip("-01"), f.kind) for f in faults(FAULTS, SEED, 2.0)}
    assert {victim for victim, _ in hit} == {"producer", "pair", "single", "controller", "index"}
    assert {kind for _, kind in hit} == {"kill", "stop"}
    assert all(f.down > max(TIMES.lease, TIMES.member) for f in faults(200, 1, 2.0) if f.kind == "stop")


def test_one_element_of_another_version_is_noticed() -> None:
    held = [base(0), base(1)]
    for tensor in held:
        tensor.add_(7919 * 5)
    assert torn(held, [base(0), base(1)], 5) == ""
    held[1][random.Random(1).randrange(700), 3] += 7919
    assert "tensor 1" in torn(held, [base(0), base(1)], 5)
    assert versions_in(held[1], base(1)) == [5, 6]
    held[0][0, 0] = torch.iinfo(torch.int32).min
    assert "tensor 0" in torn(held, [base(0), base(1)], 5)


def version(number: int, state: VersionState) -> Version:
    return Version("m", number, state, 0, "", 1, 1, 0.0, 0.0, (0,), (), 1)


def model(states: dict[int, VersionState], highest: int) -> Model:
    versions = tuple(version(n, state) for n, state in states.items())
    return Model("m", 1, 1, RETENTION, highest, (), versions, highest=highest)


def test_a_ready_version_that_is_gone_before_its_time_is_counted_once() -> None:
    ledger = Ledger()
    ready, freed = VersionState.READY, VersionState.FREED
    ledger.snapshot(model({1: ready, 2: ready, 3: ready}, 3), 3)
    ledger.snapshot(model({1: freed, 2: ready, 3: ready, 4: VersionState.OPEN}, 3), 3)
    assert ledger.lost == []
    for _ in range(2):
        ledger.snapshot(model({2: ready, 3: freed}, 3), 3)
    assert len(ledger.lost) == 1
    assert "version 3" in ledger.lost[0]
    ledger.snapshot(model({2: ready}, 2), 5)
    assert "version 5 was said to be ready" in ledger.lost[-1]


def test_ranks_of_a_group_that_serve_different_versions_at_once_are_noticed() -> None:
    ledger = Ledger()

    def update(who: str, begun: float, ended: float, held: int) -> None:
        ledger.hear(who, {"call": "update", "bound": 10.0, "begun": begun, "ended": ended, "version": held})

    update("a", 0, 1, 1)
    update("b", 0, 1.5, 1)
    update("a", 3, 5, 2)
    update("b", 4, 5, 2)
    assert ledger.groups_apart([("a", "b")]) == []
    update("a", 6, 7, 3)  # while b serves 2
    assert len(ledger.groups_apart([("a", "b")])) == 1


def test_a_call_is_late_beyond_its_bound_unless_it_was_itself_stopped() -> None:
    ledger = Ledger()
    said = {
        "call": "update",
        "bound": 10.0,
        "begun": 0.0,
        "ended": 40.0,
        "version": None,
        "error": "WaitTimeout",
    }
    ledger.hear("a", said)
    ledger.stopped("b", 5.0, 33.0)
    ledger.hear("b", said)
    assert [call.late for call in ledger.calls] == [True, False]
