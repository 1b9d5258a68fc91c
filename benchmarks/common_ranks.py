"""Ranks in processes of their own, told what to do together; and the controller that they speak to."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from typing_extensions import Self

ANSWER_S = 120.0  # longest wait for one step of a rank

Step = Callable[..., Any]
"""A method of a rank: what it returns is sent back beside the seconds that it took."""


class Crew:
    """Some ranks of one kind: `make(rank, **options)` in each process, whose methods are called at once.

    Each has one thread: as many processes as cores share the machine.
    """

    def __init__(self, make: Callable[..., Any], count: int, **options: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.count = count
        # one alone has nobody to begin together with; a barrier of one was seen to hang
        barrier = context.Barrier(count) if count > 1 else None
        self._ranks: list[tuple[Any, Connection]] = []
        for rank in range(count):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(make, rank, barrier, there, options), daemon=True)
            process.start()
            there.close()
            self._ranks.append((process, here))
        self._answers()

    def call(self, method: str, *args: Any) -> float:
        """Seconds of the slowest rank, all having begun together."""
        return max(seconds for seconds, _ in self.each(method, *args))

    def ask(self, method: str, *args: Any) -> list[Any]:
        """What each rank returned."""
        return [answer for _, answer in self.each(method, *args)]

    def each(self, method: str, *args: Any) -> list[tuple[float, Any]]:
        self.begin(method, *args)
        return self._answers()

    def begin(self, method: str, *args: Any) -> None:
        for _, connection in self._ranks:
            connection.send((method, args))

    def end(self) -> list[tuple[float, Any]]:
        """The answers to `begin`."""
        return self._answers()

    def close(self) -> None:
        for _, connection in self._ranks:
            with contextlib.suppress(OSError):
                connection.send(None)
        for process, connection in self._ranks:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answers(self) -> list[tuple[float, Any]]:
        found = []
        for rank, (process, connection) in enumerate(self._ranks):
            if not connection.poll(ANSWER_S):
                os.kill(process.pid, signal.SIGUSR1)  # says on stderr what each of its threads is in
                time.sleep(1)
                raise SystemExit(f"rank {rank} did not answer within {ANSWER_S:g} s (see its stacks above)")
            try:
                seconds, answer, error = connection.recv()
            except EOFError:
                raise SystemExit(f"rank {rank} ended (see above)") from None
            if error:
                raise SystemExit(f"rank {rank} failed:\n{error}")
            found.append((seconds, answer))
        return found


def _serve(make: Callable[..., Any], rank: int, barrier: Any, connection: Connection, options: Any) -> None:
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    with contextlib.ExitStack() as stack:
        try:
            made = make(rank, **options)
            if hasattr(made, "close"):
                stack.callback(made.close)
            connection.send((0.0, None, ""))
            while (request := connection.recv()) is not None:
                method, args = request
                step: Step = getattr(made, method)
                if barrier is not None:
                    barrier.wait(ANSWER_S)
                begun = time.perf_counter()
                answer = step(*args)
                connection.send((time.perf_counter() - begun, answer, ""))
        except EOFError:
            return
        except BaseException:  # noqa: BLE001 - whatever it is, the one who asked must hear of it
            if barrier is not None:
                barrier.abort()
            connection.send((0.0, None, traceback.format_exc()))


@contextlib.contextmanager
def controller(arguments: Sequence[str] = ()) -> Iterator[str]:
    """`weightdepot serve` as a user starts it; its URL."""
    command = [sys.executable, "-m", "weightdepot.api", "serve", "--log-level", "warning", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        url = next((word for word in line.split() if word.startswith("http")), "")
        if not url:
            raise SystemExit(f"the controller said {line!r}")
        yield url
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
