"""A plug-in of vLLM with what tests ask for: a layer that fails in the ranks that a file names, a loader that
computes, steps that take their time."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any


def register() -> None:
    from weightdepot.consumers.vllm import apply

    if "WEIGHTDEPOT_TEST_LOADER" in os.environ:
        _loader_that_computes()
    if "WEIGHTDEPOT_TEST_STEP" in os.environ:
        _slow_steps(float(os.environ["WEIGHTDEPOT_TEST_STEP"]))
    module: Any = apply
    process = module._layerwise_process
    if getattr(process, "faulty", False):
        return

    def faulty(layer: Any, info: Any) -> None:
        file = Path(os.environ["WEIGHTDEPOT_TEST_FAULT"])
        if file.exists() and type(layer).__name__ == "RowParallelLinear":
            from vllm.distributed import get_tensor_model_parallel_rank

            if str(get_tensor_model_parallel_rank()) in file.read_text():
                raise ValueError("a fault that the test asked for")
        process(layer, info)

    faulty.faulty = True  # type: ignore[attr-defined]
    module._layerwise_process = faulty


def _slow_steps(seconds: float) -> None:
    """So that a request of a tiny model is in flight for longer than a call takes."""
    from vllm.v1.worker.gpu_worker import Worker

    execute = Worker.execute_model

    def slowly(self: Any, *args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return execute(self, *args, **kwargs)

    Worker.execute_model = slowly


def _loader_that_computes() -> None:
    """Qwen3's loader, but it doubles some weights: no copy can do that."""
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    load = Qwen3ForCausalLM.load_weights

    def doubling(self: Any, weights: Any) -> Any:
        doubled = ("layers.0.self_attn.q_proj.weight", "layers.1.input_layernorm.weight")
        return load(self, ((name, t * 2 if name.endswith(doubled) else t) for name, t in weights))

    Qwen3ForCausalLM.load_weights = doubling
