"""Sharing out work that several ranks could do, such that the most-loaded has least. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from weightdepot.store.layout import Ints

Floats = npt.NDArray[np.float64]

SWEEPS = 100
TOLERANCE = 1e-4  # of the mean load; a sweep that moves less ends the search


def fill_up(levels: Floats, amount: float) -> Floats:
    """How `amount` of water spreads over vessels that stand at `levels`: (k,) what each gets."""
    rising = np.sort(levels)
    # with the lowest i + 1 vessels wet, the water stands at surface[i]
    surface = (amount + np.cumsum(rising)) / np.arange(1, len(rising) + 1)
    wet = np.flatnonzero(surface >= rising)[-1]
    share: Floats = np.maximum(surface[wet] - levels, 0.0)
    return share


def quotas(fixed: Floats, sets: Sequence[Ints], amounts: Floats) -> list[Floats]:
    """How much of each amount each rank of its set does: one (len(set),) array for each set.

    fixed: (ranks,) what each rank does in any case. Least in the sum of squares, hence also in the largest
    load: each set in turn gives back what it has and is spread anew over its ranks as they stand, until
    nothing moves any more.
    """
    load = fixed.astype(np.float64)
    shares = [np.zeros(len(ranks)) for ranks in sets]
    enough = TOLERANCE * (load.sum() + float(amounts.sum())) / max(len(load), 1)
    for _ in range(SWEEPS):
        moved = 0.0
        for i, ranks in enumerate(sets):
            others = load[ranks] - shares[i]
            share = fill_up(others, float(amounts[i]))
            moved = max(moved, float(np.abs(share - shares[i]).max()))
            load[ranks] = others + share
            shares[i] = share
        if moved <= enough or len(sets) == 1:
            break
    return shares
