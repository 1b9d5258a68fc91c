"""Who is dead, and who shares memory with whom."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from weightdepot.store import hosts
from weightdepot.store.hosts import is_dead, shm_domain, this_process
from weightdepot.store.index.records import Process

NAP = [sys.executable, "-S", "-c", "import time; print(1, flush=True); time.sleep(60)"]


def process_of(pid: int) -> Process:
    """The identity that process `pid` would give itself."""
    started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return dataclasses.replace(this_process(), pid=pid, started=started)


def test_this_process_is_alive_and_the_same_each_time() -> None:
    assert this_process() == this_process()
    assert this_process().pid == os.getpid()
    assert is_dead(this_process()) is False


def test_case_07_a_killed_process_is_dead_at_once_also_while_nobody_has_waited_for_it() -> None:
    with subprocess.Popen(NAP, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        process = process_of(child.pid)
        assert is_dead(process) is False
        child.send_signal(signal.SIGSTOP)
        assert is_dead(process) is False, "stopped is not dead"
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert Path(f"/proc/{child.pid}").exists(), "a zombie, for this test"
        assert is_dead(process) is True
        child.wait()
        assert is_dead(process) is True


def test_a_pid_that_was_given_out_again_is_not_taken_for_the_old_process() -> None:
    mine = this_process()
    assert is_dead(dataclasses.replace(mine, started=mine.started - 1)) is True


def test_of_a_process_of_another_host_or_pid_namespace_nothing_can_be_told() -> None:
    mine = this_process()
    assert is_dead(dataclasses.replace(mine, host="another", pid=1)) is None
    boot, name, _ = mine.host.split("/")
    assert is_dead(dataclasses.replace(mine, host=f"{boot}/{name}/4:1", pid=2**22)) is None


def test_a_process_hidden_by_the_mount_of_proc_is_unknown_and_not_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hidden(pid: int) -> tuple[str, int, int]:
        raise FileNotFoundError(pid)

    mine = this_process()
    monkeypatch.setattr(hosts, "_stat_fields", hidden)
    assert is_dead(mine) is None
    assert is_dead(dataclasses.replace(mine, pid=2**22 + 1)) is True


def test_a_forked_child_has_an_identity_of_its_own() -> None:
    mine = this_process()
    child = os.fork()
    if child == 0:
        os._exit(0 if this_process().pid == os.getpid() != mine.pid else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_name_of_a_program_may_hold_brackets_and_blanks(tmp_path: Path) -> None:
    program = tmp_path / "a) S 1 (b"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([str(program), "60"], executable=str(program)) as child:
        try:
            assert is_dead(process_of(child.pid)) is False
        finally:
            child.kill()


def test_shm_domain_is_equal_in_other_processes_and_differs_by_directory(tmp_path: Path) -> None:
    code = "from weightdepot.store.hosts import shm_domain; print(shm_domain())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == shm_domain()
    assert shm_domain(tmp_path) != shm_domain()
    with pytest.raises(FileNotFoundError):
        shm_domain(tmp_path / "none")
