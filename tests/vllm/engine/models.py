"""Tiny models that vLLM's CPU kernels can really run, which ask for heads of at least 32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from .. import zoo

_HEADS: Final = {"head_dim": 32}
SERVED: Final[Mapping[str, Mapping[str, Any]]] = {
    "qwen3": {**_HEADS, "max_position_embeddings": 4096},
    "qwen3_moe": _HEADS,
    "deepseek_v3": {"kv_lora_rank": 512, "qk_rope_head_dim": 64},  # the only size of head of its kernel
    "gemma2": {**_HEADS, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    "gpt_oss": _HEADS,
}


def make(architecture: str, directory: Path, seed: int) -> Path:
    name, arguments = zoo.CONFIGS[architecture]
    with patch.dict(zoo.CONFIGS, {architecture: (name, {**arguments, **SERVED[architecture]})}):
        return zoo.make(architecture, directory, seed=seed)
