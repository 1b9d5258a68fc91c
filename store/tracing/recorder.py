"""The dispatch mode under which a loader runs: it keeps the maps, and lets no write reach a real tensor.

Incoming tensors are plain meta tensors. Their views are torch's own, so geometry, identity of storage,
`.data`, in-place changes of metadata and `__setitem__` need no imitation; a storage is known by its address,
whoever holds the tensor. Parameters are known by their storage too, live or meta, and nothing that writes
to one is executed. Modes belong to a thread: a loader that copies in threads of its own is not seen there,
and fails on live parameters, or leaves meta ones unfilled, which is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
from weightdepot.store.tracing.kinds import ASKS, MOVES, is_view
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


Handler = Callable[["Recorder", Any, tuple[Any, ...], dict[str, Any]], Any]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """See the module. One trace each."""

    handlers: ClassVar[dict[Any, Handler]] = {}

    def __init__(self, tensors: Sequence[TensorSpec]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors = tensors
        self.faults: list[Fault] = []  # those that do not wait to land in a parameter
        self.touched: set[int] = set()  # tensors without elements that were copied somewhere
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

    def incoming(self, index: int) -> torch.Tensor:
        """The recording tensor of checkpoint tensor `index`."""
        spec = self.tensors[index]
        dtype = torch_dtype(spec.dtype)
        self._making = True
        try:
            tensor = torch.empty(spec.shape, dtype=dtype, device="meta")
        finally:
            self._making = False
        memory = self._adopt(tensor, Source(index, dtype, dtype))
        if tensor.numel() == 1:
            scalar = tensor.as_subclass(ScalarWeight)
            scalar.token = lambda: self.tokens.issue(memory, dtype, spec.name, self.stop)
            return scalar
        return tensor

    def know(self, tensor: torch.Tensor, number: int) -> None:
        """Watch the storage of a parameter. `number` tells parameters apart."""
        memory = self._memories.get(tensor.untyped_storage()._cdata)
        if memory is None:
            self._adopt(tensor, Old(number))
        elif memory.preferred != tensor.stride():
            memory.preferred = ()  # several tensors of different shapes lie there

    def place(self, tensor: torch.Tensor) -> Place | None:
        """Where a tensor lies; None where nobody watches its storage."""
        try:
            memory = self._memories.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # sparse tensors and wrappers have no storage
            return None
        if memory is None:
            return None
        return Place(memory, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def _adopt(self, tensor: torch.Tensor, initial: Content) -> Memory:
        storage = tensor.untyped_storage()
        itemsize = tensor.dtype.itemsize
        memory = Memory(initial, itemsize, storage.nbytes() // itemsize, tensor.stride())
        self._memories[storage._cdata] = memory
        self._storages[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return memory

    # -- copies -------------------------------------------------------------------------------------

    def names(self, places: Iterable[Place]) -> tuple[str, ...]:
        """The checkpoint tensors whose elements lie in these views, in order of first appearance."""
        found: dict[str, None] = {}
        for place in places:
            for entry in self.read(place):
                if isinstance(entry.content, Source):
                    found[self.tensors[entry.content.tensor].name] = None
                elif isinstance(entry.content, Poison):
                    found.update(dict.fromkeys(entry.content.fault.tensors))
        return tuple(found)

    def read(
        self, place: Place, to: int = 0, strides: Sequence[int] | None = None, origin: int = 0
    ) -> list[Entry]:
        """What a view holds, with images at `to` and `strides` (else its own); `origin`: see Memory."""
        if not place.fits:
            reason = f"memory of {place.memory.itemsize}-byte elements is read as {place.dtype}"
            there = Place(place.memory, to, place.shape, tuple(strides or place.strides), place.dtype)
            return [self._whole(there, Poison(Fault("view", self.initial_name(place), "", 3, reason)))]
        dims = zip(place.shape, place.strides, strides or place.strides, strict=True)
        try:
            return place.memory.read(place.offset, to, dims, origin)
        except (TooIrregular, OutsideFrame) as error:
            fault = Fault("copy_", (), "", 2, f"a copy {error}")
            there = Place(place.memory, to, place.shape, tuple(strides or place.strides), place.dtype)
            return [self._whole(there, Poison(fault))]

    @staticmethod
    def _whole(place: Place, content: Content) -> Entry:
        dims = tuple((n, s, 0) for n, s in zip(place.shape, place.strides, strict=True))
        return Entry(place.offset, 0, dims, content)

    def write(self, place: Place, content: Content) -> None:
        """Set a whole view to a constant, or to something that cannot be mapped."""
        if not place.fits:
            m = place.memory
            reason = f"memory of {m.itemsize}-byte elements is written as {place.dtype}"
            held = content if isinstance(content, Poison) else Poison(Fault("view", (), "", 3, reason))
            m.write(Entry(0, 0, ((m.numel, 1, 0),), held))
            return
        place.memory.write(self._whole(place, content))

    def copy(self, target: Place, source: Place) -> None:
        """Record `target.copy_(source)`; shapes are the same by now."""
        if not (target.fits and source.fits):
            if source.fits or target.fits:
                names = self.names([source]) if source.fits else ()
                reason = "elements are copied through a view as a type of another size"
                self.write(target, Poison(Fault("view", names, "", 3, reason)))
            else:
                self.write(target, UNDEFINED)  # poisons the whole memory: see write
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
        return self._other(func, args, kwargs)

    def _tracked(self, args: Any) -> list[Place]:
        places = (self.place(x) for x in tree_flatten(args)[0] if isinstance(x, torch.Tensor))
        return [p for p in places if p is not None]

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Really run an operation on tensors that nobody watches, and remember that the results are ours."""
        out = func(*args, **kwargs)
        for x in tree_flatten(out)[0]:
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                if storage._cdata not in self._memories and storage._cdata not in self._born:
                    self._born.add(storage._cdata)
                    self._storages[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
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
        memory = self._adopt(tensor, initial)
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
            to = self._adopt_real(target, self.names([place]) or self.initial_name(place), op)
            if to is None:
                return
        if source.is_conj() or source.is_neg() or target.is_conj() or target.is_neg():
            names = self.names([place]) if place else ()
            self.write(to, Poison(Fault(op, names, "", 3, "a conjugated or negated view is copied")))
            return
        if overlaps_itself(to.shape, to.strides):
            if any(n > 1 and s == 0 for n, s in zip(to.shape, to.strides, strict=True)):
                raise RuntimeError(
                    "unsupported operation: more than one element of the written-to tensor refers to a "
                    "single memory location"
                )
            names = self.names([place]) if place else ()
            self.write(to, Poison(Fault(op, names, "", 0, "is copied to a view that overlaps itself")))
            return
        if place is not None:
            self.copy(to, place)
        else:
            self.write(to, self._value(source, to.dtype, op))

    def initial_name(self, place: Place) -> tuple[str, ...]:
        initial = place.memory.initial
        return (self.tensors[initial.tensor].name,) if isinstance(initial, Source) else ()

    def _value(self, source: torch.Tensor, dtype: torch.dtype, op: str) -> Content:
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
        return Poison(Fault(op, (), "", 3, reason))

    def _adopt_real(self, target: torch.Tensor, names: tuple[str, ...], op: str) -> Place | None:
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
        initial: Content = Poison(Fault(op, (), "", 3, "values that the loader computed are mixed in"))
        if flat.numel() and bool((flat == flat[0]).all()):
            initial = constant(flat[0].item(), target.dtype)
        self._adopt(target, initial)
        return self.place(target)

    def _other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation that moves or makes values in a way that the map has no words for."""
        places = self._tracked((args, kwargs))
        if not places:
            return self.run(func, args, kwargs)
        name = func._schema.name.split("::")[-1]
        fault = self._fault(name, places)
        schema = func._schema
        written = [
            (kwargs[a.name] if a.name in kwargs else args[i] if i < len(args) else None)
            for i, a in enumerate(schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write
        ]
        if written:
            for x in tree_flatten(written)[0]:
                if isinstance(x, torch.Tensor):
                    place = self.place(x) or self._adopt_real(x, fault.tensors, name)
                    if place is not None:
                        self.write(place, Poison(fault))
            answers = [w for w in written if w is not None][: len(schema.returns)]
            return answers[0] if len(schema.returns) == 1 else tuple(answers) if answers else None
        if name in ASKS:
            raise self.stop(fault)
        try:
            out = self.geometry(func, args, kwargs)
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            # no meta kernel (a framework's own kernel), or a shape that depends on values
            raise self.stop(fault) from error
        leaves = tree_flatten(out)[0]
        if not all(isinstance(x, torch.Tensor) for x in leaves):
            raise self.stop(fault)
        for x in leaves:
            if x.untyped_storage()._cdata not in self._memories:
                self._adopt(x, Poison(fault))
        return out

    def _fault(self, name: str, places: list[Place]) -> Fault:
        for place in places:
            for entry in self.read(place):
                if isinstance(entry.content, Poison):
                    return entry.content.fault  # the first cause says more than what became of it
        names = self.names(places)
        if name in ASKS:
            return Fault(name, names, "", 0, f"the loader asks for a value ({name}) while no values exist")
        if name in MOVES:
            return Fault(name, names, "", 2, f"passes through `{name}`, which is no view")
        return Fault(name, names, "", 3, f"passes through `{name}`, which may change values")

    def stop(self, fault: Fault) -> Untraceable:
        """The exception for a loader that cannot go on; the fault counts even if the loader catches it."""
        self.faults.append(fault)
        return Untraceable(fault)

    def known_value(self, place: Place) -> float | None:
        """The one number that a view holds, where it is a constant that the loader itself wrote."""
        entries = self.read(place)
        values = {e.content for e in entries}
        only = values.pop() if len(values) == 1 else None
        return only.value if isinstance(only, Constant) and only.dtype == place.dtype else None


def _meta(x: torch.Tensor) -> torch.Tensor:
    if x.device.type == "meta":
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


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
