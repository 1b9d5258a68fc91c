"""What Prometheus is told: counts of this process, and what the index holds at the moment of the scrape.

Counters and histograms are this controller's own: each of several counts what it served. Gauges of models are
the same at all of them, since they are read from the index. Everything says of which run it is: runs have
models of the same name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.registry import Collector

from weightdepot.api.openings import Openings
from weightdepot.store.index.records import Group, Model, VersionState

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
PREFIX = "weightdepot_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATES = tuple(VersionState)
PAST = (VersionState.RETIRED, VersionState.FREED)  # give no new leases


class Metrics:
    """Owned by one application, which serves `run`. `openings` is told of each request for a slot."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._registry = CollectorRegistry()
        self.openings = Openings(self._gave_up)
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
        self._given_up = Counter(
            PREFIX + "openings_given_up",
            "Openings of a version that a producer rank stopped asking for, by what they waited for.",
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

    def _gave_up(self, model: str, reason: str) -> None:
        self._given_up.labels(model, reason).inc()

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
        self.openings.settle()
        longest = Gauge(
            PREFIX + "opening_wait_seconds",
            "For how long the producer rank that waits longest for a slot has waited, by what for.",
            ["model", "reason"],
            registry=now,
        )
        of_model = _ModelGauges(now)
        for model, groups in models:
            # from 0 on: the first one is an increase, too
            self._waits.labels(model.name, "slot")
            self._given_up.labels(model.name, "slot")
            longest.labels(model.name, "slot")
            for group in groups:
                self._updates.labels(model.name, group.group)
                self._failed.labels(model.name, group.group)
            of_model.show(model, groups)
        for labels, seconds in self.openings.longest().items():
            longest.labels(*labels).set(seconds)
        told = CollectorRegistry()
        told.register(_OfRun(self._run, (now, self._registry)))
        return generate_latest(told)


class _OfRun(Collector):
    """What these registries hold, labelled with the run, and without the library's times of creation."""

    def __init__(self, run: str, registries: Sequence[CollectorRegistry]) -> None:
        self._run, self._registries = run, registries

    def collect(self) -> Iterator[Metric]:
        for registry in self._registries:
            for metric in registry.collect():  # made anew at each collection
                metric.samples = [
                    sample._replace(labels={"run": self._run, **sample.labels})
                    for sample in metric.samples
                    if not sample.name.endswith("_created")
                ]
                yield metric


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
        self._overdue = gauge(
            "overdue_version", "Oldest retired or freed version that is still read; none: no such sample."
        )
        self._slots = gauge("slots_used", "Slots with a version that is open, ready or retired.")
        self._all_slots = gauge("slots", "Slots that versions rotate through.")
        self._producers = gauge("producers_alive", "Producer ranks that are alive.")
        self._wanted = gauge("producers", "Producer ranks that there should be.")
        self._joined = gauge(
            "producers_joined", "Producer ranks that joined and did not leave, alive or not."
        )
        self._lag = gauge("group_lag", "Versions published since the one that the group holds.", "group")
        self._version = gauge("group_version", "Version that the group held as a whole last.", "group")
        self._live = gauge("group_live", "Whether every rank of the group is alive.", "group")
        self._half = gauge(
            "group_half", "Whether a round failed and none has made the group whole since.", "group"
        )
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
        overdue = [v.version for v in model.versions if v.state in PAST and v.leases]
        if overdue:
            self._overdue.labels(name).set(min(overdue))
        used = (VersionState.OPEN, VersionState.READY, VersionState.RETIRED)
        self._slots.labels(name).set(sum(v.state in used and not v.live for v in model.versions))
        self._all_slots.labels(name).set(model.window)
        self._producers.labels(name).set(sum(p.alive for p in model.producers))
        self._wanted.labels(name).set(model.world_size)
        self._joined.labels(name).set(len(model.producers))
        for group in groups:
            labels = (name, group.group)
            self._lag.labels(*labels).set(group.lag)
            if group.last is not None:
                self._version.labels(*labels).set(group.last)
            self._live.labels(*labels).set(group.live)
            # also while the next round, which may fail as well, is under way
            self._half.labels(*labels).set(bool(group.error))
            self._lease.labels(*labels).set(len(group.leased))


def _number(value: object) -> float | None:
    """What members report is theirs: only finite numbers of 0 and more are counted."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        return None
    return float(value)
