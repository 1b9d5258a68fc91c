"""Who this process is, whether another one is dead, and which processes share a tmpfs.

What can be told only on the spot is told only on the spot: a process of another host, or of another PID
namespace (two containers on one machine), is neither dead nor alive here but unknown.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from weightdepot.store.index.records import Process

SHM_DIRECTORY = "/dev/shm"  # noqa: S108 - it is meant: the tmpfs that POSIX shared memory lives in

# States of /proc/PID/stat in which a process runs nothing any more (proc(5)).
_ENDED = frozenset("ZXx")


def boot_id() -> str:
    """Drawn anew by the kernel at every start; equal in all containers of one machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def host_id() -> str:
    """Equal for two processes if and only if a pid means the same process to both.

    The name alone is not enough (containers copy it), nor is the boot id (containers share it): the PID
    namespace decides what a pid means.
    """
    namespace = os.stat("/proc/self/ns/pid")
    return f"{boot_id()}/{socket.gethostname()}/{namespace.st_dev:x}:{namespace.st_ino:x}"


def _stat_fields(pid: int) -> tuple[str, int, int]:
    """State, number of threads and start time (clock ticks after boot) of a process of this host."""
    raw = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    # The second field is the program's name in brackets, and may itself hold blanks and brackets.
    fields = raw[raw.rindex(")") + 2 :].split()
    return fields[0], int(fields[17]), int(fields[19])


def this_process() -> Process:
    """Never cached: a forked child is another process."""
    pid = os.getpid()
    return Process(host=host_id(), pid=pid, started=_stat_fields(pid)[2])


def is_dead(process: Process) -> bool | None:
    """Whether `process` has ended. None: it is (or was) elsewhere, or hidden from us: cannot tell."""
    if process.host != host_id():
        # A machine that was started anew has lost its processes, but another host looks the same from here.
        return None
    try:
        state, threads, started = _stat_fields(process.pid)
    except (FileNotFoundError, ProcessLookupError):
        # /proc may be mounted with hidepid: then only the signal says that the pid is taken.
        try:
            os.kill(process.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return None
        return None
    except PermissionError:
        return None
    if started != process.started:
        return True  # the pid was given out again
    # A zombie has released its memory and locks. With threads left, only its first thread has ended.
    return state in _ENDED and threads <= 1


def shm_domain(directory: str | os.PathLike[str] = SHM_DIRECTORY) -> str:
    """Equal for two processes if and only if the same path in `directory` is the same file to both.

    Containers of one machine share a boot id but each has its own tmpfs, unless it was mounted into both.
    Raises OSError when there is no such directory.
    """
    at = os.stat(directory)
    return f"{boot_id()}/{at.st_dev:x}:{at.st_ino:x}"


def default_host() -> str:
    """The address of this machine that the default route goes out from; loopback where there is none."""
    for probe in ("192.0.2.1", "10.255.255.255"):  # nothing is sent: `connect` on UDP only picks a route
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as chosen:
            chosen.connect((probe, 9))
            return str(chosen.getsockname()[0])
    return "127.0.0.1"
