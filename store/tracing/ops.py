"""The operations that are folded: copies, fills, and what makes tensors. Views need no entry here."""

from __future__ import annotations

from typing import Any

import torch

from weightdepot.store.tracing.content import UNDEFINED, Content, constant
from weightdepot.store.tracing.kinds import REAL_DTYPES
from weightdepot.store.tracing.recorder import Recorder, aten, broadcast, handles

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@handles("copy_")
def copy_(rec: Recorder, _func: Any, args: Args, _kwargs: Kwargs) -> Any:
    rec.assign(args[0], args[1])
    return args[0]


@handles("_foreach_copy_")
def foreach_copy_(rec: Recorder, func: Any, args: Args, _kwargs: Kwargs) -> Any:
    for target, source in zip(args[0], args[1], strict=True):
        rec.assign(target, source)
    return args[0] if func._schema.returns else None


@handles("fill_", "zero_")
def fill_(rec: Recorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    target, value = args[0], args[1] if len(args) > 1 else kwargs.get("value", 0)
    place = rec.place(target)
    if isinstance(value, torch.Tensor):
        if place is None and rec.place(value) is None:
            return func(*args, **kwargs)
        rec.assign(target, value, "fill_")
        return target
    if place is None:
        return func(*args, **kwargs)
    issued = rec.tokens.taken(value)
    if issued is not None:
        rec.copy(place, broadcast(issued, place.shape))
    else:
        rec.write(place, constant(value, place.dtype))
    return target


@handles("_to_copy", "clone", "_pin_memory")
def copying(rec: Recorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    source = args[0]
    place = rec.place(source)
    if place is None:
        return rec.run(func, args, kwargs)
    if func.overloadpacket is aten._pin_memory:
        func, args, kwargs = aten.clone.default, (source,), {}
    out = rec.geometry(func, args, kwargs)
    rec.born(out)
    rec.assign(out, source, func.overloadpacket.__name__)
    return out


@handles("cat", "stack")
def joining(rec: Recorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    tensors = list(args[0])
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    given = kwargs.get("out")
    if all(rec.place(t) is None for t in tensors) and (given is None or rec.place(given) is None):
        return rec.run(func, args, kwargs)
    is_stack = func.overloadpacket is aten.stack
    base = aten.stack.default if is_stack else aten.cat.default
    out = rec.geometry(base, (tensors, dim), {})
    rec.born(out)
    at = 0
    for i, t in enumerate(tensors):
        if is_stack:
            rec.assign(out.select(dim, i), t, "stack")
        elif t.dim() == out.dim():  # torch skips empty tensors of shape (0,) here
            rec.assign(out.narrow(dim, at, t.shape[dim]), t, "cat")
            at += t.shape[dim]
    if given is None:
        return out
    if given.shape != out.shape:
        raise RuntimeError(f"cat or stack with an `out` of shape {list(given.shape)}, not {list(out.shape)}")
    rec.assign(given, out, "cat")
    return given


@handles("constant_pad_nd")
def constant_pad_nd(rec: Recorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    source, pads = args[0], args[1]
    value = args[2] if len(args) > 2 else kwargs.get("value", 0)
    if rec.place(source) is None:
        return rec.run(func, args, kwargs)
    out = rec.geometry(func, args, kwargs)
    rec.born(out, constant(value, out.dtype))
    inner = out
    for i in range(len(pads) // 2):
        dim = source.dim() - 1 - i
        low, high = pads[2 * i], pads[2 * i + 1]
        cut_low, cut_high = max(-low, 0), max(-high, 0)
        source = source.narrow(dim, cut_low, source.shape[dim] - cut_low - cut_high)
        inner = inner.narrow(dim, max(low, 0), inner.shape[dim] - max(low, 0) - max(high, 0))
    rec.assign(inner, source, "constant_pad_nd")
    return out


@handles("repeat")
def repeat(rec: Recorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    source, repeats = args[0], args[1]
    if rec.place(source) is None:
        return rec.run(func, args, kwargs)
    out = rec.geometry(func, args, kwargs)
    rec.born(out)
    lead = len(repeats) - source.dim()
    sizes = (*(1,) * lead, *source.shape)
    if out.numel():
        shape = [n for pair in zip(repeats, sizes, strict=True) for n in pair]
        once = source.reshape([n for size in sizes for n in (1, size)]) if source.is_contiguous() else None
        if once is None:
            once = source
            for dim in range(source.dim()):
                once = once.unsqueeze(2 * dim)
            for _ in range(lead):
                once = once.unsqueeze(0).unsqueeze(0)
        rec.assign(out.view(shape), once.expand(shape), "repeat")
    return out


@handles("_local_scalar_dense")
def local_scalar_dense(rec: Recorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    place = rec.place(args[0])
    if place is None:
        return func(*args, **kwargs)
    value = rec.known_value(place)
    if value is not None:
        return value if place.dtype.is_floating_point else int(value)
    return rec.other(func, args, kwargs)


@handles("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "empty_permuted",
         "zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones",
         "full", "full_like", "new_full", "scalar_tensor")  # fmt: skip
def making(rec: Recorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """New tensors of the loader: virtual, unless they are real tensors for counting (see the recorder)."""
    name = func.overloadpacket.__name__
    if name == "scalar_tensor":
        name, func, args = "full", aten.full.default, ((), *args)
    model = args[0] if args and isinstance(args[0], torch.Tensor) else None
    dtype = kwargs.get("dtype") or (model.dtype if model is not None else None)
    if dtype is None:
        dtype = torch.get_default_dtype()
        if name == "full" and not isinstance(args[1], float):
            dtype = torch.bool if isinstance(args[1], bool) else torch.int64
    device = kwargs.get("device") or (model.device if model is not None else torch.get_default_device())
    watched = model is not None and rec.place(model) is not None
    if dtype in REAL_DTYPES and not watched:
        out = rec.run(func, args, {**kwargs, "device": device})
        if out.device.type != "meta":  # else it is large: better virtual
            return out
    out = rec.geometry(func, args, kwargs)
    initial: Content = UNDEFINED
    if "full" in name:
        value = args[-1] if "fill_value" not in kwargs else kwargs["fill_value"]
        issued = rec.tokens.taken(value)
        if issued is not None:
            place = rec.born(out)
            rec.copy(place, broadcast(issued, place.shape))
            return out
        initial = constant(value, out.dtype)
    elif "zeros" in name or "ones" in name:
        initial = constant(int("ones" in name), out.dtype)
    rec.born(out, initial)
    return out
