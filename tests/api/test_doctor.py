"""`weightdepot doctor` finds what is missing on a machine, and says what to do."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from weightdepot.api.config import ClientSettings
from weightdepot.api.doctor import Finding, Machine, State, examine
from weightdepot.api.settings import Settings
from weightdepot.store.index.embedded import EmbeddedRedis


def found(settings: Settings | None = None, machine: Machine | None = None) -> dict[str, list[Finding]]:
    client = ClientSettings(controller="http://127.0.0.1:9")
    by_name: dict[str, list[Finding]] = {}
    for finding in examine(settings or Settings(port=0), client, machine):
        by_name.setdefault(finding.what, []).append(finding)
    return by_name


def test_this_machine_has_nothing_that_will_not_work() -> None:
    bad = [f for findings in found().values() for f in findings if f.state is State.BAD]
    assert bad == []


def test_everything_that_is_not_good_says_what_to_do() -> None:
    for findings in found(Settings(redis_url="redis://127.0.0.1:9/0")).values():
        for finding in findings:
            assert finding.state is State.GOOD or finding.advice, finding


def test_a_missing_shared_memory_is_found(tmp_path: Path) -> None:
    place = tmp_path / "shm"
    (finding,) = found(machine=Machine(shm=place))[str(place)]
    assert finding.state is State.BAD
    assert "mount" in finding.advice


def test_rdma_devices_are_listed_with_the_limit_on_locked_memory(tmp_path: Path) -> None:
    (tmp_path / "mlx5_0").mkdir()
    by_name = found(machine=Machine(infiniband=tmp_path))
    assert by_name["RDMA"][0].found == "mlx5_0"


def test_a_redis_that_forgets_is_found() -> None:
    with EmbeddedRedis() as redis:
        index = found(Settings(redis_url=redis.url))["index"]
    assert index[0].state is State.GOOD
    assert any("appendonly" in f.found and f.state is State.NOTE for f in index)


def test_a_redis_that_does_not_answer_is_bad() -> None:
    (finding,) = found(Settings(redis_url="redis://:secret@127.0.0.1:9/0"))["index"]
    assert finding.state is State.BAD
    assert "secret" not in finding.found


def test_a_port_in_use_is_found() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (finding,) = found(Settings(port=port))[f"port {port}"]
    assert finding.state is State.NOTE
    assert "in use" in finding.found


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None,
    reason="needs root and unshare, for a small /dev/shm",
)
def test_in_a_namespace_with_a_small_shared_memory_the_exit_code_is_1() -> None:
    script = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$0" -m weightdepot.cli doctor --json'
    ran = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, sys.executable],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    if "permission denied" in ran.stderr.lower() or "not permitted" in ran.stderr.lower():
        pytest.skip(f"no mounts may be made here: {ran.stderr.strip()}")
    assert ran.returncode == 1, ran.stderr
    (shm,) = [f for f in json.loads(ran.stdout) if f["what"] == "/dev/shm"]
    assert shm["state"] == "bad"
    assert "remount" in shm["advice"]
