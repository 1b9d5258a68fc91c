"""Shadows: any rank of a vLLM model, without an engine and without weights, to trace its loader on."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from pydantic import ValidationError
from torch import nn
from vllm.config import CompilationMode, VllmConfig, get_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.kernels import linear
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from weightdepot.consumers.vllm.groups import rank_groups
from weightdepot.store.errors import InvalidRequest

Device = Literal["meta", "cpu", "auto"]


@dataclass(frozen=True)
class Parallel:
    """How an engine is spread over ranks. One data-parallel replica: others are the same again."""

    tensor: int = 1
    pipeline: int = 1
    expert: bool = False
    """Whether experts are shared out whole, instead of cut in slices."""

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline

    def __str__(self) -> str:
        return (
            f"tp {self.tensor}"
            + (f", pp {self.pipeline}" if self.pipeline > 1 else "")
            + (", ep" if self.expert else "")
        )


def engine_config(directory: str | Path, parallel: Parallel | None = None, **arguments: Any) -> VllmConfig:
    """vLLM's own configuration of an engine for a model's directory, of which `config.json` suffices.

    `arguments` are further ones of vLLM's EngineArgs (`dtype`, `quantization`, `hf_overrides`, ...).
    Raises InvalidRequest with vLLM's reason for a model that it does not serve.
    """
    path = Path(directory)
    if not (path / "config.json").is_file():
        raise InvalidRequest(f"{path} has no config.json: is it a model's directory?")
    spread = parallel or Parallel()
    try:
        return EngineArgs(
            model=str(path),
            tensor_parallel_size=spread.tensor,
            pipeline_parallel_size=spread.pipeline,
            enable_expert_parallel=spread.expert,
            **{"skip_tokenizer_init": True, "enforce_eager": True, **arguments},
        ).create_engine_config()
    except Exception as error:  # whatever vLLM raises here says why it does not serve this model
        raise InvalidRequest(f"vLLM does not serve {path} ({spread}): {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """What it says, without the wrapping of pydantic, which vLLM's configurations raise through."""
    if isinstance(error, ValidationError):
        return "; ".join(str(e["msg"]).removeprefix("Value error, ") for e in error.errors())
    return f"{type(error).__name__}: {error}"


@contextmanager
def shadow(
    directory: str | Path,
    rank: int = 0,
    parallel: Parallel | None = None,
    *,
    device: Device = "auto",
    **arguments: Any,
) -> Iterator[nn.Module]:
    """One rank's model, as an engine of that spread would build it, not loaded.

    Inside the context vLLM's groups and current config are that rank's, which some loaders ask for: trace or
    load there. The module may be used for its parameters afterwards. For a process without process groups;
    in a vLLM worker use `shadow_of`.

    Raises InvalidRequest for a model, a rank or an environment that does not do.
    """
    config = engine_config(directory, parallel, **arguments)
    with rank_groups(config, rank):
        yield shadow_of(config, device)


def shadow_of(config: VllmConfig | None = None, device: Device = "auto") -> nn.Module:
    """A twin of the model of `config` (vLLM's current one, if None), for the rank that this process is.

    On `meta` it takes no memory. Some constructors read what they made, which meta tensors do not allow:
    `auto` then takes `cpu`, where memory that nobody writes costs nothing either. Nothing that a live model
    uses is touched: neither the config, in which each attention layer registers itself, nor the rotary
    embeddings that models of one process share.

    Raises InvalidRequest when vLLM cannot build it, with vLLM's reason.
    """
    given = config or get_current_vllm_config()
    failures: list[Exception] = []
    for where in ("meta", "cpu") if device == "auto" else (device,):
        for any_kernel in (False, True):
            try:
                return _build(given, where, any_kernel)
            except Exception as error:  # noqa: BLE001 - whatever a constructor raises, it cannot be built so
                failures.append(error)
    model = given.model_config.model
    raise InvalidRequest(f"vLLM cannot build {model} here: {_reason(failures[0])}") from failures[0]


def _build(given: VllmConfig, device: str, any_kernel: bool) -> nn.Module:
    """`any_kernel`: take the first one where the machine can run none (fp8 without a GPU): nothing is run."""
    own = copy.copy(given)
    own.compilation_config = copy.copy(given.compilation_config)
    own.compilation_config.static_forward_context = {}
    own.compilation_config.static_all_moe_layers = []
    own.compilation_config.mode = CompilationMode.NONE  # it never runs
    own.quant_config = copy.deepcopy(given.quant_config)
    kernels = patch.object(linear, "is_supported_and_can_implement_kernel", lambda *_: (True, ""))
    with (
        kernels if any_kernel else nullcontext(),
        patch.dict(rotary_embedding._ROPE_DICT, clear=True),
        patch.object(ExpertMapManager, "__init__", _on_cpu(ExpertMapManager.__init__)),
        set_default_torch_dtype(given.model_config.dtype),
        torch.device(device),
    ):
        model: nn.Module = initialize_model(own)
        return model


def _on_cpu(method: Any) -> Any:
    """Loaders ask which experts are theirs, so that this table needs values, on meta too."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with torch.device("cpu"):
            return method(*args, **kwargs)

    return wrapped
