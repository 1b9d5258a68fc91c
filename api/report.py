"""Who holds which version, and what is stuck: the one answer that the command line and the page show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weightdepot.store.index.records import (
    Group,
    GroupState,
    Member,
    Mode,
    Model,
    Version,
    VersionState,
)

MANY = 8  # ranks are listed up to here, then counted


@dataclass(frozen=True)
class ModelReport:
    """One model at one moment."""

    model: Model
    groups: tuple[Group, ...]
    troubles: tuple[str, ...]  # in words, each with what to do where that is known


def report_on(model: Model, groups: Sequence[Group]) -> ModelReport:
    troubles = [
        *_producer_troubles(model),
        *(trouble for version in model.versions for trouble in _version_troubles(version)),
        *_slot_troubles(model),
        *(trouble for group in groups for trouble in _group_troubles(group)),
        *_lag_troubles(model, groups),
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


def _kept(model: Model, version: Version) -> bool:
    """Whether it is kept by somebody's wish: such versions take no slot of the others."""
    return version.pinned or bool(version.tags) or (model.held and version.version == model.current)


def _slot_troubles(model: Model) -> Iterator[str]:
    using = [
        v
        for v in model.versions
        if v.state in (VersionState.OPEN, VersionState.READY, VersionState.RETIRED)
        and not v.live
        and not _kept(model, v)
    ]
    newest = max((v.version for v in using if v.state is VersionState.READY), default=None)
    blocked = [v for v in using if v.leases and v.version != newest]
    if len(using) >= model.window and len(blocked) == len(using) - (newest is not None) and blocked:
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


def _lag_troubles(model: Model, groups: Sequence[Group]) -> Iterator[str]:
    """Who holds the trainer up, in the modes in which somebody does."""
    policy = model.policy
    if policy.mode is Mode.ASYNC:
        return
    for group in groups:
        behind = group.live and group.lag > (policy.max_lag if policy.mode is Mode.BOUNDED else 0)
        if behind and not (model.held and group.version == model.current):
            limit = f" (max_lag {policy.max_lag})" if policy.mode is Mode.BOUNDED else ""
            yield f"group {group.group} is {group.lag} versions behind{limit}: publishing waits for it"
    if model.held and policy.mode is Mode.BOUNDED and model.latest != model.current:
        yield f"the model is held at {model.current}: in mode bounded publishing waits until it is released"
