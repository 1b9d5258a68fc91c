"""The entry point in vLLM's group `vllm.general_plugins`: makes the backend `weightdepot` known.

vLLM calls `register` in each of its processes, whichever backend is chosen, so that it does little, and never
raises: what a vLLM lacks is said when the backend is chosen.
"""

from __future__ import annotations

import logging

NAME = "weightdepot"


def register() -> None:
    """Makes `--weight-transfer-config '{"backend": "weightdepot"}'` work. May be called again."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

        from weightdepot.consumers.vllm import core

        if NAME not in Factory._registry:
            Factory.register_engine(NAME, "weightdepot.consumers.vllm.engine", "WeightDepotEngine")
        core.install()
    except (ImportError, AttributeError) as error:
        logging.getLogger("vllm.weightdepot").warning(
            "this vLLM has no weight transfer that weightdepot knows (written for 0.32): %s", error
        )
