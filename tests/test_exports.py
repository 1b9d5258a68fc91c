"""The exported surface: these names and no others, each what its home says it is."""

from __future__ import annotations

import weightdepot
from weightdepot.store import errors


def test_every_exported_name_is_there() -> None:
    assert set(weightdepot.__all__) == set(weightdepot._HOME)
    for name in weightdepot.__all__:
        assert getattr(weightdepot, name).__name__ == name
    assert set(weightdepot.__all__) <= set(dir(weightdepot))


def test_every_error_is_exported() -> None:
    own = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.WeightDepotError)
    }
    assert own <= set(weightdepot.__all__)


def test_a_mistyped_name_is_an_attribute_error() -> None:
    assert not hasattr(weightdepot, "Producter")
