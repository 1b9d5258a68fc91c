"""Pulling one version: reading a plan's tiles, checking them, and writing them into the weights.

Tiles go from where they arrive into the weights about a mebibyte at a time: what was just hashed is still in
the cache when it is copied. No tile is written before its digest was found right. A pull that fails may have
written others before that one: from the first byte on (`on_write`) the weights are of no version until a pull
has succeeded.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from weightdepot.consumers.live import is_live, read_live
from weightdepot.store.digests import combine, digests_of
from weightdepot.store.errors import IntegrityError, SourceLost, VersionGone
from weightdepot.store.index.records import Part, Round
from weightdepot.store.layout import Ints, Layout
from weightdepot.store.moving import Scatter, check_buffers, fill
from weightdepot.store.planning import Plan
from weightdepot.store.progress import OnProgress, Progress
from weightdepot.store.remembered import Remembered
from weightdepot.store.transports.base import Range, Source
from weightdepot.store.transports.select import Transports
from weightdepot.store.weights import Mapped

LARGEST_RANGE = 8 << 20  # bytes read at once: long enough for full speed, several to a staging batch
AT_ONCE = 1 << 20  # bytes that are hashed, then copied: half of a core's second-level cache
READERS = 4  # sources on other machines that are read at the same time


@dataclass(frozen=True)
class FromSource:
    """What came from one source: bytes, and seconds from the first request to the last byte in place."""

    rank: int
    transport: str
    nbytes: int
    seconds: float
    predicted: float | None
    """Seconds that earlier reads over this transport let expect; None when there was none."""


@dataclass(frozen=True)
class Pulled:
    needed: int
    moved: int
    transports: tuple[str, ...]
    sources: tuple[FromSource, ...] = ()


@dataclass(frozen=True)
class Run:
    """Reads `first` to `stop` (exclusive) of a plan, which lie side by side in one slot."""

    first: int
    stop: int
    range: Range


def runs_of(plan: Plan, rows: Ints) -> list[Run]:
    """Join the reads `rows` of one source (rising, contiguous in the plan) to ranges as long as possible."""
    if not len(rows):
        return []
    offset, nbytes = plan.offset[rows], plan.nbytes[rows]
    stop = offset + nbytes
    apart = [True, *(offset[1:] != stop[:-1]).tolist()]
    offsets, sizes, numbers = offset.tolist(), nbytes.tolist(), rows.tolist()
    runs: list[Run] = []
    first = 0
    length = 0
    for i, size in enumerate(sizes):
        if i > first and (apart[i] or length + size > LARGEST_RANGE):
            runs.append(Run(numbers[first], numbers[i - 1] + 1, Range(offsets[first], length)))
            first, length = i, 0
        length += size
    runs.append(Run(numbers[first], numbers[-1] + 1, Range(offsets[first], length)))
    return runs


class _Reading:
    """What of a plan every version needs: its runs, and the tiles of each as plain numbers."""

    def __init__(self, plan: Plan) -> None:
        self.runs = {rank: runs_of(plan, np.flatnonzero(plan.source == rank)) for rank in plan.sources}
        self.offset: list[int] = plan.offset.tolist()
        self.nbytes: list[int] = plan.nbytes.tolist()
        self.index: dict[int, Ints] = {rank: plan.index[plan.source == rank] for rank in plan.sources}
        self.first = {rank: runs[0].first for rank, runs in self.runs.items()}

    def groups(self, run: Run) -> Iterator[range]:
        """Its reads, about `AT_ONCE` bytes at a time."""
        first, length = run.first, 0
        for read in range(run.first, run.stop):
            if length and length + self.nbytes[read] > AT_ONCE:
                yield range(first, read)
                first, length = read, 0
            length += self.nbytes[read]
        yield range(first, run.stop)


_readings: Remembered[Plan, _Reading] = Remembered()


def pull(
    *,
    turn: Round,
    plan: Plan,
    target: Mapped,
    digests: Mapping[int, bytes] | None,
    transports: Transports,
    deadline: float,
    model: str,
    on_progress: OnProgress,
    on_write: Callable[[], None] = lambda: None,
) -> Pulled:
    """Read the version of this round into the target's buffers. `digests`: of each source's tiles, to be
    compared before a tile is written; None to trust what arrives. `on_write`: called once, in this thread,
    before the first byte is written.

    Raises SourceLost (its details name the rank), IntegrityError, WaitTimeout at `deadline`, LayoutError
    when the buffers changed their form. Once `on_write` was called, the buffers may then hold anything.
    """
    buffers = target.buffers()
    check_buffers(target.layout, buffers)
    work = _Pull(
        plan=plan,
        reading=_readings.of(plan, lambda: _Reading(plan)),
        scatter=Scatter(plan, target.layout, buffers),
        model=model,
        version=turn.version,
        deadline=deadline,
        on_progress=on_progress,
        gate=_Gate(on_write),
    )
    parts = {part.rank: part for part in turn.parts}
    with ExitStack() as stack:
        jobs, live = [], []
        for rank in plan.sources:
            part = parts.get(rank)
            if part is None:
                raise VersionGone(
                    f"version {turn.version} of {model!r} has no part of rank {rank}", model=model
                )
            if is_live(part):
                live.append(part)
                continue
            expected = work.expected(part, digests.get(rank, b"")) if digests is not None else None
            nbytes = max(run.range.stop for run in work.reading.runs[rank])
            with work.naming(rank):
                source = stack.enter_context(transports.reach(part.endpoints, nbytes))
            jobs.append(_Job(rank, source, expected))
        sources = work.run(jobs, transports)
        sources += [work.read_live(part, target.layout, buffers, transports) for part in live]
    work.gate.open()
    fill(target.layout.fills, buffers)
    target.finish()
    used = tuple(sorted({source.transport for source in sources}))
    return Pulled(plan.needed_nbytes, work.moved, used, tuple(sources))


class _Stopped(Exception):
    """Another thread of this pull has failed."""


class _Gate:
    """Holds back who would write before `on_write` was called, which the pull's own thread does."""

    def __init__(self, on_write: Callable[[], None]) -> None:
        self._on_write = on_write
        self._thread = threading.get_ident()
        self._opened = False
        self._settled = threading.Event()

    def open(self) -> None:
        if not self._opened:
            self._on_write()
            self._opened = True
            self._settled.set()

    def enter(self) -> None:
        """Raises _Stopped when the pull has failed before anything was written."""
        if self._opened:
            return
        if threading.get_ident() == self._thread:
            self.open()
            return
        self._settled.wait()  # the pull's own thread is bounded by its deadline, and always comes by
        if not self._opened:
            raise _Stopped

    def close(self) -> None:
        self._settled.set()


