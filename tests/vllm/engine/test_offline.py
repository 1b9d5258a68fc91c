"""Offline `LLM`, the real engine: after each update it computes what one started from those weights does."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Checkpoints
from .process import Engine, Trainer

CASES = [
    *[pytest.param(a, 1, False, id=a) for a in ("qwen3", "qwen3_moe", "deepseek_v3", "gemma2", "gpt_oss")],
    pytest.param("qwen3", 2, False, id="qwen3-tp2"),
    pytest.param("qwen3_moe", 2, False, id="qwen3_moe-tp2"),
    pytest.param("qwen3_moe", 2, True, id="qwen3_moe-ep2"),
]


@pytest.mark.parametrize(("architecture", "ranks", "experts"), CASES)
def test_three_updates_in_a_row_each_bit_equal_to_an_engine_started_fresh(
    controller: str, checkpoints: Checkpoints, tmp_path: Path, architecture: str, ranks: int, experts: bool
) -> None:
    """Greedy tokens and the bits of their log-probabilities. The first engine is itself the fresh one for the
    weights that it comes back to in the end."""
    weights = checkpoints(architecture)
    fresh = []
    with (
        Trainer(controller, weights[0]) as trainer,
        Engine(weights[0], tmp_path, ranks=ranks, experts=experts) as engine,
    ):
        fresh.append(engine.ask("generate"))
        for other in weights[1:]:
            with Engine(other, tmp_path, ranks=ranks, experts=experts) as started:
                fresh.append(started.ask("generate"))
        assert fresh[0] != fresh[1] != fresh[2] != fresh[0]

        engine.ask("init", **trainer.info())
        for version, which in ((1, 1), (2, 2), (5, 0)):
            trainer.publish(version, weights[which])
            engine.ask("update", min_version=version)
            assert engine.ask("generate") == fresh[which], f"after version {version}"
            assert engine.ask("version") == str(version)


def test_tensors_that_the_loader_computes_with_go_through_it_at_each_update(
    controller: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """With a loader of Qwen3 that doubles a norm, and the q of a fused qkv of which k and v are copied."""
    weights = checkpoints("qwen3")
    computing = {"WEIGHTDEPOT_TEST_LOADER": "1"}
    fresh = []
    with (
        Trainer(controller, weights[0]) as trainer,
        Engine(weights[0], tmp_path, variables=computing) as engine,
    ):
        fresh.append(engine.ask("generate"))
        with Engine(weights[1], tmp_path, variables=computing) as started:
            fresh.append(started.ask("generate"))
        engine.ask("init", **trainer.info())
        assert "2 whole" in engine.tail() or "whole: 2" in engine.tail()
        for version, which in ((1, 1), (2, 0)):
            trainer.publish(version, weights[which])
            engine.ask("update", version=version)
            assert engine.ask("generate") == fresh[which], f"after version {version}"


def test_the_next_version_is_read_in_the_background_and_the_update_only_places_it(
    controller: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    weights = checkpoints("qwen3")
    executor = "llm.llm_engine.engine_core.engine_core.model_executor"
    consumer = f"consumer = {executor}.driver_worker.worker.weight_transfer_engine._consumer; "
    with Trainer(controller, weights[0]) as trainer, Engine(weights[0], tmp_path) as engine:
        before = engine.ask("generate")
        engine.ask("init", **trainer.info())
        for version, which in ((1, 1), (2, 0)):
            trainer.publish(version, weights[which])
            staged = consumer + "answer = consumer.prefetch().result(30)"  # the one that is under way
            assert engine.ask("run", code=staged) == version
            assert engine.ask("version") == ("default" if version == 1 else "1")
            engine.ask("update")
            last = engine.ask(
                "run", code=consumer + "import dataclasses; answer = dataclasses.asdict(consumer.last)"
            )
            assert last["version"] == version
            assert last["prefetched"]
            assert last["pull"] == 0 < last["place"]
        assert engine.ask("generate") == before
