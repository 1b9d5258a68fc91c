"""Memory of versions is given back: pins come and go, and what is left is what there was."""

from __future__ import annotations

import os

from weightdepot.api.client import ControllerClient

from .fleet import holds, publish, ranks, trainer
from .harness import eventually


def shared(session: str) -> int:
    """Bytes of shared memory of the producer of this session."""
    found = [f for f in os.scandir("/dev/shm") if f.name.startswith("weightdepot-") and session in f.name]
    return sum(f.stat().st_size for f in found)


def test_case_29_after_100_versions_with_pins_between_memory_is_what_it_was_after_5(
    controller: str, model: str
) -> None:
    with (
        trainer(controller, model) as producer,
        ranks(controller, model, 1) as (reader,),
        ControllerClient(controller) as client,
    ):
        session = producer._membership.session
        publish(producer, *range(5))
        eventually(lambda: shared(session) > 0)
        after_5 = shared(session)
        most = after_5
        for version in range(5, 100):
            publish(producer, version)
            if version % 10 == 3:
                client.pin(model, version)
                client.tag(model, "best", version)
            if version % 10 == 8 and version > 10:
                pinned = version - 5
                assert reader.update(version=pinned) == pinned
                assert holds(reader) == pinned
                client.unpin(model, pinned)
                client.untag(model, "best")
            most = max(most, shared(session))
        publish(producer, 100, 101)
        assert most > after_5  # the pins did take memory
        assert shared(session) == after_5
