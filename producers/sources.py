"""What a caller hands to `Producer`, made into weights with a layout: sharded models are recognized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from weightdepot.producers.fsdp1 import fsdp1_weights, is_fsdp1
from weightdepot.producers.hf import as_checkpoint
from weightdepot.producers.zero3 import is_zero3, unwrapped_engine, zero3_weights
from weightdepot.store.errors import InvalidRequest
from weightdepot.store.weights import Weights


def weights_of(weights: Any) -> Weights:
    """The weights, with a layout for a model that FSDP1 or ZeRO-3 shards, and for one that transformers holds
    in another form than its checkpoints do.

    Mappings and `Mapped` are left as they are, and so are other modules (plain, FSDP2; of DDP the module in
    it). Raises InvalidRequest
    for a model that cannot be published without more being said (Megatron-core, PEFT), naming the function to
    use; and what the adapters raise.
    """
    if isinstance(weights, (list, tuple)) and weights and all(isinstance(w, nn.Module) for w in weights):
        raise InvalidRequest(
            "a list of modules: for the chunks of a Megatron-core model use "
            "weightdepot.producers.megatron.megatron_weights(model, vocab_size=..., names=...)"
        )
    if isinstance(weights, Mapping) or not isinstance(weights, nn.Module):
        return weights
    if isinstance(weights, nn.parallel.DistributedDataParallel):
        weights = weights.module
    module = unwrapped_engine(weights)
    if any(_is_megatron(m) for m in module.modules()):
        raise InvalidRequest(
            f"a Megatron-core model ({type(module).__name__}) does not bear the checkpoint's names: give "
            f"weightdepot.producers.megatron.megatron_weights(model, vocab_size=..., names=...)"
        )
    if any(_is_peft(m) for m in module.modules()):
        raise InvalidRequest(
            "a PEFT model is either published merged, or its adapter alone: give peft_merged(model) or "
            "peft_adapter(model), of weightdepot.producers.peft"
        )
    return as_checkpoint(weights, sharded_weights(weights))


def sharded_weights(module: nn.Module) -> Weights:
    """The weights of a module under its own names, whatever they are."""
    if is_fsdp1(module):
        return fsdp1_weights(module)
    if is_zero3(module):
        return zero3_weights(module)
    return unwrapped_engine(module)


def _is_megatron(module: nn.Module) -> bool:
    return any(c.__module__.startswith("megatron.core.models.") for c in type(module).__mro__)


def _is_peft(module: nn.Module) -> bool:
    # a layer is enough: transformers puts adapters into its models without PEFT's own wrapper
    return any(c.__module__.startswith("peft.") for c in type(module).__mro__)
