"""Places of checkpoints, their manifest, and digests of files: what writing and reading them share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import xxhash

from weightdepot.store.errors import InvalidRequest

MANIFEST = "weightdepot.json"  # beside the weights, written last
CHUNK = 8 << 20  # bytes hashed or copied at once


class Entry(msgspec.Struct, frozen=True):
    """One file as it was written."""

    nbytes: int
    xxh3_128: str


class Manifest(msgspec.Struct, frozen=True):
    """What `weightdepot.json` says."""

    model: str
    version: int
    attempt: str
    files: dict[str, Entry]


def is_remote(place: str) -> bool:
    """Whether it is a URL of something else than a local directory."""
    return "://" in place and not place.startswith("file://")


def local_path(place: str) -> Path:
    return Path(place.removeprefix("file://"))


def filesystem(url: str) -> tuple[Any, str]:
    """fsspec's file system for a URL, and the path in it. Raises InvalidRequest saying what to install."""
    try:
        import fsspec

        fs, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise InvalidRequest(
            f"{url} cannot be reached: {error}. For S3: pip install 'weightdepot[s3]'"
        ) from error
    return fs, str(path).rstrip("/")


def digest_of(path: Path) -> Entry:
    """Size and xxh3-128 of a file."""
    hashed, nbytes = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            hashed.update(chunk)
            nbytes += len(chunk)
    return Entry(nbytes, hashed.hexdigest())


def read_manifest(content: bytes, where: str) -> Manifest:
    """Raises InvalidRequest for what is none."""
    try:
        return msgspec.json.decode(content, type=Manifest)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"{where} is not a manifest of weightdepot: {error}") from error
