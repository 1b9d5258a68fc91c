"""Shadows: any rank of an SGLang model, without an engine and without weights, to trace its loader on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.rotary_embedding import factory as rotary_embedding
from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
from sglang.srt.model_loader.utils import set_default_torch_dtype
from sglang.srt.server_args import ServerArgs
from torch import nn

from weightdepot.consumers.sglang.ranks import rank_context
from weightdepot.store.errors import InvalidRequest

Device = Literal["meta", "cpu", "auto"]


def engine_arguments(
    directory: str | Path, tensor: int = 1, expert: int = 1, pipeline: int = 1, **arguments: Any
) -> ServerArgs:
    """SGLang's own arguments of an engine for a model's directory, of which `config.json` suffices.

    tensor, pipeline: ranks of tensor and pipeline parallelism; expert: over how many of the former experts
    are shared out whole. `arguments` are further ones of SGLang's ServerArgs.
    Raises InvalidRequest with SGLang's reason.
    """
    path = Path(directory)
    if not (path / "config.json").is_file():
        raise InvalidRequest(f"{path} has no config.json: is it a model's directory?")
    try:
        return ServerArgs(
            model_path=str(path),
            tp_size=tensor,
            ep_size=expert,
            pp_size=pipeline,
            **{"device": "cpu", "skip_tokenizer_init": True, **arguments},
        )
    except Exception as error:  # whatever SGLang raises here says why it does not serve this model
        raise InvalidRequest(f"SGLang does not serve {path}: {type(error).__name__}: {error}") from error


@contextmanager
def shadow(arguments: ServerArgs, rank: int = 0, device: Device = "auto") -> Iterator[nn.Module]:
    """One rank's model, as an engine of these arguments would build it, not loaded.

    Inside the context SGLang's ranks are that rank's, which some loaders ask for: trace or load there. The
    module may be used for its parameters afterwards. In a process of a running engine use `shadow_of`.

    Raises InvalidRequest for a model or a rank that does not do.
    """
    with rank_context(arguments, rank):
        yield shadow_of(ModelConfig.from_server_args(arguments), device)


def shadow_of(config: ModelConfig, device: Device = "auto") -> nn.Module:
    """A twin of the model of `config`, for the rank that SGLang's context says this process is.

    On `meta` it takes no memory. Constructors that read what they made fail there: `auto` then takes `cpu`.
    Rotary embeddings, which models of one process share, are the twin's own.

    Raises InvalidRequest when SGLang cannot build it, with SGLang's reason.
    """
    failures: list[Exception] = []
    for where in ("meta", "cpu") if device == "auto" else (device,):
        try:
            return _build(config, where)
        except Exception as error:  # noqa: BLE001 - whatever a constructor raises, it cannot be built so
            failures.append(error)
    reason = f"{type(failures[0]).__name__}: {failures[0]}"
    raise InvalidRequest(f"SGLang cannot build {config.model_path} here: {reason}") from failures[0]


def _build(config: ModelConfig, device: str) -> nn.Module:
    load = LoadConfig()
    quantization = _get_quantization_config(config, load)
    with (
        patch.dict(rotary_embedding._ROPE_DICT, clear=True),
        set_default_torch_dtype(config.dtype),
        torch.device(device),
    ):
        model: nn.Module = _initialize_model(config, load, quantization)
    return model
