"""Memory of versions is given back: pins come and go, and what is left is what there was."""

from __future__ import annotations

import contextlib
import os

import torch

from weightdepot import Consumer, Producer
from weightdepot.api.client import ControllerClient

from .harness import QUICK, eventually

PART = 1 << 20  # bytes


def shared(session: str) -> int:
    """Bytes of shared memory of the producer of this session."""
    total = 0
    for f in os.scandir("/dev/shm"):
        if f.name.startswith("weightdepot-") and session in f.name:
            with contextlib.suppress(FileNotFoundError):  # given back since it was listed
                total += f.stat().st_size
    return total


def test_case_29_after_100_versions_with_pins_between_memory_is_what_it_was_after_5(
    controller: str, model: str
) -> None:
    held, got = torch.zeros(PART // 4), torch.zeros(PART // 4)
    with (
        Producer(controller, model=model, weights={"w": held}, timeouts=QUICK) as producer,
        Consumer(controller, model=model, weights={"w": got}, timeouts=QUICK) as reader,
        ControllerClient(controller) as client,
    ):
        session = producer._membership.session

        def publish(*versions: int) -> None:
            for version in versions:
                held.fill_(version)
                producer.publish(version, wait="ready")

        def segments() -> int:
            """A segment may be larger than the part by what was guessed before the first version."""
            return shared(session) // PART

        publish(*range(5))
        # one for each slot, and the spare one that the next version is packed into
        eventually(lambda: segments() == 3)
        most = segments()
        for version in range(5, 100):
            publish(version)
            if version % 10 == 3:
                client.pin(model, version)
                client.tag(model, "best", version)
            if version % 10 == 8 and version > 10:
                pinned = version - 5
                assert reader.update(version=pinned) == pinned
                assert got.eq(pinned).all()
                client.unpin(model, pinned)
                client.untag(model, "best")
            most = max(most, segments())
        publish(100, 101)
        assert 4 <= most <= 5, "the pins did take memory, and no more than they need"
        eventually(lambda: segments() == 3)
