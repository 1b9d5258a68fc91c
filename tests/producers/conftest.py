"""What the tests of the trainers' frameworks share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the checkpoints that several tests share."""
    return tmp_path_factory.mktemp("checkpoints")
