"""What a checkpoint holds, where only its config.json is there: asked of transformers' own model, on meta."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weightdepot.store.checkpoint import checkpoint_index, checkpoint_tensors, has_weights
from weightdepot.store.dtypes import dtype_name
from weightdepot.store.errors import InvalidRequest
from weightdepot.store.layout import TensorSpec


@dataclass(frozen=True)
class Described:
    """What is known of a checkpoint's contents."""

    tensors: tuple[TensorSpec, ...]
    source: str
    """From what it is known, for a person."""
    unknown: tuple[str, ...] = ()
    """Names in the index of which neither shape nor data type is known."""


def describe_checkpoint(directory: str | Path) -> Described:
    """The tensors of a checkpoint: from its files' headers, or else from config.json, and an index if there.

    Raises InvalidRequest when neither is there, or cannot be read.
    """
    path = Path(directory)
    if path.is_dir() and has_weights(path):
        return Described(checkpoint_tensors(path), "the headers of its files")
    if not (path / "config.json").is_file():
        raise InvalidRequest(f"{path} holds neither safetensors files nor a config.json")
    tensors, index = tensors_of_config(path), checkpoint_index(path)
    if not index:
        return Described(tensors, "its config.json, by transformers")
    known = {t.name for t in tensors}
    return Described(
        tuple(t for t in tensors if t.name in index),
        "its index and config.json, by transformers",
        tuple(name for name in index if name not in known),
    )


def tensors_of_config(directory: str | Path) -> tuple[TensorSpec, ...]:
    """The tensors that transformers would save for the model of a config.json, with the checkpoint's names.

    transformers 5 holds stacked what checkpoints hold apart (experts): its own conversion is run backwards,
    on meta. Data types are those of loading and saving again: the config's, but for the modules that
    transformers keeps in float32.

    Raises InvalidRequest when transformers is missing or does not know the model.
    """
    try:
        import transformers
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError as error:
        raise InvalidRequest(
            f"there are no safetensors files, and to tell from config.json what they would hold takes "
            f"transformers 5 (pip install 'transformers>=5'): {error}"
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(str(directory), local_files_only=True)
        if getattr(config, "quantization_config", None):
            raise InvalidRequest(
                f"{directory} describes a quantized checkpoint: its config.json does not tell what the files "
                f"hold (scales, packed weights); give a directory with the safetensors files"
            )
        cls = _model_class(transformers, config)
        with torch.device("meta"):
            model = cls._from_config(config, dtype=config.dtype or torch.float32)
        state = _untied(model)
        ignored = set(model._keys_to_ignore_on_save or ())
        saved = revert_weight_conversion(model, {k: v for k, v in state.items() if k not in ignored})
    except InvalidRequest:
        raise
    except (ValueError, OSError, KeyError, AttributeError, TypeError, ImportError, RuntimeError) as error:
        raise InvalidRequest(
            f"transformers cannot tell what a checkpoint of {directory} holds: "
            f"{type(error).__name__}: {error}"
        ) from error
    wide = _kept_in_float32(model, config.dtype)
    return tuple(
        TensorSpec(
            name,
            tuple(tensor.shape),
            "float32"
            if wide and tensor.is_floating_point() and wide.search(name)
            else dtype_name(tensor.dtype),
        )
        for name, tensor in saved.items()
    )


def _model_class(transformers: Any, config: Any) -> Any:
    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if found is not None:
            return found
    return transformers.AutoModelForCausalLM._model_mapping[type(config)]


def _untied(model: Any) -> dict[str, torch.Tensor]:
    """The state without the names that are another tensor's second name: those are saved once."""
    state: dict[str, torch.Tensor] = model.state_dict()
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    return {name: t for name, t in state.items() if tied.get(name, name) == name or tied[name] not in state}


def _kept_in_float32(model: Any, dtype: torch.dtype | None) -> re.Pattern[str] | None:
    names = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        names |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    if dtype not in (torch.float16, torch.bfloat16) or not names:
        return None
    inner = "|".join(re.escape(n).replace(r"\*", ".*") for n in sorted(names))
    return re.compile(rf"(^|\.)({inner})(\.|$)")
