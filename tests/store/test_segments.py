"""Segments: made whole or not at all, found when orphaned, valid for whoever holds them."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from weightdepot.store.errors import InvalidRequest, SourceLost, StoreFull, TransportUnavailable
from weightdepot.store.segments import MappedSegment, Segment, is_orphan, remove_orphans

MIB = 1 << 20


@pytest.fixture
def shm() -> Iterator[Path]:
    """A directory of our own in /dev/shm, so that other tests' segments do not matter."""
    path = Path(f"/dev/shm/weightdepot.test.{os.getpid()}")
    path.mkdir()
    yield path
    for left in path.iterdir():
        left.unlink()
    path.rmdir()


HOLD = """
import sys, time
from weightdepot.store.segments import Segment
segment = Segment.create(4096, "owner", "dead-session", directory=sys.argv[1])
segment.tensor.fill_(7)
if len(sys.argv) > 2:
    import os
    if os.fork() == 0:
        time.sleep(60)
print(segment.path, flush=True)
time.sleep(60)
"""


def holder(shm: Path, *more: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(shm), *more],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_a_segment_is_zero_page_aligned_private_to_the_user_and_named_after_its_owner(shm: Path) -> None:
    with Segment.create(10_000, "abc", "s-1", directory=shm) as segment:
        assert segment.tensor.numel() == segment.nbytes == 10_000
        assert segment.tensor.dtype == torch.uint8
        assert not segment.tensor.any()
        assert segment.address == segment.tensor.data_ptr()
        assert segment.address % os.sysconf("SC_PAGE_SIZE") == 0
        assert Path(segment.path).name.startswith("weightdepot-abc-s-1-")
        at = os.stat(segment.path)
        assert at.st_mode & 0o777 == 0o600
        assert at.st_blocks * 512 >= 10_000, "its memory is taken now, not when it is written to"
        with Segment.create(1, "abc", "s-1", directory=shm) as other:
            assert other.path != segment.path


def test_close_unlinks_once_and_views_stay_valid(shm: Path) -> None:
    segment = Segment.create(MIB, "o", "s", directory=shm)
    view = segment.tensor[100:200]
    view.fill_(9)
    segment.close()
    assert not os.path.exists(segment.path)
    Path(segment.path).touch()  # somebody else's, of the same name
    segment.close()
    assert os.path.exists(segment.path)
    with pytest.raises(InvalidRequest, match="closed"):
        _ = segment.tensor
    gc.collect()
    assert view.tolist() == [9] * 100
    view.fill_(3)


def test_a_segment_that_was_forgotten_is_unlinked_with_its_last_reference(shm: Path) -> None:
    path = Segment.create(10, "o", "s", directory=shm).path
    gc.collect()
    assert not os.path.exists(path)


def test_memory_is_given_back_when_the_last_view_goes(shm: Path) -> None:
    def mapped(path: str) -> int:
        # not the free space of the tmpfs, which other processes use too
        return Path("/proc/self/maps").read_text().count(path)

    for _ in range(5):
        with Segment.create(8 * MIB, "o", "s", directory=shm) as segment:
            path = segment.path
            reader = MappedSegment.open(path, 8 * MIB)
            assert mapped(path) == 2
        assert mapped(path) == 1  # the reader's; the owner let go when it closed
        del segment
        del reader
        gc.collect()
        assert mapped(path) == 0


@pytest.mark.parametrize(
    ("owner", "session"), [("a-b", "s"), ("a", "s/t"), ("", "s"), ("a", ""), ("../a", "s")]
)
def test_what_cannot_be_a_file_name_is_refused(shm: Path, owner: str, session: str) -> None:
    with pytest.raises(InvalidRequest, match="file name"):
        Segment.create(1, owner, session, directory=shm)
    with pytest.raises(InvalidRequest, match="-1 bytes"):
        Segment.create(-1, "a", "s", directory=shm)


def test_an_empty_segment_is_one_too(shm: Path) -> None:
    with Segment.create(0, "o", "s", directory=shm) as segment:
        assert segment.tensor.numel() == 0
        assert MappedSegment.open(segment.path, 0).tensor.numel() == 0


def test_too_much_is_store_full_saying_how_much_is_free_and_how_to_enlarge_it(shm: Path) -> None:
    free = os.statvfs(shm).f_bavail * os.statvfs(shm).f_frsize
    with pytest.raises(StoreFull, match=r"free.*remount,size=.*--shm-size") as caught:
        Segment.create(free * 2, "o", "s", directory=shm)
    assert caught.value.details["asked"] == free * 2
    assert list(shm.iterdir()) == []


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 4 MiB; needs the right to mount."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(tmp_path)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("no right to mount a tmpfs")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_really_full_tmpfs_is_store_full_and_never_a_bus_error(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Segment.create(3 * MIB, "o", "s", directory=small) as segment:
        with pytest.raises(StoreFull, match="free"):
            Segment.create(2 * MIB, "o", "s", directory=small)
        # Also when somebody takes the memory between the look and the leap.
        monkeypatch.setattr(
            "shutil.disk_usage", lambda _: type("Usage", (), {"free": 1 << 40, "total": 1 << 40})
        )
        with pytest.raises(StoreFull):
            Segment.create(2 * MIB, "o", "s", directory=small)
        assert [str(p) for p in small.iterdir()] == [segment.path]
        segment.tensor.fill_(1)


