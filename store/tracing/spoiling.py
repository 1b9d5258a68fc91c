"""Operations that the map has no words for: what they write is poisoned, and says where it came from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from weightdepot.store.geometry import contiguous_strides
from weightdepot.store.tracing.content import Old, Poison
from weightdepot.store.tracing.kinds import ASKS, OVERWRITES
from weightdepot.store.tracing.memory import Entry
from weightdepot.store.tracing.recorder import Place, Recorder, bind, fingerprint


def unknown(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str = "") -> Any:
    """Stand in for an operation. Nothing is run on a tensor that is watched.

    Raises Untraceable where the loader would be given a value, or a shape that depends on values.
    """
    if not rec.tracked((args, kwargs)):
        return rec.run(func, args, kwargs)
    schema = func._schema
    name = schema.name.split("::")[-1]
    if name in ASKS and all(_is_table(rec, place) for place in rec.tracked((args, kwargs))):
        return rec.run(func, args, kwargs)
    bound = bind(func, args, kwargs)
    changed = [a for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    written = [bound.get(a.name) for a in changed]
    unread = [a.name for a in changed if a.kwarg_only or name in OVERWRITES]
    read = rec.tracked([value for key, value in bound.items() if key not in unread])
    poison = replace(_cause(rec, name, read, reason), how=hash((str(func), _frozen(rec, (args, kwargs)))))
    if written:
        for k, x in enumerate(tree_flatten(written)[0]):
            if isinstance(x, torch.Tensor):
                place = rec.place(x) or rec.adopt_real(x, poison.fault.tensors, name)
                if place is not None:
                    _spoil(rec, func, place, read, replace(poison, how=hash((poison.how, k))))
        answers = [w for w in written if w is not None][: len(schema.returns)]
        return answers[0] if len(schema.returns) == 1 else tuple(answers) if answers else None
    if name in ASKS:
        raise rec.stop(poison.fault)
    try:
        out = rec.geometry(func, args, kwargs)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        # no meta kernel (a framework's own kernel), or a shape that depends on values
        raise rec.stop(poison.fault) from error
    leaves = tree_flatten(out)[0]
    if not all(isinstance(x, torch.Tensor) for x in leaves):
        raise rec.stop(poison.fault)
    for k, x in enumerate(leaves):
        if rec.place(x) is None:
            _spoil(rec, func, rec.born(x), read, replace(poison, how=hash((poison.how, k))))
    return out


Recorder.unknown = staticmethod(unknown)


def _is_table(rec: Recorder, place: Place) -> bool:
    """A real buffer that the loader has not written: which experts are this rank's, for instance. Its values
    are the module's own, whatever the checkpoint holds."""
    memory = place.memory
    return isinstance(memory.initial, Old) and memory.initial.buffer in rec.tables and not memory.entries


def _cause(rec: Recorder, name: str, read: list[Place], reason: str) -> Poison:
    if name in ASKS:
        return rec.poison(name, read, f"the loader asks for a value ({name}) while no values exist", 0)
    text = reason or f"passes through `{name}`, which may change values"
    return rec.poison(name, read, text, keep_cause=True)


def _spoil(rec: Recorder, func: Any, place: Place, read: list[Place], poison: Poison) -> None:
    """Where each result comes from one element only, it is not said to come from the others as well."""
    source = read[0] if read else None
    if (
        torch.Tag.pointwise not in func.tags
        or source is None
        or any(r != source for r in read)
        or source.shape != place.shape
        or not (source.fits and place.fits)
    ):
        rec.write(place, poison)
        return
    for entry in rec.read(source, place.offset, place.strides):
        names, old = rec.taint([entry.content])
        cause = entry.content.fault if isinstance(entry.content, Poison) else poison.fault
        held = Poison(replace(cause, tensors=names), old, poison.how)
        dims = tuple((n, s, s) for n, s, _ in entry.dims)
        place.memory.write(Entry(entry.start, entry.start - place.offset, dims, held))


def _frozen(rec: Recorder, value: Any) -> object:
    """The arguments of an operation, as what two runs of a loader can be compared by."""
    if isinstance(value, torch.Tensor):
        place = rec.place(value)
        if place is None:
            return fingerprint(value)
        entries = rec.read(place, 0, contiguous_strides(place.shape))
        return (place.dtype, place.shape, tuple(entries))
    if isinstance(value, list | tuple):
        return tuple(_frozen(rec, v) for v in value)
    if isinstance(value, dict):
        return tuple((k, _frozen(rec, v)) for k, v in value.items())
    return repr(float.__repr__(value)) if isinstance(value, float) else repr(value)
