"""The entry point `weightdepot`: the controller's commands, and those that the other rooms bring."""

from __future__ import annotations

from weightdepot.api.cli import app
from weightdepot.api.cli_machine import config, doctor
from weightdepot.consumers.files.command import export
from weightdepot.consumers.layout_command import layout
from weightdepot.producers.import_command import import_

__all__ = ["app", "main"]

for command in (config, doctor, layout, export):
    app.command()(command)
app.command("import")(import_)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
