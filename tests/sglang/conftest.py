"""A suite of its own: where SGLang is neither installed nor in SGLANG_SOURCE, nothing here is collected."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from .without_dependencies import available

# read by SGLang, torch and the hub when they are imported
os.environ |= {"HF_HUB_OFFLINE": "1"}
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("OMP_NUM_THREADS", "1")

HERE = Path(__file__).parent
collect_ignore_glob = ["*"]
if available():
    collect_ignore_glob = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what this machine lacks, at the first import
        import_module("sglang.srt.managers.scheduler")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            # SGLang and what it brings along warn at import; our own warnings are errors in the main suite
            item.add_marker(pytest.mark.filterwarnings("default"))
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a tiny model of an architecture, made when first asked for."""
    from ..vllm.zoo import make

    return functools.cache(lambda name: make(name, tmp_path_factory.mktemp(name)))
