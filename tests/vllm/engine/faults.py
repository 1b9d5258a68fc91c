"""A plug-in of vLLM that makes a layer fail, in the ranks that a file names, while the file is there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def register() -> None:
    from weightdepot.consumers.vllm import apply

    process = apply._layerwise_process
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
    apply._layerwise_process = faulty
