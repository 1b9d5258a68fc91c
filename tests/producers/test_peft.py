"""PEFT: merged weights under the base's names, and adapters as models of their own, to a real reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import weightdepot
from weightdepot import Producer
from weightdepot.producers.hf import transformers_weights
from weightdepot.producers.peft import adapter_weights, peft_adapter, peft_merged
from weightdepot.store.errors import InvalidRequest, LayoutError
from weightdepot.store.weights import Mapped, layout_of, local_buffers

from ..docs.pages import run
from .checkpoints import config_of, load, lora_of, model_of
from .ranks import different, pulled

pytest.importorskip("transformers", minversion="5")
peft = pytest.importorskip("peft")
# PEFT asks transformers for what the latter has renamed
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning:transformers.*", "ignore:.*tie_word_embeddings.*", "ignore:Already unmerged"
)

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def read(weights: Mapped) -> dict[str, torch.Tensor]:
    """What the layout says lies in the buffers, without a store between."""
    found = {t.name: torch.empty(t.shape) for t in weights.layout.tensors}
    buffers = weights.buffers()
    for p in weights.layout.placements():
        buffer = buffers[p.buffer]
        box = tuple(slice(o, o + n) for o, n in zip(p.box.offset, p.box.shape, strict=True))
        found[p.tensor][box] = buffer.as_strided(p.box.shape, p.strides, buffer.storage_offset() + p.offset)
    return found


def qwen3(**changes: Any) -> Any:
    return model_of(config_of("qwen3", num_hidden_layers=1, **changes))


def test_merged_weights_are_those_of_merge_and_unload_and_the_base_is_as_before(controller: str) -> None:
    tuned = lora_of(qwen3())
    before = {n: p.clone() for n, p in tuned.named_parameters()}
    with Producer(controller, model="peft-merged", weights=peft_merged(tuned)) as producer:
        for version in (1, 2):
            tuned.merge_adapter()
            producer.publish(version, wait="ready")
            tuned.unmerge_adapter()
            expected = lora_of(qwen3()).merge_and_unload().state_dict()
            assert {t.name for t in producer.layout.tensors} == set(expected)
            got = pulled(controller, "peft-merged", expected, version)
            if version == 1:
                assert different(got, expected) == []
        with pytest.raises(InvalidRequest, match=r"not merged in 2 layers .*call model.merge_adapter"):
            producer.publish(3, wait="ready")
        # nothing was made visible, and the next one is
        tuned.merge_adapter()
        producer.publish(3, wait="ready")
    tuned.unmerge_adapter()
    for n, p in tuned.named_parameters():
        torch.testing.assert_close(p, before[n])


def test_the_trained_copy_of_a_module_is_published_merged_and_the_base_s_where_it_is_switched_off() -> None:
    tuned = lora_of(qwen3())
    tuned.merge_adapter()
    trained = tuned.base_model.model.lm_head
    got = read(peft_merged(tuned))
    assert torch.equal(got["lm_head.weight"], trained.modules_to_save["default"].weight)
    assert not torch.equal(got["lm_head.weight"], trained.original_module.weight)


def test_an_adapter_that_is_switched_off_or_not_active_is_noticed() -> None:
    tuned = lora_of(qwen3(), modules_to_save=None)
    tuned.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    weights = peft_merged(tuned)
    tuned.set_adapter("other")
    tuned.merge_adapter(["other"])
    weights.buffers()  # the active adapter is merged where it is; elsewhere there is nothing to merge
    tuned.unmerge_adapter()
    tuned.set_adapter("default")
    with pytest.raises(InvalidRequest, match="not merged"):
        weights.buffers()
    tuned.merge_adapter(["other"])
    with pytest.raises(InvalidRequest, match="not merged"):
        weights.buffers()
    tuned.unmerge_adapter()
    tuned.merge_adapter()
    weights.buffers()
    with tuned.disable_adapter(), pytest.raises(InvalidRequest, match="not merged"):
        weights.buffers()


def test_stacked_experts_are_wrapped_twice_and_published_merged_one_by_one() -> None:
    def tuned() -> Any:
        model = model_of(config_of("qwen3_moe", num_hidden_layers=1, num_experts=3))
        return lora_of(model, target_modules=["q_proj"], target_parameters=EXPERTS, modules_to_save=None)

    mine = tuned()
    weights = peft_merged(mine)
    mine.merge_adapter()
    expected = tuned().merge_and_unload().state_dict()
    got = read(weights)
    assert set(got) == set(expected)
    assert different(got, expected) == []
    apart = transformers_weights(mine, weights)
    assert isinstance(apart, Mapped)
    single = read(apart)
    whole = expected["model.layers.0.mlp.experts.gate_up_proj"]
    assert torch.equal(single["model.layers.0.mlp.experts.2.up_proj.weight"], whole[2, 12:])
    assert torch.equal(single["model.layers.0.mlp.experts.1.gate_proj.weight"], whole[1, :12])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_dora": True},
        {"bias": "lora_only", "modules_to_save": None},
        {"target_modules": ["embed_tokens", "q_proj"], "modules_to_save": ["norm"]},
        {"target_parameters": EXPERTS, "modules_to_save": None},
    ],
)
def test_an_adapter_has_the_names_and_bytes_that_peft_saves(
    controller: str, tmp_path: Path, changes: dict[str, Any]
) -> None:
    kind = "qwen3_moe" if "target_parameters" in changes else "qwen3"
    tuned = lora_of(model_of(config_of(kind, num_hidden_layers=1)), adapter="policy", **changes)
    tuned.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    tuned.save_pretrained(tmp_path, selected_adapters=["policy"], save_embedding_layers=False)
    expected = load(tmp_path / "policy")
    assert any("lora_" in n for n in expected)
    name = f"adapter-{abs(hash(str(changes)))}"
    with Producer(controller, model=name, weights=peft_adapter(tuned, "policy")) as producer:
        producer.publish(1, wait="ready")
        assert {t.name for t in producer.layout.tensors} == set(expected)
        assert different(pulled(controller, name, expected), expected) == []


def test_case_26_an_adapter_without_a_module_that_its_configuration_names_is_refused(tmp_path: Path) -> None:
    tuned = lora_of(qwen3(), modules_to_save=["lm_head", "norm"])
    tuned.save_pretrained(tmp_path)
    tensors, config = load(tmp_path), json.loads((tmp_path / "adapter_config.json").read_text())
    assert adapter_weights(tensors, config).keys() == tensors.keys()
    assert adapter_weights(tensors, tuned.peft_config["default"]).keys() == tensors.keys()
    lacking = {n: t for n, t in tensors.items() if "lm_head" not in n and "norm." not in n}
    with pytest.raises(LayoutError) as caught:
        adapter_weights(lacking, config)
    assert [f.tensor for f in caught.value.faults] == ["lm_head", "norm"]
    assert "trained in full, and no tensor of it is there" in str(caught.value)
    # the same of a live model whose configuration was changed after it was made
    tuned.peft_config["default"].modules_to_save = ["lm_head", "norm", "score"]
    with pytest.raises(LayoutError, match="score: is named by modules_to_save"):
        peft_adapter(tuned)


def test_half_a_pair_is_refused_by_name() -> None:
    with pytest.raises(LayoutError, match=r"a.lora_A.weight: has no lora_B beside it"):
        adapter_weights({"a.lora_A.weight": torch.ones(2)}, {"modules_to_save": None})
    with pytest.raises(LayoutError, match="no tensors at all"):
        adapter_weights({}, {"modules_to_save": None})


def test_what_cannot_be_published_is_refused_with_what_to_do() -> None:
    with pytest.raises(InvalidRequest, match="has no PEFT adapters"):
        peft_merged(nn.Linear(2, 2))
    with pytest.raises(InvalidRequest, match="there is no adapter 'default': none at all"):
        peft_adapter(nn.Linear(2, 2))
    tuned = lora_of(qwen3())
    with pytest.raises(InvalidRequest, match="there is no adapter 'x': 'default'"):
        peft_adapter(tuned, "x")
    with pytest.raises(InvalidRequest, match=r"give peft_merged\(model\) or peft_adapter\(model\)"):
        Producer("http://localhost:1", model="m", weights=tuned)
    tokens = lora_of(qwen3(), modules_to_save=None, trainable_token_indices={"embed_tokens": [1, 5]})
    with pytest.raises(LayoutError, match=r"embed_tokens: has single tokens that are trained"):
        peft_merged(tokens)


def test_a_layout_that_is_known_is_published_in_another_type_where_asked_for() -> None:
    tuned = lora_of(qwen3())
    tuned.merge_adapter()
    layout = layout_of(peft_merged(tuned), torch.bfloat16)
    assert {t.dtype for t in layout.tensors} == {"bfloat16"}
    assert {b.dtype for b in layout.buffers} == {"float32"}
    assert local_buffers(peft_merged(tuned))


def test_the_code_of_the_page_runs(controller: str) -> None:
    given = {"url": controller, "model": lora_of(qwen3()), "step": 1, "weightdepot": weightdepot}
    producer = run("docs/peft.md", controller, **given)["producer"]
    assert isinstance(producer, Producer)
    assert producer.highest == 1
