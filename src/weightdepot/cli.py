"""The entry point `weightdepot`: the controller's commands, and those that the other rooms bring."""

from __future__ import annotations

from weightdepot.api.cli import app
from weightdepot.consumers.layout_command import layout

__all__ = ["app", "main"]

app.command()(layout)


def main() -> None:
    app()
