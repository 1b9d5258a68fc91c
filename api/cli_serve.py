"""Commands for who runs a controller: `weightdepot serve` and `weightdepot token`."""

from __future__ import annotations

import enum
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from weightdepot.api.cli_common import errors_said
from weightdepot.api.config import configured
from weightdepot.api.roles import Role
from weightdepot.api.settings import DEFAULT_HOST, DEFAULT_PORT, DEFAULT_RUN, Settings


class LogLevel(str, enum.Enum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogForm(str, enum.Enum):
    TEXT = "text"
    JSON = "json"


def serve(
    *,
    host: Annotated[
        str | None, typer.Option(help=f"Address to listen on; 0.0.0.0 for all. [{DEFAULT_HOST}]")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help=f"Port to listen on; 0 for a free one. [{DEFAULT_PORT}]"),
    ] = None,
    redis_url: Annotated[
        str | None, typer.Option(metavar="URL", help="The Redis to use; none: one is started and owned.")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Where the embedded index keeps its data; none: it starts empty.")
    ] = None,
    run: Annotated[str | None, typer.Option(help=f"The run that is served. [{DEFAULT_RUN}]")] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Who may do what (JSON or TOML); none: everybody everything."),
    ] = None,
    open_reading: Annotated[
        bool, typer.Option("--open-reading", help="With --tokens: reading takes no token.")
    ] = False,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Serve https with this certificate (PEM).")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="The certificate's key (PEM).")] = None,
    log_level: Annotated[LogLevel | None, typer.Option(help="How much is said on stderr. [info]")] = None,
    log_format: Annotated[LogForm | None, typer.Option(help="How it is said. [text]")] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A settings file; see `weightdepot config`.")
    ] = None,
) -> None:
    """Run a controller until it is told to stop (SIGTERM, Ctrl-C).

    What is not given here is taken from WEIGHTDEPOT_... variables, then from a settings file.
    """
    # imported here: the other commands start faster without the server
    from weightdepot.api import server

    with errors_said():
        options = {
            "host": host, "port": port, "redis_url": redis_url, "data_dir": data_dir, "run": run,
            "tokens": tokens, "open_reading": open_reading or None, "tls_cert": tls_cert, "tls_key": tls_key,
            "log_level": None if log_level is None else log_level.value,
            "log_format": None if log_format is None else log_format.value,
        }  # fmt: skip
        settings = configured(Settings, "controller", options, file=config).settings
        server.serve(settings, announce=lambda url: print(f"serving {url}", flush=True))


def token(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose it is; shown in messages.")],
    *,
    role: Annotated[list[Role], typer.Option("--role", help="What it allows; may be given more than once.")],
    run: Annotated[str | None, typer.Option(help="The only run that it is for.")] = None,
) -> None:
    """Make a token. It is printed once, with the entry for the tokens file, which does not hold it."""
    from weightdepot.api.access import entry_of, new_token

    with errors_said():
        made = new_token()
        entry = entry_of(name, made, role, run)
    print(made)
    print(json.dumps(entry))
    if sys.stdout.isatty():
        print("The first line is the token, the second its entry for the file of --tokens.", file=sys.stderr)