@dataclass(frozen=True)
class _Job:
    """All that is read from one source."""

    rank: int
    source: Source
    expected: list[int] | None
    """Digests of the tiles, in the order of the plan; None to trust what arrives."""


@dataclass
class _Pull:
    """One call of `pull`: what its threads share."""

    plan: Plan
    reading: _Reading
    scatter: Scatter
    model: str
    version: int
    deadline: float
    on_progress: OnProgress
    gate: _Gate
    moved: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._failed = threading.Event()
        self._error: BaseException | None = None  # of whichever thread failed first

    def run(self, jobs: Sequence[_Job], transports: Transports) -> list[FromSource]:
        """Carry them all out. Sources on other machines are read several at a time, each in a thread (this
        is one of them); memory of this machine by this thread alone."""
        here = deque(job for job in jobs if not job.source.remote)
        away = deque(job for job in jobs if job.source.remote)
        done: list[FromSource] = []

        def work(*queues: deque[_Job]) -> None:
            try:
                for queue in queues:
                    while not self._failed.is_set():
                        try:
                            job = queue.popleft()
                        except IndexError:
                            break
                        done.append(self._read(job, transports))
            except BaseException as error:  # noqa: BLE001 - raised below, by the pull's own thread
                with self._lock:
                    self._error = self._error or error
                self._failed.set()
                for job in jobs:
                    job.source.close()  # nobody waits any more for what was to be read there

        threads = min(READERS, len(away)) - (0 if here else 1)
        with ThreadPoolExecutor(max(threads, 1), thread_name_prefix="weightdepot-pull") as pool:
            for _ in range(threads):
                pool.submit(work, away)
            work(here, away)
            self.gate.close()
        if self._error is not None:
            raise self._error
        return sorted(done, key=lambda source: source.rank)

    def _read(self, job: _Job, transports: Transports) -> FromSource:
        source, runs = job.source, self.reading.runs[job.rank]
        nbytes = sum(run.range.nbytes for run in runs)
        predicted = transports.predict(source.transport, nbytes)
        total, arrived = self.plan.moved_nbytes, 0
        begun = time.perf_counter()
        with self.naming(job.rank):
            for index, memory in source.fetch([run.range for run in runs], self.deadline):
                if self._failed.is_set():
                    raise _Stopped
                run = runs[index]
                if memory.numel() != run.range.nbytes:
                    raise self._incomplete(job.rank, memory.numel(), run.range.nbytes)
                self._place(job, run, memory)
                arrived += run.range.nbytes
                with self._lock:
                    self.moved += run.range.nbytes
                    moved = self.moved
                self.on_progress(Progress(self.model, "pull", self.version, moved, total, source.transport))
        if arrived != nbytes:
            raise self._incomplete(job.rank, arrived, nbytes)
        seconds = time.perf_counter() - begun
        transports.observed(source.transport, nbytes, seconds)
        return FromSource(job.rank, source.transport, nbytes, seconds, predicted)

    def _place(self, job: _Job, run: Run, memory: torch.Tensor) -> None:
        """Check each group of tiles, then write it."""
        reading = self.reading
        for reads in reading.groups(run):
            places = [at - run.range.offset for at in reading.offset[reads.start : reads.stop]]
            if job.expected is not None:
                first = reading.first[job.rank]
                got = digests_of(memory, places, reading.nbytes[reads.start : reads.stop])
                if got != job.expected[reads.start - first : reads.stop - first]:
                    raise self._changed(job, reads, got)
            self.gate.enter()
            stop = places[-1] + reading.nbytes[reads.stop - 1]
            self.scatter.write(reads, memory[places[0] : stop], [at - places[0] for at in places])

    def read_live(
        self, part: Part, layout: Layout, buffers: Mapping[str, torch.Tensor], transports: Transports
    ) -> FromSource:
        """A part that is read in place: there is nothing to stage, and there are no digests."""
        begun = time.perf_counter()

        def moved(nbytes: int) -> None:
            self.moved += nbytes
            total = self.plan.moved_nbytes
            self.on_progress(Progress(self.model, "pull", self.version, self.moved, total, "live"))

        nbytes = read_live(
            part=part,
            plan=self.plan,
            layout=layout,
            buffers=buffers,
            transports=transports,
            deadline=self.deadline,
            model=self.model,
            version=self.version,
            on_write=self.gate.open,
            on_moved=moved,
        )
        return FromSource(part.rank, "live", nbytes, time.perf_counter() - begun, None)

    def expected(self, part: Part, raw: bytes) -> list[int]:
        """The digests of the tiles that are read from this part.

        Raises IntegrityError when they are not those that it was sealed with.
        """
        found = np.frombuffer(raw, dtype="<u8").astype(np.uint64)
        if combine(found) != part.digests:
            raise IntegrityError(
                f"the digests of rank {part.rank} of version {self.version} of {self.model!r} are not those "
                f"that it sealed",
                model=self.model,
                version=self.version,
                rank=part.rank,
            )
        chosen: list[int] = found[self.reading.index[part.rank]].tolist()
        return chosen

    @contextmanager
    def naming(self, rank: int) -> Iterator[None]:
        """Let SourceLost say what was lost."""
        try:
            yield
        except SourceLost as error:
            raise SourceLost(
                f"rank {rank} of version {self.version} of {self.model!r} cannot be read: {error.message}",
                **{**error.details, "model": self.model, "version": self.version, "rank": rank},
            ) from error

    def _changed(self, job: _Job, reads: range, got: Sequence[int]) -> IntegrityError:
        assert job.expected is not None
        first = self.reading.first[job.rank]
        wrong = [r for r, digest in zip(reads, got, strict=True) if digest != job.expected[r - first]]
        names = list(dict.fromkeys(self.plan.tensors[self.plan.tensor[r]] for r in wrong))
        return IntegrityError(
            f"{len(wrong)} tile(s) of version {self.version} of {self.model!r} from rank {job.rank} arrived "
            f"changed, in {', '.join(names[:8])}: the memory was overwritten or the transfer is faulty; call "
            f"update again",
            model=self.model,
            version=self.version,
            rank=job.rank,
            tensors=names[:100],
        )

    def _incomplete(self, rank: int, got: int, wanted: int) -> IntegrityError:
        return IntegrityError(
            f"rank {rank} of version {self.version} of {self.model!r} was read short: {got} bytes came of "
            f"{wanted}; call update again",
            model=self.model,
            version=self.version,
            rank=rank,
        )
