"""Tiny models of the architectures that are tried, randomly made: each a directory with real files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

# odd numbers where a model allows them: a vocabulary that needs padding, more experts than ranks
SMALL: Final[Mapping[str, Any]] = {
    "vocab_size": 138, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
EXPERTS: Final[Mapping[str, Any]] = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}

Configs = Mapping[str, tuple[str, Mapping[str, Any]]]

# those of the promise
PROMISED: Final[Configs] = {
    "llama": ("Llama", {**SMALL, "head_dim": 16}),
    "qwen2": ("Qwen2", {**SMALL, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {**SMALL, "head_dim": 16}),
    "qwen3_moe": ("Qwen3Moe", {**SMALL, **EXPERTS, "head_dim": 16, "num_experts": 6}),
    "mixtral": ("Mixtral", {**SMALL, "num_local_experts": 6, "num_experts_per_tok": 2}),
    "gemma2": ("Gemma2", {**SMALL, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 64}),
    "phi3": ("Phi3", {**SMALL, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **SMALL, **EXPERTS, "num_hidden_layers": 3, "num_key_value_heads": 4, "n_routed_experts": 8,
            "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
            "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
            "v_head_dim": 16, "num_nextn_predict_layers": 0,
            # not transformers' own, but what the published config.json says, and vLLM looks at
            "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        },
    ),
    "gpt_oss": (
        "GptOss",
        {**SMALL, "intermediate_size": 64, "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2,
         "sliding_window": 64},
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            **SMALL, **EXPERTS, "num_hidden_layers": 3, "head_dim": 16, "n_routed_experts": 6,
            "n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True,
            "num_nextn_predict_layers": 0,
        },
    ),
    "gpt2": (
        "GPT2", {"vocab_size": 138, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256,
                 "bos_token_id": 1, "eos_token_id": 2}),
    "qwen3_next": (
        "Qwen3Next",
        {
            **SMALL, **EXPERTS, "num_hidden_layers": 4, "head_dim": 16, "num_experts": 6,
            "shared_expert_intermediate_size": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        },
    ),
}  # fmt: skip

_NO_GROUPS: Final = {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}
_OLD: Final = {"vocab_size": 138, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
_MAMBA: Final = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8}

# others, of every kind of loader that vLLM has been seen to have
OTHERS: Final[Configs] = {
    "mistral": ("Mistral", {**SMALL, "head_dim": 16}),
    "gemma3": ("Gemma3Text", {**SMALL, "head_dim": 16, "sliding_window": 64}),
    "glm4": ("Glm4", {**SMALL, "head_dim": 16, "pad_token_id": 0}),
    "granite": ("Granite", SMALL),
    "olmo2": ("Olmo2", SMALL),
    "cohere2": ("Cohere2", {**SMALL, "sliding_window": 64}),
    "starcoder2": ("Starcoder2", SMALL),
    "opt": (
        "OPT", {"vocab_size": 138, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2,
                "num_attention_heads": 4, "max_position_embeddings": 256, "word_embed_proj_dim": 64}),
    "gpt_neox": ("GPTNeoX", _NO_GROUPS),
    "gptj": ("GPTJ", {**_OLD, "rotary_dim": 8}),
    "gpt_bigcode": ("GPTBigCode", _OLD),
    "falcon": (
        "Falcon", {"vocab_size": 138, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                   "num_kv_heads": 2, "new_decoder_architecture": True}),
    "bloom": ("Bloom", {"vocab_size": 138, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "apertus": ("Apertus", SMALL),
    "phi": ("Phi", SMALL),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **SMALL, **EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 6, "n_shared_experts": 1,
            "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 32,
            "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": 8,
        },
    ),
    "qwen2_moe": ("Qwen2Moe", {**SMALL, **EXPERTS, "num_experts": 6, "shared_expert_intermediate_size": 48}),
    "olmoe": ("Olmoe", {**SMALL, "num_experts": 6, "num_experts_per_tok": 2}),
    "granitemoe": ("GraniteMoe", {**SMALL, "num_local_experts": 6, "num_experts_per_tok": 2}),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {**SMALL, "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1},
    ),
    "llama4": (
        "Llama4Text",
        {**SMALL, "head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 4,
         "num_experts_per_tok": 1, "interleave_moe_layer_step": 1},
    ),
    "mamba": ("Mamba", {"vocab_size": 138, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}),
    "mamba2": (
        "Mamba2", {"vocab_size": 138, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8,
                   "num_heads": 8, "head_dim": 16, "n_groups": 2}),
    "falcon_h1": ("FalconH1", {**SMALL, **_MAMBA, "mamba_d_ssm": 64}),
    "nemotron_h": (
        "NemotronH",
        {**SMALL, "hybrid_override_pattern": "M*-", "num_hidden_layers": 3, "mamba_num_heads": 4,
         "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8, "head_dim": 16},
    ),
    "jamba": (
        "Jamba",
        {**SMALL, "num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 4, "attn_layer_period": 4,
         "attn_layer_offset": 2, "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 8,
         "use_mamba_kernels": False},
    ),
}  # fmt: skip

CONFIGS: Final[Configs] = {**PROMISED, **OTHERS}

# those with experts that are separate parameters or slices, so that expert parallelism means something
WITH_EXPERTS: Final = frozenset(
    {"qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "glm4_moe", "qwen3_next", "deepseek_v2", "qwen2_moe",
     "olmoe", "granitemoe", "ernie4_5_moe", "llama4", "jamba"}
)  # fmt: skip


def spreads(architecture: str) -> list[tuple[int, bool, int]]:
    """(ranks of tensor parallelism, expert parallelism, rank): what is tried."""
    plain = [(1, False, 0), (2, False, 0), (2, False, 1)]
    return [*plain, (2, True, 0), (2, True, 1)] if architecture in WITH_EXPERTS else plain


def make(architecture: str, directory: Path, seed: int = 0, weights: bool = True) -> Path:
    """A model's directory as `save_pretrained` makes it, every element random; or only its config.json."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    name, arguments = CONFIGS[architecture]
    config = getattr(transformers, f"{name}Config")(**arguments)
    config.dtype = "bfloat16"
    if not weights:
        config.architectures = [transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__]
        config.save_pretrained(directory)
        return directory
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        # norms begin as ones and biases as zeros: equal weights would hide what goes to the wrong place
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)
    model.save_pretrained(directory)
    return directory
