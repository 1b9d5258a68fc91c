"""One rank's model filled twice: by vLLM's own loader from files, and by weightdepot from tiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from weightdepot.consumers.vllm.groups import rank_groups
from weightdepot.consumers.vllm.offline import trace_model
from weightdepot.consumers.vllm.shadow import shadow_of
from weightdepot.store.checkpoint import checkpoint_tensors

from ..filling import Filled, deliver, different, scribble, tensors_of, weights_of

__all__ = ["Filled", "both_ways", "deliver"]


def both_ways(config: VllmConfig, rank: int) -> Filled:
    """Everything that the loader fills, bit by bit; what it leaves is random, and the same on both sides."""
    directory = Path(config.model_config.model)
    with rank_groups(config, rank):
        trace = trace_model(shadow_of(config), checkpoint_tensors(directory), on_fault="keep")
        theirs, ours = shadow_of(config, "cpu"), shadow_of(config, "cpu")
        loader = DefaultModelLoader(config.load_config)
        loader.load_weights(ours, config.model_config)  # as in an engine, which was started from some weights
        for module in (theirs, ours):
            scribble(module)
        loader.load_weights(theirs, config.model_config)
        weights = weights_of(directory)
        deliver(weights, trace.layout, tensors_of(ours))
        if trace.needs_loader:
            load: Any = ours.load_weights
            load((name, weights[name].clone()) for name in trace.whole)
    return Filled(trace, different(theirs, ours))
