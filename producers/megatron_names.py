"""What Megatron-core's weights are called in the checkpoints of model families, as data.

A table has an entry for each key of Megatron's `sharded_state_dict`, without the layer's number. For a family
that is not here give a table of your own, most easily `{**MEGATRON_NAMES["llama"], key: rule, ...}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal


@dataclass(frozen=True)
class Rule:
    """How one of Megatron's tensors lies in the checkpoint.

    kind: `same`, one tensor of the same form; `vocabulary`, one with its first dimension clipped to the
    vocabulary's size; `gate_up`, two, the gate above the up projection; `qkv`, three, whose rows are
    interleaved by query group (all queries of the group, its key, its value); `skip`, not in the checkpoint.
    names: of the checkpoint's tensors, as many as that, with `{layer}` and `{expert}`.
    """

    kind: Literal["same", "vocabulary", "gate_up", "qkv", "skip"]
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        wanted = {"same": 1, "vocabulary": 1, "gate_up": 2, "qkv": 3, "skip": 0}[self.kind]
        if len(self.names) != wanted:
            raise ValueError(f"a rule of kind {self.kind!r} has {wanted} names, not {len(self.names)}")


Names = Mapping[str, Rule]

_LAYER: Final = "model.layers.{layer}."
_FC1_NORM: Final = "decoder.layers.mlp.linear_fc1.layer_norm_weight"


def _same(name: str) -> Rule:
    return Rule("same", (name,))


def _in_layer(kind: Literal["same", "gate_up", "qkv"], *names: str) -> Rule:
    return Rule(kind, tuple(_LAYER + name for name in names))


_ATTENTION: Final[Names] = {
    "embedding.word_embeddings.weight": Rule("vocabulary", ("model.embed_tokens.weight",)),
    "output_layer.weight": Rule("vocabulary", ("lm_head.weight",)),
    "decoder.final_layernorm.weight": _same("model.norm.weight"),
    "decoder.layers.self_attention.linear_qkv.weight": _in_layer(
        "qkv", "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"
    ),
    "decoder.layers.self_attention.linear_qkv.bias": _in_layer(
        "qkv", "self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"
    ),
    "decoder.layers.self_attention.linear_proj.weight": _in_layer("same", "self_attn.o_proj.weight"),
    # with Transformer Engine the norm is part of the linear layer after it; the local layers are keyed alike
    "decoder.layers.self_attention.linear_qkv.layer_norm_weight": _in_layer("same", "input_layernorm.weight"),
    "decoder.layers.input_layernorm.weight": _in_layer("same", "input_layernorm.weight"),
    "decoder.layers.pre_mlp_layernorm.weight": _in_layer("same", "post_attention_layernorm.weight"),
    _FC1_NORM: _in_layer("same", "post_attention_layernorm.weight"),
}

_DENSE: Final[Names] = {
    "decoder.layers.mlp.linear_fc1.weight": _in_layer(
        "gate_up", "mlp.gate_proj.weight", "mlp.up_proj.weight"
    ),
    "decoder.layers.mlp.linear_fc2.weight": _in_layer("same", "mlp.down_proj.weight"),
}

_QK_NORM: Final[Names] = {
    "decoder.layers.self_attention.q_layernorm.weight": _in_layer("same", "self_attn.q_norm.weight"),
    "decoder.layers.self_attention.k_layernorm.weight": _in_layer("same", "self_attn.k_norm.weight"),
}

_BIASES: Final[Names] = {
    "decoder.layers.self_attention.linear_proj.bias": _in_layer("same", "self_attn.o_proj.bias"),
    "decoder.layers.mlp.linear_fc1.bias": _in_layer("gate_up", "mlp.gate_proj.bias", "mlp.up_proj.bias"),
    "decoder.layers.mlp.linear_fc2.bias": _in_layer("same", "mlp.down_proj.bias"),
}


def _experts(router: str, gate: str, up: str, down: str) -> Names:
    return {
        "decoder.layers.mlp.router.weight": _in_layer("same", router),
        "decoder.layers.mlp.experts.experts.linear_fc1.weight": _in_layer("gate_up", gate, up),
        "decoder.layers.mlp.experts.experts.linear_fc2.weight": _in_layer("same", down),
    }


_QWEN_EXPERTS: Final[Names] = _experts(
    "mlp.gate.weight",
    "mlp.experts.{expert}.gate_proj.weight",
    "mlp.experts.{expert}.up_proj.weight",
    "mlp.experts.{expert}.down_proj.weight",
)

_SHARED_EXPERT: Final[Names] = {
    "decoder.layers.mlp.shared_experts.linear_fc1.weight": _in_layer(
        "gate_up", "mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"
    ),
    "decoder.layers.mlp.shared_experts.linear_fc2.weight": _in_layer(
        "same", "mlp.shared_expert.down_proj.weight"
    ),
    "decoder.layers.mlp.shared_experts.gate_weight": _in_layer("same", "mlp.shared_expert_gate.weight"),
}

_MIXTRAL_EXPERTS: Final[Names] = _experts(
    "block_sparse_moe.gate.weight",
    "block_sparse_moe.experts.{expert}.w1.weight",
    "block_sparse_moe.experts.{expert}.w3.weight",
    "block_sparse_moe.experts.{expert}.w2.weight",
)

MEGATRON_NAMES: Final[Mapping[str, Names]] = {
    "llama": {**_ATTENTION, **_DENSE, **_BIASES},
    "mistral": {**_ATTENTION, **_DENSE},
    "qwen2": {**_ATTENTION, **_DENSE},
    "qwen2_moe": {**_ATTENTION, **_DENSE, **_QWEN_EXPERTS, **_SHARED_EXPERT},
    "qwen3": {**_ATTENTION, **_QK_NORM, **_DENSE},
    "qwen3_moe": {**_ATTENTION, **_QK_NORM, **_DENSE, **_QWEN_EXPERTS},
    "mixtral": {**_ATTENTION, **_MIXTRAL_EXPERTS},
}
