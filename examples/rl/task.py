"""The task: say three digits backwards. Every token of an answer is right or wrong."""

from __future__ import annotations

import random
from typing import Any

DIGITS, LENGTH = 10, 3
BEGIN, ANSWER = 10, 11  # tokens beside the ten digits
VOCABULARY = 16

MODEL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": BEGIN,
    "eos_token_id": 15,
}


def prompt(rng: random.Random) -> list[int]:
    return [BEGIN, *(rng.randrange(DIGITS) for _ in range(LENGTH)), ANSWER]


def rewards(prompt: list[int], answer: list[int]) -> list[float]:
    """1 for each token of the answer that is right, 0 for each that is not."""
    wanted = prompt[1 : 1 + LENGTH][::-1]
    return [float(a == w) for a, w in zip(answer, wanted, strict=True)]
