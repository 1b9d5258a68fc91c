"""For tests only: SGLang's source beside a torch that its own dependencies do not fit.

`SGLANG_SOURCE` names a folder that `tests/sglang/setup.sh` filled with the unpacked wheel. What SGLang
imports and is not there (kernels, notebooks, vision) is replaced by modules in which every name exists and
nothing works: the loaders do not use them. An installed SGLang needs none of this.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any

ABSENT = ("IPython", "sgl_kernel", "torchvision", "gguf")


class _Nothing(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(name, (), {})


class _Empty(ModuleType):
    __path__: list[str] = []  # noqa: RUF012 - what makes it a package, to the import system

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(name, (), {"__module__": self.__name__})


class _Finder(MetaPathFinder, Loader):
    """Last on the path: what is installed is found before."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to execute."""


def available() -> bool:
    """Whether SGLang can be imported, installed or from `SGLANG_SOURCE`, which is then on the path."""
    source = os.environ.get("SGLANG_SOURCE")
    if source and find_spec("sglang") is None and os.path.isdir(os.path.join(source, "sglang")):
        sys.path.append(source)
        _stand_in()
    return find_spec("sglang") is not None


def _stand_in() -> None:
    from transformers.utils import is_torchvision_available, is_torchvision_v2_available

    for answer in (is_torchvision_available, is_torchvision_v2_available):
        answer()  # transformers remembers that it is not there, and goes without
    sys.meta_path.append(_Finder())
