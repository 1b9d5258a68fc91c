"""Everything about a controller that can be set, as one frozen value. Nothing else reads the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from weightdepot.api.logs import LogFormat
from weightdepot.api.names import check_name
from weightdepot.store.errors import InvalidRequest

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8300
DEFAULT_URL = f"http://{DEFAULT_HOST}:{DEFAULT_PORT}"
DEFAULT_RUN = "default"
RUN_HEADER = "Weightdepot-Run"
TOKEN_VARIABLE = "WEIGHTDEPOT_TOKEN"  # noqa: S105 - its name
CA_VARIABLE = "WEIGHTDEPOT_CA"

MAX_WAIT = 30.0  # seconds; the longest that one long poll is held
# Seconds that even a request that does not wait gives to planning, which mostly takes milliseconds. Less than
# a client gives an answer past its deadline (exchange.py).
PATIENCE = 0.5
DEFAULT_MEMBER_TTL = 15.0  # seconds without a heartbeat until a member counts as dead
DEFAULT_LEASE_TTL = 30.0  # seconds without a heartbeat until a round's lease ends
DEFAULT_SEAL_TIMEOUT = 600.0  # seconds from a version's opening to its last seal

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class Timeouts:
    """Seconds, all of them."""

    wait: float = MAX_WAIT  # the longest that one long poll is held
    recheck: float = 1.0  # waiters look again after this time even when no event came
    sweep: float = 1.0  # between two rounds of lazily-due transitions
    # Layouts, tilings and plans are kept this long after they were last needed.
    blob_ttl: float = 7 * 24 * 3600.0
    index_connect: float = 2.0
    index_operation: float = 5.0
    keep_alive: float = 5.0  # between two signs of life in a stream of events
    tokens: float = 1.0  # between two looks at the tokens file
    # From SIGTERM to the end; requests in flight have until one second before it.
    shutdown: float = 4.0


@dataclass(frozen=True)
class Limits:
    """What one request or one process may take up."""

    body: int = 64 << 20  # bytes of a request's body
    cache: int = 256 << 20  # bytes of encoded tilings, plans and manifests kept in memory
    planning_threads: int = 2
    listeners: int = 256  # streams of events at once
    backlog: int = 1024  # events that one of them may be behind


@dataclass(frozen=True)
class Settings:
    """How one controller runs. Raises InvalidRequest where the values cannot work."""

    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT  # 0: any free one
    redis_url: str | None = None  # None: an embedded index that lives and dies with this process
    data_dir: Path | None = None  # where an embedded index keeps its data; None: it starts empty
    run: str = DEFAULT_RUN
    log_level: str = "info"
    log_format: LogFormat = "text"
    tokens: Path | None = None  # who may do what (see access.py); None: everybody everything
    open_reading: bool = False  # with tokens: whether one may read without
    tls_cert: Path | None = None  # the certificate chain (PEM) to serve https with, and its key
    tls_key: Path | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        check_name("run", self.run)
        if not 0 <= self.port <= 65535:
            raise InvalidRequest(f"port {self.port} is outside 0 to 65535")
        if self.log_level not in LOG_LEVELS:
            raise InvalidRequest(f"log level {self.log_level!r} is not one of {', '.join(LOG_LEVELS)}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidRequest("tls_cert and tls_key go together: https takes a certificate and its key")
        if self.redis_url is not None:
            _check_redis_url(self.redis_url)
            if self.data_dir is not None:
                raise InvalidRequest(
                    "data_dir is where the embedded index keeps its data; with a Redis URL there is none: "
                    "give one of the two"
                )


def token_here() -> str | None:
    """The token of whoever runs this process."""
    return os.environ.get(TOKEN_VARIABLE) or None


def ca_here() -> str | None:
    """A file with the certificates (PEM) that a controller's is checked against."""
    return os.environ.get(CA_VARIABLE) or None


def _check_redis_url(url: str) -> None:
    parts = urlsplit(url)
    try:
        port_is_number = parts.port is None or parts.port > 0
    except ValueError:
        port_is_number = False
    named = bool(parts.path) if parts.scheme == "unix" else bool(parts.hostname)
    if parts.scheme not in ("redis", "rediss", "unix") or not named or not port_is_number:
        raise InvalidRequest(
            f"{redacted(url)!r} is not a Redis URL: redis://HOST:PORT/0, rediss://... (TLS) and "
            "unix:///PATH are taken"
        )


def redacted(url: str) -> str:
    """The URL without its password, for messages and logs."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    return url.replace(f":{parts.password}@", ":***@", 1)
