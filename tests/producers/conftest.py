"""A real controller for all tests of the trainers' frameworks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from weightdepot.api.client import ControllerClient

from ..system.harness import Server


@pytest.fixture(scope="session")
def controller() -> Iterator[str]:
    server = Server("--port", "0")
    try:
        with ControllerClient(server.url) as client:
            client.ready(timeout=20)
        yield server.url
    finally:
        server.stop()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the checkpoints that several tests share."""
    return tmp_path_factory.mktemp("checkpoints")
