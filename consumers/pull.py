"""Pulling one version: reading a plan's tiles, checking them, and writing them into the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from weightdepot.store.digests import combine, digest_tiles
from weightdepot.store.errors import IntegrityError, SourceLost, VersionGone
from weightdepot.store.index.records import Part, Round
from weightdepot.store.layout import Ints
from weightdepot.store.moving import Scatter, check_buffers, fill
from weightdepot.store.planning import Plan
from weightdepot.store.progress import OnProgress, Progress
from weightdepot.store.transports.base import Range
from weightdepot.store.transports.select import Transports
from weightdepot.store.weights import Mapped

Hashes = np.typing.NDArray[np.uint64]

LARGEST_RANGE = 8 << 20  # bytes read at once: long enough for full speed, several to a staging batch


@dataclass(frozen=True)
class Pulled:
    needed: int
    moved: int
    transports: tuple[str, ...]


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
    apart = np.concatenate([[True], offset[1:] != stop[:-1]])
    runs: list[Run] = []
    first = 0
    length = 0
    for i in range(len(rows)):
        if i > first and (apart[i] or length + int(nbytes[i]) > LARGEST_RANGE):
            runs.append(Run(int(rows[first]), int(rows[i]), Range(int(offset[first]), length)))
            first, length = i, 0
        length += int(nbytes[i])
    runs.append(Run(int(rows[first]), int(rows[-1]) + 1, Range(int(offset[first]), length)))
    return runs


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
) -> Pulled:
    """Read the version of this round into the target's buffers. `digests`: of each source's tiles, to be
    compared before a tile is written; None to trust what arrives.

    Raises SourceLost (its details name the rank), IntegrityError, WaitTimeout at `deadline`, LayoutError
    when the buffers changed their form. The buffers may then hold anything.
    """
    buffers = target.buffers()
    check_buffers(target.layout, buffers)
    scatter = Scatter(plan, target.layout, buffers)
    parts = {part.rank: part for part in turn.parts}
    used: set[str] = set()
    moved, total = 0, plan.moved_nbytes
    for rank in plan.sources:
        part = parts.get(rank)
        if part is None:
            raise VersionGone(f"version {turn.version} of {model!r} has no part of rank {rank}", model=model)
        expected = None
        if digests is not None:
            expected = _Digests.of(part, digests.get(rank, b""), plan, model, turn.version)
        rows = np.flatnonzero(plan.source == rank)
        runs = runs_of(plan, rows)
        try:
            with transports.reach(part.endpoints, max(run.range.stop for run in runs)) as source:
                used.add(source.transport)
                for index, memory in source.fetch([run.range for run in runs], deadline):
                    run = runs[index]
                    reads = range(run.first, run.stop)
                    places = plan.offset[run.first : run.stop] - run.range.offset
                    sizes = plan.nbytes[run.first : run.stop]
                    if expected is not None:
                        expected.check(reads, memory, places, sizes)
                    tiles = [memory[o : o + n] for o, n in zip(places.tolist(), sizes.tolist(), strict=True)]
                    scatter.write(reads, tiles)
                    moved += run.range.nbytes
                    on_progress(Progress(model, "pull", turn.version, moved, total, source.transport))
        except SourceLost as error:
            raise SourceLost(
                f"rank {rank} of version {turn.version} of {model!r} cannot be read: {error.message}",
                **{**error.details, "model": model, "version": turn.version, "rank": rank},
            ) from error
    fill(target.layout.fills, buffers)
    target.finish()
    return Pulled(plan.needed_nbytes, moved, tuple(sorted(used)))


@dataclass(frozen=True)
class _Digests:
    """What the tiles of one source must be."""

    model: str
    version: int
    rank: int
    plan: Plan
    expected: Hashes

    @classmethod
    def of(cls, part: Part, raw: bytes, plan: Plan, model: str, version: int) -> _Digests:
        """Raises IntegrityError when they are not those that the part was sealed with."""
        found = np.frombuffer(raw, dtype="<u8").astype(np.uint64)
        if combine(found) != part.digests:
            raise IntegrityError(
                f"the digests of rank {part.rank} of version {version} of {model!r} are not those that it "
                f"sealed",
                model=model,
                version=version,
                rank=part.rank,
            )
        return cls(model, version, part.rank, plan, found)

    def check(self, reads: range, memory: torch.Tensor, places: Ints, sizes: Ints) -> None:
        """Raises IntegrityError naming the tensors whose tiles are not what was published."""
        got = digest_tiles(memory, places, sizes)
        wrong = np.flatnonzero(got != self.expected[self.plan.index[reads.start : reads.stop]])
        if not len(wrong):
            return
        names = list(dict.fromkeys(self.plan.tensors[self.plan.tensor[reads.start + i]] for i in wrong))
        raise IntegrityError(
            f"{len(wrong)} tile(s) of version {self.version} of {self.model!r} from rank {self.rank} arrived "
            f"changed, in {', '.join(names[:8])}: the memory was overwritten or the transfer is faulty; call "
            f"update again",
            model=self.model,
            version=self.version,
            rank=self.rank,
            tensors=names[:100],
        )