def test_memory_refused_by_the_kernel_for_another_reason_is_not_called_full(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match="broken"):
        Segment.create(10, "o", "s", directory=shm)
    assert list(shm.iterdir()) == []


def test_a_limit_on_file_sizes_is_named(shm: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(StoreFull, match="ulimit -f"):
            Segment.create(2 * MIB, "o", "s", directory=shm)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_directory_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(TransportUnavailable, match="no shared memory"):
        Segment.create(1, "o", "s", directory=tmp_path / "none")


def test_readers_map_without_warnings_see_what_is_written_and_outlive_the_segment(shm: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        segment = Segment.create(10_000, "o", "s", directory=shm)
        mapped = MappedSegment.open(segment.path, 10_000)
    segment.tensor.fill_(4)
    assert bool((mapped.tensor == 4).all())
    assert mapped.is_current()
    tail = mapped.tensor[9_000:]
    segment.close()
    assert not mapped.is_current()
    del mapped, segment
    gc.collect()
    assert tail.tolist() == [4] * 1000


def test_a_reader_cannot_write(shm: Path) -> None:
    with Segment.create(4096, "o", "s", directory=shm) as segment:
        code = (
            "import sys; from weightdepot.store.segments import MappedSegment\n"
            "MappedSegment.open(sys.argv[1], 4096).tensor.fill_(1)"
        )
        done = subprocess.run([sys.executable, "-c", code, segment.path], capture_output=True, check=False)
        assert done.returncode == -signal.SIGSEGV
        assert not segment.tensor.any()


def test_missing_short_and_strange_files_are_not_mapped(shm: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceLost, match="gone"):
        MappedSegment.open(shm / "weightdepot-o-s-0", 1)
    with Segment.create(100, "o", "s", directory=shm) as segment:
        with pytest.raises(SourceLost, match="100 bytes, not the 101"):
            MappedSegment.open(segment.path, 101)
        link = tmp_path / "weightdepot-link-s-0"
        link.symlink_to(segment.path)
        with pytest.raises(TransportUnavailable):
            MappedSegment.open(link, 100)
    with pytest.raises((SourceLost, TransportUnavailable)):
        MappedSegment.open(tmp_path, 0)


def test_case_07_a_killed_owners_segment_is_an_orphan_at_once_and_a_live_ones_is_never_touched(
    shm: Path,
) -> None:
    with Segment.create(10, "owner", "live", directory=shm) as mine:
        process, path = holder(shm)
        assert not is_orphan(path)
        assert not is_orphan(mine.path)
        assert remove_orphans(None, directory=shm) == []
        process.send_signal(signal.SIGSTOP)
        assert remove_orphans("owner", directory=shm) == [], "stopped is not dead"
        mapped = MappedSegment.open(path, 4096)
        process.kill()
        process.communicate()
        assert is_orphan(path)
        assert not is_orphan(mine.path)
        # What readers may still want stays, and so does what belongs to others or is too young.
        assert remove_orphans("owner", ["dead-session"], directory=shm) == []
        assert remove_orphans("other", directory=shm) == []
        assert remove_orphans(None, older_than_s=60, directory=shm) == []
        assert MappedSegment.open(path, 4096).tensor[0] == 7
        assert remove_orphans("owner", ["live-too"], directory=shm) == [path]
        assert is_orphan(path)
        assert os.path.exists(mine.path)
        assert mapped.tensor.tolist() == [7] * 4096


def test_a_child_forked_by_a_dead_owner_does_not_keep_its_segments_alive(shm: Path) -> None:
    process, path = holder(shm, "fork")
    try:
        assert not is_orphan(path)
        process.kill()
        process.wait()
        assert remove_orphans(None, directory=shm) == [path]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_forked_child_that_closes_or_ends_leaves_the_segment_to_its_owner(shm: Path) -> None:
    with Segment.create(4096, "o", "s", directory=shm) as segment:
        child = os.fork()
        if child == 0:
            segment.tensor.fill_(8)  # memory is shared still
            segment.close()
            del segment
            gc.collect()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert os.path.exists(segment.path)
        assert not is_orphan(segment.path)
        assert bool((segment.tensor == 8).all())


def test_an_interpreter_that_ends_without_closing_leaves_nothing(shm: Path) -> None:
    code = (
        "import sys; from weightdepot.store.segments import Segment\n"
        "kept = Segment.create(10, 'o', 's', directory=sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", code, str(shm)], check=True)
    assert list(shm.iterdir()) == []


def test_a_file_that_a_sweeper_took_while_it_was_being_made_is_made_again(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    lock = fcntl.flock

    def sweep_first(fd: int, how: int) -> None:
        if not taken:
            taken.append(os.readlink(f"/proc/self/fd/{fd}"))
            os.unlink(taken[0])
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", sweep_first)
    with Segment.create(10, "o", "s", directory=shm) as segment:
        assert taken
        assert segment.path != taken[0]
        assert os.path.exists(segment.path)


def test_strange_names_are_left_alone(shm: Path) -> None:
    for name in ("weightdepot-notes.txt", "weightdepot-a-1", "other-a-b-1"):
        (shm / name).touch()
    os.mkfifo(shm / "weightdepot-a-s-1")
    start = time.monotonic()
    assert remove_orphans(None, directory=shm) == []
    assert time.monotonic() - start < 1
    assert len(list(shm.iterdir())) == 4
