"""Segments: large arenas of shared memory, made once and registered once with every transport.

A segment is a file `weightdepot-<owner>-<session>-<n>` in a tmpfs. Its owner holds an exclusive `flock` on
it for as long as it lives. The kernel drops that lock with the process, whatever killed it, so an orphan is
known at once and to everybody; no pid has to be trusted.

The lock belongs to the open file, which `fork` shares: a child would keep its dead parent's segments
looking alive. Children therefore close the file (`_forget_in_child`), and never unlink what is not theirs.

A mapping is never unmapped by hand: it goes when the last tensor over it goes. `mmap.close` would succeed
while tensors still look at the memory, and the next read of them would end the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import re
import resource
import shutil
import stat
import time
import weakref
from collections.abc import Collection, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from weightdepot.store.errors import InvalidRequest, SourceLost, StoreFull, TransportUnavailable
from weightdepot.store.hosts import SHM_DIRECTORY

PREFIX = "weightdepot-"
_OWNER = re.compile(r"[A-Za-z0-9_.]+")
_SESSION = re.compile(r"[A-Za-z0-9_.-]+")
_NAME = re.compile(rf"{PREFIX}(?P<owner>[A-Za-z0-9_.]+)-(?P<session>[A-Za-z0-9_.-]+)-(?P<n>[0-9]+)")
# Memory is asked for in steps, so that a signal that interrupts the call repeats one step, not all of them.
_STEP = 1 << 28

_serials = itertools.count()
_live: weakref.WeakSet[Segment] = weakref.WeakSet()


class Segment:
    """Memory that this process owns and others may read. Make it with `create`.

    A context manager. `close` may be called more than once; a segment that is never closed is unlinked when
    the interpreter ends, and by `remove_orphans` when it was killed before that.
    """

    def __init__(self, path: Path, fd: int, nbytes: int, memory: torch.Tensor) -> None:
        self.path = str(path)
        self.nbytes = nbytes
        self._pid = os.getpid()
        self._memory: torch.Tensor | None = memory
        self._fd = fd
        self._finalizer = weakref.finalize(self, _unlink_and_unlock, self.path, fd, self._pid)
        _live.add(self)

    @classmethod
    def create(
        cls, nbytes: int, owner: str, session: str, *, directory: str | os.PathLike[str] = SHM_DIRECTORY
    ) -> Segment:
        """A new segment of `nbytes` (0 is allowed), all zero, every page of it present.

        `owner` is the hash of run, model and rank: letters, digits, dot and underscore. `session` is unique
        to this start of the process, and may hold hyphens too.
        Raises StoreFull when the memory is not there: now, and not as a SIGBUS in the middle of a write.
        """
        if nbytes < 0:
            raise InvalidRequest(f"a segment of {nbytes} bytes cannot be made")
        if not _OWNER.fullmatch(owner) or not _SESSION.fullmatch(session):
            raise InvalidRequest(f"not fit for a file name: owner {owner!r}, session {session!r}")
        size = max(nbytes, 1)  # an empty file cannot be mapped
        path, fd = _new_file(Path(directory), owner, session, size)
        try:
            _allocate(fd, size, Path(directory))
            # Opened anew: `mmap` keeps a duplicate of what it is given, which would keep the lock in a forked
            # child, and with the last view of a closed segment.
            opened = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                memory = torch.frombuffer(mmap.mmap(opened, size), dtype=torch.uint8)
            finally:
                os.close(opened)
            # The pages are there; this enters them in our page table, without the GIL.
            memory[:: mmap.PAGESIZE].zero_()
        except BaseException:
            _unlink_and_unlock(str(path), fd, os.getpid())
            raise
        return cls(path, fd, nbytes, memory[:nbytes])

    @property
    def tensor(self) -> torch.Tensor:
        """uint8, `nbytes` long. Views of it stay valid after `close`, for as long as they are held."""
        if self._memory is None:
            raise InvalidRequest(f"segment {self.path} is closed")
        return self._memory

    @property
    def address(self) -> int:
        """Of the first byte, in this process; page-aligned."""
        return self.tensor.data_ptr()

    @property
    def closed(self) -> bool:
        return self._memory is None

    def close(self) -> None:
        """Unlink. Readers that mapped it keep their memory; nobody can open it any more."""
        self._memory = None
        self._finalizer()

    def _forget_in_child(self) -> None:
        if self._finalizer.detach() is not None:
            with contextlib.suppress(OSError):
                os.close(self._fd)

    def __enter__(self) -> Segment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Segment({self.path!r}, nbytes={self.nbytes}{', closed' if self.closed else ''})"


def _after_fork_in_child() -> None:
    for segment in list(_live):
        segment._forget_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _unlink_and_unlock(path: str, fd: int, pid: int) -> None:
    if os.getpid() != pid:
        return
    # In this order: a file without a lock is an orphan, and somebody else's to remove.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    with contextlib.suppress(OSError):
        os.close(fd)


def _new_file(directory: Path, owner: str, session: str, size: int) -> tuple[Path, int]:
    """A new, locked, empty file. Nobody else can have locked it, or removed it, when this returns."""
    for n in _serials:
        path = directory / f"{PREFIX}{owner}-{session}-{n}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileExistsError:
            continue
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _full(directory, size) from error
            raise TransportUnavailable(f"no shared memory in {directory}: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # `remove_orphans` in another process saw the file between the two calls: it is being removed.
            os.close(fd)
            continue
        if os.fstat(fd).st_nlink == 0:  # it was removed just before we locked it
            os.close(fd)
            continue
        return path, fd
    raise AssertionError("itertools.count ended")


def _allocate(fd: int, size: int, directory: Path) -> None:
    if shutil.disk_usage(directory).free < size:
        raise _full(directory, size)  # without taking all there is from the others first
    try:
        for start in range(0, size, _STEP):
            os.posix_fallocate(fd, start, min(_STEP, size - start))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
            raise _full(directory, size) from error
        if error.errno == errno.EFBIG:
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
            raise StoreFull(
                f"a segment of {size} bytes was asked for, but this process may not make files of more than "
                f"{limit} bytes: raise the limit (ulimit -f)",
                asked=size,
                limit=limit,
            ) from error
        raise


def _full(directory: Path, size: int) -> StoreFull:
    usage = shutil.disk_usage(directory)
    return StoreFull(
        f"a segment of {size} bytes ({size / 2**30:.2f} GiB) was asked for, but {directory} has {usage.free} "
        f"bytes ({usage.free / 2**30:.2f} GiB) free of {usage.total}: enlarge it (`mount -o "
        f"remount,size=... {directory}`, `docker run --shm-size=...`, in Kubernetes an emptyDir with medium "
        f"Memory), lower the retention, or remove what dead processes left",
        asked=size,
        free=usage.free,
        total=usage.total,
        directory=str(directory),
    )


class MappedSegment:
    """Another process's segment, mapped for reading. Make it with `open`.

    `tensor` is uint8 and must not be written to: the memory is protected, and a write ends the process.
    The mapping lives as long as any tensor over it, also when the file is unlinked and its owner dead.
    """

    def __init__(self, path: str, nbytes: int, inode: int, memory: torch.Tensor) -> None:
        self.path = path
        self.nbytes = nbytes
        self.inode = inode
        self.tensor = memory

    @classmethod
    def open(cls, path: str | os.PathLike[str], nbytes: int) -> MappedSegment:
        """Map the first `nbytes` of the segment at `path`.

        Raises SourceLost when it is gone or shorter than that, TransportUnavailable when it may not be read.
        """
        path = os.fspath(path)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError as error:
            raise SourceLost(f"segment {path} is gone: its owner closed it or died", path=path) from error
        except OSError as error:
            raise TransportUnavailable(
                f"segment {path} cannot be opened ({error.strerror}): read as the user that made it",
                path=path,
            ) from error
        try:
            at = os.fstat(fd)
            if not stat.S_ISREG(at.st_mode) or at.st_size < nbytes:
                raise SourceLost(
                    f"segment {path} holds {at.st_size} bytes, not the {nbytes} that were announced",
                    path=path,
                )
            if nbytes == 0:
                return cls(path, 0, at.st_ino, torch.empty(0, dtype=torch.uint8))
            memory = _read_only_tensor(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ))
        finally:
            os.close(fd)
        return cls(path, nbytes, at.st_ino, memory)

    def is_current(self) -> bool:
        """Whether `path` still is the file that was mapped."""
        try:
            return os.stat(self.path).st_ino == self.inode
        except OSError:
            return False


class _Keeper(ctypes.Array):  # type: ignore[type-arg]
    """Placeholder for the generated array types, which carry the mapping that they look into."""

    _type_ = ctypes.c_ubyte
    _length_ = 0
    mapping: mmap.mmap


def _read_only_tensor(mapping: mmap.mmap) -> torch.Tensor:
    """A tensor over a read-only mapping, which keeps the mapping alive.

    `torch.frombuffer` warns about every read-only buffer. Silencing warnings changes the state of all
    threads, so the buffer is offered as a ctypes array instead, which says nothing about protection.
    """
    nbytes = len(mapping)
    address = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
    kind: Any = type("MappedBytes", (_Keeper,), {"_type_": ctypes.c_ubyte, "_length_": nbytes})
    view = kind.from_address(address)
    view.mapping = mapping
    return torch.frombuffer(view, dtype=torch.uint8)


def is_orphan(path: str | os.PathLike[str]) -> bool:
    """Whether nobody alive owns the segment at `path`; True when it is gone."""
    try:
        with _opened(path) as fd:
            # Shared: two processes that ask at the same time do not take each other for the owner.
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
    except FileNotFoundError:
        return True
    except BlockingIOError:
        return False


def remove_orphans(
    owner: str | None,
    keep_sessions: Collection[str] = (),
    older_than_s: float = 0.0,
    *,
    directory: str | os.PathLike[str] = SHM_DIRECTORY,
) -> list[str]:
    """Unlink the segments that dead processes left, and return their paths.

    owner: only those of this owner; None for everybody's.
    keep_sessions: whose segments stay all the same, because versions that readers may still open lie in them.
    older_than_s: seconds since the file was made.
    Never touches a segment whose owner lives, and passes over what this user may not open.
    """
    removed = []
    now = time.time()
    for path in sorted(Path(directory).glob(f"{PREFIX}*")):
        name = _NAME.fullmatch(path.name)
        if name is None or name["session"] in keep_sessions or owner not in (None, name["owner"]):
            continue
        try:
            with _opened(path) as fd:
                at = os.fstat(fd)
                if not stat.S_ISREG(at.st_mode) or now - at.st_mtime < older_than_s:
                    continue
                # Exclusive, and held over the unlink: a process that is just making this file gives it up.
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.stat(path).st_ino == at.st_ino:
                    os.unlink(path)
                    removed.append(str(path))
        except (BlockingIOError, FileNotFoundError, PermissionError):
            continue  # alive, gone by itself, or another user's
    return removed


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        yield fd
    finally:
        os.close(fd)
