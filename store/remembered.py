"""Values worked out from an object once, and kept for as long as the object is there."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Remembered(Generic[Key, Value]):
    """By identity: tables of numpy columns are neither hashable nor quickly compared."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[weakref.ref[Key], Value]] = {}

    def of(self, key: Key, make: Callable[[], Value]) -> Value:
        found = self._kept.get(id(key))
        if found is not None and found[0]() is key:
            return found[1]
        value = make()  # must not refer to `key`, or neither would ever go
        number = id(key)

        def forget(gone: weakref.ref[Key]) -> None:
            kept = self._kept.get(number)
            if kept is not None and kept[0] is gone:  # not another object's that lies there since
                self._kept.pop(number, None)

        self._kept[number] = (weakref.ref(key, forget), value)
        return value

    def __len__(self) -> int:
        return len(self._kept)
