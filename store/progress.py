"""Progress of long waits and transfers: a value, a callback, and a bar for those who want one ready-made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Phase = Literal["wait", "pack", "digest", "pull", "apply"]


@dataclass(frozen=True)
class Progress:
    """`done` of `total`, in bytes; both 0 while something is waited for. `note` says what, for people."""

    model: str
    phase: Phase
    version: int | None
    done: int
    total: int
    note: str = ""


OnProgress = Callable[[Progress], None]


def ignore(_: Progress) -> None:
    """The callback of those who do not want to know."""


@contextmanager
def progress_bar() -> Iterator[OnProgress]:
    """A live bar in the terminal: `with progress_bar() as bar: Consumer(..., on_progress=bar)`.

    The callback may be given to any number of producers and consumers, and called from any thread.
    """
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as RichProgress

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with RichProgress(*columns, transient=True) as bars:
        tasks = {}

        def show(p: Progress) -> None:
            version = "" if p.version is None else f" version {p.version}"
            text = f"{p.model}{version}: {p.phase}" + (f" ({p.note})" if p.note else "")
            key = (p.model, p.phase)
            if key not in tasks:
                tasks[key] = bars.add_task(text, total=None)
            bars.update(tasks[key], description=text, completed=p.done, total=p.total or None)

        yield show
