"""Two controllers on one Redis, and a real Prometheus that scrapes both."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..api.helpers import unique
from ..system.harness import Redis, Server
from .prometheus import Prometheus


@pytest.fixture(scope="package")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    server = Redis(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture(scope="package")
def controller(redis: Redis) -> Iterator[str]:
    server = Server("--port", "0", "--redis-url", redis.url)
    yield server.url
    server.stop()


@pytest.fixture(scope="package")
def other(redis: Redis) -> Iterator[Server]:
    """The same gauges from another controller: no alert may be given twice for that."""
    server = Server("--port", "0", "--redis-url", redis.url)
    yield server
    server.stop()


@pytest.fixture(scope="package")
def prometheus(
    controller: str, other: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    running = Prometheus(tmp_path_factory.mktemp("prometheus"), [controller, other.url])
    yield running
    running.stop()


@pytest.fixture
def model() -> str:
    return unique("watched")
