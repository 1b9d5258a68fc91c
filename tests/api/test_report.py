"""What is stuck, in words: one line for each trouble, none where all is well."""

from __future__ import annotations

import dataclasses
from typing import Any

from weightdepot.api.report import ranks_text, report_on
from weightdepot.store.index.records import (
    Group,
    GroupState,
    Member,
    Mode,
    Model,
    Policy,
    Process,
    Version,
    VersionState,
)


def member(rank: int, *, alive: bool = True, version: int | None = None) -> Member:
    return Member(rank, f"s{rank}", "", Process("h", 1, 1), 0.0, alive, 5.0 if alive else -5.0, version)


def version(
    number: int, state: VersionState, *, sealed: tuple[int, ...] = (0, 1), leases: tuple[str, ...] = ()
) -> Version:
    missing = tuple(r for r in (0, 1) if r not in sealed)
    return Version("m", number, state, 0, "t", 1, 2, 0.0, 1.0, sealed, missing, 10, "", leases)


def model(*versions: Version, producers: tuple[Member, ...] | None = None) -> Model:
    ready = [v.version for v in versions if v.state is VersionState.READY]
    if producers is None:
        producers = (member(0), member(1))
    return Model("m", 1, 2, 2, max(ready, default=None), producers, versions)


GROUP = Group("m", "g", 2, GroupState.WHOLE, 1, None, 1, (member(0, version=1), member(1, version=1)), (), ())


def test_where_all_is_well_nothing_is_said() -> None:
    report = report_on(model(version(1, VersionState.READY), version(2, VersionState.READY)), [GROUP])
    assert report.troubles == ()


def test_missing_and_silent_producers_are_named() -> None:
    report = report_on(model(producers=(member(0, alive=False),)), [])
    assert "rank 1 of 2 never joined" in report.troubles[0]
    assert "rank 0 sent no heartbeat" in report.troubles[1]


def test_an_open_version_names_the_ranks_that_hold_it_up() -> None:
    (trouble,) = report_on(model(version(3, VersionState.OPEN, sealed=(0,))), []).troubles
    assert trouble == "version 3 is open: rank 1 not sealed yet"


def test_readers_that_hold_every_slot_are_named() -> None:
    held = version(1, VersionState.READY, leases=("g/7",))
    (trouble,) = report_on(model(held, version(2, VersionState.READY)), []).troubles
    assert "the next publish waits for g/7" in trouble
    retired = report_on(
        model(version(1, VersionState.RETIRED, leases=("g/7",)), version(2, VersionState.READY)), []
    )
    assert any("version 1 is retired, but g/7 still read it" in trouble for trouble in retired.troubles)


def test_groups_that_are_half_way_stuck_or_short_are_named() -> None:
    half = dataclasses.replace(GROUP, state=GroupState.HALF, error="rank 1: bad digest")
    moving = dataclasses.replace(GROUP, state=GroupState.MOVING, target=2, pending=(1,))
    short = dataclasses.replace(GROUP, members=(member(0, alive=False),), missing=(1,))
    troubles = [report_on(model(), [group]).troubles for group in (half, moving, short)]
    assert troubles[0] == ("group g is half-way and must not serve: rank 1: bad digest",)
    assert troubles[1] == ("group g moves to version 2: rank 1 not done yet",)
    assert len(troubles[2]) == 2


def test_who_holds_the_trainer_up_is_named_in_the_modes_in_which_somebody_does() -> None:
    ready = [version(number, VersionState.READY) for number in (1, 2, 3)]
    behind = dataclasses.replace(GROUP, live=True, last=1, lag=2)

    def troubles(policy: Policy, group: Group = behind, **changes: Any) -> tuple[str, ...]:
        return report_on(dataclasses.replace(model(*ready), policy=policy, **changes), [group]).troubles

    (named,) = troubles(Policy(Mode.BOUNDED, 1))
    assert named == "group g is 2 versions behind (max_lag 1): publishing waits for it"
    assert troubles(Policy(Mode.SYNC)) == ("group g is 2 versions behind: publishing waits for it",)
    assert troubles(Policy(Mode.ASYNC)) == ()
    assert troubles(Policy(Mode.BOUNDED, 2)) == ()
    assert troubles(Policy(Mode.BOUNDED, 1), dataclasses.replace(behind, live=False)) == ()
    (held,) = troubles(Policy(Mode.BOUNDED, 1), current=1, held=True)
    assert "held at 1" in held


def test_pinned_versions_take_no_slot_of_the_others() -> None:
    read = version(1, VersionState.READY, leases=("g/7",))
    newest = version(3, VersionState.READY)
    assert report_on(model(read, newest), []).troubles
    for kept in ({"pinned": True}, {"tags": ("best",)}):
        assert report_on(model(dataclasses.replace(read, **kept), newest), []).troubles == ()


def test_many_ranks_are_counted() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text(list(range(20))) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"
