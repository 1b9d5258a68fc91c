"""Megatron-core, from real ranks to a real reader: the bytes of the checkpoint that transformers made.

The ranks' parameters are filled by a conversion that is written by hand in `rank_megatron`, and that is right
because the filled model computes what transformers computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from weightdepot.producers.hf import as_checkpoint
from weightdepot.producers.megatron_names import MEGATRON_NAMES, Rule
from weightdepot.store.weights import layout_of

from .checkpoints import load, save
from .ranks import Said, different, pulled, ranks

transformers = pytest.importorskip("transformers", minversion="5")
pytestmark = pytest.mark.timeout(300)  # ranks are started by the first test

FILES = {
    **{name: name.partition("-")[2] for name in ("tp-qwen3", "tp-qwen2", "tp-qwen3-mqa")},
    **{name: name.partition("-")[2] for name in ("pp-qwen3", "pp-qwen2", "vpp-qwen3")},
    **dict.fromkeys(("ep-moe", "etp-moe", "tp-ep-moe", "numbered-moe"), "qwen3_moe"),
    "shared-moe": "qwen2_moe",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("megatron")
    save("qwen3", path)
    save("qwen2", path)
    save("qwen2_moe", path)
    save("qwen3-mqa", path)
    save("qwen3_moe", path, num_experts=4).rename(path / "qwen3_moe")
    return path


@pytest.fixture(scope="module")
def two(controller: str, folder: Path) -> Iterator[Said]:
    pytest.importorskip("megatron.core")
    with ranks("rank_megatron", 2, controller, folder) as said:
        yield said


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "qwen3-mqa", "qwen3_moe", "qwen2_moe"])
def test_the_filled_model_computes_what_transformers_computes(two: Said, folder: Path, kind: str) -> None:
    seen = load(folder / f"{kind}-logits")
    assert float(seen["difference"]) < 1e-5 * float(seen["size"])


@pytest.mark.parametrize("name", FILES)
def test_case_23_readers_get_the_bytes_of_the_file(
    two: Said, controller: str, folder: Path, name: str
) -> None:
    expected = load(folder / FILES[name])
    assert two.stated[f"megatron-{name}"] == set(expected)
    assert different(pulled(controller, f"megatron-{name}", expected), expected) == []


def test_wrapped_models_are_published_as_they_are_held(two: Said, controller: str, folder: Path) -> None:
    expected = {n: t.bfloat16() for n, t in load(folder / "qwen2").items()}
    assert different(pulled(controller, "megatron-half", expected), expected) == []


def test_parameters_that_were_given_other_memory_are_followed(
    two: Said, controller: str, folder: Path
) -> None:
    expected = {n: t * 2 for n, t in load(folder / "qwen3").items()}
    assert different(pulled(controller, "megatron-moved", expected), expected) == []


def test_a_mapping_that_swaps_gate_and_up_is_found(two: Said, controller: str, folder: Path) -> None:
    """The comparison above would have seen it: a swap keeps every name and every shape."""
    expected = load(folder / "qwen3")
    assert two.stated["megatron-swapped"] == set(expected)
    wrong = different(pulled(controller, "megatron-swapped", expected), expected)
    assert set(wrong) == {n for n in expected if "gate_proj" in n or "up_proj" in n}


@pytest.mark.parametrize(
    ("what", "said"),
    {
        # every key without a name, not the first
        "unnamed": [
            "decoder.final_layernorm.weight: has no name",
            "decoder.layers.self_attention.linear_qkv.weight: has no name",
        ],
        "vocabulary": ["has 104 rows, fewer than the vocabulary of 105"],
        "heads": ["linear_fc2.weight: has 32 rows, not 2 query groups of 32 (4 heads of 8)"],
        "one-name": ["linear_fc2.weight: is of one layer, other than its name 'down' says"],
        "twice": ["k_layernorm.weight: is 'model.layers.0.self_attn.q_norm.weight' by the table, and so"],
        "family": ["no table of names for 'gpt5'", "qwen3_moe"],
        "centered": ["layernorm_zero_centered_gamma: norms hold their weight minus one"],
        "left-out": ["decoder.layers.1.mlp.router_bias: is a parameter that the model's sharded_state_dict"],
        "copied": ["linear_proj.weight: is exported as a copy"],
        "itself": ["GPTModel", "megatron_weights(model, vocab_size=..., names=...)"],
        "chunks": ["megatron_weights(model, vocab_size=..., names=...)"],
    }.items(),
)
def test_case_14_what_does_not_map_is_refused_by_name(two: Said, what: str, said: list[str]) -> None:
    for refused in two.refused:
        for text in said:
            assert text in refused[what]


def test_a_rule_has_as_many_names_as_its_kind() -> None:
    with pytest.raises(ValueError, match="'qkv' has 3 names, not 1"):
        Rule("qkv", ("a",))


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2_moe": ("Qwen2MoeConfig", {"num_experts": 2, "decoder_sparse_step": 1, "mlp_only_layers": [1]}),
    "qwen3": ("Qwen3Config", {"attention_bias": False}),
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": 2, "decoder_sparse_step": 1, "mlp_only_layers": [1]}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 2}),
}


@pytest.mark.parametrize("family", MEGATRON_NAMES)
def test_the_tables_name_what_transformers_saves(family: str) -> None:
    """For families that no rank above holds, at least no name is wrong or missing."""
    kind, changes = VARIANTS[family]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            getattr(transformers, kind)(
                hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, head_dim=4,
                num_key_value_heads=1, vocab_size=8, tie_word_embeddings=False, **changes,
            )
        )  # fmt: skip
    # the second layer is a dense one
    saved = {t.name.replace("layers.1", "layers.0") for t in layout_of(as_checkpoint(model, model)).tensors}
    named = {
        name.format(layer=0, expert=expert)
        for rule in MEGATRON_NAMES[family].values()
        for name in rule.names
        for expert in range(2)
    }
    assert saved - named == set()
    # Megatron has biases for all three or none
    assert {n for n in named - saved if not n.endswith("_proj.bias")} == set()
