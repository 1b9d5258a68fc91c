"""One run of a loader under the recorder: what it wrote to the parameters, and what went wrong."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weightdepot.store.dtypes import dtype_name
from weightdepot.store.errors import InvalidRequest
from weightdepot.store.geometry import overlaps_itself
from weightdepot.store.layout import TensorSpec
from weightdepot.store.tracing import moves, ops, spoiling
from weightdepot.store.tracing.content import Fault, Old, Untraceable
from weightdepot.store.tracing.counting import Counting
from weightdepot.store.tracing.recorder import Place, Recorder

REGISTERED = (ops, moves, spoiling)  # importing them registers the operations


LoadWeights = Callable[[Iterable[tuple[str, Tensor]]], Any]
MAX_RESTARTS = 32  # of a loader that raises: enough to name what is wrong


@contextmanager
def uncollected() -> Iterator[None]:
    """Tracing makes many small objects and hardly any cycle; looking for cycles would take a third of it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True)
class Target:
    """A parameter as it was before the run."""

    name: str
    tensor: Tensor
    kept: Tensor  # an alias of its data: put back, should the loader give the parameter other data
    place: Place
    needed: bool  # whether it must be filled

    @property
    def number(self) -> int:
        """Of the memory it lies in."""
        initial = self.place.memory.initial
        assert isinstance(initial, Old)
        return initial.buffer


@dataclass(frozen=True)
class Loading:
    """A loader, and what it writes to."""

    load_weights: LoadWeights
    tensors: Sequence[TensorSpec]
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor] = field(default_factory=dict)  # may be written, need not be
    # the tensors that go by the parameters' names when the loader is through
    after: Callable[[], Mapping[str, Tensor]] | None = None
    # puts back, after each run, what else the loader may have changed
    around: Callable[[], AbstractContextManager[None]] = nullcontext

    def record(self, chosen: Sequence[int] | None = None) -> Recording:
        """Run the loader over all tensors, or over the chosen ones (indices, rising) only.

        Over all, it is called again when it raises, with what it has not seen yet, to find all that is wrong.
        """
        recorder = Recorder(self.tensors)
        targets = _targets(recorder, self.parameters, self.buffers)
        found: dict[str, Tensor] = {}
        try:
            with self.around(), torch.no_grad(), recorder, Counting():
                if chosen is None:
                    _run(recorder, self.load_weights, range(len(self.tensors)), MAX_RESTARTS)
                else:
                    _run(recorder, self.load_weights, chosen, 1)
                recorder.current = -1
                if self.after is not None:
                    found = dict(self.after())
                for target in targets:
                    _follow(recorder, target, found.get(target.name, target.tensor))
        finally:
            for target in targets:
                if _moved(target.tensor, target):
                    target.tensor.data = target.kept
        return Recording(recorder, targets)


@dataclass(frozen=True)
class Recording:
    recorder: Recorder
    targets: list[Target]

    @property
    def faults(self) -> tuple[Fault, ...]:
        """What no tier can mend."""
        return (*self.recorder.faults, *self.recorder.tokens.lost())

    def aliases(self) -> dict[str, str]:
        """Tied parameters, and the first one of each tie."""
        first: dict[Any, str] = {}
        found: dict[str, str] = {}
        for target in self.targets:
            owner = first.setdefault((id(target.place.memory), *target.place[1:]), target.name)
            if owner != target.name:
                found[target.name] = owner
        return found


def _targets(
    recorder: Recorder, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
) -> list[Target]:
    targets = []
    for number, (name, tensor) in enumerate([*parameters.items(), *buffers.items()]):
        kept = tensor.detach()
        try:
            dtype_name(tensor.dtype)
            recorder.know(kept, number)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            # a sparse tensor, or a wrapper subclass (DTensor): it has no storage of its own
            raise InvalidRequest(
                f"parameter {name!r} ({type(tensor).__name__}) cannot be traced: {error}"
            ) from error
        place = recorder.place(kept)
        assert place is not None
        if tensor.numel() and overlaps_itself(place.shape, place.strides):
            raise InvalidRequest(f"parameter {name!r} cannot be traced: its elements share memory")
        targets.append(Target(name, tensor, kept, place, name in parameters))
        if name not in parameters and not tensor.is_meta and not tensor.is_floating_point():
            recorder.tables.add(number)
    return targets


def _moved(tensor: Tensor, target: Target) -> bool:
    return (
        tensor.untyped_storage()._cdata != target.kept.untyped_storage()._cdata
        or tensor.storage_offset() != target.place.offset
        or tuple(tensor.shape) != target.place.shape
        or tensor.stride() != target.place.strides
        or tensor.dtype != target.place.dtype
    )


def _follow(recorder: Recorder, target: Target, now: Tensor) -> None:
    """Where a parameter was replaced (`param.data = ...`, a new Parameter), take the new one's content."""
    if not _moved(now, target):
        return
    if tuple(now.shape) != target.place.shape:
        reason = f"is replaced by a tensor of shape {list(now.shape)}, not {list(target.place.shape)}"
        recorder.faults.append(Fault("set_data", (), target.name, 0, reason))
        return
    place = recorder.place(now)
    if place is None:
        recorder.faults.append(Fault("set_data", (), target.name, 0, "is replaced by an unrecorded tensor"))
    elif place.dtype != target.place.dtype:
        reason = f"is replaced by a tensor of {place.dtype}, not {target.place.dtype}"
        recorder.faults.append(Fault("set_data", (), target.name, 0, reason))
    else:
        recorder.copy(target.place, place)


def _run(recorder: Recorder, load_weights: LoadWeights, chosen: Sequence[int], attempts: int) -> None:
    """Call the loader; when it raises, again with what it has not seen yet."""
    tensors = recorder.tensors
    state = {"next": 0, "done": False}

    def weights() -> Iterator[tuple[str, Tensor]]:
        while state["next"] < len(chosen):
            i = chosen[state["next"]]
            state["next"] += 1
            recorder.current = i
            yield tensors[i].name, recorder.incoming(i)
        state["done"] = True

    for _ in range(attempts):
        before = state["next"]
        try:
            load_weights(weights())
        except Untraceable:
            pass  # its fault is recorded already
        except Exception as error:  # noqa: BLE001 - whatever the loader raises becomes a fault of its tensor
            at = state["next"] - 1
            text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            if at < 0 or state["done"]:
                when = "before it took a tensor" if at < 0 else "after it had taken all tensors"
                recorder.faults.append(Fault("load_weights", (), "", 0, f"the loader raised {when}: {text}"))
            else:
                spec = tensors[chosen[at]]
                reason = f"the loader raised while it loaded this tensor {list(spec.shape)}: {text}"
                recorder.faults.append(Fault("load_weights", (spec.name,), "", 0, reason))
        else:
            return
        if state["done"] or state["next"] == before or state["next"] == len(chosen):
            return
