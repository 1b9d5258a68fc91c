"""Where a checkpoint is written: a directory, or whatever fsspec reaches. Whole under its name, or not there.

A directory is filled beside its final name and renamed at the end. An object store has no rename: there the
manifest, `weightdepot.json`, is written last, and what has none is no checkpoint. Both remember the files
that are done, with their digests, so that an export that was killed goes on where it was.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from weightdepot.consumers.files.shards import ShardFile
from weightdepot.store.errors import InvalidRequest, WeightDepotError
from weightdepot.store.files import (
    CHUNK,
    MANIFEST,
    Entry,
    Manifest,
    digest_of,
    filesystem,
    is_remote,
    local_path,
)

PROGRESS = ".weightdepot.progress.json"


class ExportFailed(WeightDepotError):
    """The place cannot take the checkpoint. Nothing is under the final name."""

    slug, status, title = "export-failed", 507, "The checkpoint was not written"


@dataclass(frozen=True)
class Identity:
    """What is written: two exports with the same identity have the same bytes."""

    model: str
    version: int
    attempt: str


class Place(Protocol):
    @property
    def where(self) -> str:
        """For messages."""
        ...

    def begin(self, identity: Identity, files: Mapping[str, int]) -> set[str]:
        """Make ready for files of these names and sizes in bytes; the names of those that are there already,
        from an earlier attempt at the same. Raises ExportFailed, InvalidRequest where something else is."""
        ...

    def file(self, file: ShardFile) -> contextlib.AbstractContextManager[Path]:
        """A local file of this size, whose content is the place's when the block ends well."""
        ...

    def finish(self, small: Mapping[str, bytes]) -> None:
        """Add these small files, and make the checkpoint appear under its name."""
        ...


def place_for(target: str, *, overwrite: bool = False) -> Place:
    """A directory, or a URL of fsspec (`s3://bucket/folder`; needs `s3fs`)."""
    if is_remote(target):
        return Remote(target, overwrite=overwrite)
    return Folder(local_path(target), overwrite=overwrite)


