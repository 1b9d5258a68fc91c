"""Exporters: what a trainer's own conversion makes of its tensors, against running it for real."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weightdepot.store.errors import InvalidRequest, LayoutError
from weightdepot.store.geometry import Box
from weightdepot.store.layout import Layout
from weightdepot.store.tracing import Trace, lattice, trace_export
from weightdepot.store.weights import Shard

from .execution import bits, checkpoint, twins, values
from .programs import CHECKPOINT, PARAMETERS, Numbers, _run

Local = Mapping[str, Tensor]
Exported = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


def really(exporter: Callable[[Local], Exported], local: Local) -> dict[str, Tensor]:
    with torch.no_grad():
        made = exporter({n: t.clone() for n, t in local.items()})
        return dict(made.items() if isinstance(made, Mapping) else made)


def gather(layouts: Sequence[tuple[Layout, Local]], into: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The checkpoint that ranks with these layouts hold; each element is held by at least one."""
    out = {n: torch.zeros_like(t) for n, t in into.items()}
    held = {n: torch.zeros(t.shape, dtype=torch.bool) for n, t in into.items()}
    for layout, local in layouts:
        for p in layout.placements():
            own = local[p.buffer]
            box = tuple(slice(a, b) for a, b in zip(p.box.offset, p.box.stop, strict=True))
            out[p.tensor][box] = own.as_strided(p.box.shape, p.strides, own.storage_offset() + p.offset)
            held[p.tensor][box] = True
    assert all(h.all() for h in held.values())
    return out


def compare(exporter: Callable[[Local], Exported], local: Local) -> Trace:
    """Trace over live and over meta tensors, run for real, carry out the layout: all agree. Nothing of the
    local tensors is changed."""
    before = {n: bits(t) for n, t in local.items()}
    trace = trace_export(exporter, local)
    assert trace.layout == trace_export(exporter, twins(local, "meta")).layout
    assert {n: bits(t) for n, t in local.items()} == before
    expected = really(exporter, local)
    found = gather([(trace.layout, local)], expected)
    for name, t in expected.items():
        assert bits(found[name]) == bits(t), name
    assert [t.name for t in trace.layout.tensors] == list(expected)
    return trace


E, HIDDEN, INNER = 4, 8, 6


def split_experts(local: Local) -> Iterator[tuple[str, Tensor]]:
    """transformers 5: stacked in the model, separate in the checkpoint."""
    for e, both in enumerate(local["experts.gate_up_proj"].unbind(0)):
        gate, up = both.chunk(2, dim=0)
        yield f"experts.{e}.gate_proj.weight", gate.contiguous()
        yield f"experts.{e}.up_proj.weight", up
    for e, one in enumerate(torch.split(local["experts.down_proj"], 1)):
        yield f"experts.{e}.down_proj.weight", one.squeeze(0)


def experts() -> dict[str, Tensor]:
    return checkpoint(
        {"experts.gate_up_proj": (E, 2 * INNER, HIDDEN), "experts.down_proj": (E, HIDDEN, INNER)}
    )


def test_case_15_stacked_experts_are_exported_one_by_one() -> None:
    trace = compare(split_experts, experts())
    assert len(trace.layout.table) == 3 * E
    assert set(trace.tiers.values()) == {"traced"}


def test_case_15_separate_experts_are_exported_stacked() -> None:
    local = really(split_experts, experts())

    def stack(local: Local) -> dict[str, Tensor]:
        pairs = [torch.cat([local[f"experts.{e}.{p}_proj.weight"] for p in ("gate", "up")]) for e in range(E)]
        down = torch.stack([local[f"experts.{e}.down_proj.weight"] for e in range(E)])
        return {"experts.gate_up_proj": torch.stack(pairs), "experts.down_proj": down}

    assert len(compare(stack, local).layout.table) == 3 * E


def test_case_16_a_transposed_fused_tensor_and_its_scale_are_exported_transposed_once() -> None:
    local = checkpoint({"gate_up": (512, 256), "gate_up_scale": (4, 2)})

    def turn(local: Local) -> dict[str, Tensor]:
        return {n: t.t().contiguous() for n, t in local.items()}

    assert {p.strides for p in compare(turn, local).layout.placements()} == {(1, 256), (1, 2)}


