"""The installed release of weightdepot."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def release() -> str:
    try:
        return version("weightdepot")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "unknown"
