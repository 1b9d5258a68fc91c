"""ZeRO-3's partitions, from real ranks to a real reader: the bytes of the checkpoint that was loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from weightdepot.producers.zero3 import zero3_weights
from weightdepot.store.errors import InvalidRequest

from .checkpoints import load, save
from .ranks import Said, different, pulled, ranks

pytest.importorskip("transformers", minversion="5")
pytestmark = pytest.mark.timeout(300)  # ranks are started by the first test

WORLD = 3  # no size of the model is divisible by it: the last ranks end in padding


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("zero3")
    save("qwen3", path)
    save("qwen2", path).rename(path / "qwen2-tied")
    save("qwen3_moe", path)
    return path


@pytest.fixture(scope="module")
def three(controller: str, folder: Path) -> Iterator[Said]:
    pytest.importorskip("deepspeed")
    with ranks("rank_zero3", WORLD, controller, folder, DS_ACCELERATOR="cpu", DS_BUILD_OPS="0") as said:
        yield said


@pytest.mark.parametrize("name", ["partitioned", "persistent", "bf16"])
def test_readers_get_the_bytes_of_the_file(three: Said, controller: str, folder: Path, name: str) -> None:
    expected = load(folder / ("qwen2-tied" if name == "bf16" else "qwen3"))
    if name == "bf16":
        expected = {n: t.bfloat16() for n, t in expected.items()}
    assert three.stated[f"zero3-{name}"] == set(expected)
    assert different(pulled(controller, f"zero3-{name}", expected), expected) == []


@pytest.mark.parametrize("name", ["partitioned", "persistent", "bf16"])
def test_after_a_step_and_an_evaluation_it_is_what_deepspeed_gathers(
    three: Said, controller: str, folder: Path, name: str
) -> None:
    expected = load(folder / f"zero3-{name}-trained")
    assert different(pulled(controller, f"zero3-{name}-trained", expected), expected) == []
    before = load(folder / ("qwen2-tied" if name == "bf16" else "qwen3"))
    assert different({n: expected[n].float() for n in before}, before), "the step changed nothing"


def test_case_15_stacked_experts_are_published_one_by_one(three: Said, controller: str, folder: Path) -> None:
    expected = load(folder / "qwen3_moe")
    assert three.stated["zero3-moe"] == set(expected)
    assert different(pulled(controller, "zero3-moe", expected), expected) == []


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("quantized", "is quantized"),
        ("nvme", "is offloaded to a disk"),
        ("experts", "belongs to DeepSpeed's expert parallelism"),
        ("otherwise", "is partitioned in a way that is not known here"),
    ],
)
def test_partitions_that_are_no_flat_range_are_refused_all_by_name(three: Said, what: str, said: str) -> None:
    for refused in three.refused:
        assert f"model.embed_tokens.weight: {said}" in refused[what]
        assert "model.layers.0.self_attn.q_proj.weight: is quantized" in refused[what]


def test_a_model_that_is_not_partitioned_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no parameter of this Linear is partitioned"):
        zero3_weights(nn.Linear(2, 2))
