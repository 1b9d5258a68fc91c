"""What a checkpoint holds: from its headers, or from config.json alone; damaged files are refused by name."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightdepot.consumers.hf import describe_checkpoint, tensors_of_config
from weightdepot.store.checkpoint import INDEX, checkpoint_index, checkpoint_tensors, has_weights
from weightdepot.store.dtypes import dtype_name
from weightdepot.store.errors import InvalidRequest
from weightdepot.store.layout import TensorSpec

safetensors = pytest.importorskip("safetensors.torch")

DTYPES = (torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
          torch.float8_e4m3fn, torch.float8_e5m2)  # fmt: skip


def header(entries: dict[str, Any], data: int = 0) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + b"\0" * data


@settings(deadline=None, max_examples=30)
@given(
    shapes=st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=5),
    kinds=st.lists(st.sampled_from(DTYPES), min_size=5, max_size=5),
    files=st.integers(1, 3),
)
def test_headers_say_what_was_saved(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]], kinds: list[torch.dtype], files: int
) -> None:
    path = tmp_path_factory.mktemp("saved")
    tensors = {f"t.{i}": torch.zeros(s, dtype=kinds[i]) for i, s in enumerate(shapes)}
    where = {name: f"model-{i % files}.safetensors" for i, name in enumerate(tensors)}
    for file in set(where.values()):
        safetensors.save_file({n: t for n, t in tensors.items() if where[n] == file}, path / file)
    expected = {n: TensorSpec(n, tuple(t.shape), dtype_name(t.dtype)) for n, t in tensors.items()}
    assert {t.name: t for t in checkpoint_tensors(path)} == expected
    (path / INDEX).write_text(json.dumps({"weight_map": where}))
    assert {t.name: t for t in checkpoint_tensors(path)} == expected
    assert describe_checkpoint(path).source == "the headers of its files"


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no safetensors header"),
        (b"\xff" * 9, "no safetensors header"),
        (struct.pack("<Q", 4) + b"{{{{", "damaged"),
        (struct.pack("<Q", 2) + b"[]", "not a table"),
        (header({"a": ENTRY}, data=4), "cut short: 4 bytes are missing"),
        (header({"a": {**ENTRY, "dtype": "F7"}}, 8), "data type F7"),
        (header({"a": {**ENTRY, "shape": [3]}}, 8), "8 bytes for F32"),
        (header({"a": {**ENTRY, "shape": [-2]}}, 8), "damaged at 'a'"),
        (header({"a": {**ENTRY, "shape": "x"}}, 8), "damaged at 'a'"),
        (header({"a": {"dtype": "F32", "shape": [2]}}, 8), "damaged at 'a'"),
        (header({"a": 3}, 8), "damaged at 'a'"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(InvalidRequest, match=message) as error:
        checkpoint_tensors(tmp_path)
    assert "model.safetensors" in str(error.value)


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(header({"x": ENTRY}, 8))
    (tmp_path / "b.safetensors").write_bytes(header({"x": ENTRY}, 8))
    (tmp_path / "c.safetensors").write_bytes(b"")
    with pytest.raises(InvalidRequest) as error:
        checkpoint_tensors(tmp_path)
    assert "'x' is in a.safetensors and in b.safetensors" in str(error.value)
    assert "c.safetensors has no safetensors header" in str(error.value)


def test_the_index_decides_which_files_and_copies_count(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(header({"x": ENTRY, "y": ENTRY}, 8))
    (tmp_path / "b.safetensors").write_bytes(header({"x": {**ENTRY, "dtype": "I32"}}, 8))
    (tmp_path / "consolidated.safetensors").write_bytes(b"")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "b.safetensors", "y": "a.safetensors"}}))
    assert {t.name: t.dtype for t in checkpoint_tensors(tmp_path)} == {"y": "float32", "x": "int32"}
    (tmp_path / INDEX).write_text(
        json.dumps({"weight_map": {"x": "b.safetensors", "z": "b.safetensors", "w": "d.safetensors"}})
    )
    with pytest.raises(InvalidRequest, match=r"d\.safetensors cannot be read: No such file"):
        checkpoint_tensors(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "b.safetensors", "z": "b.safetensors"}}))
    with pytest.raises(InvalidRequest, match=r"'z' should be in b\.safetensors and is not"):
        checkpoint_tensors(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "../a.safetensors"}}'])
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(InvalidRequest, match=r"index\.json"):
        checkpoint_index(tmp_path)


def test_directories_without_a_checkpoint_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no directory"):
        checkpoint_tensors(tmp_path / "none")
    with pytest.raises(InvalidRequest, match="no safetensors files"):
        checkpoint_tensors(tmp_path)
    with pytest.raises(InvalidRequest, match=r"neither safetensors files nor a config\.json"):
        describe_checkpoint(tmp_path)
    assert not has_weights(tmp_path)


TINY = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama": TINY,
    "Gemma2": {**TINY, "head_dim": 8},  # tied
    "Qwen3Moe": {**TINY, "head_dim": 8, "moe_intermediate_size": 8, "num_experts": 3,
                 "num_experts_per_tok": 1},
    "Mixtral": {**TINY, "num_local_experts": 3, "num_experts_per_tok": 1},
    "Glm4Moe": {**TINY, "head_dim": 8, "moe_intermediate_size": 8, "n_routed_experts": 3,
                "num_experts_per_tok": 1, "first_k_dense_replace": 1},
}  # fmt: skip


@pytest.fixture(params=CONFIGS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model of transformers, saved, loaded and saved again, as checkpoints come to be."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{request.param}Config")(**CONFIGS[request.param])
    config.dtype = "bfloat16"
    auto = transformers.AutoModelForCausalLM
    auto.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "first")
    auto.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    return tmp_path / "second"


@pytest.mark.filterwarnings("default")  # transformers' own
def test_config_json_alone_tells_what_the_files_hold(saved: Path) -> None:
    expected = {t.name: t for t in checkpoint_tensors(saved)}
    (saved / "model.safetensors").unlink()
    assert {t.name: t for t in tensors_of_config(saved)} == expected
    described = describe_checkpoint(saved)
    assert {t.name: t for t in described.tensors} == expected
    assert described.unknown == ()
    names = [*list(expected)[1:], "model.layers.2.extra"]
    (saved / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model-00001.safetensors")}))
    described = describe_checkpoint(saved)
    assert {t.name for t in described.tensors} == set(list(expected)[1:])
    assert described.unknown == ("model.layers.2.extra",)


def test_a_config_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(InvalidRequest, match="no-such-model"):
        tensors_of_config(tmp_path)


def test_a_quantized_checkpoint_is_not_guessed_from_its_config(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**TINY)
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config.save_pretrained(tmp_path)
    with pytest.raises(InvalidRequest, match="quantized checkpoint"):
        tensors_of_config(tmp_path)
