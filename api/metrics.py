"""What Prometheus is told: counts of this process, and what the index holds at the moment of the scrape.

Counters and histograms are this controller's own: each of several counts what it served. Gauges are the same
at all of them, since they are read from the index.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from weightdepot.store.index.records import Group, Model, VersionState

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
PREFIX = "weightdepot_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATES = tuple(VersionState)


class Metrics:
    """Owned by one application."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        counted: dict[str, Any] = {"registry": self._registry}
        self._parts = Counter(PREFIX + "parts_sealed", "Parts of versions sealed.", ["model"], **counted)
        self._published = Counter(
            PREFIX + "published_bytes", "Bytes of the parts sealed.", ["model"], **counted
        )
        self._publish = Histogram(
            PREFIX + "publish_seconds",
            "What a producer rank reports of a publish, by phase (wait, pack, digest).",
            ["model", "phase"],
            buckets=SECONDS,
            **counted,
        )
        self._updates = Counter(
            PREFIX + "updates", "Rounds that a consumer rank reported applied.", ["model", "group"], **counted
        )
        self._update = Histogram(
            PREFIX + "update_seconds",
            "What a consumer rank reports of an update, by phase (wait, pull, place).",
            ["model", "group", "phase"],
            buckets=SECONDS,
            **counted,
        )
        self._moved = Counter(
            PREFIX + "moved_bytes",
            "Bytes that consumers read, by transport.",
            ["model", "transport"],
            **counted,
        )
        self._needed = Counter(
            PREFIX + "needed_bytes", "Bytes that consumers' layouts have a place for.", ["model"], **counted
        )
        self._failed = Counter(
            PREFIX + "failed_rounds",
            "Rounds that a consumer rank reported failed.",
            ["model", "group"],
            **counted,
        )
        self._problems = Counter(
            PREFIX + "problems", "Answers that were problems, by kind.", ["kind"], **counted
        )
        self._waits = Counter(
            PREFIX + "waits",
            "Long polls of members that ended without an answer, by what they wait for.",
            ["model", "reason"],
            **counted,
        )

    def sealed(self, model: str, nbytes: int, stats: Mapping[str, Any]) -> None:
        """A producer rank has sealed its part."""
        self._parts.labels(model).inc()
        self._published.labels(model).inc(nbytes)
        for phase in ("wait", "pack", "digest"):
            seconds = _number(stats.get(phase))
            if seconds is not None:
                self._publish.labels(model, phase).observe(seconds)

    def finished(self, model: str, group: str, error: str, stats: Mapping[str, Any]) -> None:
        """A consumer rank has reported a round."""
        if error:
            self._failed.labels(model, group).inc()
            return
        self._updates.labels(model, group).inc()
        for phase in ("wait", "pull", "place"):
            seconds = _number(stats.get(phase))
            if seconds is not None:
                self._update.labels(model, group, phase).observe(seconds)
        self._needed.labels(model).inc(_number(stats.get("needed")) or 0)
        transports = str(stats.get("transports") or "unknown").replace(" ", "")[:64]
        self._moved.labels(model, transports).inc(_number(stats.get("moved")) or 0)

    def waited(self, model: str, reason: str) -> None:
        """A producer asked for a slot, or a consumer for a version, and was told to ask again."""
        self._waits.labels(model, reason).inc()

    def problem(self, kind: str) -> None:
        """An answer was a problem of this kind."""
        self._problems.labels(kind).inc()

    def exposition(
        self, models: Iterable[tuple[Model, Sequence[Group]]], waiting: int, index_seconds: float | None
    ) -> bytes:
        """Everything, as text. `index_seconds`: of one round trip to the index; None: it does not answer."""
        now = CollectorRegistry()
        up = Gauge(PREFIX + "index_up", "Whether the index answers.", registry=now)
        up.set(index_seconds is not None)
        trip = Gauge(PREFIX + "index_seconds", "One round trip to the index.", registry=now)
        trip.set(math.nan if index_seconds is None else index_seconds)
        Gauge(PREFIX + "waiting_requests", "Requests held until something changes.", registry=now).set(
            waiting
        )
        of_model = _ModelGauges(now)
        for model, groups in models:
            self._waits.labels(model.name, "slot")  # from 0 on: the first one is an increase, too
            of_model.show(model, groups)
        return generate_latest(now) + generate_latest(self._registry)


class _ModelGauges:
    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(PREFIX + name, text, ["model", *labels], registry=registry)

        self._latest = gauge("latest_version", "Newest ready version.")
        self._current = gauge("current_version", "Version that groups are given: the newest, unless held.")
        self._held = gauge("held", "Whether an operator holds the model.")
        self._states = gauge("versions", "Versions that are remembered, by state.", "state")
        self._aborted = Counter(
            PREFIX + "aborted_versions", "Versions that were ever aborted.", ["model"], registry=registry
        )
        self._leases = gauge("leases", "Live leases on versions of each state.", "state")
        self._slots = gauge("slots_used", "Slots with a version that is open, ready or retired.")
        self._all_slots = gauge("slots", "Slots that versions rotate through.")
        self._producers = gauge("producers_alive", "Producer ranks that are alive.")
        self._wanted = gauge("producers", "Producer ranks that there should be.")
        self._lag = gauge("group_lag", "Versions published since the one that the group holds.", "group")
        self._version = gauge("group_version", "Version that the group held as a whole last.", "group")
        self._live = gauge("group_live", "Whether every rank of the group is alive.", "group")
        self._half = gauge("group_half", "Whether the group is half-way, and must not serve.", "group")
        self._lease = gauge("group_leases", "Versions that the group holds leases on.", "group")

    def show(self, model: Model, groups: Sequence[Group]) -> None:
        name = model.name
        if model.latest is not None:
            self._latest.labels(name).set(model.latest)
        if model.current is not None:
            self._current.labels(name).set(model.current)
        self._held.labels(name).set(model.held)
        self._aborted.labels(name).inc(model.aborted)
        for state in STATES:
            of_state = [v for v in model.versions if v.state is state]
            self._states.labels(name, state.value).set(len(of_state))
            self._leases.labels(name, state.value).set(sum(len(v.leases) for v in of_state))
        used = (VersionState.OPEN, VersionState.READY, VersionState.RETIRED)
        self._slots.labels(name).set(sum(v.state in used and not v.live for v in model.versions))
        self._all_slots.labels(name).set(model.retention)
        self._producers.labels(name).set(sum(p.alive for p in model.producers))
        self._wanted.labels(name).set(model.world_size)
        for group in groups:
            labels = (name, group.group)
            self._lag.labels(*labels).set(group.lag)
            if group.last is not None:
                self._version.labels(*labels).set(group.last)
            self._live.labels(*labels).set(group.live)
            self._half.labels(*labels).set(group.state.value == "half")
            self._lease.labels(*labels).set(len(group.leased))


def _number(value: object) -> float | None:
    """What members report is theirs: only finite numbers of 0 and more are counted."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        return None
    return float(value)
