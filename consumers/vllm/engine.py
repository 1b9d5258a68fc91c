"""vLLM's weight transfer backend `weightdepot`: one engine in each worker, a consumer rank of the depot.

`init_transfer_engine` joins the group; from then on the next version is read into staging memory while the
model generates, and `update_weights` puts it in place. What it needs of vLLM is listed in `needs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger

from weightdepot.consumers.consumer import Consumer
from weightdepot.consumers.vllm import experts, needs
from weightdepot.consumers.vllm.apply import Applier, Whole
from weightdepot.consumers.vllm.offline import trace_model
from weightdepot.consumers.vllm.shadow import shadow_of
from weightdepot.consumers.whole import given, with_whole
from weightdepot.store.errors import InvalidRequest, WaitTimeout
from weightdepot.store.layout import TensorSpec
from weightdepot.store.timeouts import Timeouts
from weightdepot.store.weights import Mapped

logger = init_logger("vllm.weightdepot")

GRACE = (
    5.0  # seconds that `init` waits for the producers to say what the checkpoint holds; an update waits on
)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """`init_info` of `init_weight_transfer_engine`."""

    controller: str
    """The controller's URL."""
    model: str
    """The name under which versions are published."""
    group: str = "vllm"
    """The name of this engine among those that follow the model: one for each engine."""
    transport: Literal["auto", "shm", "tcp", "mooncake"] = "auto"
    run: str = "default"
    token: str | None = None
    """Where the controller asks for one; None: WEIGHTDEPOT_TOKEN of the workers' environment."""
    ca: str | None = None
    """A PEM file of the authorities that signed the controller's certificate; None: WEIGHTDEPOT_CA."""
    prefetch: bool = True
    """Read the next version in the background, while the model generates."""
    verify: bool = True
    optional: list[str] = field(default_factory=list)
    """Parameters that the loader may leave alone (names, or patterns with `*`)."""
    timeouts: dict[str, float] = field(default_factory=dict)
    """Those of `weightdepot.Timeouts`, in seconds."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """`update_info` of `update_weights`. All empty: the version that was prefetched, or the current one."""

    version: int | None = None
    """Exactly this version, which may be older than the one that the engine has."""
    tag: str | None = None
    """Exactly the version that this name points to."""
    min_version: int | None = None
    """This version or a newer one; waits for it."""
    max_lag: int | None = None
    """Change nothing when what the engine has is at most so many published versions behind."""
    timeout: float | None = None
    """Seconds to wait for the version and the other ranks."""


class WeightDepotEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        needs.check()
        experts.mend()
        self._consumer: Consumer | None = None
        self._applier: Applier | None = None
        self._info: InitInfo | None = None
        self.version: int | None = None
        """What the weights are; None: what vLLM loaded when it started."""
        self.torn: str = ""
        """Why the weights are not whole; "" when they are."""

    # -- the calls of vLLM, in their order -----------------------------------------------------------------

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join the group as this worker's rank. May be called again, to join another.

        Raises LayoutError naming everything that does not map, MemberConflict, ControllerUnavailable.
        """
        self.shutdown()
        rank, size, group = self._place(init_info.group)
        try:
            timeouts = Timeouts(**init_info.timeouts)
        except TypeError as error:
            raise InvalidRequest(f"init_info.timeouts: {error}") from error
        self._info = init_info
        self._consumer = Consumer(
            init_info.controller,
            model=init_info.model,
            weights=self._trace,
            group=group,
            rank=rank,
            world_size=size,
            transport=init_info.transport,
            verify=init_info.verify,
            optional=init_info.optional,
            install=self._install,
            run=init_info.run,
            token=init_info.token,
            ca=init_info.ca,
            timeouts=timeouts,
        )
        try:
            self._consumer.prepare(timeout=min(GRACE, timeouts.join))
        except WaitTimeout as error:
            logger.warning("not traced yet: %s", error)
        except BaseException:
            self.shutdown()
            raise
        self._prefetch()

    def start_weight_update(self) -> None:
        """Nothing is written before `update_weights`."""
        self._joined()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Bring the weights to a version: the same on every rank of the engine, whole."""
        consumer = self._joined()
        if update_info.version is not None and update_info.tag is not None:
            raise InvalidRequest("version and tag were given: one of them says which version is wanted")
        try:
            version = consumer.update(
                update_info.min_version,
                update_info.timeout,
                version=update_info.tag if update_info.version is None else update_info.version,
                max_lag=update_info.max_lag,
            )
        except BaseException as error:
            if self.torn:
                self.torn = f"{type(error).__name__}: {error}"
            raise
        self.version, self.torn = version, ""
        if (last := consumer.last) is not None:
            logger.info(
                "version %d of %r is in place: waited %.3f s, read %.3f s%s, placed %.3f s, group %.3f s",
                version, consumer.model, last.wait, last.pull,
                " (before, in the background)" if last.prefetched else "", last.place, last.group,
            )  # fmt: skip

    def finish_weight_update(self) -> None:
        """Begin to prefetch the version after this one."""
        self._joined()
        if self.torn:
            raise InvalidRequest(f"the update failed: {self.torn}; start another")
        self._prefetch()

    def shutdown(self) -> None:
        """Leave the group. The weights stay as they are."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()

    # -- how -----------------------------------------------------------------------------------------------

    def _place(self, group: str) -> tuple[int, int, str]:
        """This worker's rank, of how many, in which group.

        Data-parallel replicas that share experts are one engine; others are engines of their own, though
        they are given the same `init_info`, and follow the model each as a group of its own.
        """
        parallel = self.parallel_config
        if parallel.data_parallel_size > 1:
            rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
            return rank, parallel.data_parallel_size * parallel.world_size, group
        replica = parallel.data_parallel_index
        return parallel.rank, parallel.world_size, f"{group}-{replica}" if replica else group

    def _joined(self) -> Consumer:
        if self._consumer is None:
            raise InvalidRequest("the engine has not joined: call init_weight_transfer_engine first")
        return self._consumer

    def _prefetch(self) -> None:
        consumer = self._joined()
        # A layout is found in this thread only: building a shadow changes defaults of torch and vLLM that a
        # model which generates meanwhile would see.
        if self._info is not None and self._info.prefetch and consumer.layout is not None:
            consumer.prefetch().add_done_callback(_noted)

    def _trace(self, tensors: Sequence[TensorSpec]) -> Mapped:
        """Where the loader puts the checkpoint's elements, found on a shadow of the model."""
        optional = tuple(self._info.optional) if self._info else ()
        with set_current_vllm_config(self.vllm_config):
            shadow = shadow_of(self.vllm_config)
            trace = trace_model(shadow, tensors, optional=optional)
        logger.info("%s", trace.report())
        self._applier = Applier(
            self.model,
            self.model_config.dtype,
            trace.layout,
            aliases=trace.aliases,
            left=[left.parameter for left in trace.left],
            whole=Whole(frozenset(trace.whole_parameters), lambda staged: given(trace.whole, staged)),
        )
        return Mapped(with_whole(trace), dict)

    def _install(self, staged: Any) -> None:
        assert self._applier is not None
        self.torn = "new weights are being written"
        self._applier(staged)


def _noted(future: Future[int]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        logger.warning("nothing was prefetched, the next update reads for itself: %s", error)
