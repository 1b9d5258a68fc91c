"""`trace_load`: run a framework's own loader over tensors without data, and get the layout it carries out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

from torch import Tensor

from weightdepot.store.dtypes import ITEMSIZE
from weightdepot.store.errors import InvalidRequest, LayoutError, LayoutFault
from weightdepot.store.layout import TensorSpec
from weightdepot.store.tracing.content import Fault
from weightdepot.store.tracing.coverage import Left, is_optional
from weightdepot.store.tracing.recording import Loading, LoadWeights, Recording, uncollected
from weightdepot.store.tracing.report import Trace
from weightdepot.store.tracing.through import Through, settle
from weightdepot.store.tracing.writing import Frames, Writer, describe

OnFault = Literal["raise", "keep"]


def trace_load(
    load_weights: LoadWeights,
    tensors: Sequence[TensorSpec],
    parameters: Mapping[str, Tensor],
    *,
    optional: Collection[str] = (),
    buffers: Mapping[str, Tensor] | None = None,
    on_fault: OnFault = "raise",
    after: Callable[[], Mapping[str, Tensor]] | None = None,
    whole: bool = True,
) -> Trace:
    """The layout of the parameters that `load_weights` fills from a checkpoint of `tensors`.

    The loader is called with (name, tensor) pairs, as if with a checkpoint; the tensors hold no data.
    `parameters` are those it writes to, live on any device or on meta. They are neither changed nor read, and
    need no more memory. `buffers` are further places that may be written but need not be (a module's
    buffers). Names or patterns (`*`) in `optional` may be left unfilled. `after` is called when the loader is
    through, and gives the tensors that then go by the parameters' names: it may have replaced some.

    Where values are changed on their way, no layout can say it: those tensors are in `Trace.whole`, to be
    given to the loader at each update, and it is called again, with them only, to see that it can be.
    `whole=False` makes that a fault.

    The loader may be called again after it raised, with the tensors that follow, to find what else is wrong.
    It should be deterministic, and copy in the calling thread.

    Raises LayoutError with every fault at once, each with the checkpoint tensor or the parameter concerned;
    with `on_fault="keep"` the trace is returned with its `faults`, and the layout lacks what they concern.
    Raises InvalidRequest for tensors or parameters that cannot be described.
    """
    loading = Loading(load_weights, tensors, parameters, buffers or {}, after)
    return trace_loading(loading, optional, on_fault, whole)


def trace_loading(loading: Loading, optional: Collection[str], on_fault: OnFault, whole: bool) -> Trace:
    """`trace_load` for a loader with its surroundings."""
    _check(loading.tensors)
    with uncollected():
        return _trace(loading, optional, on_fault, whole)


def _trace(loading: Loading, optional: Collection[str], on_fault: OnFault, whole: bool) -> Trace:
    first = loading.record()
    frames = Frames()
    tied = first.aliases()
    described = {
        t.name: (t, describe(first.recorder, t, frames)) for t in first.targets if t.name not in tied
    }
    through = settle(loading, first, described) if whole else Through()
    writer = Writer(first.recorder)
    given_up = {f.parameter for f in through.faults}
    for name, (target, rows) in described.items():
        if name in through.rest:
            rest = describe(first.recorder, target, frames, through.rest[name])
            if rest:
                writer.target(target, rows=rest, frames=frames)
            continue
        writer.target(target, [r for r in rows if not (r.problem and name in given_up)], frames)
    return _conclude(loading, first, writer, through, tied, optional, on_fault)


def _check(tensors: Sequence[TensorSpec]) -> None:
    names = Counter(t.name for t in tensors)
    wrong = [f"{name!r} is listed {n} times" for name, n in names.items() if n > 1]
    wrong += [f"{t.name!r} has an unknown data type {t.dtype!r}" for t in tensors if t.dtype not in ITEMSIZE]
    if wrong:
        raise InvalidRequest(f"the checkpoint cannot be traced: {'; '.join(wrong[:12])}")


def _conclude(
    loading: Loading, first: Recording, writer: Writer, through: Through, tied: Mapping[str, str],
    optional: Collection[str], on_fault: OnFault,
) -> Trace:  # fmt: skip
    tensors = loading.tensors
    # where the loader could not be called again, all that it alone could do is lost
    lost = writer.faults if not through.faults else [f for f in writer.faults if not f.tier]
    faults = tuple(dict.fromkeys((*first.faults, *through.faults, *lost)))
    missing = _missing(first, writer.left, tied, optional)
    refused = {name for f in faults for name in f.tensors}
    if through.faults:
        refused |= {tensors[i].name for i in through.given}
    given = {} if through.faults else dict.fromkeys(through.given, "whole")
    used = writer.used | given.keys()
    trace = Trace(
        writer.builder.build(),
        unused=tuple(t.name for i, t in enumerate(tensors) if i not in used and t.name not in refused),
        left=tuple(writer.left),
        aliases=tied,
        tiers={
            t.name: given.get(i) or ("probed" if i in writer.probed else "traced")
            for i, t in enumerate(tensors)
            if i in used and t.name not in refused
        },
        faults=(*faults, *(Fault("", (), x.parameter, 0, "is not filled by the loader") for x in missing)),
        whole=tuple(tensors[i].name for i in given),
        whole_parameters=tuple(
            t.name for t in first.targets if not through.faults and tied.get(t.name, t.name) in through.rest
        ),
        reasons={tensors[i].name: through.reasons.get(i, "") for i in given},
    )
    if on_fault == "raise" and trace.faults:
        lines = [LayoutFault(", ".join(f.tensors) or f.parameter or "(loader)", str(f)) for f in faults]
        lines += [LayoutFault(x.parameter, x.text + " by the loader") for x in missing]
        raise LayoutError("the loader cannot be traced to a layout", lines)
    return trace


def _missing(
    first: Recording, left: Sequence[Left], tied: Mapping[str, str], optional: Collection[str]
) -> list[Left]:
    """What is left and is not optional, under any of its names."""
    needed = {t.name for t in first.targets if t.needed}
    names: dict[str, list[str]] = {}
    for alias, owner in tied.items():
        names.setdefault(owner, [owner]).append(alias)
    return [
        x
        for x in left
        if x.parameter in needed
        and not any(is_optional(n, optional) for n in names.get(x.parameter, [x.parameter]))
    ]
