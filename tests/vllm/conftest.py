"""A suite of its own, run with vLLM's interpreter. Without vLLM nothing here is collected."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

# read by vLLM, torch and the hub when they are imported
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("OMP_NUM_THREADS", "1")

HERE = Path(__file__).parent
collect_ignore_glob = [] if find_spec("vllm") else ["*"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            # vLLM and what it brings along warn at import; our own warnings are errors in the main suite
            item.add_marker(pytest.mark.filterwarnings("default"))
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a tiny model of an architecture, made when first asked for."""
    from .zoo import make

    return functools.cache(lambda name: make(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="session")
def config_of(model_of: Callable[[str], Path]) -> Callable[..., Any]:
    """vLLM's configuration for (architecture, ranks of tensor parallelism, expert parallelism)."""
    from weightdepot.consumers.vllm.shadow import Parallel, engine_config

    @functools.cache
    def config(name: str, tensor: int, expert: bool) -> Any:
        return engine_config(model_of(name), Parallel(tensor, expert=expert))

    return config
