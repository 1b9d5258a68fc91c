"""Runs a controller as a process: binds first, opens the index, serves, and ends within a stated time."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from ipaddress import ip_address
from pathlib import Path

import uvicorn

from weightdepot.api import logs
from weightdepot.api.app import create_app
from weightdepot.api.controller import Controller
from weightdepot.api.index import open_index
from weightdepot.api.settings import Settings, redacted
from weightdepot.store.errors import WeightDepotError

log = logging.getLogger("weightdepot.api")

KEEP_ALIVE = 75  # seconds; above the client's, so that the client ends idle connections and never races us


class CannotServe(WeightDepotError):
    """The address cannot be listened on."""

    slug, title = "cannot-serve", "The controller cannot listen there"


def serve(settings: Settings, announce: Callable[[str], None] = lambda _url: None) -> None:
    """Serve until SIGTERM or SIGINT. `announce` is called with the URL once requests are answered.

    Raises CannotServe where the address is taken or not ours or the certificate cannot be used,
    InvalidRequest for a tokens file that is none, IndexUnavailable where Redis does not answer.
    """
    logs.configure(settings.log_level, settings.log_format)
    if settings.tls_cert is not None and settings.tls_key is not None:
        check_certificate(settings.tls_cert, settings.tls_key)
    with bind(settings.host, settings.port) as listener:
        planning = asyncio.run(_serve(settings, listener, announce))
    if planning:
        # Its thread cannot be stopped, and nobody is left who wants what it makes.
        log.info("ending although a plan is being made")
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def bind(host: str, port: int) -> socket.socket:
    """A socket that is bound but does not listen yet. Raises CannotServe."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise CannotServe(
            f"the host {host!r} is not known here ({error}): give --host an own address"
        ) from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # now already, since a second one could bind it until then
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise CannotServe(_why_not(host, port, error)) from error
    return listener


def _why_not(host: str, port: int, error: OSError) -> str:
    at = f"{host}:{port}"
    if error.errno == errno.EADDRINUSE:
        return f"{at} is in use, perhaps by another controller: stop that one, or give another --port"
    if error.errno == errno.EACCES:
        return f"this user may not listen on {at}: give a --port above 1023"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is no address of this machine: give --host an own one (0.0.0.0: all)"
    return f"cannot listen on {at}: {error.strerror or error}"


def check_certificate(cert: Path, key: Path) -> None:
    """Raises CannotServe where https cannot be served with these."""
    try:
        # an encrypted key would make somebody type a password, at each start
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=lambda: "")
    except OSError as error:  # SSLError is one
        raise CannotServe(
            f"https cannot be served with the certificate {cert} and the key {key} ({error}): both are PEM "
            "files, they belong together, and the key is not encrypted"
        ) from error


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def warn_of_openness(settings: Settings, host: str) -> None:
    """Said once, where others can reach what is not protected."""
    if ip_address(host).is_loopback:
        return
    if settings.tokens is None:
        log.warning(
            "everybody who reaches %s may do everything: no tokens are asked for (--tokens; see "
            "docs/security.md)",
            host,
        )
    elif settings.tls_cert is None:
        log.warning(
            "tokens reach %s unencrypted, unless something in front of it speaks TLS (--tls-cert)", host
        )


class _Server(uvicorn.Server):
    """uvicorn's, but signals are ours (they must not end the process before the index is closed), and
    long polls are ended first (their connections would hold up the rest)."""

    def __init__(self, config: uvicorn.Config, end_waits: Callable[[], None]) -> None:
        super().__init__(config)
        self._end_waits = end_waits

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._end_waits()
        await super().shutdown(sockets)


async def _serve(settings: Settings, listener: socket.socket, announce: Callable[[str], None]) -> bool:
    """Whether planning still goes on at the end."""
    async with _stop_signal() as stop:
        async with open_index(settings) as index:
            app = create_app(settings, index)
            config = uvicorn.Config(
                app,
                log_config=None,
                log_level=None,
                access_log=settings.log_level == "debug",
                lifespan="on",
                ws="none",
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE,
                ssl_certfile=settings.tls_cert,
                ssl_keyfile=settings.tls_key,
                timeout_graceful_shutdown=max(1, int(settings.timeouts.shutdown) - 2),
            )

            def end_waits() -> None:
                controller: Controller = app.state.controller
                controller.end_waits()

            server = _Server(config, end_waits)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            stopping = asyncio.create_task(stop.wait())
            while not server.started and not serving.done():
                await asyncio.sleep(0.01)
            if server.started:
                url = url_of(listener, "http" if settings.tls_cert is None else "https")
                where = "an embedded index" if settings.redis_url is None else redacted(settings.redis_url)
                log.info("controller of run %r at %s, on %s", settings.run, url, where)
                warn_of_openness(settings, listener.getsockname()[0])
                announce(url)
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            controller: Controller | None = getattr(app.state, "controller", None)
            planning = controller is not None and controller.planner.busy
            server.should_exit = True
            await serving
            stopping.cancel()
        log.info("controller ended")
    return planning


@contextlib.asynccontextmanager
async def _stop_signal() -> AsyncIterator[asyncio.Event]:
    """Set by SIGTERM and SIGINT while inside, wherever in the life of the process they come."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
