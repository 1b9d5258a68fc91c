"""Openings that were told to wait: how long they wait, and that each which is given up is counted once."""

from __future__ import annotations

import pytest

from weightdepot.api.openings import GIVEN_UP_S, Openings
from weightdepot.store.errors import IndexUnavailable, VersionNotNewer
from weightdepot.store.index.records import Grant, Wait

SLOT = Wait("slot", "all are leased")
GRANT = Grant(version=1, slot=0, tiling="t", incarnation=1)


class Scene:
    """Openings, a clock that is moved by hand, and who gave up."""

    def __init__(self) -> None:
        self.now = 100.0
        self.gone: list[tuple[str, str]] = []
        self.openings = Openings(lambda model, reason: self.gone.append((model, reason)), lambda: self.now)

    def ask(self, *answers: object, seconds: float = 1.0, version: int = 1, rank: int = 0) -> None:
        """One request of `seconds`, and what its looks found."""
        with self.openings.asking("m", version, rank) as told:
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
                told(answer)
            self.now += seconds

    def later(self) -> None:
        self.now += GIVEN_UP_S + 0.1
        self.openings.settle()


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_one_that_is_not_asked_for_again_was_given_up_and_is_counted_once(scene: Scene) -> None:
    scene.ask(SLOT)
    scene.openings.settle()
    assert scene.gone == []
    scene.later()
    scene.later()
    assert scene.gone == [("m", "slot")]
    assert scene.openings.longest() == {}


def test_many_polls_are_one_wait_and_a_grant_ends_it(scene: Scene) -> None:
    for _ in range(20):
        scene.ask(SLOT)
        scene.now += GIVEN_UP_S / 2
    assert scene.openings.longest() == {("m", "slot"): pytest.approx(20 * (1 + GIVEN_UP_S / 2))}
    scene.ask(SLOT, GRANT)
    scene.later()
    assert scene.gone == []
    assert scene.openings.longest() == {}


def test_one_that_is_still_asked_for_is_not_given_up_however_long_the_poll(scene: Scene) -> None:
    with scene.openings.asking("m", 1, 0) as told:
        told(SLOT)
        scene.later()
        assert scene.gone == []
        assert scene.openings.longest() == {("m", "slot"): pytest.approx(GIVEN_UP_S + 0.1)}
    scene.later()
    assert scene.gone == [("m", "slot")]


def test_it_counts_for_what_it_waited_for_last(scene: Scene) -> None:
    scene.ask(Wait("ranks", "one is missing"), SLOT)
    scene.later()
    assert scene.gone == [("m", "slot")]


def test_each_rank_is_one(scene: Scene) -> None:
    for rank in (0, 1):
        scene.ask(SLOT, rank=rank)
    scene.ask(GRANT, rank=0)
    scene.later()
    assert scene.gone == [("m", "slot")]


def test_a_refusal_is_an_answer_and_no_giving_up(scene: Scene) -> None:
    scene.ask(SLOT)
    with pytest.raises(VersionNotNewer):
        scene.ask(VersionNotNewer("no"))
    scene.later()
    assert scene.gone == []


def test_an_index_that_is_away_for_a_moment_is_no_answer(scene: Scene) -> None:
    scene.ask(SLOT)
    with pytest.raises(IndexUnavailable):
        scene.ask(IndexUnavailable("away"))
    assert scene.openings.longest() == {("m", "slot"): pytest.approx(1)}
    scene.later()
    assert scene.gone == [("m", "slot")]


def test_those_given_up_are_forgotten_by_other_requests_without_a_scrape(scene: Scene) -> None:
    scene.ask(SLOT, version=1)
    scene.now += GIVEN_UP_S + 0.1
    scene.ask(GRANT, version=2)
    assert scene.gone == [("m", "slot")]
