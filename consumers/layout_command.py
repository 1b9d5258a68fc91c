"""`weightdepot layout`: where a checkpoint's tensors go, found offline, without weights and without a GPU."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import nn

from weightdepot.api.cli import FAILED, errors_said
from weightdepot.consumers.hf import Described, describe_checkpoint
from weightdepot.consumers.layout_report import RankReport, differences
from weightdepot.consumers.layout_tables import show_rank
from weightdepot.store.errors import InvalidRequest
from weightdepot.store.layout import Layout
from weightdepot.store.tracing import Trace, trace_load, trace_module_load


def layout(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(
            metavar="CHECKPOINT",
            help="The checkpoint's directory: its safetensors files, or only its config.json (and index). "
            "Left out, it is that of --vllm.",
        ),
    ] = None,
    *,
    loader: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="A function that returns a module with load_weights, or (parameters, load_weights); called "
            "for each rank, on torch's meta device, with `rank` and `world_size` if it takes them.",
        ),
    ] = None,
    vllm: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="vLLM's own model and loader for this model's directory."),
    ] = None,
    world_size: Annotated[
        int, typer.Option("--tp", "--world-size", min=1, help="Ranks of tensor parallelism.")
    ] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Stages of pipeline parallelism (vLLM).")] = 1,
    ep: Annotated[bool, typer.Option("--ep", help="Expert parallelism (vLLM).")] = False,
    rank: Annotated[
        list[int] | None, typer.Option(min=0, help="Only this rank; may be given more than once.")
    ] = None,
    optional: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Parameters that may be left unfilled; `*` stands for anything."),
    ] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write each rank's layout to DIR/rank-N.layout.")
    ] = None,
    diff: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="A B",
            help="What differs between two layouts: files that --save wrote, or ranks of this model.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON value instead of tables.")] = False,
) -> None:
    """How each tensor of a checkpoint maps to each rank's parameters, in which tier, and what does not map.

    The exit code is 1 when something does not map (with --diff: when the layouts differ).
    """
    with errors_said():
        request = _Request(checkpoint, loader, vllm, world_size, pp, ep, tuple(optional or ()))
        ok = _diff(request, diff, as_json) if diff is not None else _show(request, rank, save, as_json)
    if not ok:
        raise typer.Exit(FAILED)


class _Request:
    """Which loader is asked about which checkpoint."""

    def __init__(
        self, checkpoint: Path | None, loader: str | None, vllm: Path | None, world_size: int, pp: int,
        ep: bool, optional: tuple[str, ...],
    ) -> None:  # fmt: skip
        if loader is not None and vllm is not None:
            raise InvalidRequest("--loader and --vllm: give one of them")
        if vllm is None and (ep or pp > 1):
            raise InvalidRequest("--ep and --pp are for --vllm; a --loader is told rank and world_size")
        self.vllm, self.loader, self.optional = vllm, loader, optional
        self.checkpoint = checkpoint or vllm
        self.tensor, self.pp, self.ep = world_size, pp, ep
        self.world_size = world_size * pp

    def reports(self, ranks: Sequence[int] | None) -> Iterator[RankReport]:
        wanted = list(range(self.world_size)) if not ranks else list(dict.fromkeys(ranks))
        outside = [r for r in wanted if not 0 <= r < self.world_size]
        if outside:
            raise InvalidRequest(
                f"there is no rank {outside[0]} among {self.world_size}: ranks count from 0, and --tp says "
                f"how many there are"
            )
        if self.checkpoint is None or (self.vllm is None and self.loader is None):
            raise InvalidRequest("say whose layout: --vllm DIR, or CHECKPOINT with --loader MODULE:FUNCTION")
        if self.vllm is not None:
            _offline()
        described = describe_checkpoint(self.checkpoint)
        for rank, trace in self._traces(described, wanted):
            yield RankReport(rank, self.world_size, trace, described.unknown)

    def _traces(self, described: Described, ranks: Sequence[int]) -> Iterator[tuple[int, Trace]]:
        if self.vllm is not None:
            try:
                from weightdepot.consumers.vllm.platform import take_cpu_where_there_is_no_device

                take_cpu_where_there_is_no_device()
                from weightdepot.consumers.vllm.offline import trace_ranks
                from weightdepot.consumers.vllm.shadow import Parallel
            except ImportError as error:
                raise InvalidRequest(
                    f"--vllm takes vLLM 0.32 or later (pip install vllm), which is not here: {error}"
                ) from error
            parallel = Parallel(self.tensor, self.pp, self.ep)
            yield from trace_ranks(self.vllm, described.tensors, parallel, ranks, optional=self.optional)
            return
        assert self.loader is not None
        make = _function(self.loader)
        for rank in ranks:
            yield rank, _trace(make, self.loader, described, rank, self.world_size, self.optional)


def _offline() -> None:
    """Before vLLM is imported: nothing is fetched, and only what goes wrong is said."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def _function(text: str) -> Callable[..., Any]:
    """Raises InvalidRequest that says which half of `module:function` is wrong."""
    module_name, _, name = text.partition(":")
    if not module_name or not name:
        raise InvalidRequest(f"--loader {text!r} is not of the form MODULE:FUNCTION")
    if "" not in sys.path:
        sys.path.insert(0, "")  # a script's module lies where the user is, as with `python -m`
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise InvalidRequest(f"--loader {text!r}: {module_name!r} cannot be imported: {error}") from error
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise InvalidRequest(
            f"--loader {text!r}: {module_name!r} has no function {name!r}; it has "
            f"{', '.join(names[:8]) or 'none'}"
        )
    function: Callable[..., Any] = found
    return function


