"""The dispatch mode under which a loader runs: it keeps the maps, and lets no write reach a real tensor.

Incoming tensors are plain meta tensors. Their views are torch's own, so geometry, identity of storage,
`.data`, in-place changes of metadata and `__setitem__` need no imitation; a storage is known by its address,
whoever holds the tensor. Parameters are known by their storage too, live or meta, and nothing that writes
to one is executed. Modes belong to a thread: a loader that copies in threads of its own is not seen there,
and fails on live parameters, or leaves meta ones unfilled, which is reported.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from weightdepot.store.dtypes import torch_dtype
from weightdepot.store.geometry import overlaps_itself
from weightdepot.store.layout import TensorSpec
from weightdepot.store.tracing.content import (
    UNDEFINED,
    Constant,
    Content,
    Fault,
    Old,
    Poison,
    Source,
    Untraceable,
    cast,
    constant,
)
from weightdepot.store.tracing.kinds import REAL_DTYPES, is_view
from weightdepot.store.tracing.lattice import OutsideFrame, TooIrregular
from weightdepot.store.tracing.memory import Entry, Memory
from weightdepot.store.tracing.scalars import Issued, ScalarWeight, Tokens

aten = torch.ops.aten


class Place(NamedTuple):
    """A tracked tensor: a view of a memory."""

    memory: Memory
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def fits(self) -> bool:
        """Whether elements of this view are elements of the memory (not of a type of another size)."""
        return self.dtype.itemsize == self.memory.itemsize


MAX_REAL = 1 << 24  # elements of a counting tensor that a loader wants on meta, where it could not count
Handler = Callable[["Recorder", Any, tuple[Any, ...], dict[str, Any]], Any]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """See the module. One trace each."""

    handlers: ClassVar[dict[Any, Handler]] = {}
    unknown: ClassVar[Callable[..., Any]]  # set by `spoiling`

    def __init__(self, tensors: Sequence[TensorSpec]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors = tensors
        self.faults: list[Fault] = []  # those that do not wait to land in a parameter
        self.touched: set[int] = set()  # tensors without elements that were copied somewhere
        self.current = -1  # the tensor that the loader was given last
        self.history: dict[int, set[int]] = {}  # parameter: tensors that ever went into it, or were current
        self.tables: set[int] = (
            set()
        )  # buffers of counting numbers, whose values may be asked for until written
        self._index = {t.name: i for i, t in enumerate(tensors)}
        self._memories: dict[int, Memory] = {}
        # an address is not given out again while one of these lives
        self._storages: dict[int, StorageWeakRef] = {}
        self._born: set[int] = set()  # real storages that were made by the loader
        self._plain: dict[Any, bool] = {}
        self._making = False  # an incoming tensor: no operation of the loader
        self.tokens = Tokens()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # nothing is compiled here; torch's guard around the dispatch costs more than the dispatch
        return False

    # -- what is known ------------------------------------------------------------------------------

    def incoming(self, index: int, strides: Sequence[int] | None = None) -> torch.Tensor:
        """The recording tensor of checkpoint tensor `index`; contiguous, unless said otherwise."""
        spec = self.tensors[index]
        dtype = torch_dtype(spec.dtype)
        self._making = True
        try:
            if strides is None:
                tensor = torch.empty(spec.shape, dtype=dtype, device="meta")
            else:
                tensor = torch.empty_strided(spec.shape, strides, dtype=dtype, device="meta")
        finally:
            self._making = False
        memory = self.adopt(tensor, Source(index, dtype, dtype))
        if tensor.numel() == 1:
            scalar = tensor.as_subclass(ScalarWeight)
            scalar.token = lambda: self.tokens.issue(memory, dtype, spec.name, self.stop)
            return scalar
        return tensor

    def know(self, tensor: torch.Tensor, number: int) -> None:
        """Watch the storage of a parameter. `number` tells parameters apart."""
        memory = self._memories.get(tensor.untyped_storage()._cdata)
        if memory is None:
            self.history[number] = set()
            self.adopt(tensor, Old(number)).watcher = partial(self._written, self.history[number])
        elif memory.preferred != tensor.stride():
            memory.preferred = ()  # several tensors of different shapes lie there

    def _written(self, history: set[int], content: Content) -> None:
        if self.current >= 0:
            history.add(self.current)
        if isinstance(content, Source):
            history.add(content.tensor)
        elif isinstance(content, Poison):
            history.update(self.numbers(content.fault.tensors))

    def place(self, tensor: torch.Tensor) -> Place | None:
        """Where a tensor lies; None where nobody watches its storage."""
        try:
            memory = self._memories.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # sparse tensors and wrappers have no storage
            return None
        if memory is None:
            return None
        return Place(memory, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def adopt(self, tensor: torch.Tensor, initial: Content) -> Memory:
        storage = tensor.untyped_storage()
        itemsize = tensor.dtype.itemsize
        memory = Memory(initial, itemsize, storage.nbytes() // itemsize, tensor.stride())
        self._memories[storage._cdata] = memory
        self._storages[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return memory

    # -- copies -------------------------------------------------------------------------------------

    def names(self, places: Iterable[Place]) -> tuple[str, ...]:
        """The checkpoint tensors whose elements lie in these views, in order of first appearance."""
        return self.taint(c for place in places for c in self.contents(place))[0]

    def numbers(self, names: Iterable[str]) -> list[int]:
        return [self._index[name] for name in names]

    def contents(self, place: Place) -> list[Content]:
        """What lies in a view. Where it is read as another type or is too irregular: in all of its memory."""
        if place.fits:
            try:
                dims = [(n, s, s) for n, s in zip(place.shape, place.strides, strict=True)]
                return [e.content for e in place.memory.read(place.offset, 0, dims)]
            except (TooIrregular, OutsideFrame):
                pass
        return place.memory.seen()

    def taint(self, contents: Iterable[Content]) -> tuple[tuple[str, ...], frozenset[int]]:
        """The checkpoint tensors, and the parameters' former values, that are among these."""
        names: dict[str, None] = {}
        old: set[int] = set()
        for content in contents:
            if isinstance(content, Source):
                names[self.tensors[content.tensor].name] = None
            elif isinstance(content, Poison):
                names.update(dict.fromkeys(content.fault.tensors))
                old |= content.old
            elif isinstance(content, Old) and content.buffer >= 0:
                old.add(content.buffer)
        return tuple(names), frozenset(old)

    def poison(
        self, op: str, places: Iterable[Place], reason: str, tier: int = 3, keep_cause: bool = False
    ) -> Poison:
        """What becomes of values that come from these views. `keep_cause`: of several reasons the first one
        says more than what became of it."""
        places = list(places)
        contents = [c for place in places for c in self.contents(place)]
        names, old = self.taint(contents)
        fault = Fault(op, names, "", tier, reason)
        if keep_cause:
            causes = (c.fault for c in contents if isinstance(c, Poison))
            fault = next((replace(f, tensors=names) for f in causes), fault)
        return Poison(fault, old, hash((op, tuple(contents), tuple(p[1:] for p in places))))

    def read(
        self, place: Place, to: int = 0, strides: Sequence[int] | None = None, origin: int = 0
    ) -> list[Entry]:
        """What a view holds, with images at `to` and `strides` (else its own); `origin`: see Memory."""
        if not place.fits:
            reason = f"memory of {place.memory.itemsize}-byte elements is read as {place.dtype}"
            there = Place(place.memory, to, place.shape, tuple(strides or place.strides), place.dtype)
            return [self._whole(there, self.poison("view", [place], reason))]
        dims = zip(place.shape, place.strides, strides or place.strides, strict=True)
        try:
            return place.memory.read(place.offset, to, dims, origin)
        except (TooIrregular, OutsideFrame) as error:
            there = Place(place.memory, to, place.shape, tuple(strides or place.strides), place.dtype)
            return [self._whole(there, self.poison("copy_", [place], f"a copy {error}", 2))]

    @staticmethod
    def _whole(place: Place, content: Content) -> Entry:
        each = isinstance(content, Poison)  # what is computed differs from element to element
        dims = tuple((n, s, s if each else 0) for n, s in zip(place.shape, place.strides, strict=True))
        return Entry(place.offset, 0, dims, content)

    def write(self, place: Place, content: Content) -> None:
        """Set a whole view to a constant, or to something that cannot be mapped."""
        if not place.fits:
            m = place.memory
            held = self.poison(
                "view", [place], f"elements of {m.itemsize} bytes are written as {place.dtype}"
            )
            if isinstance(content, Poison):
                names = dict.fromkeys((*content.fault.tensors, *held.fault.tensors))
                how = hash((content.how, held.how))
                held = Poison(replace(content.fault, tensors=tuple(names)), content.old | held.old, how)
            m.write(Entry(0, 0, ((m.numel, 1, 1),), held))
            return
        place.memory.write(self._whole(place, content))

    def copy(self, target: Place, source: Place, probed: bool = False) -> None:
        """Record `target.copy_(source)`; shapes are the same by now."""
        if not (target.fits and source.fits):
            reason = "elements are copied through a view as a type of another size"
            self.write(target, self.poison("view", [source], reason))
            return
        if 0 in source.shape:
            if isinstance(source.memory.initial, Source):
                self.touched.add(source.memory.initial.tensor)
            return
        for entry in self.read(source, target.offset, target.strides):
            content = entry.content
            if source.dtype != target.dtype:
                names = (self.tensors[content.tensor].name,) if isinstance(content, Source) else ()
                content = cast(content, source.dtype, target.dtype, names)
            if probed and isinstance(content, Source):
                content = replace(content, probed=True)
            target.memory.write(entry._replace(content=content) if content is not entry.content else entry)

    # -- dispatch -----------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        plain = self._plain.get(func)
        if plain is None:
            plain = self._plain[func] = is_view(func)
        if plain or self._making:
            return func(*args, **kwargs)
        handler = self.handlers.get(func.overloadpacket)
        # of the variants that write to `out`, only joining ones are folded
        if handler is not None and ("out" not in kwargs or func.overloadpacket in (aten.cat, aten.stack)):
            return handler(self, func, args, kwargs)
        return self.other(func, args, kwargs)

    def tracked(self, args: Any) -> list[Place]:
        places = (self.place(x) for x in tree_flatten(args)[0] if isinstance(x, torch.Tensor))
        return [p for p in places if p is not None]

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Really run an operation on tensors that nobody watches, and remember that the results are ours."""
        out = self._really(func, args, kwargs)
        for x in tree_flatten(out)[0]:
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                if storage._cdata not in self._memories and storage._cdata not in self._born:
                    self._born.add(storage._cdata)
                    self._storages[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return out

    @staticmethod
    def _really(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Counting tensors that are asked for on meta are made on the CPU, to be indices and masks there."""
        given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        if any(x.device.type == "meta" for x in given):
            if any(x.device.type != "meta" for x in given):
                args, kwargs = tree_map_only(torch.Tensor, _meta, (args, kwargs))
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        if (
            isinstance(out, torch.Tensor)
            and out.device.type == "meta"
            and out.dtype in REAL_DTYPES
            and out.numel() <= MAX_REAL
            and "device" in kwargs
        ):
            return func(*args, **{**kwargs, "device": torch.device("cpu")})
        return out

    def geometry(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The results of an operation, as meta tensors without content."""
        args, kwargs = tree_map_only(torch.Tensor, _meta, (args, kwargs))
        kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory", "non_blocking")}
        if any(a.name == "device" for a in func._schema.arguments):
            kwargs["device"] = torch.device("meta")
        return func(*args, **kwargs)

    def born(self, tensor: torch.Tensor, initial: Content = UNDEFINED) -> Place:
        """Watch a meta tensor that the loader made."""
        memory = self.adopt(tensor, initial)
        return Place(memory, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def assign(self, target: torch.Tensor, source: torch.Tensor, op: str = "copy_") -> None:
        """`target.copy_(source)` for tensors of which at least one is tracked; `source` is broadcast."""
        if source.shape != target.shape:
            source = source.expand(target.shape)
        to, place = self.place(target), self.place(source)
        if to is None:
            if place is None:
                target.copy_(source)
                return
            to = self.adopt_real(target, self.names([place]) or self.initial_name(place), op)
            if to is None:
                return
        if source.is_conj() or source.is_neg() or target.is_conj() or target.is_neg():
            reason = "a conjugated or negated view is copied"
            self.write(to, self.poison(op, [place] if place else [], reason))
            return
        if overlaps_itself(to.shape, to.strides):
            if any(n > 1 and s == 0 for n, s in zip(to.shape, to.strides, strict=True)):
                raise RuntimeError(
                    "unsupported operation: more than one element of the written-to tensor refers to a "
                    "single memory location"
                )
            reason = "is copied to a view that overlaps itself"
            self.write(to, self.poison(op, [place] if place else [], reason, 0))
            return
        if place is not None:
            self.copy(to, place)
        else:
            self.write(to, self.value_of(source, to.dtype, op))

    def initial_name(self, place: Place) -> tuple[str, ...]:
        initial = place.memory.initial
        return (self.tensors[initial.tensor].name,) if isinstance(initial, Source) else ()

    def value_of(self, source: torch.Tensor, dtype: torch.dtype, op: str) -> Content:
        """The content that a real, untracked tensor gives: a constant, where it is one number."""
        if source.device.type != "meta" and source.numel():
            first = source[(0,) * source.dim()]
            if source.numel() == 1 or all(
                s == 0 for n, s in zip(source.shape, source.stride(), strict=True) if n > 1
            ):
                return constant(first.item(), dtype, source.dtype)
        reason = (
            f"a tensor that comes from nothing recorded ({source.dtype}, {list(source.shape)}) is written"
        )
        return Poison(Fault(op, (), "", 3, reason), how=hash(fingerprint(source)))

    def adopt_real(self, target: torch.Tensor, names: tuple[str, ...], op: str) -> Place | None:
        """From now on a real temporary of the loader is virtual. Any other tensor is somebody's: a fault."""
        storage = target.untyped_storage()
        if storage._cdata not in self._born:
            reason = (
                f"is written ({op}) into a tensor of shape {list(target.shape)} that is neither a parameter "
                "nor made by the loader"
            )
            self.faults.append(Fault(op, names, "", 0, reason))
            return None
        flat = torch.empty(0, dtype=target.dtype, device=target.device).set_(storage)
        reason = "values that the loader computed are mixed in"
        initial: Content = Poison(Fault(op, (), "", 3, reason), how=hash(fingerprint(flat)))
        if flat.numel() and bool((flat == flat[0]).all()):
            initial = constant(flat[0].item(), target.dtype)
        self.adopt(target, initial)
        return self.place(target)

    def other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str = "") -> Any:
        """An operation that moves or makes values in a way that the map has no words for: see `spoiling`."""
        return Recorder.unknown(self, func, args, kwargs, reason)

    def stop(self, fault: Fault) -> Untraceable:
        """The exception for a loader that cannot go on; the fault counts even if the loader catches it."""
        fault = replace(fault, tier=0)  # no tier helps a loader that cannot be run to its end
        self.faults.append(fault)
        return Untraceable(fault)

    def known_value(self, place: Place) -> float | None:
        """The one number that a view holds, where it is a constant that the loader itself wrote."""
        entries = self.read(place)
        values = {e.content for e in entries}
        only = values.pop() if len(values) == 1 else None
        return only.value if isinstance(only, Constant) and only.dtype == place.dtype else None


def fingerprint(x: torch.Tensor) -> tuple[object, ...]:
    """What tells apart real tensors of a loader."""
    form = (x.dtype, tuple(x.shape))
    if x.device.type == "meta" or x.numel() > MAX_REAL:
        return form
    # a copy, since `contiguous` keeps the strides of one element, whatever they are
    flat = x.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
    return (*form, hashlib.blake2b(flat.numpy().tobytes(), digest_size=16).digest())


def _meta(x: torch.Tensor) -> torch.Tensor:
    if x.device.type == "meta":
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def bind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an operation by the names of its schema."""
    return {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs


def broadcast(issued: Issued, shape: Sequence[int]) -> Place:
    """A one-element tensor, as large as `shape`."""
    return Place(issued.memory, 0, tuple(shape), (0,) * len(shape), issued.dtype)


def handles(*packets: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        for name in packets:
            packet = getattr(aten, name, None)
            if packet is not None:
                Recorder.handlers[packet] = handler
        return handler

    return register
