"""A fresh model name for each test, and processes that join it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from weightdepot import Producer

from .fleet import trainer
from .harness import Child

_numbers = itertools.count()


@pytest.fixture
def model() -> str:
    return f"model-{next(_numbers)}"


@pytest.fixture
def producer(controller: str, model: str) -> Iterator[Producer]:
    """Publishes `model`, in this process."""
    with trainer(controller, model) as producer:
        yield producer


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
