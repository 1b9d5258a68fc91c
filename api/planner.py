"""Tilings and plans: made once per set of layouts, in a thread, however many members ask at once.

They are kept as blobs in the index, where any controller finds them, and the last ones in memory.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import anyio
import anyio.to_thread

from weightdepot.api.problems import UnknownLayout
from weightdepot.api.settings import Settings
from weightdepot.api.tilings import checked_tiling
from weightdepot.store.errors import InvalidRequest, VersionGone
from weightdepot.store.index.index import Index
from weightdepot.store.layout import Layout, manifest_of
from weightdepot.store.planning import make_plan
from weightdepot.store.tiling import Tiling, TilingMaker, tiling_id

T = TypeVar("T")

DECODED_TILINGS = 2  # the present one and the one before; a large model's takes hundreds of megabytes
MAKERS = 2  # producer groups whose tilings are changed instead of made anew


class StillPlanning(Exception):
    """The answer is being made; its maker goes on. Never leaves the routes: they answer with a wait."""


class Lru(Generic[T]):
    """The values used last, up to `capacity` in the sum of their sizes."""

    def __init__(self, capacity: int, size: Callable[[T], int]) -> None:
        self._capacity = capacity
        self._size = size
        self._used = 0
        self._values: OrderedDict[str, T] = OrderedDict()

    def get(self, key: str) -> T | None:
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key]

    def put(self, key: str, value: T) -> None:
        """A value larger than the whole capacity is not kept."""
        self.drop(key)
        if self._size(value) > self._capacity:
            return
        self._values[key] = value
        self._used += self._size(value)
        while self._used > self._capacity:
            _, old = self._values.popitem(last=False)
            self._used -= self._size(old)

    def drop(self, key: str) -> None:
        old = self._values.pop(key, None)
        if old is not None:
            self._used -= self._size(old)


@dataclass(frozen=True)
class Wanted:
    """The tiling of a model's members, as they are at one membership."""

    membership: int
    incarnation: int
    tiling: str


