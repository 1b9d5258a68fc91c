"""What `Producer` makes of what it is handed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from weightdepot.producers.fsdp1 import fsdp1_weights, is_fsdp1
from weightdepot.producers.hf import transformers_weights
from weightdepot.producers.sources import weights_of
from weightdepot.producers.zero3 import is_zero3, zero3_weights
from weightdepot.store.errors import InvalidRequest, LayoutError
from weightdepot.store.layout import LayoutBuilder, renamed
from weightdepot.store.weights import Mapped, layout_of


def test_plain_modules_mappings_and_mapped_weights_are_left_as_they_are() -> None:
    module = nn.Linear(2, 2)
    for weights in (module, dict(module.named_parameters()), Mapped(layout_of(module), dict)):
        assert weights_of(weights) is weights


def test_a_plain_module_is_not_taken_for_a_sharded_one() -> None:
    module = nn.Linear(2, 2)
    assert not is_fsdp1(module)
    assert not is_zero3(module)
    for adapter in (fsdp1_weights, zero3_weights, transformers_weights):
        with pytest.raises(InvalidRequest, match="Linear"):
            adapter(module)


def test_of_ddp_the_module_in_it_is_published(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        module = nn.Linear(2, 2)
        assert weights_of(nn.parallel.DistributedDataParallel(module)) is module
    finally:
        torch.distributed.destroy_process_group()


def test_several_modules_are_refused_with_what_to_use() -> None:
    with pytest.raises(InvalidRequest, match=r"megatron_weights\(model, vocab_size=..., names=...\)"):
        weights_of([nn.Linear(2, 2), nn.Linear(2, 2)])


def tiny(kind: str, **changes: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers", minversion="5")
    from .checkpoints import config_of

    with torch.device("meta"):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config_of(kind, **changes))
    return model


def test_a_transformers_model_that_holds_what_it_saves_is_left_as_it_is() -> None:
    model = tiny("qwen3")
    assert weights_of(model) is model


def test_a_conversion_that_computes_is_refused_by_name_and_a_mapping_gets_round_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny("qwen3")
    import transformers.core_model_loading as loading

    def doubling(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {n: t * 2 if n == "model.norm.weight" else t for n, t in state.items()}

    monkeypatch.setattr(loading, "revert_weight_conversion", doubling)
    with pytest.raises(LayoutError, match=r"model.norm.weight"):
        weights_of(model)
    plain = dict(model.named_parameters())
    assert weights_of(plain) is plain


def test_tensors_are_renamed_and_left_out_with_their_buffers() -> None:
    layout = layout_of({"a": torch.zeros(3, 2), "b": torch.zeros(4), "c": torch.zeros(5)})
    made = renamed(layout, {"a": "x", "c": "y"})
    assert [(t.name, t.shape) for t in made.tensors] == [("x", (3, 2)), ("y", (5,))]
    assert [b.name for b in made.buffers] == ["a", "c"]
    assert [(p.tensor, p.buffer) for p in made.placements()] == [("x", "a"), ("y", "c")]
    with pytest.raises(LayoutError, match="x: would be both 'a' and 'b'"):
        renamed(layout, {"a": "x", "b": "x"})
    assert renamed(LayoutBuilder().build(), {}).tensors == ()
