"""FSDP2 and transformers 5, from real ranks to a real reader, also where the model stacks its experts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from .checkpoints import load, lora_of, save
from .ranks import Said, different, pulled, ranks

transformers = pytest.importorskip("transformers", minversion="5")
# PEFT asks transformers for what the latter has renamed
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*"),
    pytest.mark.timeout(300),  # ranks are started by the first test
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fsdp2")
    save("qwen3", path)
    save("qwen3_moe", path)
    return path


@pytest.fixture(scope="module")
def two(controller: str, folder: Path) -> Iterator[Said]:
    with ranks("rank_fsdp2", 2, controller, folder) as said:
        yield said


def test_readers_get_the_bytes_of_the_file(two: Said, controller: str, folder: Path) -> None:
    expected = load(folder / "qwen3")
    assert two.stated["fsdp2-dense"] == set(expected)
    assert different(pulled(controller, "fsdp2-dense", expected), expected) == []


@pytest.mark.parametrize("model", ["fsdp2-moe", "fsdp1-moe"])
def test_case_15_stacked_experts_in_uneven_shards_are_published_one_by_one(
    two: Said, controller: str, folder: Path, model: str
) -> None:
    expected = load(folder / "qwen3_moe")
    assert "model.layers.1.mlp.experts.4.up_proj.weight" in expected
    assert two.stated[model] == set(expected)
    assert different(pulled(controller, model, expected), expected) == []


def test_stacked_experts_are_cast_as_asked_for(two: Said, controller: str, folder: Path) -> None:
    expected = {n: t.bfloat16() for n, t in load(folder / "qwen3_moe").items()}
    assert different(pulled(controller, "fsdp2-moe-bf16", expected), expected) == []


def test_a_sharded_adapter_is_published_under_the_names_it_is_saved_with(
    two: Said, controller: str, folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    lora_of(transformers.AutoModelForCausalLM.from_pretrained(folder / "qwen3")).save_pretrained(tmp_path)
    expected = load(tmp_path)
    assert two.stated["fsdp2-adapter"] == set(expected)
    assert different(pulled(controller, "fsdp2-adapter", expected), expected) == []


def test_sharded_weights_are_published_merged(two: Said, controller: str, folder: Path) -> None:
    pytest.importorskip("peft")
    for refused in two.refused:
        assert "call model.merge_adapter() before publish" in refused["unmerged"]
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder / "qwen3", dtype=torch.float32)
    expected = lora_of(plain).merge_and_unload().state_dict()
    got = pulled(controller, "fsdp2-merged", expected)
    assert two.stated["fsdp2-merged"] == set(expected)
    for name, tensor in expected.items():
        # merged in shards: the same products, summed in another order
        torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-6)
