"""Shared memory: readers of one machine look straight into the segment. No copy, no staging, no calls."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from weightdepot.store.errors import InvalidRequest, SourceLost, TransportUnavailable
from weightdepot.store.hosts import SHM_DIRECTORY, shm_domain
from weightdepot.store.segments import PREFIX, MappedSegment, Segment
from weightdepot.store.transports.base import Range, Source, Transport, fetch_views, field


class ShmTransport(Transport):
    """Reaches a segment if and only if both sides see the same directory (`hosts.shm_domain`).

    A reader that has mapped a segment keeps its bytes, whatever becomes of the process that wrote them.
    Mappings are kept for the next version, until their file is gone and no source uses them.
    """

    name = "shm"

    def __init__(self, directory: str | os.PathLike[str] = SHM_DIRECTORY) -> None:
        self._directory = os.fspath(directory)
        self._lock = threading.Lock()
        self._mapped: dict[str, tuple[MappedSegment, set[int]]] = {}  # name -> mapping, ids of its users
        self._closed = False

    def serve(self, segment: Segment) -> dict[str, Any]:
        self._check_open()
        directory, name = os.path.split(segment.path)
        try:
            here, there = shm_domain(self._directory), shm_domain(directory)
            at = os.stat(segment.path)
        except OSError as error:
            raise TransportUnavailable(
                f"segment {segment.path} cannot be shared: {error.strerror}"
            ) from error
        if here != there:
            raise TransportUnavailable(f"segment {segment.path} does not lie in {self._directory}")
        return {"domain": here, "file": name, "inode": at.st_ino, "nbytes": segment.nbytes}

    def withdraw(self, segment: Segment) -> None:
        """Nothing to do: it ends with the segment's file."""

    def reach(self, endpoint: Mapping[str, Any], nbytes: int) -> Source:
        self._check_open()
        domain: str = field(endpoint, "domain", str, self.name)
        file: str = field(endpoint, "file", str, self.name)
        inode: int = field(endpoint, "inode", int, self.name)
        held: int = field(endpoint, "nbytes", int, self.name)
        if os.path.basename(file) != file or not file.startswith(PREFIX):
            # An endpoint comes from elsewhere: it must not make us map any file that it likes.
            raise InvalidRequest(f"not the name of a segment: {file!r}")
        if not 0 <= nbytes <= held:
            raise InvalidRequest(f"{nbytes} bytes were asked of a segment of {held}", file=file)
        try:
            here = shm_domain(self._directory)
        except OSError as error:
            raise TransportUnavailable(
                f"no shared memory here: {self._directory}: {error.strerror}"
            ) from error
        if domain != here:
            raise TransportUnavailable(
                f"segment {file} lies on another host, or in another container's {self._directory}"
            )
        with self._lock:
            self._evict()
            known = self._mapped.get(file)
            if known is None or known[0].inode != inode or known[0].nbytes < nbytes:
                mapping = MappedSegment.open(os.path.join(self._directory, file), nbytes=held)
                if mapping.inode != inode:
                    raise SourceLost(f"segment {mapping.path} was replaced by another of its name", file=file)
                known = self._mapped[file] = (mapping, set())
            source = _ShmSource(self, known[0], nbytes)
            known[1].add(id(source))
            return source

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._mapped.clear()

    def release(self, source: _ShmSource) -> None:
        """By the source, when it is closed."""
        with self._lock:
            for _, users in self._mapped.values():
                users.discard(id(source))
            self._evict()

    def _evict(self) -> None:
        """Let go of mappings that nobody uses and nobody can use again: their memory is freed only then."""
        for file in [f for f, (m, users) in self._mapped.items() if not users and not m.is_current()]:
            del self._mapped[file]

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequest("this transport is closed")


class _ShmSource(Source):
    transport = "shm"
    remote = False

    def __init__(self, owner: ShmTransport, mapping: MappedSegment, nbytes: int) -> None:
        self._owner = owner
        self._mapping: MappedSegment | None = mapping
        self.peer = mapping.path
        self.nbytes = nbytes

    def fetch(self, ranges: Sequence[Range], deadline: float) -> Iterator[tuple[int, torch.Tensor]]:
        mapping = self._mapping
        if mapping is None:
            raise InvalidRequest(f"the source {self.peer} is closed")
        yield from fetch_views(self, mapping.tensor, ranges, deadline)

    def close(self) -> None:
        self._mapping = None
        self._owner.release(self)
