"""Ranks of Megatron-core, filled by a conversion written by hand, independently of the product's tables."""

from __future__ import annotations

import contextlib
import functools
from typing import Any
from unittest import mock

import torch

from weightdepot.producers.megatron import megatron_weights
from weightdepot.producers.megatron_names import MEGATRON_NAMES, Rule
from weightdepot.store.errors import LayoutError

from .checkpoints import config_of, load
from .ranks import Rank

CPU = torch.device("cpu")


@contextlib.contextmanager
def parallel(**sizes: int) -> Any:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(**sizes)
    try:
        # tied embeddings are moved to the GPU to be compared between the pipeline's ends
        with mock.patch.object(torch.Tensor, "cuda", lambda self, *a, **k: self):
            yield parallel_state
    finally:
        parallel_state.destroy_model_parallel()


def build(hf: Any, ps: Any, vp_stage: int | None = None, **changes: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    experts = getattr(hf, "num_experts", None)
    options: dict[str, Any] = {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "ffn_hidden_size": hf.intermediate_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.rms_norm_eps,
        "add_bias_linear": False,
        "add_qkv_bias": hf.model_type.startswith("qwen2"),
        "qk_layernorm": not hf.model_type.startswith("qwen2"),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "tensor_model_parallel_size": ps.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": ps.get_pipeline_model_parallel_world_size(),
        "expert_model_parallel_size": ps.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": ps.get_expert_tensor_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": ps.get_virtual_pipeline_model_parallel_world_size(),
        "pipeline_dtype": torch.float32,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
    }
    if experts:
        options |= {
            "num_moe_experts": experts,
            "moe_ffn_hidden_size": hf.moe_intermediate_size,
            "moe_router_topk": hf.num_experts_per_tok,
            "moe_router_load_balancing_type": "none",
            "moe_router_pre_softmax": False,
            "moe_token_dispatcher_type": "allgather",
            "moe_grouped_gemm": False,
        }
    config = TransformerConfig(**{**options, **changes})
    spec = get_gpt_layer_local_spec(
        num_experts=experts, moe_grouped_gemm=False, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    return GPTModel(
        config,
        spec,
        vocab_size=104,  # padded, as Megatron's training does
        max_sequence_length=hf.max_position_embeddings,
        pre_process=ps.is_pipeline_first_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage),
        post_process=ps.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage),
        position_embedding_type="rope",
        rotary_base=int(config_rope(hf)),
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        vp_stage=vp_stage,
    )


def config_rope(hf: Any) -> float:
    parameters = getattr(hf, "rope_parameters", None) or {}
    return float(parameters.get("rope_theta", 10000.0))


