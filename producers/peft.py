"""Models with PEFT adapters: merged weights under the base's names, or an adapter as a model of its own.

An adapter's names are PEFT's own: its `get_peft_model_state_dict` is run over tensors without data, so that
sharded adapters (FSDP2, FSDP1, ZeRO-3) are published without being gathered.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from weightdepot.producers.sources import sharded_weights
from weightdepot.producers.zero3 import unwrapped_engine
from weightdepot.store.errors import InvalidRequest, LayoutError, LayoutFault
from weightdepot.store.layout import renamed
from weightdepot.store.weights import Mapped, clean_name, layout_of, local_buffers

_PREFIX = "base_model.model."


def peft_merged(model: nn.Module) -> Mapped:
    """The weights of the base model with its active adapters merged into them, under the base model's names.

    The caller merges before each publish and unmerges after it:

        with weightdepot.Producer(..., weights=peft_merged(model)) as producer:
            model.merge_adapter()
            producer.publish(step)
            model.unmerge_adapter()

    A module that is trained in full (`modules_to_save`) is published as its active copy. A publish while an
    active adapter is not merged raises InvalidRequest and makes nothing visible.

    Raises InvalidRequest for a model without adapters, LayoutError naming every weight that cannot be
    published merged (quantized ones, and modules of which single tokens are trained).
    """
    inner = unwrapped_engine(model)
    if not _tuned(inner):
        raise InvalidRequest(f"this {type(inner).__name__} has no PEFT adapters")
    held = sharded_weights(model)
    layout = layout_of(held)
    names, faults = _merged_names(inner, [t.name for t in layout.tensors])
    faults += [
        LayoutFault(
            clean_name(n), f"is held as {type(p).__name__}: quantized weights cannot be published merged"
        )
        for n, p in inner.named_parameters()
        if hasattr(p, "quant_state") or type(p).__name__ in ("Params4bit", "Int8Params")
    ]
    if faults:
        raise LayoutError("these weights cannot be published merged", faults)

    def live() -> dict[str, torch.Tensor]:
        apart = _unmerged(inner)
        if apart:
            raise InvalidRequest(
                f"the active adapters are not merged in {len(apart)} layers ({', '.join(apart[:3])}): call "
                f"model.merge_adapter() before publish, and model.unmerge_adapter() after it"
            )
        return local_buffers(held)

    return Mapped(renamed(layout, names), live)


def peft_adapter(
    model: nn.Module, adapter: str = "default", *, save_embedding_layers: bool = False
) -> Mapped:
    """One adapter's weights, under the names that they have in a saved adapter (`adapter_model.safetensors`).

    Publish it as a model of its own, beside the base. Modules that its configuration names as trained in full
    are part of it. save_embedding_layers: as PEFT's own parameter; its "auto" is not offered, since it asks
    the Hub.

    Raises InvalidRequest for an adapter that the model does not have; LayoutError naming every module that
    the configuration names as trained in full and that is not there, every half of a LoRA pair without the
    other, and every tensor that PEFT would save in another form than it is held in.
    """
    try:
        from peft import get_peft_model_state_dict
    except ImportError as error:
        raise InvalidRequest(
            f"an adapter's names are PEFT's own; PEFT cannot be imported: {error}"
        ) from error
    inner = unwrapped_engine(model)
    configs: Mapping[str, Any] = getattr(inner, "peft_config", {})
    if adapter not in configs:
        raise InvalidRequest(
            f"there is no adapter {adapter!r}: {', '.join(map(repr, configs)) or 'none at all'}"
        )
    held = sharded_weights(model)
    layout = layout_of(held)
    blank = {t.name: torch.empty(t.shape, device="meta") for t in layout.tensors}
    saved = get_peft_model_state_dict(
        inner, state_dict=blank, adapter_name=adapter, save_embedding_layers=save_embedding_layers
    )
    own = {id(t): name for name, t in blank.items()}
    faults = [
        LayoutFault(name, "is saved in another form than it is held in")
        for name, t in saved.items()
        if id(t) not in own
    ]
    faults += adapter_faults(configs[adapter], saved)
    if faults:
        raise LayoutError(f"adapter {adapter!r} cannot be published", faults)
    names = {own[id(t)]: name for name, t in saved.items()}
    return Mapped(renamed(layout, names), lambda: local_buffers(held))


def adapter_weights(tensors: Mapping[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """An adapter's tensors that were named and gathered elsewhere, checked against its configuration.

    config: a `PeftConfig`, or what `adapter_config.json` holds. Raises LayoutError as `peft_adapter` does.
    """
    faults = adapter_faults(config, tensors)
    if faults:
        raise LayoutError("this adapter cannot be published", faults)
    return dict(tensors)


def adapter_faults(config: Any, names: Iterable[str]) -> list[LayoutFault]:
    """What an adapter of these tensors lacks, by its configuration."""
    present = list(names)
    if not present:
        return [LayoutFault("adapter", "has no tensors at all")]
    wanted = config.get("modules_to_save") if isinstance(config, Mapping) else config.modules_to_save
    faults = [
        LayoutFault(module, "is named by modules_to_save as trained in full, and no tensor of it is there")
        for module in ([wanted] if isinstance(wanted, str) else wanted or ())
        if not any(re.search(rf"(^|\.){re.escape(module)}\.", name) for name in present)
    ]
    known = set(present)
    for a, b in (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")):
        for one, other in ((a, b), (b, a)):
            faults += [
                LayoutFault(name, f"has no {other} beside it")
                for name in present
                if re.search(rf"\.{one}(\.|$)", name)
                and re.sub(rf"\.{one}(?=\.|$)", f".{other}", name) not in known
            ]
    return faults


def _tuned(model: nn.Module) -> dict[str, Any]:
    """The layers that adapters are put into, by name."""
    return {
        clean_name(name + ".")[:-1]: m
        for name, m in model.named_modules()
        if hasattr(m, "merged_adapters") and hasattr(m, "base_layer") and hasattr(m, "adapter_layer_names")
    }


def _unmerged(model: nn.Module) -> list[str]:
    apart = []
    for name, layer in _tuned(model).items():
        mine = {a for kind in layer.adapter_layer_names for a in getattr(layer, kind, ())}
        if layer.disable_adapters or set(layer.active_adapters) & mine != set(layer.merged_adapters):
            apart.append(name)
    return apart


def _merged_names(model: nn.Module, names: Iterable[str]) -> tuple[dict[str, str], list[LayoutFault]]:
    """For each of the model's own names the base model's, leaving out what is an adapter's."""
    left_out: list[str] = []
    copies: dict[str, str] = {}
    faults = []
    for prefix, layer in _tuned(model).items():
        kinds = (*layer.adapter_layer_names, *layer.other_param_names)
        left_out += [f"{prefix}.{kind}." for kind in kinds]
    for name, module in model.named_modules():
        prefix = clean_name(name + ".")
        if hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
            active = [a for a in module.active_adapters if a in module.modules_to_save]
            if len(active) > 1:
                faults.append(LayoutFault(prefix[:-1], f"has several active copies: {', '.join(active)}"))
            kept = f"modules_to_save.{active[0]}." if active else "original_module."
            left_out += [f"{prefix}original_module.", f"{prefix}modules_to_save."]
            copies[f"{prefix}{kept}"] = prefix
        elif hasattr(module, "token_adapter"):
            reason = "has single tokens that are trained, which is not supported merged"
            faults.append(LayoutFault(prefix[:-1], reason))
    found = {}
    for name in names:
        base = name
        for copy, prefix in copies.items():
            if name.startswith(copy):
                base = prefix + name[len(copy) :]
        if base == name and any(name.startswith(p) for p in left_out):
            continue
        # experts of one module are wrapped once for each of their parameters
        found[name] = re.sub(r"(\.base_layer)+\.", ".", base).removeprefix(_PREFIX)
    return found, faults
