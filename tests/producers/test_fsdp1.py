"""FSDP1's flat shards, from real ranks to a real reader: the bytes of the checkpoint that was loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from weightdepot.producers.fsdp1 import fsdp1_weights, is_fsdp1
from weightdepot.store.errors import InvalidRequest

from .checkpoints import load, save
from .ranks import Said, different, pulled, ranks

pytest.importorskip("transformers", minversion="5")
pytestmark = pytest.mark.timeout(300)  # ranks are started by the first test

UNITS = ("full-orig", "full-flat", "one-unit", "grad-op", "grad-op-flat", "no-shard")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fsdp1")
    save("qwen3", path)
    save("qwen2", path).rename(path / "qwen2-tied")
    return path


@pytest.fixture(scope="module")
def two(controller: str, folder: Path) -> Iterator[Said]:
    with ranks("rank_fsdp1", 2, controller, folder) as said:
        yield said


@pytest.mark.parametrize("name", UNITS)
def test_readers_get_the_bytes_of_the_file(two: Said, controller: str, folder: Path, name: str) -> None:
    expected = load(folder / "qwen3")
    assert two.stated[f"fsdp1-{name}"] == set(expected)
    assert different(pulled(controller, f"fsdp1-{name}", expected), expected) == []


@pytest.mark.parametrize("name", [*UNITS, "mixed"])
def test_after_a_step_and_while_gathered_it_is_what_fsdp_gathers(
    two: Said, controller: str, folder: Path, name: str
) -> None:
    expected, before = load(folder / f"fsdp1-{name}-trained"), load(folder / "qwen3")
    assert different(pulled(controller, f"fsdp1-{name}-trained", expected), expected) == []
    changed = {n: expected[n].float() for n in before}
    assert set(different(changed, before)) == set(before), "the step did not change everything"


@pytest.mark.parametrize("name", ["full-orig", "no-shard"])
def test_parameters_that_were_given_other_memory_are_followed(
    two: Said, controller: str, folder: Path, name: str
) -> None:
    expected = load(folder / f"fsdp1-{name}-moved")
    assert different(pulled(controller, f"fsdp1-{name}-moved", expected), expected) == []


def test_mixed_precision_is_published_from_the_full_shard_and_cast(
    two: Said, controller: str, folder: Path
) -> None:
    expected = {n: t.bfloat16() for n, t in load(folder / "qwen3").items()}
    assert different(pulled(controller, "fsdp1-mixed", expected), expected) == []


@pytest.mark.parametrize("orig", [True, False])
def test_ties_buffers_ignored_modules_and_memory_that_is_not_row_major(
    two: Said, controller: str, folder: Path, orig: bool
) -> None:
    expected = load(folder / f"fsdp1-odd-{orig}")
    assert two.stated[f"fsdp1-odd-{orig}"] == set(expected)
    assert "one.weight" in expected
    assert "two.weight" not in expected
    assert different(pulled(controller, f"fsdp1-odd-{orig}", expected), expected) == []


def test_tied_embeddings_are_published_once(two: Said, controller: str, folder: Path) -> None:
    expected = load(folder / "qwen2-tied")
    assert "lm_head.weight" not in expected
    assert two.stated["fsdp1-tied"] == set(expected)
    assert different(pulled(controller, "fsdp1-tied", expected), expected) == []


def test_hybrid_shards_are_held_by_two_ranks_each_and_sent_once(controller: str, folder: Path) -> None:
    expected = load(folder / "qwen3")
    with ranks("rank_fsdp1", 4, controller, folder):
        assert different(pulled(controller, "fsdp1-hybrid", expected), expected) == []
        trained = load(folder / "fsdp1-hybrid-trained")
        assert different(pulled(controller, "fsdp1-hybrid-trained", trained), trained) == []


def test_a_module_that_is_not_wrapped_is_refused() -> None:
    assert not is_fsdp1(nn.Linear(2, 2))
    with pytest.raises(InvalidRequest, match="no part of this Linear"):
        fsdp1_weights(nn.Linear(2, 2))
    assert torch.distributed.is_available()