@torch.no_grad()
def fill(model: Any, files: dict[str, torch.Tensor], hf: Any, ps: Any, vp_stage: int | None = None) -> None:
    """The checkpoint into this rank's parameters, as someone who knows Megatron would write it by hand."""
    tp, tp_size = ps.get_tensor_model_parallel_rank(), ps.get_tensor_model_parallel_world_size()
    ep, ep_size = ps.get_expert_model_parallel_rank(), ps.get_expert_model_parallel_world_size()
    etp, etp_size = ps.get_expert_tensor_parallel_rank(), ps.get_expert_tensor_parallel_world_size()
    groups = hf.num_key_value_heads

    def rows(t: torch.Tensor, expert: bool = False) -> torch.Tensor:
        part: torch.Tensor = t.chunk(etp_size if expert else tp_size)[etp if expert else tp]
        return part

    def columns(t: torch.Tensor, expert: bool = False) -> torch.Tensor:
        part: torch.Tensor = t.chunk(etp_size if expert else tp_size, dim=1)[etp if expert else tp]
        return part

    def vocabulary(t: torch.Tensor) -> torch.Tensor:
        return rows(torch.cat([t, torch.full((104 - t.shape[0], t.shape[1]), 77.0)]))

    def fused(prefix: str, kind: str) -> torch.Tensor:
        parts = [files[f"{prefix}self_attn.{x}_proj.{kind}"] for x in "qkv"]
        by_group = [p.reshape(groups, -1, *p.shape[1:]) for p in parts]
        return rows(torch.cat(by_group, dim=1).reshape(-1, *parts[0].shape[1:]))

    def gated(prefix: str, expert: bool = False) -> torch.Tensor:
        gate, up = files[prefix + "gate_proj.weight"], files[prefix + "up_proj.weight"]
        return torch.cat([rows(gate, expert), rows(up, expert)])

    done = set()

    def put(parameter: torch.Tensor, value: torch.Tensor) -> None:
        assert parameter.shape == value.shape, (parameter.shape, value.shape)
        parameter.copy_(value)
        done.add(id(parameter))

    if model.pre_process:
        put(model.embedding.word_embeddings.weight, vocabulary(files["model.embed_tokens.weight"]))
    if model.post_process:
        put(model.decoder.final_layernorm.weight, files["model.norm.weight"])
        if model.output_layer.weight is not None:
            head = files.get("lm_head.weight", files["model.embed_tokens.weight"])
            put(model.output_layer.weight, vocabulary(head))
    for layer in model.decoder.layers:
        p = f"model.layers.{layer.layer_number - 1}."
        attention, mlp = layer.self_attention, layer.mlp
        put(layer.input_layernorm.weight, files[p + "input_layernorm.weight"])
        put(layer.pre_mlp_layernorm.weight, files[p + "post_attention_layernorm.weight"])
        put(attention.linear_qkv.weight, fused(p, "weight"))
        if hf.model_type.startswith("qwen2"):
            put(attention.linear_qkv.bias, fused(p, "bias"))
        else:
            put(attention.q_layernorm.weight, files[p + "self_attn.q_norm.weight"])
            put(attention.k_layernorm.weight, files[p + "self_attn.k_norm.weight"])
        put(attention.linear_proj.weight, columns(files[p + "self_attn.o_proj.weight"]))
        if hf.model_type.endswith("_moe"):
            put(mlp.router.weight, files[p + "mlp.gate.weight"])
            local = hf.num_experts // ep_size
            for i, expert in enumerate(mlp.experts.local_experts):
                e = f"{p}mlp.experts.{ep * local + i}."
                put(expert.linear_fc1.weight, gated(e, expert=True))
                put(expert.linear_fc2.weight, columns(files[e + "down_proj.weight"], expert=True))
            if mlp.use_shared_expert:
                put(mlp.shared_experts.linear_fc1.weight, gated(p + "mlp.shared_expert."))
                put(
                    mlp.shared_experts.linear_fc2.weight,
                    columns(files[p + "mlp.shared_expert.down_proj.weight"]),
                )
                put(mlp.shared_experts.gate_weight, files[p + "mlp.shared_expert_gate.weight"])
        else:
            put(mlp.linear_fc1.weight, gated(p + "mlp."))
            put(mlp.linear_fc2.weight, columns(files[p + "mlp.down_proj.weight"]))
    assert done == {id(q) for q in model.parameters()}, "the conversion by hand left parameters out"


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """A forward pass on the CPU: Megatron asks CUDA for its device and its random state."""
    from megatron.core import tensor_parallel
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    size = tokens.shape[1]
    mask = torch.ones(1, 1, size, size, dtype=torch.bool).triu(1)
    fork = mock.patch.object(
        CudaRNGStatesTracker, "fork", side_effect=lambda *a, **k: contextlib.nullcontext()
    )
    with mock.patch("torch.cuda.current_device", return_value=CPU), fork, torch.no_grad():
        out = model(tokens, torch.arange(size)[None], mask)
        found: torch.Tensor = tensor_parallel.gather_from_tensor_model_parallel_region(out)[..., :101]
        return found


