"""Settings of all tests: properties are judged by their answers, not by how busy the machine is. And a real
controller in a process of its own, with its embedded index, for those that want one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from weightdepot.api.client import ControllerClient

from .system.harness import Server

settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The same examples at each run, so that a change that did not break anything is not held up.
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture(scope="session")
def controller() -> Iterator[str]:
    server = Server("--port", "0")
    try:
        with ControllerClient(server.url) as client:
            client.ready(timeout=20)
        yield server.url
    finally:
        server.stop()
