"""Who holds which version, and what is stuck: the one answer that the command line and the page show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weightdepot.store.index.records import Group, GroupState, Member, Model, Version, VersionState

MANY = 8  # ranks are listed up to here, then counted


@dataclass(frozen=True)
class ModelReport:
    """One model at one moment."""

    model: Model
    groups: tuple[Group, ...]
    troubles: tuple[str, ...]  # in words, each with what to do where that is known

    def lag(self, held: int | None) -> int | None:
        """How many versions (in their own numbers) something is behind; None where either is unknown."""
        return None if held is None or self.model.latest is None else max(0, self.model.latest - held)


def report_on(model: Model, groups: Sequence[Group]) -> ModelReport:
    troubles = [
        *_producer_troubles(model),
        *(trouble for version in model.versions for trouble in _version_troubles(version)),
        *_slot_troubles(model),
        *(trouble for group in groups for trouble in _group_troubles(group)),
    ]
    return ModelReport(model, tuple(groups), tuple(troubles))


def ranks_text(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:MANY]))
    more = f" and {len(ranks) - MANY} more" if len(ranks) > MANY else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"


def _silent(members: Sequence[Member]) -> list[int]:
    return [member.rank for member in members if not member.alive]


def _producer_troubles(model: Model) -> Iterator[str]:
    present = {member.rank for member in model.producers}
    missing = [rank for rank in range(model.world_size) if rank not in present]
    if missing and model.producers:
        yield f"producers: {ranks_text(missing)} of {model.world_size} never joined; no version can open"
    silent = _silent(model.producers)
    if silent:
        yield f"producers: {ranks_text(silent)} sent no heartbeat in time (dead, stopped or cut off)"


def _version_troubles(version: Version) -> Iterator[str]:
    if version.state is VersionState.OPEN and version.missing:
        yield f"version {version.version} is open: {ranks_text(version.missing)} not sealed yet"
    if version.state is VersionState.RETIRED and version.leases:
        yield f"version {version.version} is retired, but {', '.join(version.leases)} still read it"


def _slot_troubles(model: Model) -> Iterator[str]:
    live = [
        v for v in model.versions if v.state in (VersionState.OPEN, VersionState.READY, VersionState.RETIRED)
    ]
    ready = [v for v in live if v.state is VersionState.READY]
    newest = max((v.version for v in ready), default=None)
    blocked = [v for v in live if v.leases and v.version != newest]
    if len(live) >= model.retention and len(blocked) == len(live) - (newest is not None) and blocked:
        holders = sorted({lease for v in blocked for lease in v.leases})
        yield f"every slot is in use; the next publish waits for {', '.join(holders)}"


def _group_troubles(group: Group) -> Iterator[str]:
    name = f"group {group.group}"
    if group.missing:
        yield f"{name}: {ranks_text(group.missing)} of {group.world_size} never joined"
    silent = _silent(group.members)
    if silent:
        yield f"{name}: {ranks_text(silent)} sent no heartbeat in time (dead, stopped or cut off)"
    if group.state is GroupState.HALF:
        yield f"{name} is half-way and must not serve: {group.error or 'a round failed'}"
    if group.state is GroupState.MOVING and group.pending:
        yield f"{name} moves to version {group.target}: {ranks_text(group.pending)} not done yet"
