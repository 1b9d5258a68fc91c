"""Loaders as frameworks write them, traced over live and over meta parameters, against the real thing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from weightdepot.store.errors import LayoutError

from .execution import checkpoint, compare, parameter, values

Weights = Iterable[tuple[str, Tensor]]
Params = Mapping[str, Any]


def default_weight_loader(param: Any, loaded_weight: Tensor) -> None:
    """vLLM's, word for word where it counts."""
    if param.numel() == 1 and loaded_weight.numel() == 1:
        param.data.fill_(loaded_weight.item())
    else:
        assert param.size() == loaded_weight.size(), (
            f"Attempted to load weight ({loaded_weight.size()}) into parameter ({param.size()})"
        )
        param.data.copy_(loaded_weight)


def qkv_loader(tp: int, rank: int, heads: int, kv_heads: int, dim: int) -> Callable[..., None]:
    q = heads // tp * dim
    kv = max(kv_heads // tp, 1) * dim
    replicas = max(tp // kv_heads, 1)

    def load(param: Any, loaded_weight: Tensor, shard_id: str) -> None:
        param_data = param.data
        offset, size = {"q": (0, q), "k": (q, kv), "v": (q + kv, kv)}[shard_id]
        param_data = param_data.narrow(0, offset, size)
        shard = rank if shard_id == "q" else rank // replicas
        loaded_weight = loaded_weight.narrow(0, shard * size, size)
        assert param_data.shape == loaded_weight.shape
        param_data.copy_(loaded_weight)

    return load


def merged_loader(tp: int, rank: int) -> Callable[..., None]:
    def load(param: Any, loaded_weight: Tensor, shard_id: int | None = None) -> None:
        if shard_id is None:  # fused on disk: split, and load each part
            for i, part in enumerate(loaded_weight.chunk(2, dim=0)):
                load(param, part, i)
            return
        size = param.shape[0] // 2
        target = param.data.narrow(0, shard_id * size, size)
        target.copy_(loaded_weight.narrow(0, rank * size, size))

    return load


def row_loader(rank: int) -> Callable[..., None]:
    def load(param: Any, loaded_weight: Tensor) -> None:
        size = param.shape[1]
        loaded_weight = loaded_weight.narrow(1, rank * size, size)
        assert param.data.shape == loaded_weight.shape
        param.data.copy_(loaded_weight)

    return load


def vocab_loader(rank: int) -> Callable[..., None]:
    def load(param: Any, loaded_weight: Tensor) -> None:
        start = rank * param.shape[0]
        size = max(0, min(param.shape[0], loaded_weight.shape[0] - start))
        loaded_weight = loaded_weight.narrow(0, min(start, loaded_weight.shape[0]), size)
        param[: loaded_weight.shape[0]].data.copy_(loaded_weight)
        param[loaded_weight.shape[0] :].data.fill_(0)

    return load


MAPPING = [
    ("qkv_proj", "q_proj", "q"), ("qkv_proj", "k_proj", "k"), ("qkv_proj", "v_proj", "v"),
    ("gate_up_proj", "gate_proj", 0), ("gate_up_proj", "up_proj", 1),
]  # fmt: skip


def load_llama(params: Params, weights: Weights) -> set[str]:
    params_dict = dict(params)
    loaded: set[str] = set()
    for name, loaded_weight in weights:
        if "rotary_emb.inv_freq" in name:
            continue
        for fused, part, shard_id in MAPPING:
            if part not in name:
                continue
            param = params_dict[name.replace(part, fused)]
            param.weight_loader(param, loaded_weight, shard_id)
            break
        else:
            param = params_dict[name]
            getattr(param, "weight_loader", default_weight_loader)(param, loaded_weight)
        loaded.add(name)
    return loaded


def llama(tp: int, rank: int, kv_heads: int = 2) -> tuple[dict[str, Tensor], dict[str, Any]]:
    heads, dim, hidden, inner, vocab = 4, 4, 12, 20, 29
    weights = checkpoint({
        "embed.weight": (vocab, hidden), "norm.weight": (hidden,), "rotary_emb.inv_freq": (3,), "scale": (1,),
        "q_proj.weight": (heads * dim, hidden), "k_proj.weight": (kv_heads * dim, hidden),
        "v_proj.weight": (kv_heads * dim, hidden), "o_proj.weight": (hidden, heads * dim),
        "gate_proj.weight": (inner, hidden), "up_proj.weight": (inner, hidden),
        "down_proj.weight": (hidden, inner),
    })  # fmt: skip
    qkv = (heads // tp + 2 * max(kv_heads // tp, 1)) * dim
    padded = -(-vocab // (4 * tp)) * 4  # each rank's rows, in multiples of 4
    params: dict[str, Any] = {
        "embed.weight": parameter(padded, hidden, weight_loader=vocab_loader(rank)),
        "norm.weight": parameter(hidden),
        "scale": parameter(),
        "qkv_proj.weight": parameter(qkv, hidden, weight_loader=qkv_loader(tp, rank, heads, kv_heads, dim)),
        "o_proj.weight": parameter(hidden, heads * dim // tp, weight_loader=row_loader(rank)),
        "gate_up_proj.weight": parameter(2 * inner // tp, hidden, weight_loader=merged_loader(tp, rank)),
        "down_proj.weight": parameter(hidden, inner // tp, weight_loader=row_loader(rank)),
    }
    return weights, params


@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 0), (2, 1), (4, 0), (4, 1), (4, 3)])
def test_a_llama_is_traced_at_any_rank(tp: int, rank: int) -> None:
    """Fused qkv, gate_up, row parallel, padded vocabulary, a scale by `.item()`; tp 4 replicates kv heads."""
    weights, params = llama(tp, rank)
    trace = compare(load_llama, weights, params).trace
    assert trace.unused == ("rotary_emb.inv_freq",)
    assert trace.left == ()
    assert set(trace.tiers.values()) == {"traced"}
    # one placement for each tensor, and one fill at most for the padding
    assert len(trace.layout.table) == len(weights) - 1


def test_case_22_a_kv_head_shared_by_ranks_is_placed_once_in_each() -> None:
    boxes = []
    for rank in (0, 1):
        weights, params = llama(4, rank)
        layout = compare(load_llama, weights, params).trace.layout
        boxes.append([p.box for p in layout.placements() if p.tensor == "k_proj.weight"])
    assert boxes[0] == boxes[1]
    assert len(boxes[0]) == 1


def test_the_last_rank_of_an_uneven_vocabulary_may_hold_padding_only() -> None:
    weights = checkpoint({"embed.weight": (8, 4)})
    params = {"embed.weight": parameter(8, 4, weight_loader=vocab_loader(1))}
    trace = compare(load_llama, weights, params).trace
    assert trace.unused == ()  # the loader took its rows, and there were none
    assert [f.value for f in trace.layout.fills] == [0.0]


E, HIDDEN, INNER = 4, 8, 6


def load_each_expert(params: Params, weights: Weights) -> None:
    """vLLM's experts: one tensor for each expert and projection, into stacked parameters."""
    for name, w in weights:
        expert, projection = int(name.split(".")[1]), name.split(".")[2]
        if projection == "down_proj":
            params["w2"].data[expert].copy_(w)
        else:
            data = params["w13"].data[expert]
            half = data.shape[0] // 2
            data.narrow(0, 0 if projection == "gate_proj" else half, half).copy_(w)


def load_stacked_experts(params: Params, weights: Weights) -> None:
    """The checkpoint is stacked, the loader takes it apart: `unbind`, `chunk`."""
    for name, w in weights:
        for expert, one in enumerate(w.unbind(0)):
            if name == "experts.gate_up_proj":
                gate, up = one.chunk(2, dim=0)
                params[f"experts.{expert}.gate_proj"].data.copy_(gate)
                params[f"experts.{expert}.up_proj"].data.copy_(up)
            else:
                params[f"experts.{expert}.down_proj"].data.copy_(one)


def expert_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for e in range(E):
        shapes[f"experts.{e}.gate_proj"] = shapes[f"experts.{e}.up_proj"] = (INNER, HIDDEN)
        shapes[f"experts.{e}.down_proj"] = (HIDDEN, INNER)
    return shapes


def test_case_15_separate_experts_go_into_stacked_parameters() -> None:
    params = {"w13": parameter(E, 2 * INNER, HIDDEN), "w2": parameter(E, HIDDEN, INNER)}
    trace = compare(load_each_expert, checkpoint(expert_shapes()), params).trace
    assert len(trace.layout.table) == 3 * E


def test_case_15_stacked_experts_go_into_separate_parameters() -> None:
    weights = checkpoint(
        {"experts.gate_up_proj": (E, 2 * INNER, HIDDEN), "experts.down_proj": (E, HIDDEN, INNER)}
    )
    params = {n: parameter(*s) for n, s in expert_shapes().items()}
    trace = compare(load_stacked_experts, weights, params).trace
    assert len(trace.layout.table) == 3 * E


def test_case_16_a_transposed_fused_tensor_and_its_block_scale_are_transposed_once() -> None:
    """(in, out) in the checkpoint, (out, in) here; scale blocks likewise; both halves of gate_up."""
    weights = checkpoint({"gate_up": (256, 512), "gate_up_scale": (2, 4)})

    def load(params: Params, weights: Weights) -> None:
        for name, w in weights:
            for i, half in enumerate(w.chunk(2, dim=1)):
                size = params[name].shape[0] // 2
                params[name].data.narrow(0, i * size, size).copy_(half.t())

    trace = compare(load, weights, {"gate_up": parameter(512, 256), "gate_up_scale": parameter(4, 2)}).trace
    assert {p.strides for p in trace.layout.placements() if p.tensor == "gate_up"} == {(1, 256)}


def test_gpt2_conv1d_weights_are_transposed() -> None:
    weights = checkpoint({"c_attn.weight": (8, 24), "c_proj.weight": (8, 8)})

    def load(params: Params, weights: Weights) -> None:
        for name, w in weights:
            params[name].data.copy_(w.t())

    trace = compare(
        load, weights, {"c_attn.weight": parameter(24, 8), "c_proj.weight": parameter(8, 8)}
    ).trace
    assert len(trace.layout.table) == 2


def test_case_23_qkv_interleaved_by_query_group_is_taken_apart() -> None:
    """Megatron's rows (group, q.. k v, dim) into plain q, k, v; falcon's loader does it so."""
    groups, per, dim, hidden = 3, 2, 4, 5
    weights = checkpoint({"qkv": (groups * (per + 2) * dim, hidden)})

    def load(params: Params, weights: Weights) -> None:
        for _, w in weights:
            x = w.view(groups, per + 2, dim, hidden)
            q = x[:, :per].reshape(-1, hidden)
            k, v = x[:, per : per + 1].reshape(-1, hidden), x[:, per + 1 :].reshape(-1, hidden)
            params["qkv"].data.copy_(torch.cat([q, k, v], dim=0))

    trace = compare(load, weights, {"qkv": parameter(groups * (per + 2) * dim, hidden)}).trace
    assert len(trace.layout.table) == 3 * groups


@pytest.mark.parametrize("maker", ["zeros", "empty", "new_zeros", "pad", "zeros_like"])
def test_case_24_a_padded_temporary_is_copied_on(maker: str) -> None:
    weights = checkpoint({"w": (5, 7)})

    def load(params: Params, weights: Weights) -> None:
        param = params["w"]
        for _, w in weights:
            if maker == "pad":
                buffer = torch.nn.functional.pad(w, (0, 1, 0, 3))
            else:
                if maker == "zeros":
                    buffer = torch.zeros(8, 8)
                elif maker == "empty":
                    buffer = torch.empty(8, 8).fill_(0)
                elif maker == "new_zeros":
                    buffer = w.new_zeros(8, 8)
                else:
                    buffer = torch.zeros_like(param.data)
                buffer[: w.shape[0], : w.shape[1]] = w
            param.data.copy_(buffer)

    trace = compare(load, weights, {"w": parameter(8, 8)}).trace
    assert len(trace.layout.table) == 1
    assert trace.layout.fills
    assert trace.left == ()


def test_gpt_oss_zeroes_the_incoming_tensor_at_ranks_over_0() -> None:
    """The bias of a row-parallel projection counts once: the other ranks zero what came, then copy it."""
    weights = checkpoint({"bias": (E, HIDDEN), "w2": (E, INNER, HIDDEN)})

    def load(params: Params, weights: Weights) -> None:
        for name, w in weights:
            if name == "bias":
                w.zero_()
                params[name].data.copy_(w)
            else:
                mine = w[:, 2:5, :].permute(0, 2, 1).contiguous()
                params[name][: mine.shape[0], : mine.shape[1], : mine.shape[2]].copy_(mine)

    trace = compare(load, weights, {"bias": parameter(E, HIDDEN), "w2": parameter(E, HIDDEN, 3)}).trace
    assert trace.unused == ("bias",)
    assert len(trace.layout.fills) == 1


@pytest.mark.parametrize(("embed", "head", "tied"), list(itertools.product([True, False], repeat=3)))
def test_case_19_tied_embeddings(embed: bool, head: bool, tied: bool) -> None:
    """Both, either or none in the checkpoint; the reader ties them or not. A tie with both: the last wins."""
    names = [*(["embed"] if embed else []), *(["lm_head"] if head else [])]
    weights = checkpoint(dict.fromkeys(names, (6, 4)))
    one = parameter(6, 4)
    params = {"embed": one, "lm_head": one if tied else parameter(6, 4)}

    def load(params: Params, weights: Weights) -> None:
        for name, w in weights:
            params[name].data.copy_(w)

    if (embed and head) or (tied and (embed or head)):
        trace = compare(load, weights, params).trace
        assert trace.aliases == ({"lm_head": "embed"} if tied else {})
        assert [b.name for b in trace.layout.buffers] == (["embed"] if tied else ["embed", "lm_head"])
        assert trace.unused == (("embed",) if tied and embed and head else ())
    else:
        with pytest.raises(LayoutError) as caught:
            compare(load, weights, params)
        missing = {"embed", "lm_head"} - set(names) - ({"lm_head"} if tied else set())
        assert {f.tensor for f in caught.value.faults} == missing


def test_mla_projections_are_split_and_stacked() -> None:
    """deepseek's kv_b into (heads, nope, rank) and (heads, rank, v), q_a beside kv_a in one parameter."""
    heads, nope, v, rank = 3, 4, 5, 6
    weights = checkpoint({"kv_b": (heads * (nope + v), rank), "q_a": (7, rank), "kv_a": (8, rank)})

    def load(params: Params, weights: Weights) -> None:
        for name, w in weights:
            if name == "kv_b":
                k, value = torch.split(w.view(heads, nope + v, rank), [nope, v], dim=1)
                params["w_uk"].data.copy_(k)
                params["w_uv"].data.copy_(value.transpose(1, 2))
            else:
                params["fused_a"].data[slice(0, 7) if name == "q_a" else slice(7, 15)].copy_(w)

    params = {
        "w_uk": parameter(heads, nope, rank),
        "w_uv": parameter(heads, rank, v),
        "fused_a": parameter(15, rank),
    }
    compare(load, weights, params)


def test_cat_into_a_parameter_and_into_an_incoming_list() -> None:
    weights = checkpoint({"a": (2, 3), "b": (4, 3), "c": (6, 3)})

    def load(params: Params, weights: Weights) -> None:
        held = dict(weights)
        torch.cat([held["a"], held["b"]], out=params["ab"].data)
        torch.stack([held["c"], held["c"]], 1, out=params["cc"].data)

    compare(load, weights, {"ab": parameter(6, 3), "cc": parameter(6, 2, 3)})


def test_a_casting_copy_keeps_the_tensors_and_the_buffers_types_apart() -> None:
    weights = {"w": values((4, 4), torch.bfloat16, 1), "v": values((4,), torch.float32, 2)}

    def load(params: Params, weights: Weights) -> None:
        for name, w in weights:
            params[name].data.copy_(w.to(torch.float32) if name == "w" else w)

    params = {"w": parameter(4, 4), "v": parameter(4, dtype=torch.float16)}
    layout = compare(load, weights, params).trace.layout
    assert [t.dtype for t in layout.tensors] == ["bfloat16", "float32"]
    assert [b.dtype for b in layout.buffers] == ["float32", "float16"]


def test_loading_twice_the_last_wins_element_by_element() -> None:
    weights = checkpoint({"a": (6, 6), "b": (3, 4), "c": (6,)})

    def load(params: Params, weights: Weights) -> None:
        for name, w in weights:
            data = params["p"].data
            {"a": data, "b": data[2:5, 1:5], "c": data[:, 3]}[name].copy_(w)
        data[4].fill_(7)

    trace = compare(load, weights, {"p": parameter(6, 6)}).trace
    assert len(trace.layout.fills) == 1


def test_broadcasts_scalars_and_empty_tensors() -> None:
    weights = checkpoint({"bias": (3,), "scalar": (), "none": (0, 4), "one": (1,)})

    def load(params: Params, weights: Weights) -> None:
        for name, w in weights:
            params[name][...] = w

    params = {
        "bias": parameter(4, 3),
        "scalar": parameter(2, 2),
        "none": parameter(0, 4),
        "one": parameter(1),
    }
    trace = compare(load, weights, params).trace
    assert trace.unused == ()


def test_parameters_in_one_flat_memory_are_told_apart() -> None:
    weights = checkpoint({"a": (2, 3), "b": (4,)})
    flat = values((12,), torch.float32, 5)
    params = {"a": flat[1:7].view(2, 3), "b": flat[8:]}

    def load(params: Params, weights: Weights) -> None:
        for name, w in weights:
            params[name].copy_(w)

    compare(load, weights, params)


def test_falcon_and_bloom_copy_in_a_reshape() -> None:
    weights = checkpoint({"qkv": (2 * 3 * 4, 5)})

    def load(params: Params, weights: Weights) -> None:
        for _, w in weights:
            params["qkv"].data.copy_(w.view(2, 3, 4, *w.shape[1:]).transpose(0, 1).reshape(w.shape))

    compare(load, weights, {"qkv": parameter(24, 5)})


def test_a_stepped_slice_becomes_several_boxes() -> None:
    """gpt_oss interleaves gate and up rows: every second row."""
    weights = checkpoint({"gate_up": (E, 2 * INNER, HIDDEN)})

    def load(params: Params, weights: Weights) -> None:
        for _, w in weights:
            params["gate"].data.copy_(w[:, ::2])
            params["up"].data.copy_(w[:, 1::2])

    params = {"gate": parameter(E, INNER, HIDDEN), "up": parameter(E, INNER, HIDDEN)}
    trace = compare(load, weights, params).trace
    assert len(trace.layout.table) == 2 * INNER
