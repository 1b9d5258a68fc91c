"""One pull: several sources at a time, and what is said and left when one of them fails."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from weightdepot.consumers.pull import Pulled, pull
from weightdepot.store.digests import combine, digest_tiles
from weightdepot.store.errors import IntegrityError, SourceLost, VersionGone
from weightdepot.store.index.records import Part, Round
from weightdepot.store.moving import pack
from weightdepot.store.planning import Plan, make_packing, make_plan
from weightdepot.store.progress import ignore
from weightdepot.store.segments import Segment
from weightdepot.store.tiling import make_tiling
from weightdepot.store.transports.base import Transport
from weightdepot.store.transports.faults import Fault, FaultyTransport
from weightdepot.store.transports.memory import MemoryHub, MemoryTransport
from weightdepot.store.transports.select import Transports
from weightdepot.store.transports.tcp.transport import TcpTransport
from weightdepot.store.weights import Mapped, Shard, layout_of, local_buffers

from ..store.transports.conftest import soon

RANKS, ROWS, COLUMNS = 6, 600, 1024
WHOLE = torch.arange(RANKS * ROWS * COLUMNS, dtype=torch.int32).view(RANKS * ROWS, COLUMNS)


@dataclass
class Store:
    """Six ranks that hold each 600 rows of one tensor, and a reader of its left half."""

    plan: Plan
    segments: list[Segment]
    digests: dict[int, bytes]
    combined: dict[int, str]
    into: torch.Tensor
    target: Mapped
    writes: list[int] = field(default_factory=list)

    def pull(self, transport: Transport, absent: int | None = None, **changes: Any) -> Pulled:
        parts = tuple(
            Part(rank, "s", {transport.name: transport.serve(segment)}, segment.nbytes, self.combined[rank])
            for rank, segment in enumerate(self.segments)
            if rank != absent
        )
        arguments: dict[str, Any] = {
            "turn": Round("g", 1, 7, None, "t", parts, 30.0),
            "plan": self.plan,
            "target": self.target,
            "digests": self.digests,
            "transports": Transports(transports=[transport]),
            "deadline": soon(),
            "model": "policy",
            "on_progress": ignore,
            "on_write": lambda: self.writes.append(threading.get_ident()),
        }
        return pull(**{**arguments, **changes})


@pytest.fixture
def store() -> Iterator[Store]:
    shape = tuple(WHOLE.shape)
    shards = [{"w": Shard(WHOLE[r * ROWS :][:ROWS], shape, (r * ROWS, 0))} for r in range(RANKS)]
    layouts = [layout_of(s) for s in shards]
    into = torch.full((RANKS * ROWS, COLUMNS // 2), -1, dtype=torch.int32)
    weights = {"w": Shard(into, shape, (0, 0))}
    layout = layout_of(weights)
    tiling = make_tiling(layouts, [layout])
    with contextlib.ExitStack() as stack:
        segments, digests, combined = [], {}, {}
        for rank in range(RANKS):
            source = tiling.source_tiling(rank)
            segment = stack.enter_context(Segment.create(source.slot_nbytes, "test", f"{os.getpid()}"))
            packing = make_packing(source, layouts[rank])
            pack(source, packing, layouts[rank], local_buffers(shards[rank]), segment.tensor)
            found = digest_tiles(segment.tensor, source.offset, source.nbytes)
            digests[rank], combined[rank] = found.astype("<u8").tobytes(), combine(found)
            segments.append(segment)
        target = Mapped(layout, lambda: local_buffers(weights))
        yield Store(make_plan(tiling, layout), segments, digests, combined, into, target)


@pytest.fixture(params=["memory", "tcp"])
def transport(request: pytest.FixtureRequest) -> Iterator[Transport]:
    made: Transport = MemoryTransport() if request.param == "memory" else TcpTransport(host="127.0.0.1")
    with made:
        yield made


@pytest.mark.parametrize("verify", [True, False])
def test_all_sources_arrive_and_each_is_accounted_for(
    store: Store, transport: Transport, verify: bool
) -> None:
    done = store.pull(transport, **({} if verify else {"digests": None}))
    assert torch.equal(store.into, WHOLE[:, : COLUMNS // 2])
    assert store.writes == [threading.get_ident()], "said once, by the thread that pulls"
    assert [s.rank for s in done.sources] == list(range(RANKS))
    assert sum(s.nbytes for s in done.sources) == done.moved == done.needed == store.into.nbytes
    assert all(s.seconds > 0 and s.transport == transport.name for s in done.sources)


def test_the_second_pull_over_a_transport_is_predicted(store: Store, transport: Transport) -> None:
    transports = Transports(transports=[transport])
    store.pull(transport, transports=transports)
    again = store.pull(transport, transports=transports)
    assert all(s.predicted is not None and s.predicted > 0 for s in again.sources)


@pytest.mark.parametrize("rank", [0, 3, 5])
def test_a_source_that_is_gone_is_named_and_the_others_are_left(
    store: Store, transport: Transport, rank: int
) -> None:
    missing = store.segments[rank]
    endpoint = transport.serve(missing)
    transport.withdraw(missing)
    real = transport.serve

    def serve(segment: Segment) -> dict[str, Any]:
        return endpoint if segment is missing else real(segment)

    transport.serve = serve  # type: ignore[method-assign]
    with pytest.raises(SourceLost, match=f"rank {rank} of version 7 of 'policy'") as caught:
        store.pull(transport)
    assert caught.value.details["rank"] == rank
    assert threading.active_count() < 10, "its threads have ended"


def test_a_part_that_is_missing_is_a_version_that_is_gone(store: Store, transport: Transport) -> None:
    with pytest.raises(VersionGone, match="rank 4"):
        store.pull(transport, absent=4)
    assert store.writes == []


@pytest.mark.parametrize("remote", [False, True], ids=["here", "away"])
@pytest.mark.parametrize("kind", ["corrupt", "truncate", "drop"])
@pytest.mark.parametrize("at", [0, 4])
def test_what_does_not_arrive_as_it_was_published_is_refused_and_not_written(
    store: Store, kind: Any, at: int, remote: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner: Transport = TcpTransport(host="127.0.0.1") if remote else MemoryTransport(MemoryHub())
    with FaultyTransport(inner, Fault(at, kind)) as transport:
        with pytest.raises(IntegrityError, match="version 7 of 'policy'"):
            store.pull(transport)
        wanted = WHOLE[:, : COLUMNS // 2]
        assert bool(((store.into == wanted) | (store.into == -1)).all()), "only right bytes were written"
        assert bool((store.into == -1).any())
        if not remote and at == 0:
            assert store.writes == [], "nothing was written yet, and nothing was said"
        store.pull(transport)
        assert torch.equal(store.into, wanted)


def test_digests_that_are_not_the_sealed_ones_are_refused_before_anything_is_read(
    store: Store, transport: Transport
) -> None:
    forged = {**store.digests, 2: bytes(len(store.digests[2]))}
    with pytest.raises(IntegrityError, match="rank 2"):
        store.pull(transport, digests=forged)
    assert store.writes == []
