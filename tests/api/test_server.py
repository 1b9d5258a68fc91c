"""The controller as a process: it starts with clear words or not at all, and it ends in time."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from weightdepot.api.app import create_app
from weightdepot.api.cli import app
from weightdepot.api.client import ControllerClient
from weightdepot.api.server import CannotServe, bind, url_of
from weightdepot.api.settings import Settings, Timeouts
from weightdepot.store.errors import IndexUnavailable, WaitTimeout
from weightdepot.store.index import EmbeddedRedis

from .helpers import Trainer, serving, threaded, unique
from .test_routes import MODEL, problem


def failed_start(*options: str) -> tuple[int, str]:
    """Exit code and stderr of a controller that must not come up."""
    done = CliRunner().invoke(app, ["serve", "--port", "0", *options])
    assert "Traceback" not in done.stderr
    assert not done.stdout
    return done.exit_code, done.stderr


def test_a_port_in_use_is_said(redis_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = failed_start("--port", str(port), "--redis-url", redis_url)
    assert code == 1
    assert f"127.0.0.1:{port} is in use" in said


def test_a_redis_that_is_not_there_is_said_without_its_password() -> None:
    code, said = failed_start("--redis-url", "redis://:secret@127.0.0.1:1/0")
    assert code == 1
    assert "127.0.0.1:1" in said
    assert "secret" not in said


def test_what_is_no_redis_url_is_wrong_use() -> None:
    code, said = failed_start("--redis-url", "localhost")
    assert code == 2
    assert "redis://HOST:PORT" in said


@pytest.mark.parametrize(
    ("host", "says"), [("no.such.host.invalid", "not known"), ("192.0.2.1", "no address of this machine")]
)
def test_a_host_that_is_not_ours_is_said(host: str, says: str) -> None:
    with pytest.raises(CannotServe, match=says):
        bind(host, 0)


def test_urls_of_both_families() -> None:
    with bind("127.0.0.1", 0) as listener:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
    if socket.has_ipv6:
        try:
            with bind("::1", 0) as listener:
                assert url_of(listener).startswith("http://[::1]:")
        except CannotServe:
            pytest.skip("no IPv6 here")


ENDLESS_PLANNING = """
import time
from weightdepot.api import planner
planner.TilingMaker.make = lambda maker, consumers, load: time.sleep(60)
"""


def test_on_sigterm_long_polls_end_and_the_process_is_gone_within_five_seconds() -> None:
    """With its own embedded index, which must be gone too, and although a plan is being made."""
    with serving(prelude=ENDLESS_PLANNING) as (url, process), ControllerClient(url) as client:
        trainer = Trainer(client, "policy", world_size=1).join_all()
        with pytest.raises(WaitTimeout, match=r"tiling .* is being made"):
            trainer.open(1, timeout=0.1)
        outcome: list[BaseException] = []

        def wait() -> None:
            try:
                client.latest("policy", timeout=3)
            except Exception as error:  # noqa: BLE001 - looked at below
                outcome.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.3)
        children = _children(process.pid)
        assert len(children) == 1, "the embedded Valkey"
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=5)
        assert time.monotonic() - begun < 3
        assert process.returncode == 0
        assert "Traceback" not in errors
        assert not any(_runs(child) for child in children)
        thread.join(10)
        assert outcome, "the reader's time is up, or it says that the controller is gone"


def test_what_an_embedded_index_keeps_outlives_a_controller_that_was_killed(tmp_path: Path) -> None:
    with serving("--data-dir", str(tmp_path)) as (url, process), ControllerClient(url) as client:
        Trainer(client, "policy", world_size=1).join_all().publish(7)
        process.kill()
        process.communicate(timeout=5)
    with serving("--data-dir", str(tmp_path)) as (url, process), ControllerClient(url) as client:
        assert client.latest("policy", timeout=5).version == 7
        # Ctrl-C in a terminal interrupts the whole process group: the index goes first
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=5)
        assert process.returncode == 0
        assert "Traceback" not in errors


def test_two_controllers_on_one_redis_are_one(redis_url: str) -> None:
    """What one is told wakes who waits at the other."""
    settings = Settings(redis_url=redis_url, run=unique("run"), port=0)
    with (
        threaded(settings) as first,
        threaded(settings) as second,
        ControllerClient(first, settings.run) as trainer_side,
        ControllerClient(second, settings.run) as reader_side,
    ):
        trainer = Trainer(trainer_side, "policy").join_all()
        woken: list[float] = []

        def read() -> None:
            assert reader_side.latest("policy", timeout=10).version == 1
            woken.append(time.monotonic())

        thread = threading.Thread(target=read)
        thread.start()
        time.sleep(0.2)
        trainer.publish(1)
        published = time.monotonic()
        thread.join(10)
        assert woken[0] - published < 0.5


async def test_an_index_that_dies_is_a_503_and_all_goes_on_when_it_is_back(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as redis:
        controller = create_app(
            Settings(redis_url=redis.url, timeouts=Timeouts(index_connect=0.5, index_operation=0.5))
        )
        port = redis.port
        transport = httpx.ASGITransport(controller, raise_app_exceptions=False)
        async with (
            controller.router.lifespan_context(controller),
            httpx.AsyncClient(transport=transport, base_url="http://test", timeout=40) as http,
        ):
            assert (await http.get("/v1/ready")).status_code == 200
            os.kill(redis.pid, signal.SIGKILL)
            redis.stop()
            for path in ("/v1/ready", "/v1/models", MODEL, f"{MODEL}/versions/latest?wait=5"):
                begun = time.monotonic()
                response = await http.get(path)
                assert "Redis" in problem(response, 503, "index-unavailable")["detail"]
                assert response.headers["retry-after"] == "1"
                assert time.monotonic() - begun < 3
            assert (await http.get("/v1/health")).status_code == 200
            with EmbeddedRedis(tmp_path, port=port):
                assert (await http.get("/v1/models")).json() == {"models": []}
                assert (await http.get("/v1/ready")).status_code == 200


def test_the_client_waits_for_an_index_to_come_back_and_names_it_when_it_does_not(tmp_path: Path) -> None:
    with (
        EmbeddedRedis(tmp_path) as redis,
        threaded(
            Settings(redis_url=redis.url, port=0, timeouts=Timeouts(index_connect=0.5, index_operation=0.5))
        ) as url,
        ControllerClient(url) as client,
    ):
        port = redis.port
        assert client.models(timeout=5) == ()
        os.kill(redis.pid, signal.SIGKILL)
        redis.stop()
        begun = time.monotonic()
        with pytest.raises(IndexUnavailable, match="Redis"):
            client.models(timeout=0.5)
        assert time.monotonic() - begun < 4
        found: list[object] = []
        thread = threading.Thread(target=lambda: found.append(client.models(timeout=20)))
        thread.start()
        time.sleep(0.2)
        with EmbeddedRedis(tmp_path, port=port):
            thread.join(10)
            assert found == [()]
            with pytest.raises(WaitTimeout):
                client.latest("policy", timeout=0.1)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False