def same_logits(rank: Rank, model: Any, kind: str) -> None:
    import transformers

    tokens = torch.randint(0, 101, (1, 9), generator=torch.Generator().manual_seed(3))
    twin = transformers.AutoModelForCausalLM.from_pretrained(
        rank.folder / kind, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        expected = twin(input_ids=tokens).logits
    difference = (logits(model.eval(), tokens) - expected).abs().max().item()
    rank.save(
        f"{kind}-logits", {"difference": torch.tensor([difference]), "size": expected.abs().max()[None]}
    )


def main(rank: Rank) -> None:
    rank.join()
    with parallel(tensor_model_parallel_size=2) as ps:
        for kind in ("qwen3", "qwen2", "qwen3-mqa"):
            hf, files = config_of(kind), load(rank.folder / kind)
            model = build(hf, ps)
            fill(model, files, hf, ps)
            weights = megatron_weights(model, vocab_size=101, names=hf.model_type)
            rank.publish(f"megatron-tp-{kind}", weights)
            same_logits(rank, model, kind)
            if kind == "qwen3":
                wrong(rank, model, hf)
                with torch.no_grad():
                    for p in model.parameters():
                        p.data = p.data * 2  # other memory: the next publish reads there
                rank.publish("megatron-moved", weights)
            if kind == "qwen2":
                from megatron.core.transformer.module import Float16Module

                model.config.bf16 = True
                half = Float16Module(model.config, model)
                rank.publish("megatron-half", megatron_weights(half, vocab_size=101, names=kind))
    with parallel(pipeline_model_parallel_size=2) as ps:
        for kind in ("qwen3", "qwen2"):
            hf, files = config_of(kind), load(rank.folder / kind)
            model = build(hf, ps)
            fill(model, files, hf, ps)
            rank.publish(f"megatron-pp-{kind}", megatron_weights(model, vocab_size=101, names=kind))
    with parallel(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2) as ps:
        hf, files = config_of("qwen3"), load(rank.folder / "qwen3")
        chunks = [build(hf, ps, vp_stage=i) for i in range(2)]
        for i, chunk in enumerate(chunks):
            fill(chunk, files, hf, ps, vp_stage=i)
        rank.publish("megatron-vpp-qwen3", megatron_weights(chunks, vocab_size=101, names="qwen3"))
    hf, files = config_of("qwen3_moe", num_experts=4), load(rank.folder / "qwen3_moe")
    for name, sizes in {
        "ep": {"expert_model_parallel_size": 2},
        "etp": {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
        "tp-ep": {
            "tensor_model_parallel_size": 2,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
        },
    }.items():
        with parallel(**sizes) as ps:
            model = build(hf, ps)
            fill(model, files, hf, ps)
            rank.publish(f"megatron-{name}-moe", megatron_weights(model, vocab_size=101, names="qwen3_moe"))
            if name == "ep":
                same_logits(rank, model, "qwen3_moe")
    hf, files = config_of("qwen2_moe"), load(rank.folder / "qwen2_moe")
    with parallel(expert_model_parallel_size=2) as ps:
        model = build(hf, ps, moe_shared_expert_intermediate_size=20, moe_shared_expert_gate=True)
        fill(model, files, hf, ps)
        rank.publish("megatron-shared-moe", megatron_weights(model, vocab_size=101, names="qwen2_moe"))
        same_logits(rank, model, "qwen2_moe")
    hf, files = config_of("qwen3_moe", num_experts=4), load(rank.folder / "qwen3_moe")
    # layers that differ from each other have their number in the key
    with parallel(expert_model_parallel_size=2) as ps:
        model = build(hf, ps, moe_layer_freq=[1, 1])
        fill(model, files, hf, ps)
        rank.publish("megatron-numbered-moe", megatron_weights(model, vocab_size=101, names="qwen3_moe"))


def wrong(rank: Rank, model: Any, hf: Any) -> None:
    """Mappings that are not right: published under a name of their own, or refused."""
    table = MEGATRON_NAMES["qwen3"]
    fc1 = table["decoder.layers.mlp.linear_fc1.weight"]
    swapped = {**table, "decoder.layers.mlp.linear_fc1.weight": Rule("gate_up", fc1.names[::-1])}
    rank.publish("megatron-swapped", megatron_weights(model, vocab_size=101, names=swapped))
    layers = "decoder.layers."
    fc2 = layers + "mlp.linear_fc2.weight"
    q, k = (f"{layers}self_attention.{x}_layernorm.weight" for x in "qk")
    tables: dict[str, Any] = {
        "unnamed": {n: r for n, r in table.items() if "qkv.weight" not in n and "final" not in n},
        "heads": {**table, fc2: Rule("qkv", ("a{layer}", "b{layer}", "c{layer}"))},
        "one-name": {**table, fc2: Rule("same", ("down",))},
        "twice": {**table, k: table[q]},
        "family": "gpt5",
    }
    for what, names in tables.items():
        attempt(rank, what, functools.partial(megatron_weights, model, vocab_size=101, names=names))
    attempt(rank, "vocabulary", lambda: megatron_weights(model, vocab_size=105, names="qwen3"))
    model.config.layernorm_zero_centered_gamma = True
    attempt(rank, "centered", lambda: megatron_weights(model, vocab_size=101, names="qwen3"))
    model.config.layernorm_zero_centered_gamma = False
    bias = torch.nn.Parameter(torch.zeros(3))  # case 14: a bias that one export path does not know
    model.decoder.layers[1].mlp.router_bias = bias
    whole = type(model).sharded_state_dict

    def forgetful(self: Any, *a: Any, **k: Any) -> Any:
        return {n: v for n, v in whole(self, *a, **k).items() if "router_bias" not in n}

    with mock.patch.object(type(model), "sharded_state_dict", forgetful):
        attempt(rank, "left-out", lambda: megatron_weights(model, vocab_size=101, names="qwen3"))

    def copying(self: Any, *a: Any, **k: Any) -> Any:
        found = whole(self, *a, **k)
        for n, v in found.items():
            if n.endswith("linear_proj.weight"):
                v.data = v.data.clone()
        return {n: v for n, v in found.items() if "router_bias" not in n}

    del model.decoder.layers[1].mlp.router_bias
    with mock.patch.object(type(model), "sharded_state_dict", copying):
        attempt(rank, "copied", lambda: megatron_weights(model, vocab_size=101, names="qwen3"))
    attempt(rank, "itself", lambda: rank.producer("megatron-itself", model))
    attempt(rank, "chunks", lambda: rank.producer("megatron-itself", [model]))


def attempt(rank: Rank, what: str, call: Any) -> None:
    try:
        call()
    except (LayoutError, ValueError) as error:
        rank.refuse(what, error)
