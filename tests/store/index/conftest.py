"""One real Valkey server for all tests of the index; every test has a run of its own on it."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator

import pytest

from weightdepot.store.index import EmbeddedRedis, Index

from .hand import Hand

_runs = itertools.count()


@pytest.fixture(scope="session")
def valkey() -> Iterator[str]:
    """URL of the server that all tests of this session share."""
    with EmbeddedRedis() as server:
        yield server.url


@pytest.fixture
async def index(valkey: str) -> AsyncIterator[Index]:
    """An index with nothing in it."""
    made = Index(valkey, run=f"run{next(_runs)}")
    yield made
    await made.close()


@pytest.fixture
def hand(valkey: str, index: Index) -> Iterator[Hand]:
    """The hand on model `m` of `index`."""
    made = Hand(valkey, index.run, "m")
    yield made
    made.close()