class Planner:
    """Single-flight: one computation per id and process. Owned by one event loop."""

    def __init__(self, index: Index, settings: Settings) -> None:
        self._index = index
        self._ttl = settings.timeouts.blob_ttl
        self._threads = anyio.CapacityLimiter(settings.limits.planning_threads)
        # of their own, so that members can join while a large plan is made
        self._checks = anyio.CapacityLimiter(settings.limits.planning_threads)
        self._capacity = settings.limits.cache
        self._bytes: Lru[bytes] = Lru(self._capacity, len)
        self._tilings: Lru[Tiling] = Lru(DECODED_TILINGS, lambda _: 1)
        self._makers: Lru[TilingMaker] = Lru(MAKERS, lambda _: 1)
        self._flights: dict[str, asyncio.Task[Any]] = {}
        # By model: the tiling that its members want, as long as these do not change.
        self.wanted: dict[str, Wanted] = {}

    @property
    def busy(self) -> bool:
        return bool(self._flights)

    def forget(self) -> None:
        """The index was away and may have come back empty: look there before trusting memory again."""
        self._bytes = Lru(self._capacity, len)
        self._tilings = Lru(DECODED_TILINGS, lambda _: 1)
        self.wanted.clear()

    async def close(self) -> None:
        """Stop waiting for what is being made. A thread that computes cannot be stopped."""
        flights = list(self._flights.values())
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)

    async def put_layout(self, digest: str, data: bytes) -> Layout:
        """Check and keep a layout. Raises InvalidRequest or LayoutError, and keeps nothing then."""
        layout = await anyio.to_thread.run_sync(_decoded, data, limiter=self._checks)
        if layout.digest != digest:
            raise InvalidRequest(
                f"the layout's digest is {layout.digest}, but it was sent as {digest}: "
                "were the two made by different releases of weightdepot?"
            )
        await self._index.put_blob("layout", digest, data, self._ttl)
        self._bytes.put(f"layout {digest}", data)
        return layout

    async def layout(self, digest: str) -> bytes:
        """Encoded. Raises UnknownLayout."""
        data = await self._blob("layout", digest)
        if data is None:
            raise UnknownLayout(
                f"no layout {digest} is known (any more): send it with PUT /v1/layouts/{digest} first",
                layout=digest,
            )
        return data

    async def manifest(self, producers: Sequence[str], patience: float) -> bytes:
        """The checkpoint's tensors as JSON. Raises LayoutError where the ranks disagree, StillPlanning."""
        key = "manifest " + tiling_id(producers, ())
        kept = self._bytes.get(key)
        return (
            kept
            if kept is not None
            else await self._once(key, lambda: self._make_manifest(key, producers), patience)
        )

    async def tiling(self, producers: Sequence[str], consumers: Collection[str], patience: float) -> str:
        """The id of the tiling of these layouts, which is kept when this returns.

        Raises LayoutError where the producers' layouts do not fit, UnknownLayout, StillPlanning.
        """
        tiling = tiling_id(producers, consumers)
        if self._bytes.get(f"tiling {tiling}") is None:
            await self._once(f"tiling {tiling}", lambda: self._ensure(tiling, producers, consumers), patience)
        return tiling

    async def whole_tiling(self, tiling: str) -> bytes:
        """Encoded. Raises VersionGone."""
        data = await self._blob("tiling", tiling)
        if data is None:
            raise _tiling_gone(tiling)
        return data

    async def put_tiling(self, tiling: str, data: bytes) -> None:
        """Check and keep a tiling that the index may have lost. One that is there stays as it is: versions
        may have been made with it. Raises InvalidRequest."""
        await anyio.to_thread.run_sync(checked_tiling, data, limiter=self._checks)
        # not from memory: the index may have lost it since
        if await self._index.get_blob("tiling", tiling, ttl_s=self._ttl) is None:
            await self._index.put_blob("tiling", tiling, data, self._ttl)
            self._bytes.put(f"tiling {tiling}", data)

    async def source_tiling(self, tiling: str, rank: int, patience: float) -> bytes:
        """What one producer rank stores. Raises VersionGone for an unknown tiling, StillPlanning."""
        key = f"source {tiling} {rank}"
        kept = self._bytes.get(key)
        return (
            kept
            if kept is not None
            else await self._once(key, lambda: self._make_source(key, tiling, rank), patience)
        )

    async def plan(self, tiling: str, layout: str, patience: float) -> bytes:
        """What a rank of this layout reads. Raises LayoutError where it does not fit, StillPlanning."""
        key = f"plan {tiling}-{layout}"
        kept = self._bytes.get(key)
        return (
            kept
            if kept is not None
            else await self._once(key, lambda: self._make_plan(tiling, layout), patience)
        )

    async def refresh(self, layouts: Collection[str], tilings: Collection[str]) -> None:
        """Put off the end of what is still in use."""
        for kind, digests in (("layout", layouts), ("tiling", tilings)):
            for digest in digests:
                await self._index.get_blob(kind, digest, ttl_s=self._ttl)

    # -- how each is made ------------------------------------------------------------------------------

    async def _make_manifest(self, key: str, producers: Sequence[str]) -> bytes:
        encoded = [await self.layout(digest) for digest in dict.fromkeys(producers)]

        def make() -> bytes:
            # one decoded layout at a time: of a large model they would not fit together
            specs = manifest_of(_decoded(data) for data in encoded)
            tensors = [{"name": s.name, "shape": list(s.shape), "dtype": s.dtype} for s in specs]
            return json.dumps({"tensors": tensors}).encode()

        made = await self._in_thread(make)
        self._bytes.put(key, made)
        return made

    async def _ensure(self, tiling: str, producers: Sequence[str], consumers: Collection[str]) -> None:
        if await self._blob("tiling", tiling) is not None:
            return
        # What one group of producers wants is changed when consumers come and go, not made anew.
        key = " ".join(producers)
        maker = self._makers.get(key)
        known = {*consumers} if maker is not None else {*producers, *consumers}
        encoded = {digest: await self.layout(digest) for digest in known}

        def make() -> tuple[TilingMaker, Tiling, bytes]:
            used = maker or TilingMaker([_decoded(encoded[digest]) for digest in producers])
            made = used.make(consumers, lambda digest: _decoded(encoded[digest]))
            return used, made, made.to_bytes()

        used, made, data = await self._in_thread(make)
        self._makers.put(key, used)
        await self._index.put_blob("tiling", tiling, data, self._ttl)
        self._bytes.put(f"tiling {tiling}", data)
        self._tilings.put(tiling, made)

    async def _make_source(self, key: str, tiling: str, rank: int) -> bytes:
        decoded = await self._decoded_tiling(tiling)
        if rank >= decoded.world_size:
            raise InvalidRequest(f"tiling {tiling} has {decoded.world_size} sources, there is no rank {rank}")
        made = await self._in_thread(lambda: decoded.source_tiling(rank).to_bytes())
        self._bytes.put(key, made)
        return made

    async def _make_plan(self, tiling: str, layout: str) -> bytes:
        digest = f"{tiling}-{layout}"
        known = await self._blob("plan", digest)
        if known is not None:
            return known
        decoded = await self._decoded_tiling(tiling)
        encoded = await self.layout(layout)
        made = await self._in_thread(lambda: make_plan(decoded, _decoded(encoded)).to_bytes())
        await self._index.put_blob("plan", digest, made, self._ttl)
        self._bytes.put(f"plan {digest}", made)
        return made

    async def _decoded_tiling(self, tiling: str) -> Tiling:
        kept = self._tilings.get(tiling)
        if kept is not None:
            return kept

        async def decode() -> Tiling:
            data = await self._blob("tiling", tiling)
            if data is None:
                raise _tiling_gone(tiling)
            made = await self._in_thread(lambda: Tiling.from_bytes(data))
            self._tilings.put(tiling, made)
            return made

        return await self._once(f"decode {tiling}", decode, None)

    async def _blob(self, kind: str, digest: str) -> bytes | None:
        key = f"{kind} {digest}"
        data = self._bytes.get(key)
        if data is None:
            data = await self._index.get_blob(kind, digest, ttl_s=self._ttl)
            if data is not None:
                self._bytes.put(key, data)
        return data

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(work, limiter=self._threads, abandon_on_cancel=True)

    async def _once(self, key: str, make: Callable[[], Coroutine[Any, Any, T]], patience: float | None) -> T:
        """The result of `make`, which runs once however many ask, and goes on when an asker goes away.

        Raises StillPlanning after `patience` seconds (None: waits for as long as it takes).
        """
        flight = self._flights.get(key)
        if flight is None:
            flight = asyncio.create_task(make(), name=f"planner: {key}")
            self._flights[key] = flight
            flight.add_done_callback(lambda done: self._landed(key, done))
        done, _ = await asyncio.wait({flight}, timeout=patience)
        if not done:
            raise StillPlanning(key)
        if flight.cancelled():  # this controller is shutting down: another one, or the next, can be asked
            raise StillPlanning(key)
        result: T = flight.result()
        return result

    def _landed(self, key: str, flight: asyncio.Task[Any]) -> None:
        self._flights.pop(key, None)
        if not flight.cancelled():
            flight.exception()  # retrieved, also when every asker is gone


def _decoded(data: bytes) -> Layout:
    return Layout.from_bytes(data)


def _tiling_gone(tiling: str) -> VersionGone:
    return VersionGone(
        f"tiling {tiling} is not kept any more, nor are versions that it was made for: "
        "ask for the newest version again",
        tiling=tiling,
    )
