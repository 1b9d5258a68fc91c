"""The second tier: operations that only move values, in a way that is no view (indices, masks, flips).

Such an operation is probed: it runs for real, on the CPU, over labels instead of values. A label is a whole
number that stands for one place in an operand's memory, so it is exact whatever the type of the weights.
What comes out is read back as boxes, each of which is then a strided copy like any other. Dimensions that
the operation passes through are left out of the probe, so that it is small. A second run over other labels
must move them alike: an operation that goes by the values is found out, and is left to the third tier.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from weightdepot.store.tracing.content import Constant, Content, cast, constant
from weightdepot.store.tracing.lattice import TooIrregular
from weightdepot.store.tracing.recorder import Place, Recorder, bind, broadcast, handles
from weightdepot.store.tracing.runs import Run, runs_of

# operation: the arguments whose values are moved; all others say where to
VALUES: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(
        ("index", "_unsafe_index", "index_select", "gather", "take", "masked_select", "flip", "roll", "rot90",
         "tril", "triu", "im2col", "diag_embed", "pixel_shuffle", "pixel_unshuffle", "native_channel_shuffle",
         "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d",
         "as_strided_copy", "diagonal_copy", "expand_copy", "narrow_copy", "permute_copy", "select_copy",
         "slice_copy", "squeeze_copy", "t_copy", "transpose_copy", "unfold_copy", "unsqueeze_copy",
         "view_copy", "tril_", "triu_"),
        ("self",),
    ),
    "embedding": ("weight",),
    "where": ("self", "other"),
    **dict.fromkeys(
        ("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"), ("self", "values")
    ),
    **dict.fromkeys(
        ("index_copy", "index_copy_", "put", "put_", "masked_scatter", "masked_scatter_"), ("self", "source")
    ),
    **dict.fromkeys(("index_fill", "index_fill_", "masked_fill", "masked_fill_"), ("self", "value")),
    **dict.fromkeys(("scatter", "scatter_"), ("self", "src", "value")),
    **dict.fromkeys(
        ("slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter"), ("self", "src")
    ),
    "fill_diagonal_": ("self", "fill_value"),
}  # fmt: skip
MAX_LABELS: Final = 1 << 25  # elements probed at once: half a gigabyte at the most
GAP: Final = 1  # label 0 stands for a zero that the operation itself puts in


class _NoMove(ValueError):
    """The operation cannot be probed; says why."""


@dataclass
class _Operand:
    """An argument whose values are moved: a recorded view, or one value all over."""

    name: str
    shape: tuple[int, ...]  # as the probe sees it: dimensions that pass through have size 1
    place: Place | None = None  # all of it, with the dimensions that pass through
    value: Content | None = None
    through: dict[int, int] = field(default_factory=dict)  # own dimension that passes through: the result's
    first: int = 0  # its smallest label

    @property
    def labels(self) -> int:
        return self.place.memory.numel if self.place is not None else 1

    def labelled(self, dtype: torch.dtype) -> torch.Tensor:
        """Labels are positions in its memory, plus `first`."""
        if self.place is None:
            return torch.full(self.shape, self.first, dtype=dtype)
        out = torch.full(self.shape, self.first + self.place.offset, dtype=dtype)
        for dim, (n, stride) in enumerate(zip(self.shape, self.place.strides, strict=True)):
            if n > 1:
                steps = torch.arange(n, dtype=dtype) * stride
                out += steps.reshape([n if d == dim else 1 for d in range(len(self.shape))])
        return out


@handles(*VALUES)
def moving(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = bind(func, args, kwargs)
    if not rec.tracked((args, kwargs)):
        return rec.run(func, args, kwargs)
    name = func._schema.name.split("::")[-1]
    if bound.get("accumulate") or bound.get("reduce") is not None:
        return rec.other(func, args, kwargs)
    try:
        return _Probe(rec, func, name, bound).result(args, kwargs)
    except (_NoMove, TooIrregular) as error:
        return rec.other(func, args, kwargs, f"passes through `{name}`, which {error}")


class _Probe:
    def __init__(self, rec: Recorder, func: Any, name: str, bound: dict[str, Any]) -> None:
        self.rec, self.func, self.name = rec, func, name
        self.given = bound
        self.in_place = any(a.alias_info and a.alias_info.is_write for a in func._schema.arguments)
        self.where = {k: self._where(v) for k, v in bound.items() if k not in VALUES[name]}
        self.operands = [self._operand(k, bound[k]) for k in VALUES[name] if bound.get(k) is not None]

    # -- arguments ----------------------------------------------------------------------------------

    def _where(self, value: Any) -> Any:
        """Indices and masks as real tensors on the CPU."""
        return tree_map_only(torch.Tensor, self._real, value)

    def _real(self, x: torch.Tensor) -> torch.Tensor:
        place = self.rec.place(x)
        if place is None:
            if x.device.type == "meta" and x.numel():
                raise _NoMove("takes its indices from a tensor on meta, which has no values")
            return x.detach().cpu()
        out = torch.empty(x.shape, dtype=x.dtype)
        for entry in self.rec.read(place, 0, out.stride()):
            if not isinstance(entry.content, Constant) or entry.content.dtype != x.dtype:
                raise _NoMove("takes indices or a mask that depend on values")
            dims = [d for d in entry.dims if d[0] != 1]
            out.as_strided([d[0] for d in dims], [d[1] for d in dims], entry.start).fill_(entry.content.value)
        return out

    def _operand(self, name: str, value: Any) -> _Operand:
        if not isinstance(value, torch.Tensor):
            issued = self.rec.tokens.taken(value)
            if issued is not None:
                return _Operand(name, (), broadcast(issued, ()))
            kind = self.given["self"].dtype if isinstance(self.given.get("self"), torch.Tensor) else None
            return _Operand(name, (), value=constant(value, kind or torch.get_default_dtype()))
        if value.is_conj() or value.is_neg():
            raise _NoMove("is given a conjugated or negated view")
        place = self.rec.place(value)
        if place is None:
            if name == "self" and self.in_place:
                raise _NoMove("writes into a tensor that holds other values")
            return _Operand(name, tuple(value.shape), value=self.rec.value_of(value, value.dtype, self.name))
        if not place.fits:
            raise _NoMove("reads memory as a type of another size")
        return _Operand(name, place.shape, place)

    def _result(self, args: Any, kwargs: Any) -> torch.Tensor | None:
        """An empty tensor like the result, where its shape does not depend on a mask."""
        if self.in_place:
            return None
        try:
            out = self.rec.geometry(self.func, args, kwargs)
        except (RuntimeError, NotImplementedError):
            return None
        if not isinstance(out, torch.Tensor):
            raise _NoMove("gives more than one tensor")
        return out

    def _leave_out(self) -> None:
        """Let the probe see one element along every dimension that passes through."""
        main = self.operands[0]
        assert main.place is not None
        n = len(main.shape)
        kept: set[int] | None = None
        given = self.where
        if self.name in ("index_select", "index_copy", "index_copy_", "index_fill", "index_fill_"):
            kept = {given["dim"] % max(n, 1)}
        elif self.name == "flip" or (self.name == "roll" and given.get("dims")):
            kept = {d % n for d in given["dims"]}
        elif self.name != "embedding" and "indices" in given:
            self._leave_out_of_indexing(main, given["indices"])
            return
        elif self.name == "embedding":
            self._narrow(main, {1: given["indices"].dim()})
        if kept is None:
            return
        for operand in self.operands:
            if len(operand.shape) == n:
                self._narrow(operand, {d: d for d in range(n) if d not in kept})

    def _leave_out_of_indexing(self, main: _Operand, indices: list[Any]) -> None:
        used: list[int] = []  # own dimensions that are indexed
        own, wide = 0, 0
        for index in indices:
            mask = index is not None and index.dtype in (torch.bool, torch.uint8)
            spans = index.dim() if mask else 1
            if index is not None:
                used += range(own, own + spans)
                wide = max(wide, 1 if mask else index.dim())
            own += spans
        n = len(main.shape)
        adjacent = bool(used) and used == list(range(used[0], used[-1] + 1))
        # where indices stand apart, their dimensions come first in the result
        lead = used[0] if adjacent else 0
        free = [d for d in range(n) if d not in used]
        out = {d: d if adjacent and d < lead else wide + i for i, d in enumerate(free)}
        shape = {out[d]: main.shape[d] for d in free}
        for operand in self.operands[1:]:
            if operand.place is not None:
                lacking = wide + len(free) - len(operand.shape)
                if lacking > 0:
                    operand.place = operand.place._replace(
                        shape=(1,) * lacking + operand.place.shape,
                        strides=(0,) * lacking + operand.place.strides,
                    )
                p = operand.place
                sizes = tuple(shape.get(i, s) for i, s in enumerate(p.shape))
                strides = tuple(0 if a != b else s for a, b, s in zip(p.shape, sizes, p.strides, strict=True))
                operand.place = p._replace(shape=sizes, strides=strides)
                operand.shape = sizes
                self._narrow(operand, {out[d]: d if self.keeps_form else out[d] for d in free})
            elif len(operand.shape) > 0:
                operand.shape = (1,) * len(operand.shape)  # the same value all over
        self._narrow(main, {d: d if self.keeps_form else out[d] for d in free})

    @property
    def keeps_form(self) -> bool:
        """Whether the result has the form of `self`."""
        return "put" in self.name

    @staticmethod
    def _narrow(operand: _Operand, through: dict[int, int]) -> None:
        through = {d: o for d, o in through.items() if operand.shape[d] > 1}
        operand.shape = tuple(1 if d in through else n for d, n in enumerate(operand.shape))
        if operand.place is not None:
            operand.through = through

    # -- the probe ----------------------------------------------------------------------------------

    def result(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        main = self.operands[0]
        out = self._result(args, kwargs)
        if main.place is not None and all(main.shape):
            self._leave_out()
        labels, bounds = self._labels()
        natural = {0, 1, *(s for o in self.operands if o.place is not None for s in o.place.strides)}
        runs = runs_of(labels.numpy().astype(np.int64, copy=False), bounds, natural)
        target = main.place if self.in_place else self._make(out, labels)
        assert target is not None
        if self.in_place and any(o.place and o.place.memory is target.memory for o in self.operands[1:]):
            raise _NoMove("reads what it writes")
        for run in runs:
            self._copy(target, run, bounds)
        return self.given["self"] if self.in_place else self._made

    def _labels(self) -> tuple[torch.Tensor, list[int]]:
        bounds, at = [0], GAP
        for operand in self.operands:
            operand.first = at
            bounds.append(at)
            at += operand.labels
        bounds.append(at)
        size = sum(math.prod(o.shape) for o in self.operands)
        if size > MAX_LABELS:
            raise _NoMove(f"moves {size:,} elements, more than are probed at once ({MAX_LABELS:,})")
        failure: Exception | None = None
        for dtype in (torch.int32 if at < 1 << 31 else torch.int64, torch.float64):
            first = [o.labelled(dtype) for o in self.operands]
            # other labels, of which none is smaller or larger where the first ones are, except by chance
            turned = [torch.where(x == 0, x, at - x) for x in first]
            try:
                labels, again = self._run(first), self._run(turned)
            except (RuntimeError, NotImplementedError) as error:
                failure = error  # no kernel for whole numbers, perhaps
                continue
            if labels.shape != again.shape or not torch.equal(
                torch.where(labels == 0, 0, at - labels), again
            ):
                raise _NoMove("goes by the values, or changes them")
            if labels.numel() > MAX_LABELS:
                raise _NoMove(f"gives {labels.numel():,} elements, more than are probed at once")
            return labels, bounds
        raise _NoMove(f"cannot be probed: {failure}")

    def _run(self, operands: Iterable[torch.Tensor]) -> torch.Tensor:
        values = {
            o.name: labels if isinstance(self.given[o.name], torch.Tensor) else labels.item()
            for o, labels in zip(self.operands, operands, strict=True)
        }
        bound = {**self.where, **values}
        arguments = [
            bound[a.name] for a in self.func._schema.arguments if a.name in bound and not a.kwarg_only
        ]
        options = {
            a.name: bound[a.name] for a in self.func._schema.arguments if a.name in bound and a.kwarg_only
        }
        out = self.func(*arguments, **options)
        assert isinstance(out, torch.Tensor)
        return out.contiguous()

    def _make(self, out: torch.Tensor | None, labels: torch.Tensor) -> Place:
        if out is None:
            shape = list(labels.shape)
            for operand in self.operands:
                for own, there in operand.through.items():
                    assert operand.place is not None
                    shape[there] = operand.place.shape[own]
            model = self.given[self.operands[0].name]
            out = self.rec.geometry(torch.ops.aten.empty.memory_format, (shape,), {"dtype": model.dtype})
        self._made = out
        return self.rec.born(out)

    def _copy(self, target: Place, run: Run, bounds: list[int]) -> None:
        owner = int(np.searchsorted(bounds, run.first, side="right")) - 2
        offset = target.offset + sum(o * s for o, s in zip(run.offset, target.strides, strict=True))
        shape, strides, steps = list(run.shape), list(target.strides), list(run.steps)
        operand = self.operands[owner] if owner >= 0 else None
        if operand is not None and operand.place is not None:
            for own, there in operand.through.items():
                shape[there], steps[there] = operand.place.shape[own], operand.place.strides[own]
        else:  # one value: over the whole of every dimension that passes through
            for other in self.operands:
                for there in other.through.values():
                    shape[there] = target.shape[there]
        if operand is None:
            self.rec.write(target._replace(offset=offset, shape=tuple(shape)), constant(0, target.dtype))
            return
        if operand.place is None:
            assert operand.value is not None
            seen = operand.value.dtype if isinstance(operand.value, Constant) else target.dtype
            value = cast(operand.value, seen, target.dtype, ())
            self.rec.write(target._replace(offset=offset, shape=tuple(shape)), value)
            return
        first = run.first - operand.first
        source = operand.place
        same = all(a == b for n, a, b in zip(shape, strides, steps, strict=True) if n > 1)
        if source.memory is target.memory and first == offset and same:
            return  # stays where it is
        for dim, (n, step) in enumerate(zip(shape, steps, strict=True)):
            if step < 0:  # both ends turned round, so that the source is read forwards
                first += (n - 1) * step
                offset += (n - 1) * strides[dim]
                steps[dim], strides[dim] = -step, -strides[dim]
        self.rec.copy(
            Place(target.memory, offset, tuple(shape), tuple(strides), target.dtype),
            Place(source.memory, first, tuple(shape), tuple(steps), source.dtype),
            probed=True,
        )
