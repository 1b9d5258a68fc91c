"""Updates that fail: what is said, and that nothing is computed with weights that are not whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from weightdepot.store.errors import InvalidRequest

from .conftest import Checkpoints
from .process import Engine, Trainer, fault_file


@pytest.mark.parametrize("ranks", [1, 2], ids=["tp1", "tp2"])
def test_a_layer_that_fails_is_named_and_the_engine_refuses_to_serve_until_a_whole_version_is_in(
    controller: str, checkpoints: Checkpoints, tmp_path: Path, ranks: int
) -> None:
    weights = checkpoints("qwen3")
    fault = fault_file(tmp_path)
    with Trainer(controller, weights[0]) as trainer, Engine(weights[0], tmp_path, ranks=ranks) as engine:
        engine.ask("init", **trainer.info())
        trainer.publish(1, weights[1])
        engine.ask("update", version=1)
        first = engine.ask("generate")

        fault.write_text(str(ranks - 1))  # the last rank
        trainer.publish(2, weights[2])
        error = engine.refused("update")
        assert f"rank {ranks - 1}: LayoutError" in error
        assert "model.layers.0.self_attn.o_proj: (RowParallelLinear)" in error
        assert "a fault that the test asked for" in error
        assert "not whole" in engine.refused("generate")
        assert "not whole" in engine.refused(
            "run", code="llm.llm_engine.engine_core.engine_core.resume_scheduler()"
        )
        assert "not whole" in engine.refused("update"), "it fails again"
        assert "not whole" in engine.refused("generate")

        fault.unlink()
        engine.ask("update")  # the same version again
        assert engine.ask("version") == "2"
        second = engine.ask("generate")
        trainer.publish(3, weights[1])
        engine.ask("update", version=3)
        assert engine.ask("generate") == first != second


def test_what_fails_before_the_first_byte_is_written_leaves_the_engine_serving_the_version_it_had(
    controller: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    weights = checkpoints("qwen3")
    with Trainer(controller, weights[0]) as trainer, Engine(weights[0], tmp_path) as engine:
        assert "call init_weight_transfer_engine first" in engine.refused("update")
        before = engine.ask("generate")
        assert "init_info" in engine.refused("init", **trainer.info(nonsense=1))
        engine.ask("init", **trainer.info())
        assert "no version 7 or newer" in engine.refused("update", min_version=7, timeout=0.5)
        assert engine.ask("generate") == before
        assert engine.ask("version") == "default"
        trainer.publish(3, weights[1])
        engine.ask("update", version=3)
        trainer.publish(4, weights[2])
        trainer.publish(5, weights[0])  # version 4 is staged by now, or 5
        after = engine.ask("generate")
        assert "version 1 of" in engine.refused("update", version=1)
        assert engine.ask("version") == "3"
        assert engine.ask("generate") == after
        engine.ask("update", version=5)
        engine.ask("update", version=4)  # an older one, which is still there
        assert engine.ask("version") == "4"
        engine.ask("update", max_lag=1)
        assert engine.ask("version") == "4"
        engine.ask("update", max_lag=0)
        assert engine.ask("version") == "5"
        assert engine.ask("generate") == before != after


def test_a_parameter_that_nothing_fills_is_named_when_the_engine_joins(
    controller: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    weights = checkpoints("qwen3")
    with Trainer(controller, weights[0]) as whole, Engine(weights[0], tmp_path) as engine:
        del whole.weights["model.layers.1.mlp.up_proj.weight"]
        whole.producer.close()
        from weightdepot import Producer

        with Producer(controller, model=whole.model, weights=whole.weights):
            error = engine.refused("init", **whole.info())
        assert "model.layers.1.mlp.gate_up_proj.weight" in error
        assert "is not filled" in error
        engine.ask("generate")


def test_a_vllm_that_lacks_what_is_needed_is_refused_by_name() -> None:
    from weightdepot.consumers.vllm import needs

    needs.check()
    with pytest.raises(InvalidRequest, match=r"vLLM 0\.32.*it has no vllm\.config:Nowhere, vllm\.gone:it"):
        needs.check([*needs.NAMES, "vllm.config:Nowhere", "vllm.gone:it"])
