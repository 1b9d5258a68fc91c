"""The demo's models: Qwen3's architecture, without tied embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Size:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    head_dim: int = 64

    def config(self) -> dict[str, Any]:
        """Keyword arguments of transformers' Qwen3Config."""
        return {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocab,
            "max_position_embeddings": 512,
            "tie_word_embeddings": False,
        }


SIZES = {
    "tiny": Size(hidden=128, layers=2, heads=4, kv_heads=2, intermediate=352, vocab=1001),
    "100m": Size(hidden=768, layers=12, heads=12, kv_heads=4, intermediate=2048, vocab=32000),
    "600m": Size(hidden=1024, layers=28, heads=16, kv_heads=8, intermediate=3072, vocab=75968, head_dim=128),
}
