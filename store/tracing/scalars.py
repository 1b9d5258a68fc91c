"""Numbers in place of values that do not exist: what `.item()` of an incoming scalar answers.

Frameworks write `param.data.fill_(w.item())` for scales. That, and nothing else, can be folded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from weightdepot.store.tracing.content import Fault
from weightdepot.store.tracing.memory import Memory


class Token(float):
    """A number that may only be handed to `fill_`. Computing with it or deciding by it raises."""

    refuse: Callable[[], Exception]

    def _refuse(self, *_: object) -> Any:
        raise self.refuse()

    __hash__ = float.__hash__
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __divmod__ = __rdivmod__ = (
        _refuse
    )
    __neg__ = __pos__ = __abs__ = __round__ = __int__ = __float__ = __trunc__ = __ceil__ = __floor__ = _refuse
    __bool__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refuse
    __str__ = __repr__ = __format__ = is_integer = as_integer_ratio = hex = _refuse


class ScalarWeight(torch.Tensor):
    """An incoming tensor of one element; in nothing but `item` different from a plain one."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    token: Callable[[], Token]

    def item(self) -> Any:
        return self.token()


@dataclass
class Issued:
    """A number that was given out, and what it stands for."""

    memory: Memory
    dtype: torch.dtype
    name: str  # of the checkpoint tensor
    filled: bool = False  # whether it came back in a fill


class Tokens:
    """The numbers of one trace. C code sees through a `Token`, so each must come back, or it is a fault."""

    def __init__(self) -> None:
        self._issued: dict[float, Issued] = {}

    def issue(
        self, memory: Memory, dtype: torch.dtype, name: str, refuse: Callable[[Fault], Exception]
    ) -> Token:
        # numbers that no program writes down, compared exactly
        value = -1.7e308 + len(self._issued) * 1e293
        token = Token(value)
        fault = self._fault(name)
        token.refuse = lambda: refuse(fault)
        self._issued[value] = Issued(memory, dtype, name)
        return token

    def taken(self, value: object) -> Issued | None:
        """What a number that is being filled in stands for; None for an ordinary number."""
        if not self._issued or not isinstance(value, float):
            return None
        issued = self._issued.get(value)
        if issued is not None:
            issued.filled = True
        return issued

    def lost(self) -> list[Fault]:
        """The faults of values that were taken and never filled in."""
        return [self._fault(i.name) for i in self._issued.values() if not i.filled]

    @staticmethod
    def _fault(name: str) -> Fault:
        reason = "the loader takes its value by `item` and does something else with it than fill a parameter"
        return Fault("item", (name,), "", 0, reason)
