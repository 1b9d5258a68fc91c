"""A real controller in a process of its own, with its embedded index; a fresh model name for each test."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from weightdepot.api.client import ControllerClient

from .harness import Child, Server

_numbers = itertools.count()


@pytest.fixture(scope="session")
def controller() -> Iterator[str]:
    server = Server("--port", "0")
    try:
        with ControllerClient(server.url) as client:
            client.ready(timeout=20)
        yield server.url
    finally:
        server.stop()


@pytest.fixture
def model() -> str:
    return f"model-{next(_numbers)}"


@pytest.fixture
def start(controller: str, model: str) -> Iterator[Callable[..., Child]]:
    """Starts children that join `model`, and ends them with the test."""
    with ExitStack() as stack:

        def begin(role: str, *, join: bool = True, **options: Any) -> Child:
            child = Child(role, options.pop("controller", controller), options.pop("model", model), **options)
            stack.callback(child.close)
            if join:
                assert child.heard().get("joined") is True
            return child

        yield begin
