"""The planner computes each thing once, whoever asks, and finds again what others made."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from weightdepot.api import planner as planning
from weightdepot.api.planner import Lru, Planner, StillPlanning
from weightdepot.api.settings import Settings
from weightdepot.store.errors import InvalidRequest, VersionGone
from weightdepot.store.index import Index
from weightdepot.store.layout import Layout
from weightdepot.store.tiling import Tiling, TilingMaker, make_tiling

from .helpers import rows_layout, unique


@pytest.fixture
async def index(redis_url: str) -> AsyncIterator[Index]:
    index = Index(redis_url, run=unique("run"))
    yield index
    await index.close()


@pytest.fixture
async def planner(index: Index) -> AsyncIterator[Planner]:
    planner = Planner(index, Settings())
    yield planner
    await planner.close()


async def put(planner: Planner, *layouts: Layout) -> list[str]:
    for layout in layouts:
        await planner.put_layout(layout.digest, layout.to_bytes())
    return [layout.digest for layout in layouts]


class Counted:
    """TilingMaker.make, counted and held up until it is let go."""

    def __init__(self) -> None:
        self.calls = 0
        self.go = threading.Event()

    def patched(self, make: Callable[..., Tiling]) -> Callable[..., Tiling]:
        def counted(*arguments: Any) -> Tiling:
            self.calls += 1
            assert self.go.wait(10)
            return make(*arguments)

        return counted


async def test_a_tiling_that_many_ask_for_at_once_is_made_once(
    planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Counted()
    monkeypatch.setattr(TilingMaker, "make", made.patched(TilingMaker.make))
    producers = await put(planner, rows_layout(0, 4), rows_layout(4, 8))
    asking = [asyncio.create_task(planner.tiling(producers, (), patience=10)) for _ in range(20)]
    await asyncio.sleep(0.05)
    made.go.set()
    assert len(set(await asyncio.gather(*asking))) == 1
    await planner.tiling(producers, (), patience=10)
    assert made.calls == 1


async def test_who_loses_patience_or_goes_away_does_not_stop_the_work(
    planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Counted()
    monkeypatch.setattr(TilingMaker, "make", made.patched(TilingMaker.make))
    producers = await put(planner, rows_layout(0, 8))
    with pytest.raises(StillPlanning):
        await planner.tiling(producers, (), patience=0.05)
    leaving = asyncio.create_task(planner.tiling(producers, (), patience=10))
    await asyncio.sleep(0.01)
    leaving.cancel()
    assert planner.busy
    made.go.set()
    await planner.tiling(producers, (), patience=10)
    assert made.calls == 1
    assert not planner.busy


async def test_another_controller_finds_what_this_one_made(
    index: Index, planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    producers = await put(planner, rows_layout(0, 4), rows_layout(4, 8))
    (reader,) = await put(planner, rows_layout(2, 6))
    tiling = await planner.tiling(producers, [reader], patience=10)
    plan = await planner.plan(tiling, reader, patience=10)
    source = await planner.source_tiling(tiling, 1, patience=10)

    def forbidden(*_: object) -> Tiling:
        raise AssertionError("made again")

    monkeypatch.setattr(TilingMaker, "make", forbidden)
    monkeypatch.setattr(planning, "make_plan", forbidden)
    other = Planner(index, Settings())
    assert await other.tiling(producers, [reader, reader], patience=10) == tiling
    assert await other.plan(tiling, reader, patience=10) == plan
    assert await other.source_tiling(tiling, 1, patience=10) == source


async def test_a_consumer_that_joins_changes_the_tiling_and_does_not_make_it_anew(
    planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    producers = await put(planner, rows_layout(0, 4), rows_layout(4, 8))
    first, second = await put(planner, rows_layout(2, 6), rows_layout(1, 3))
    await planner.tiling(producers, [first], patience=10)
    monkeypatch.setattr(planning, "TilingMaker", None)  # none is made from here on
    both = await planner.tiling(producers, [first, second], patience=10)
    await planner.tiling(producers, [second], patience=10)
    layouts = [rows_layout(0, 4), rows_layout(4, 8)], [rows_layout(2, 6), rows_layout(1, 3)]
    assert (await planner.whole_tiling(both)) == make_tiling(*layouts).to_bytes()


async def test_a_failure_reaches_all_who_asked_and_is_not_kept(planner: Planner) -> None:
    asking = [planner.plan("0" * 32, "0" * 32, patience=5) for _ in range(3)]
    results = await asyncio.gather(*asking, return_exceptions=True)
    assert all(isinstance(result, VersionGone) for result in results)
    assert not planner.busy


async def test_what_is_known_is_looked_up_again_after_the_index_was_away(index: Index) -> None:
    """It may have come back empty; then tilings are put there again, where other controllers find them."""
    planner = Planner(index, Settings())
    producers = await put(planner, rows_layout(0, 8))
    tiling = await planner.tiling(producers, (), patience=10)
    await index.put_blob("tiling", tiling, b"", 0.001)
    await asyncio.sleep(0.01)
    assert await index.get_blob("tiling", tiling) is None
    planner.forget()
    await planner.tiling(producers, (), patience=10)
    assert await index.get_blob("tiling", tiling) is not None


async def test_a_layout_that_is_damaged_is_not_kept(planner: Planner, index: Index) -> None:
    layout = rows_layout(0, 8)
    with pytest.raises(InvalidRequest):
        await planner.put_layout(layout.digest, layout.to_bytes()[:-3])
    assert await index.get_blob("layout", layout.digest) is None


async def test_refreshing_puts_off_the_end(planner: Planner, index: Index) -> None:
    layout = rows_layout(0, 8)
    await index.put_blob("layout", layout.digest, layout.to_bytes(), 0.2)
    await planner.refresh([layout.digest, "0" * 32], [])
    await asyncio.sleep(0.3)
    assert await index.get_blob("layout", layout.digest) is not None


def test_the_cache_keeps_what_was_used_last_within_its_size() -> None:
    cache: Lru[bytes] = Lru(10, len)
    cache.put("a", b"xxxx")
    cache.put("b", b"xxxx")
    assert cache.get("a") == b"xxxx"
    cache.put("c", b"xxxx")
    assert cache.get("b") is None
    assert cache.get("a") == cache.get("c") == b"xxxx"
    cache.put("a", b"y" * 11)
    assert cache.get("a") is None, "larger than the whole cache"
    cache.put("c", b"zz")
    cache.put("d", b"x" * 8)
    assert cache.get("c") == b"zz", "replaced values free their size"
