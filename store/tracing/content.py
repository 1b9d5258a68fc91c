"""What lies in memory while a loader runs over tensors without data, and how casts add up."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import torch

TIERS: Final = {1: "traced", 2: "probed", 3: "whole"}


@dataclass(frozen=True)
class Fault:
    """Something that the traced map cannot express.

    `tier` is the tier that could: 2 (values only move, in too irregular a way for a map), 3 (values change);
    0 where none can (the loader itself is at fault, or control flow depends on values).
    """

    op: str
    tensors: tuple[str, ...]  # checkpoint tensors whose values took part; () where none did
    parameter: str  # where it landed; "" where it did not get that far
    tier: int
    reason: str

    @property
    def text(self) -> str:
        where = f" on its way into {self.parameter!r}" if self.parameter else ""
        return f"{self.reason}{where}"

    def __str__(self) -> str:
        need = f" (tier {self.tier}, {TIERS[self.tier]!r}, would be needed)" if self.tier else ""
        return f"{self.text}{need}"


class Untraceable(RuntimeError):
    """Raised into a loader that asks for a value which does not exist while tracing."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.reason)
        self.fault = fault


@dataclass(frozen=True)
class Source:
    """Elements of a checkpoint tensor; the position in it is kept by the entry that refers to this."""

    tensor: int  # index into the checkpoint's specs
    origin: torch.dtype  # in the checkpoint
    dtype: torch.dtype  # as which the stored bits are a number now
    rounded: bool = False  # whether the cast so far may have lost something
    probed: bool = False  # whether it came here by an operation that is no view


@dataclass(frozen=True)
class Constant:
    value: float
    dtype: torch.dtype


@dataclass(frozen=True)
class Old:
    """What was in a memory before: of a parameter (`buffer` is its number), or nothing defined (-1)."""

    buffer: int


@dataclass(frozen=True)
class Poison:
    """Values that no map gives.

    `old`: the parameters (numbers) whose former values went into them. `how`: tells computations apart; with
    the image, which element of what was computed, it says whether two values are the same.
    """

    fault: Fault
    old: frozenset[int] = frozenset()
    how: int = 0


Content = Source | Constant | Old | Poison
UNDEFINED: Final = Old(-1)


@cache
def exact(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether every value of `source` is a value of `target` (NaN payloads aside)."""
    if source == target:
        return True
    if source == torch.bool:
        return "e8m0" not in str(target)  # which has no zero
    if target == torch.bool:
        return False
    if source.is_complex or target.is_complex:
        return target.is_complex and exact(source.to_real(), target.to_real())
    try:
        if not source.is_floating_point:
            a = torch.iinfo(source)
            if target.is_floating_point:
                b = torch.finfo(target)
                return max(-a.min, a.max) <= round(2 / b.eps) and max(-a.min, a.max) <= b.max
            c = torch.iinfo(target)
            return c.min <= a.min and a.max <= c.max
        if not target.is_floating_point or "float4" in f"{source}{target}":
            return False
    except TypeError:
        return False
    f, g = torch.finfo(source), torch.finfo(target)
    if "fnuz" in str(target) or "e8m0" in str(target) or ("fn" in str(target) and "fn" not in str(source)):
        return False  # no negative zero, no infinity, or no sign
    # multiples of the smallest subnormal, as many significant bits, no larger
    return f.max <= g.max and f.eps >= g.eps and f.smallest_normal * f.eps >= g.smallest_normal * g.eps


def cast(content: Content, seen: torch.dtype, target: torch.dtype, names: Iterable[str]) -> Content:
    """What becomes of `content`, read as `seen`, in a copy to `target`. `names`: for a fault's message."""
    if isinstance(content, Old) or seen == target:
        return content
    if isinstance(content, Poison):
        return replace(content, how=hash((content.how, seen, target)))
    if isinstance(content, Constant):
        held = reread(content, seen)
        if held is None:
            return Poison(_fault("view", names, f"bits of {content.dtype} are read as {seen}", 3))
        return constant(held.value, target, seen)
    if content.dtype != seen:
        return Poison(_fault("view", names, f"bits of {content.dtype} are read as {seen} and then cast", 3))
    if content.rounded:
        chain = f"{content.origin} to {content.dtype} to {target}"
        return Poison(_fault("to", names, f"is cast twice, and the first cast rounds: {chain}", 3))
    return replace(content, dtype=target, rounded=not exact(content.origin, target))


def reread(content: Constant, seen: torch.dtype) -> Constant | None:
    """A constant read as another type of the same size: only all-zero bits mean the same in each."""
    if content.dtype == seen:
        return content
    zero = content.value == 0 and math.copysign(1, content.value) > 0
    if zero and "e8m0" not in f"{content.dtype}{seen}":
        return Constant(0.0, seen)
    return None


def constant(value: complex, dtype: torch.dtype, given: torch.dtype | None = None) -> Content:
    """`value` as a memory of `dtype` holds it."""
    if isinstance(value, complex):
        if value.imag:
            return Poison(_fault("fill_", (), f"is filled with the complex constant {value}", 3))
        value = value.real
    wide = given or (torch.int64 if isinstance(value, int) and not dtype.is_floating_point else torch.float64)
    try:
        held = torch.tensor(value, dtype=wide).to(dtype)
        number = held.to(torch.float64).item() if dtype.is_floating_point else held.item()
    except (RuntimeError, OverflowError, TypeError) as error:
        return Poison(
            _fault("fill_", (), f"is filled with {value!r}, which {dtype} does not hold: {error}", 3)
        )
    if isinstance(number, int) and abs(number) > 1 << 53:
        return Poison(_fault("fill_", (), f"is filled with {number}, too large for a layout", 3))
    return Constant(float(number.real if isinstance(number, complex) else number), dtype)


def _fault(op: str, names: Iterable[str], reason: str, tier: int) -> Fault:
    return Fault(op, tuple(names), "", tier, reason)
