"""Tiny checkpoints as transformers saves them: what every trainer here loads, and every reader expects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 101,  # no even number: shards of it are uneven, and Megatron pads it
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
}


def config_of(kind: str, **changes: Any) -> Any:
    import transformers

    if kind == "qwen3-mqa":  # fewer query groups than ranks
        changes = {"num_key_value_heads": 1, "num_hidden_layers": 1, **changes}
    if kind in ("qwen3", "qwen3-mqa"):
        return transformers.Qwen3Config(**{**TINY, "tie_word_embeddings": False, **changes})
    if kind == "qwen2":
        return transformers.Qwen2Config(
            **{**{k: v for k, v in TINY.items() if k != "head_dim"}, "tie_word_embeddings": True, **changes}
        )
    if kind == "qwen2_moe":  # experts that all share beside the routed ones
        sizes = {**{k: v for k, v in TINY.items() if k != "head_dim"}, "num_hidden_layers": 1}
        experts = {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "norm_topk_prob": True,
        }
        shared = {"shared_expert_intermediate_size": 20, "tie_word_embeddings": False}
        return transformers.Qwen2MoeConfig(**{**sizes, **experts, **shared, **changes})
    assert kind == "qwen3_moe"
    return transformers.Qwen3MoeConfig(
        **{
            **TINY,
            "num_hidden_layers": 2,
            "moe_intermediate_size": 12,
            "num_experts": 5,  # uneven over two ranks
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
            **changes,
        }
    )


def model_of(config: Any, seed: int = 0) -> Any:
    """A model in float32 whose every parameter is random, so that none passes for another."""
    import transformers

    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.1 + (1.0 if p.dim() == 1 else 0.0))
    return model


def save(kind: str, folder: Path, **changes: Any) -> Path:
    """A checkpoint in safetensors files."""
    path = folder / "-".join([kind, *(f"{k}={v}" for k, v in changes.items())])
    if not path.exists():
        model_of(config_of(kind, **changes)).save_pretrained(path)
    return path


def load(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        found.update(load_file(file))
    return found


def lora_of(model: Any, seed: int = 5, adapter: str = "default", **changes: Any) -> Any:
    """The model with an adapter on some of its projections, random in both halves."""
    import peft

    options = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "down_proj"],
        "modules_to_save": ["lm_head"],
    }
    tuned = peft.get_peft_model(model, peft.LoraConfig(**{**options, **changes}), adapter_name=adapter)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in tuned.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    return tuned
