"""A real Valkey for the whole session, and controllers on it: in-process (quick) or as a real process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from weightdepot.api.app import create_app
from weightdepot.api.client import ControllerClient
from weightdepot.api.settings import Settings
from weightdepot.store.index import EmbeddedRedis

from .helpers import Trainer, serving, unique


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    with EmbeddedRedis() as redis:
        yield redis.url


@pytest.fixture
async def http(redis_url: str) -> AsyncIterator[httpx.AsyncClient]:
    """The application in this process, under a run of its own."""
    run = unique("run")
    app = create_app(Settings(redis_url=redis_url, run=run))
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://test", headers={"Weightdepot-Run": run}, timeout=40.0
        ) as client:
            yield client


@pytest.fixture(scope="session")
def controller(redis_url: str) -> Iterator[str]:
    """The URL of a real controller process that serves the default run."""
    with serving("--redis-url", redis_url) as (url, _):
        yield url


@pytest.fixture
def client(controller: str) -> Iterator[ControllerClient]:
    with ControllerClient(controller) as client:
        yield client


@pytest.fixture
def model() -> str:
    return unique("model")


@pytest.fixture
def trainer(client: ControllerClient, model: str) -> Trainer:
    """Two ranks that have joined."""
    return Trainer(client, model).join_all()
