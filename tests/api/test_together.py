"""Looks that are shared: as many as there are moments, and none that is older than who asks for it."""

from __future__ import annotations

import asyncio

import pytest

from weightdepot.api.together import Together


class Index:
    """Answers what it is at the moment that a look begins."""

    def __init__(self) -> None:
        self.state = self.looks = 0

    async def __call__(self) -> int:
        seen = self.state
        self.looks += 1
        await asyncio.sleep(0.01)
        return seen


async def test_all_who_ask_at_once_are_answered_by_one_look() -> None:
    together, index = Together(), Index()
    assert await asyncio.gather(*(together.look("m", index) for _ in range(64))) == [0] * 64
    assert index.looks == 1
    assert await together.look("m", index) == 0
    assert index.looks == 2


async def test_who_asks_after_a_change_is_never_told_what_was_before() -> None:
    together, index = Together(), Index()
    for state in range(1, 50):
        early = asyncio.ensure_future(together.look("m", index))
        for _ in range(state % 4):
            await asyncio.sleep(0)
        index.state = state
        assert await together.look("m", index) == state
        assert await early in (state - 1, state)


async def test_an_error_is_everybodys_and_who_goes_away_takes_nothing_from_the_others() -> None:
    together = Together()

    async def broken() -> int:
        await asyncio.sleep(0.01)
        raise ValueError("gone")

    first, second = (asyncio.ensure_future(together.look("m", broken)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(ValueError, match="gone"):
        await second
    assert first.cancelled()


async def test_different_things_are_looked_at_apart() -> None:
    together, one, other = Together(), Index(), Index()
    other.state = 5
    found = await asyncio.gather(together.look("a", one), together.look("b", other))
    assert list(found) == [0, 5]
