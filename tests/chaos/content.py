"""What each tensor holds in each version, so that every element says which version it is of."""

from __future__ import annotations

import torch

TENSORS, ROWS, COLUMNS = 6, 768, 1024  # 18 MiB in all: long enough that a fault can fall into a copy
STEP = 7919  # what each element grows by from version to version


def base(tensor: int) -> torch.Tensor:
    numbers = torch.arange(ROWS * COLUMNS, dtype=torch.int64).reshape(ROWS, COLUMNS)
    return ((numbers * 2_654_435_761 + 104_729 * tensor) % (1 << 30)).to(torch.int32)


def versions_in(held: torch.Tensor, of_version_zero: torch.Tensor) -> list[int | None]:
    """The versions that there are elements of; None: elements of no version."""
    grown = sorted(set((held - of_version_zero).flatten().tolist()))
    return [g // STEP if g >= 0 and g % STEP == 0 else None for g in grown[:10]]


def torn(held: list[torch.Tensor], bases: list[torch.Tensor], version: int) -> str:
    """Which of these tensors is not, in every element, what it is in `version`; empty: all are."""
    for number, (tensor, zero) in enumerate(zip(held, bases, strict=True)):
        if not torch.equal(tensor, zero + STEP * version):
            found = versions_in(tensor, zero)
            return f"tensor {number} is said to be of version {version} and has elements of {found}"
    return ""
