"""Several hosts on one machine: network namespaces on a bridge, each link limited, nothing else shared.

Needs root, and Debian's iproute2. A process of a host has a network, a name and a /dev/shm of its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

BURST = "256kb"
QUEUE = "50ms"


class NotPossible(Exception):
    """No namespaces can be made here; the message says why."""


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode:
        raise NotPossible(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


class Network:
    """Hosts by name, on one bridge that this process is on too (`gateway`).

    rate: of each link, in each direction, as `tc` takes it. fabric: hosts that get a second link, on a bridge
    of their own and without a limit, for what is not weightdepot's (the trainers' collectives).
    """

    def __init__(self, hosts: Sequence[str], *, rate: str = "1gbit", fabric: Sequence[str] = ()) -> None:
        self.hosts, self.rate, self.fabric = tuple(hosts), rate, tuple(fabric)
        self._id = f"{os.getpid() % 46656:x}"
        third = os.getpid() % 250
        self._own, self._other = f"10.77.{third}", f"10.78.{third}"

    @property
    def gateway(self) -> str:
        return f"{self._own}.1"

    def address(self, host: str) -> str:
        return f"{self._own}.{10 + self.hosts.index(host)}"

    def namespace(self, host: str) -> str:
        return f"wd{self._id}-{host}"

    def __enter__(self) -> Network:
        if os.geteuid() != 0 or any(shutil.which(tool) is None for tool in ("ip", "tc", "unshare")):
            raise NotPossible("namespaces are made by root, with ip, tc and unshare")
        with contextlib.ExitStack() as undo:
            undo.callback(self._remove)
            for bridge in (f"wd{self._id}a", f"wd{self._id}b"):
                run("ip", "link", "add", bridge, "type", "bridge")
                run("ip", "link", "set", bridge, "up")
            run("ip", "address", "add", f"{self.gateway}/24", "dev", f"wd{self._id}a")
            for number, host in enumerate(self.hosts):
                run("ip", "netns", "add", self.namespace(host))
                run("ip", "-n", self.namespace(host), "link", "set", "lo", "up")
                self._link(host, number, "a", "eth0", self._own, self.rate)
                if host in self.fabric:
                    self._link(host, number, "b", "eth1", self._other, None)
            undo.pop_all()
        return self

    def _link(self, host: str, number: int, bridge: str, name: str, subnet: str, rate: str | None) -> None:
        outside, space = f"wd{self._id}{bridge}{number}", self.namespace(host)
        run("ip", "link", "add", outside, "type", "veth", "peer", "name", name, "netns", space)
        run("ip", "link", "set", outside, "master", f"wd{self._id}{bridge}", "up")
        run("ip", "-n", space, "address", "add", f"{subnet}.{10 + number}/24", "dev", name)
        run("ip", "-n", space, "link", "set", name, "up")
        if bridge == "a":
            run("ip", "-n", space, "route", "add", "default", "via", self.gateway)
        if rate is not None:
            limit = ("root", "tbf", "rate", rate, "burst", BURST, "latency", QUEUE)
            run("tc", "qdisc", "add", "dev", outside, *limit)
            run("tc", "-n", space, "qdisc", "add", "dev", name, *limit)

    def command(self, host: str, command: Sequence[str], shm: str = "2g") -> list[str]:
        """The command as a process of that host."""
        script = f'hostname "$0" && mount -t tmpfs -o size={shm} tmpfs /dev/shm && exec "$@"'
        return [
            "ip", "netns", "exec", self.namespace(host),
            "unshare", "--mount", "--uts", "--propagation", "private", "sh", "-c", script, host, *command,
        ]  # fmt: skip

    def bytes(self, host: str) -> tuple[int, int]:
        """What the host received and sent over its first link, with all headers."""
        number = self.hosts.index(host)
        folder = Path(f"/sys/class/net/wd{self._id}a{number}/statistics")
        # seen from the other end of the cable
        return int((folder / "tx_bytes").read_text()), int((folder / "rx_bytes").read_text())

    def _remove(self) -> None:
        for host in self.hosts:
            _quietly("ip", "netns", "delete", self.namespace(host))
        for bridge in ("a", "b"):
            for number in range(len(self.hosts)):
                _quietly("ip", "link", "delete", f"wd{self._id}{bridge}{number}")
            _quietly("ip", "link", "delete", f"wd{self._id}{bridge}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()


def _quietly(*command: str) -> None:
    subprocess.run(command, capture_output=True, check=False, timeout=30)