def test_case_20_a_vocabulary_is_exported_in_its_global_size() -> None:
    """Rank 1 of 2 holds half of the rows; the checkpoint has them once."""
    rows = 151_936
    half = Shard(torch.empty(rows // 2, 4, device="meta"), (rows, 4), (rows // 2, 0))
    layout = trace_export(lambda local: {"lm_head": local["head"].to(torch.bfloat16)}, {"head": half}).layout
    assert [t.shape for t in layout.tensors] == [(rows, 4)]
    assert [p.box for p in layout.placements()] == [Box((rows // 2, 0), (rows // 2, 4))]


@pytest.mark.parametrize("rows", [10, 3])
def test_case_21_uneven_shards_are_exported_from_each_rank(rows: int) -> None:
    """The exporter sees whole tensors; each rank has what comes from its own rows, perhaps nothing."""
    full = checkpoint({"fused": (rows, 6), "norm": (6,)})

    def exporter(local: Local) -> dict[str, Tensor]:
        left, right = local["fused"].chunk(2, dim=1)
        return {"left": left, "right": right.t(), "norm": local["norm"]}

    size = -(-rows // 4)
    ranks = []
    for rank in range(4):
        own = full["fused"][rank * size : (rank + 1) * size].clone()
        local: dict[str, Any] = {
            "fused": Shard(own, (rows, 6), (min(rank * size, rows), 0)), "norm": full["norm"],
        }  # fmt: skip
        ranks.append((trace_export(exporter, local).layout, {"fused": own, "norm": full["norm"]}))
    expected = really(exporter, full)
    found = gather(ranks, expected)
    assert all(bits(found[n]) == bits(t) for n, t in expected.items())


def test_case_23_qkv_interleaved_by_query_group_is_exported_plain() -> None:
    """Megatron's rows (group, q.. k v, dim)."""
    groups, per, dim, hidden = 3, 2, 4, 5

    def exporter(local: Local) -> dict[str, Tensor]:
        x = local["linear_qkv"].view(groups, per + 2, dim, hidden)
        q, k, v = torch.split(x, [per, 1, 1], dim=1)
        return {n: t.reshape(-1, hidden) for n, t in {"q": q, "k": k, "v": v}.items()}

    compare(exporter, checkpoint({"linear_qkv": (groups * (per + 2) * dim, hidden)}))


def test_picking_rows_is_probed_and_a_cast_is_the_layouts() -> None:
    local = checkpoint({"rope": (8, 3), "w": (4, 2), "optimizer": (5,)})

    def exporter(local: Local) -> dict[str, Tensor]:
        order = torch.arange(8).view(2, 4).t().reshape(-1)
        return {
            "rope": local["rope"][order],
            "w": local["w"].to(torch.bfloat16),
            "turned": local["w"].flip(0),
        }

    trace = compare(exporter, local)
    assert dict(trace.tiers) == {"rope": "probed", "w": "traced", "turned": "probed"}
    assert trace.unused == ("optimizer",)
    assert [t.dtype for t in trace.layout.tensors] == ["float32", "bfloat16", "float32"]


def test_tied_and_transposed_local_tensors() -> None:
    one = values((4, 6), torch.float32, 3)
    local = {"embed": one, "head": one, "t": values((6, 4), torch.float32, 4).t()}
    trace = compare(lambda local: {"embed": local["embed"], "head": local["head"], "t": local["t"]}, local)
    assert {b.name for b in trace.layout.buffers} == {"embed", "head", "t"}
    with pytest.raises(LayoutError, match="exporter raised"):  # as it would for real
        trace_export(lambda local: {"t": local["t"].view(-1)}, local)


@pytest.mark.slow
def test_transformers_own_conversion_separates_the_experts() -> None:
    """The library's `revert_weight_conversion`, which is what `save_pretrained` writes."""
    transformers = pytest.importorskip("transformers", minversion="5")
    loading = pytest.importorskip("transformers.core_model_loading")
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, head_dim=8,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    local = {n: t.detach() for n, t in model.state_dict().items()}
    trace = compare(lambda local: loading.revert_weight_conversion(model, dict(local)), local)
    assert set(trace.tiers.values()) == {"traced"}
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in trace.tiers


def test_one_row_for_many_is_read_many_times() -> None:
    compare(lambda local: {"w": local["row"].expand(3, 4).contiguous()}, checkpoint({"row": (4,)}))


def test_all_that_cannot_be_exported_is_named() -> None:
    local = checkpoint({"a": (3,), "b": (3,), "c": (3,)})

    def exporter(local: Local) -> Iterator[tuple[str, Any]]:
        yield "sum", local["a"] + local["b"]
        yield "padded", torch.nn.functional.pad(local["c"], (0, 2))
        yield "ids", torch.arange(3)
        yield "name", "not a tensor"
        yield "half", torch.empty(4).copy_(torch.cat([local["c"], torch.empty(1)]))
        yield "fine", local["c"]
        yield "fine", local["c"]

    with pytest.raises(LayoutError) as caught:
        trace_export(exporter, local)
    reasons = {f.tensor: f.reason for f in caught.value.faults}
    assert list(reasons) == ["fine", "sum", "padded", "ids", "name", "half"]
    assert "passes through `add`" in reasons["sum"]
    assert "(from a, b)" in reasons["sum"]
    assert "at each publish" in reasons["sum"]
    assert "constant 0.0" in reasons["padded"]
    assert "none of the local tensors" in reasons["ids"]
    assert "str" in reasons["name"]
    assert "does not fill" in reasons["half"]
    assert "twice" in reasons["fine"]
    trace = trace_export(exporter, local, on_fault="keep")
    assert [f.parameter for f in trace.faults] == list(reasons)


def test_an_exporter_that_raises_or_asks_for_values_is_named() -> None:
    local = checkpoint({"a": (3,)})

    def raising(local: Local) -> Iterator[tuple[str, Tensor]]:
        yield "a", local["a"]
        raise KeyError("lm_head")

    with pytest.raises(LayoutError, match="the exporter raised after 'a': KeyError: 'lm_head'"):
        trace_export(raising, local)
    with pytest.raises(LayoutError, match="asks for a value"):
        trace_export(lambda local: {"a": local["a"][: int(local["a"].sum())]}, local)
    with pytest.raises(InvalidRequest):
        trace_export(raising, {})


def program(numbers: Sequence[int]) -> Callable[[Local], Iterator[tuple[str, Tensor]]]:
    def exporter(local: Local) -> Iterator[tuple[str, Tensor]]:
        pool = list(local.values())
        made = [torch.zeros(shape) for shape in PARAMETERS.values()]
        _run(Numbers(numbers), pool, made)
        for i, t in enumerate([*pool, *made]):
            yield f"out.{i}", t

    return exporter


def agree(numbers: Sequence[int]) -> tuple[bool, int]:
    """Whether all that is not refused is right, and how much that is."""
    local = checkpoint(CHECKPOINT)
    trace = trace_export(program(numbers), local, on_fault="keep")
    expected = {n: t for n, t in really(program(numbers), local).items() if n in trace.tiers}
    sound = {f.parameter for f in trace.faults} | expected.keys()
    assert sound >= {f"out.{i}" for i in range(len(CHECKPOINT))}
    layout = Layout(trace.layout.tensors, trace.layout.buffers, trace.layout.table)
    wanted = {n: torch.zeros(t.shape, dtype=t.dtype) for n, t in expected.items()}
    for p in layout.placements():
        if p.tensor in wanted:
            own = local[p.buffer]
            box = tuple(slice(a, b) for a, b in zip(p.box.offset, p.box.stop, strict=True))
            wanted[p.tensor][box] = own.as_strided(p.box.shape, p.strides, own.storage_offset() + p.offset)
    return all(bits(wanted[n]) == bits(t) for n, t in expected.items()), len(expected)


@settings(max_examples=100)
@given(st.lists(st.integers(0, 5000), min_size=6, max_size=160))
def test_any_program_is_exported_as_it_runs(numbers: list[int]) -> None:
    assert agree(numbers)[0]


def test_a_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = random.Random(7)
    programs = [[generator.randrange(5000) for _ in range(120)] for _ in range(60)]
    assert all(agree(p)[0] for p in programs)
    assert sum(agree(p)[1] for p in programs) > 300
    # what comes in several pieces loses all but the first
    original = lattice.cut
    monkeypatch.setattr("weightdepot.store.tracing.export.cut", lambda *args: original(*args)[:1])
    assert not all(agree(p)[0] for p in programs)