class Folder:
    """A directory of a file system."""

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        self._final = path.absolute()
        self._partial = self._final.with_name(f".{self._final.name}.partial")
        self._overwrite = overwrite
        self._progress: dict[str, Entry] = {}
        self._identity: Identity | None = None

    @property
    def where(self) -> str:
        return str(self._final)

    def begin(self, identity: Identity, files: Mapping[str, int]) -> set[str]:
        if self._final.exists() and not self._overwrite:
            raise InvalidRequest(f"{self._final} exists: choose another directory, or say --overwrite")
        with self._failing():
            self._partial.mkdir(parents=True, exist_ok=True)
            self._identity = identity
            self._progress = {}
            done = _progress_of((self._partial / PROGRESS), identity)
            for name, entry in done.items():
                path = self._partial / name
                if files.get(name) == entry.nbytes and path.is_file() and digest_of(path) == entry:
                    self._progress[name] = entry
            for path in self._partial.iterdir():
                if path.name not in self._progress and path.name != PROGRESS:
                    path.unlink()
            self._save()
            missing = sum(size for name, size in files.items() if name not in self._progress)
            free = shutil.disk_usage(self._partial).free
            if missing > free:
                raise OSError(errno.ENOSPC, f"{missing} bytes are needed, {free} are free")
        return set(self._progress)

    @contextlib.contextmanager
    def file(self, file: ShardFile) -> Iterator[Path]:
        path = self._partial / file.name
        with self._failing():
            allocate(path, file.nbytes)
            yield path
            with path.open("rb") as written:
                os.fsync(written.fileno())
            self._progress[file.name] = digest_of(path)
            self._save()

    def finish(self, small: Mapping[str, bytes]) -> None:
        with self._failing():
            for name, content in small.items():
                _write(self._partial / name, content)
            _write(self._partial / MANIFEST, _manifest(self._identity, self._progress))
            (self._partial / PROGRESS).unlink()
            _sync_directory(self._partial)
            old = self._final.with_name(f".{self._final.name}.old")
            shutil.rmtree(old, ignore_errors=True)
            if self._final.exists():
                self._final.rename(old)
            self._partial.rename(self._final)
            _sync_directory(self._final.parent)
            shutil.rmtree(old, ignore_errors=True)

    def _save(self) -> None:
        _write(self._partial / PROGRESS, _manifest(self._identity, self._progress))

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """A full or failing disk as one clear error; what was begun goes where it could not be ended."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                shutil.rmtree(self._partial, ignore_errors=True)
                raise ExportFailed(
                    f"{self._final.parent} is full ({error.strerror}): nothing was left there; free some "
                    f"space or choose another place",
                    target=self.where,
                ) from error
            raise ExportFailed(
                f"{self.where} cannot be written: {error.strerror or error}", target=self.where
            ) from error


class Remote:
    """A folder of an object store, through fsspec. One file at a time is on the local disk."""

    def __init__(self, url: str, *, overwrite: bool = False) -> None:
        self._url, self._overwrite = url.rstrip("/"), overwrite
        self._progress: dict[str, Entry] = {}
        self._identity: Identity | None = None
        self._fs, self._root = filesystem(self._url)

    @property
    def where(self) -> str:
        return self._url

    def begin(self, identity: Identity, files: Mapping[str, int]) -> set[str]:
        with self._failing():
            self._identity = identity
            if self._fs.exists(f"{self._root}/{MANIFEST}"):
                if not self._overwrite:
                    raise InvalidRequest(
                        f"{self._url} holds a checkpoint: choose another, or say --overwrite"
                    )
                self._fs.rm(f"{self._root}/{MANIFEST}")
            self._progress = {}
            progress = f"{self._root}/{PROGRESS}"
            if self._fs.exists(progress):
                done = _decoded(self._fs.cat_file(progress), identity)
                for name, entry in done.items():
                    path = f"{self._root}/{name}"
                    if (
                        files.get(name) == entry.nbytes
                        and self._fs.exists(path)
                        and self._fs.size(path) == entry.nbytes
                    ):
                        self._progress[name] = entry
        return set(self._progress)

    @contextlib.contextmanager
    def file(self, file: ShardFile) -> Iterator[Path]:
        with self._failing(), tempfile.TemporaryDirectory(prefix="weightdepot-export-") as folder:
            path = Path(folder) / file.name
            allocate(path, file.nbytes)
            yield path
            entry = digest_of(path)
            self._fs.put_file(str(path), f"{self._root}/{file.name}")
            self._progress[file.name] = entry
            self._fs.pipe_file(f"{self._root}/{PROGRESS}", _manifest(self._identity, self._progress))

    def finish(self, small: Mapping[str, bytes]) -> None:
        with self._failing():
            for name, content in small.items():
                self._fs.pipe_file(f"{self._root}/{name}", content)
            # from here on it is a checkpoint
            self._fs.pipe_file(f"{self._root}/{MANIFEST}", _manifest(self._identity, self._progress))
            if self._fs.exists(f"{self._root}/{PROGRESS}"):
                self._fs.rm(f"{self._root}/{PROGRESS}")

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ExportFailed(f"{self._url} cannot be written: {error}", target=self._url) from error


def allocate(path: Path, nbytes: int) -> None:
    """A file of this size whose blocks are the disk's already: a full disk is found now, and not as a SIGBUS
    in the middle. Raises OSError."""
    with path.open("wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            left = nbytes
            while left > 0:
                left -= file.write(bytes(min(left, CHUNK)))


def _manifest(identity: Identity | None, files: Mapping[str, Entry]) -> bytes:
    if identity is None:
        raise InvalidRequest("`begin` comes first")
    manifest = Manifest(identity.model, identity.version, identity.attempt, dict(sorted(files.items())))
    return json.dumps(msgspec.to_builtins(manifest), indent=2).encode() + b"\n"


def _progress_of(path: Path, identity: Identity) -> dict[str, Entry]:
    try:
        return _decoded(path.read_bytes(), identity)
    except FileNotFoundError:
        return {}


def _decoded(content: bytes, identity: Identity) -> dict[str, Entry]:
    """The files of an earlier attempt at the same version; none of any other."""
    try:
        found = msgspec.json.decode(content, type=Manifest)
    except msgspec.MsgspecError:
        return {}  # it was killed while it wrote this
    same = (found.model, found.version, found.attempt) == (identity.model, identity.version, identity.attempt)
    return found.files if same else {}


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all, and on the disk."""
    beside = path.with_name(f"{path.name}.new")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
