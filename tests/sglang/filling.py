"""One rank's model filled twice: by SGLang's own loader from files, and by weightdepot from tiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.server_args import ServerArgs

from weightdepot.consumers.sglang.offline import trace_model
from weightdepot.consumers.sglang.ranks import rank_context
from weightdepot.consumers.sglang.shadow import shadow_of
from weightdepot.store.checkpoint import checkpoint_tensors

from ..filling import Filled, deliver, different, scribble, tensors_of, weights_of


def both_ways(arguments: ServerArgs, rank: int) -> Filled:
    """Everything that the loader fills, bit by bit; what it leaves is random, and the same on both sides."""
    directory = Path(arguments.model_path)
    with rank_context(arguments, rank):
        config = ModelConfig.from_server_args(arguments)
        trace = trace_model(shadow_of(config, "meta"), checkpoint_tensors(directory), on_fault="keep")
        theirs, ours = shadow_of(config, "cpu"), shadow_of(config, "cpu")
        for module in (theirs, ours):
            scribble(module)
        weights = weights_of(directory)
        given = ((name, w.clone()) for name, w in sorted(weights.items()))
        DefaultModelLoader.load_weights_only(theirs, given, torch.device("cpu"))
        deliver(weights, trace.layout, tensors_of(ours))
        if trace.needs_loader:
            load: Any = ours.load_weights
            load((name, weights[name].clone()) for name in trace.whole)
    return Filled(trace, different(theirs, ours))
