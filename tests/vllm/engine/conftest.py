"""Each architecture's three checkpoints, made once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from . import models

pytest.importorskip("vllm", reason="needs vLLM: ./run test-vllm sets it up")

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:  # several engines start in a test, on two cores that others use too
            item.add_marker(pytest.mark.timeout(900), append=False)


Checkpoints = Callable[[str], list[Path]]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Of an architecture: three checkpoints with different weights."""

    @cache
    def make(architecture: str) -> list[Path]:
        directory = tmp_path_factory.mktemp(architecture)
        return [models.make(architecture, directory / str(seed), seed) for seed in range(3)]

    return make
