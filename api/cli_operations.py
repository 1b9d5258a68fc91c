"""Commands that decide: policy, hold, release, pin, unpin, tag, untag. All of them may be repeated."""

from __future__ import annotations

from typing import Annotated

import typer

from weightdepot.api import cli_common
from weightdepot.api.cli_common import Ca, ControllerUrl, ModelArgument, Run, Token, VersionArgument, asking
from weightdepot.store.index.records import Mode, Model, Version

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Such as `reference` or `best`.")]


def policy(
    model: ModelArgument,
    *,
    mode: Annotated[Mode | None, typer.Option(help="What a publish waits for.")] = None,
    max_lag: Annotated[
        int | None, typer.Option(min=0, help="Mode bounded: published versions that a group may be behind.")
    ] = None,
    controller: ControllerUrl = None,
    run: Run = None,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """How a model's versions are synchronized; with options, change it."""
    limit = cli_common.ANSWER_TIMEOUT
    with asking(controller, run, token, ca) as client:
        now = client.model(model, timeout=limit).policy
        if mode is not None or max_lag is not None:
            now = client.set_policy(
                model,
                mode=now.mode if mode is None else mode,
                max_lag=now.max_lag if max_lag is None else max_lag,
                timeout=limit,
            ).policy
        bound = f", max_lag {now.max_lag}" if now.mode is Mode.BOUNDED else ""
        print(f"{model}: {now.mode.value}{bound}")


def hold(
    model: ModelArgument,
    version: VersionArgument,
    *,
    controller: ControllerUrl = None,
    run: Run = None,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """Roll back: groups are given this version, and stay there until `weightdepot release`."""
    with asking(controller, run, token, ca) as client:
        _say_current(client.hold(model, version, timeout=cli_common.ANSWER_TIMEOUT))


def release(
    model: ModelArgument,
    *,
    controller: ControllerUrl = None,
    run: Run = None,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """End the hold: the newest version is the current one again."""
    with asking(controller, run, token, ca) as client:
        _say_current(client.release(model, timeout=cli_common.ANSWER_TIMEOUT))


def pin(
    model: ModelArgument,
    version: VersionArgument,
    *,
    controller: ControllerUrl = None,
    run: Run = None,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """Keep a version, however many come after it."""
    with asking(controller, run, token, ca) as client:
        _say_kept(client.pin(model, version, timeout=cli_common.ANSWER_TIMEOUT))


def unpin(
    model: ModelArgument,
    version: VersionArgument,
    *,
    controller: ControllerUrl = None,
    run: Run = None,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """Keep it no longer than any other."""
    with asking(controller, run, token, ca) as client:
        _say_kept(client.unpin(model, version, timeout=cli_common.ANSWER_TIMEOUT))


def tag(
    model: ModelArgument,
    name: NameArgument,
    version: VersionArgument,
    *,
    controller: ControllerUrl = None,
    run: Run = None,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """Let a name point to a version, which is kept for as long."""
    with asking(controller, run, token, ca) as client:
        _say_kept(client.tag(model, name, version, timeout=cli_common.ANSWER_TIMEOUT))


def untag(
    model: ModelArgument,
    name: NameArgument,
    *,
    controller: ControllerUrl = None,
    run: Run = None,
    token: Token = None,
    ca: Ca = None,
) -> None:
    """Take a name away; one that points nowhere is no error."""
    with asking(controller, run, token, ca) as client:
        client.untag(model, name, timeout=cli_common.ANSWER_TIMEOUT)
        print(f"{model}: nothing is called {name!r} now")


def _say_current(model: Model) -> None:
    current = "there is none" if model.current is None else str(model.current)
    held = f", held; the newest is {model.latest}" if model.held else ""
    print(f"{model.name}: current {current}{held}")


def _say_kept(version: Version) -> None:
    kept = [*(["pinned"] if version.pinned else []), *(f"tagged {name}" for name in version.tags)]
    print(f"{version.model}: version {version.version} is {', '.join(kept) or 'kept like any other'}")
