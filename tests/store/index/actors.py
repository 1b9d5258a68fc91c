"""Short ways to say who joins and what is published; all on model `m`."""

from __future__ import annotations

from weightdepot.store.index import Grant, Index, Joined, Part, Process, Round, RoundStatus, Version

TTL = 600.0
PROCESS = Process("boot/host", 17, 4242)


async def producers(index: Index, size: int = 2, retention: int = 2, prefix: str = "p") -> list[Joined]:
    """Ranks join as sessions p0, p1, ..."""
    return [
        await index.join_producer("m", r, size, f"{prefix}{r}", f"layout{r}", PROCESS, retention, TTL)
        for r in range(size)
    ]


async def consumers(index: Index, size: int = 2, group: str = "g", prefix: str = "c") -> list[Joined]:
    """Ranks join as sessions c0, c1, ..."""
    return [
        await index.join_consumer("m", group, r, size, f"{prefix}{r}", "", PROCESS, TTL) for r in range(size)
    ]


def part(rank: int, session: str, digests: str = "d0") -> Part:
    return Part(rank, session, {"shm": {"name": f"seg-{session}", "bytes": 1 << 60}}, 100 + rank, digests)


async def open_version(
    index: Index, version: int, rank: int = 0, session: str = "", seal_timeout: float = TTL
) -> Grant:
    incarnation = (await index.model("m")).incarnation
    answer = await index.open_version(
        "m", version, rank, session or f"p{rank}", "tiling", incarnation, seal_timeout
    )
    assert isinstance(answer, Grant), answer
    return answer


async def seal(index: Index, version: int, rank: int = 0, session: str = "") -> Version:
    session = session or f"p{rank}"
    return await index.seal("m", version, rank, session, part(rank, session), bytes([rank]) * 16)


async def publish(index: Index, version: int, size: int = 2) -> Version:
    for rank in range(size):
        await open_version(index, version, rank)
    return [await seal(index, version, rank) for rank in range(size)][-1]


async def begin(index: Index, rank: int = 0, minimum: int = 0, group: str = "g", ttl: float = TTL) -> Round:
    answer = await index.begin_round("m", group, rank, f"c{rank}", minimum, ttl)
    assert isinstance(answer, Round), answer
    return answer


async def finish(index: Index, rank: int, round: int, error: str = "", group: str = "g") -> RoundStatus:
    return await index.finish_round("m", group, rank, f"c{rank}", round, error)


async def update(index: Index, size: int = 2) -> int:
    """All ranks of group g move to the newest version; says which."""
    rounds = [await begin(index, rank) for rank in range(size)]
    for rank in range(size):
        await finish(index, rank, rounds[0].round)
    return rounds[0].version
