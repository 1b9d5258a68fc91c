"""What the wire carries without a store: the Mooncake engine in one large batch, and plain sockets."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

import torch

ENTRY = 16 << 20  # bytes of one entry of the engine's batch: of 1 to 256 MiB the fastest here


def _engine() -> Any:
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    os.environ.setdefault("MC_TCP_SLICE_SIZE", str(128 << 10))  # as weightdepot sets it
    os.environ["MC_FORCE_TCP"] = "1"
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0, "the engine does not start"
    return engine


class RawServer:
    """Memory that an engine, and a thread with `sendfile`, serve."""

    def __init__(self, rank: int, *, nbytes: int) -> None:
        self.fd = os.memfd_create("raw")
        os.ftruncate(self.fd, nbytes)
        self.memory = torch.from_file(f"/proc/self/fd/{self.fd}", shared=True, size=nbytes, dtype=torch.uint8)
        self.memory.fill_(rank + 1)
        self.engine = _engine()
        assert self.engine.register_memory(self.memory.data_ptr(), nbytes) == 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    def address(self) -> tuple[str, int, int]:
        port = self.listener.getsockname()[1]
        return f"127.0.0.1:{self.engine.get_rpc_port()}", self.memory.data_ptr(), port

    def _accept(self) -> None:
        while True:
            connection, _ = self.listener.accept()
            threading.Thread(target=self._send, args=(connection,), daemon=True).start()

    def _send(self, connection: socket.socket) -> None:
        while asked := connection.recv(16, socket.MSG_WAITALL):
            offset, left = int.from_bytes(asked[:8], "little"), int.from_bytes(asked[8:], "little")
            while left:
                count = os.sendfile(connection.fileno(), self.fd, offset, left)
                offset, left = offset + count, left - count

    def close(self) -> None:
        os._exit(0)  # destroying an engine takes a second


class RawReader:
    """Reads its share from each server, one after the other, into memory that is there already."""

    def __init__(self, rank: int, *, servers: list[tuple[str, int, int]], nbytes: int) -> None:
        self.servers, self.share = servers, nbytes // len(servers)
        self.rank = rank
        self.memory = torch.full((nbytes,), 255, dtype=torch.uint8)
        self.engine = _engine()
        self.sockets = [socket.create_connection(("127.0.0.1", port)) for _, _, port in servers]

    def read_engine(self) -> None:
        entries = range(0, self.share, ENTRY)
        sizes = [min(ENTRY, self.share - at) for at in entries]
        for k, (session, base, _) in enumerate(self.servers):
            to = self.memory.data_ptr() + k * self.share
            source = base + self.rank * self.share
            status = self.engine.batch_transfer_sync_read(
                session, [to + at for at in entries], [source + at for at in entries], sizes
            )
            assert status == 0, f"the engine answered {status}"

    def read_sockets(self) -> None:
        view = memoryview(self.memory.numpy())
        for k, connection in enumerate(self.sockets):
            offset = self.rank * self.share
            connection.sendall(offset.to_bytes(8, "little") + self.share.to_bytes(8, "little"))
            at, stop = k * self.share, (k + 1) * self.share
            while at < stop:
                at += connection.recv_into(view[at : min(stop, at + (1 << 20))])

    def check(self) -> None:
        for k in range(len(self.servers)):
            assert bool((self.memory[k * self.share : (k + 1) * self.share] == k + 1).all())

    def close(self) -> None:
        os._exit(0)
