"""transformers' models, as their checkpoints have them: the library's own conversion says how, and is traced.

transformers 5 holds some weights in other forms than checkpoints do (experts stacked in one parameter), and
converts when it saves. That conversion is run once, over tensors without data; what it does is then composed
with where this rank's shards lie, whoever sharded them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from weightdepot.producers.zero3 import unwrapped_engine
from weightdepot.store.composing import compose
from weightdepot.store.dtypes import torch_dtype
from weightdepot.store.errors import InvalidRequest
from weightdepot.store.layout import Layout
from weightdepot.store.tracing import trace_export
from weightdepot.store.weights import Mapped, Named, Weights, layout_of, local_buffers


def transformers_model(module: nn.Module) -> Any:
    """The transformers model inside wrappers (FSDP1, a DeepSpeed engine, PEFT, `torch.compile`); None where
    there is none."""
    inner: Any = unwrapped_engine(module)
    for _ in range(4):
        if any(c.__module__ == "transformers.modeling_utils" for c in type(inner).__mro__):
            return inner
        wrapped = getattr(inner, "_fsdp_wrapped_module", None) or getattr(inner, "_orig_mod", None)
        if wrapped is None and hasattr(inner, "peft_config") and hasattr(inner, "get_base_model"):
            wrapped = inner.get_base_model()
        if not isinstance(wrapped, nn.Module):
            return None
        inner = wrapped
    return None


def as_checkpoint(module: nn.Module, weights: Weights) -> Weights:
    """The weights of a transformers model in the names and forms of its checkpoints.

    module: the model, wrapped or not. weights: of it, under the model's own names: a module (FSDP2), what
    `fsdp1_weights`, `zero3_weights` or `peft_merged` give. They are handed back as they are where the
    checkpoint has the same, and where `module` is no transformers model.

    Raises LayoutError naming every tensor that the library's conversion computes, and not only moves.
    """
    model = transformers_model(module)
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4 holds what it saves
        return weights
    if model is None:
        return weights
    held = layout_of(weights)
    ignored = set(model._keys_to_ignore_on_save or ())
    blank = {t.name: torch.empty(t.shape, dtype=torch_dtype(t.dtype), device="meta") for t in held.tensors}

    def export(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        kept = {name: t for name, t in state.items() if name not in ignored}
        saved: dict[str, torch.Tensor] = revert_weight_conversion(model, kept)
        return saved

    saved = export(blank)
    if all(blank.get(name) is t for name, t in saved.items()) and len(saved) == len(blank):
        return weights
    return exported(trace_export(export, blank).layout, weights)


def exported(full: Layout, weights: Weights) -> Mapped:
    """Weights that an exporter puts into other names and forms: `full` says which, of whole tensors."""
    if isinstance(weights, Mapped):
        return Mapped(compose(full, weights.layout), weights.buffers)
    named: Named = weights
    return Mapped(compose(full, layout_of(named)), lambda: local_buffers(named))


def transformers_weights(module: nn.Module, weights: Weights | None = None) -> Weights:
    """`as_checkpoint` for a model given by itself. `Producer` does this to every transformers model; call it
    for one whose weights come from elsewhere, as in `transformers_weights(model, peft_merged(model))`.

    Raises InvalidRequest for a module that is no transformers model, and what `as_checkpoint` raises.
    """
    from weightdepot.producers.sources import sharded_weights

    if transformers_model(module) is None:
        raise InvalidRequest(f"this {type(module).__name__} is no transformers model")
    return as_checkpoint(module, sharded_weights(module) if weights is None else weights)
