"""The serving side as a process of its own: `python peer.py TRANSPORT NBYTES SEED`.

Prints one JSON line (its endpoint, and the processes that serve), and ends when its input does. "more" on
a line serves another segment, of seed + 1, and prints its endpoint. "withdraw" withdraws the first.
"fork" forks a child that does nothing, and prints its pid.
"""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np
import torch

from weightdepot.store.segments import Segment
from weightdepot.store.transports.base import Transport
from weightdepot.store.transports.mooncake.transport import MooncakeTransport
from weightdepot.store.transports.shm import ShmTransport
from weightdepot.store.transports.tcp.transport import TcpTransport


def fill(segment: Segment, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 256, segment.nbytes, dtype=np.uint8)
    segment.tensor.copy_(torch.from_numpy(values))


def main() -> None:
    name, nbytes, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    mooncake = MooncakeTransport(host="127.0.0.1") if name == "mooncake" else None
    transport: Transport = mooncake or (TcpTransport(host="127.0.0.1") if name == "tcp" else ShmTransport())
    with transport, Segment.create(nbytes, "peer", f"{os.getpid()}-a") as segment:
        fill(segment, seed)
        endpoint = transport.serve(segment)
        pids = [os.getpid(), *(mooncake.pids["serving"] if mooncake else [])]
        print(json.dumps({"endpoint": endpoint, "pids": pids, "path": segment.path}), flush=True)
        others = []
        for line in sys.stdin:
            if line.strip() == "more":
                other = Segment.create(nbytes, "peer", f"{os.getpid()}-b")
                fill(other, seed + 1)
                others.append(other)
                print(json.dumps(transport.serve(other)), flush=True)
            elif line.strip() == "fork":
                child = os.fork()
                if child == 0:  # lives on when its parent is killed, and holds all that it inherited
                    time.sleep(60)
                    os._exit(0)
                print(json.dumps(child), flush=True)
            elif line.strip() == "withdraw":
                transport.withdraw(segment)
                print("null", flush=True)
        for other in others:
            other.close()


if __name__ == "__main__":
    main()