def _trace(
    make: Callable[..., Any], text: str, described: Described, rank: int, world_size: int,
    optional: Sequence[str],
) -> Trace:  # fmt: skip
    try:
        accepted = inspect.signature(make).parameters
    except (TypeError, ValueError):  # a builtin
        accepted = {}  # type: ignore[assignment]
    arguments = {k: v for k, v in (("rank", rank), ("world_size", world_size)) if k in accepted}
    if "world_size" not in accepted and world_size > 1:
        raise InvalidRequest(
            f"--loader {text!r} takes no `world_size`, so that --tp {world_size} says nothing"
        )
    with torch.device("meta"):
        made = make(**arguments)
    if isinstance(made, nn.Module):
        return trace_module_load(made, described.tensors, optional=optional, on_fault="keep")
    if (
        isinstance(made, tuple)
        and len(made) == 2
        and isinstance(made[0], Mapping)
        and callable(made[1])
        and all(isinstance(t, torch.Tensor) for t in made[0].values())
    ):
        return trace_load(made[1], described.tensors, made[0], optional=optional, on_fault="keep")
    raise InvalidRequest(
        f"--loader {text!r} returned a {type(made).__name__}; it must return a module with load_weights, or "
        f"a mapping of names to parameters and a load_weights"
    )


def _show(request: _Request, ranks: Sequence[int] | None, save: Path | None, as_json: bool) -> bool:
    console = _console()
    reports = []
    for report in request.reports(ranks):
        reports.append(report)
        if save is not None:
            save.mkdir(parents=True, exist_ok=True)
            (save / f"rank-{report.rank}.layout").write_bytes(report.trace.layout.to_bytes())
        if not as_json:
            show_rank(console, report)
    ok = all(report.mapped for report in reports)
    if as_json:
        print(json.dumps({"mapped": ok, "ranks": [report.to_json() for report in reports]}, indent=2))
    return ok


def _console() -> Console:
    """As wide as the terminal; in a file or a pipe, wide enough not to break names."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=200)


def _diff(request: _Request, pair: tuple[str, str], as_json: bool) -> bool:
    ranks = [int(text) for text in pair if text.isdigit() and not Path(text).is_file()]
    traced = {r.rank: r.trace.layout for r in request.reports(ranks)} if ranks else {}
    a, b = (traced[int(text)] if text.isdigit() and int(text) in traced else _read(text) for text in pair)
    lines = list(differences(a, b))
    if as_json:
        print(json.dumps({"same": a == b, "digests": [a.digest, b.digest], "differences": lines}, indent=2))
    else:
        for line in lines or ["the layouts are the same" if a == b else "the layouts differ in order only"]:
            print(line)
    return a == b


def _read(text: str) -> Layout:
    path = Path(text)
    if not path.is_file():
        raise InvalidRequest(f"--diff: {text!r} is neither a file that --save wrote nor a rank's number")
    try:
        return Layout.from_bytes(path.read_bytes())
    except InvalidRequest as error:
        raise InvalidRequest(f"--diff: {text} is no layout: {error.message}") from error
