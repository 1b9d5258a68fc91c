"""Who asks for a slot, for how long and what for, and who gave up.

Only the caller knows when its time is up, and then it just does not ask again: an opening that was told to
wait, and was not asked for again within `GIVEN_UP_S`, found nothing in time.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from weightdepot.store.errors import IndexUnavailable
from weightdepot.store.index.records import Wait

# Seconds. Clients ask again at once; after an answer that the index is away, within a second.
GIVEN_UP_S = 3.0


@dataclass
class _Opening:
    since: float
    reason: str = ""  # what it was told last to wait for; empty while it was told nothing
    asking: int = 0  # requests under way
    heard: float = 0.0  # when the last of them ended


class Openings:
    """Of one controller; owned by its event loop. `gave_up(model, reason)` is called once for each rank that
    did, when `settle` sees it."""

    def __init__(
        self, gave_up: Callable[[str, str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._gave_up, self._clock = gave_up, clock
        self._known: dict[tuple[str, int, int], _Opening] = {}
        self._next = 0.0  # when `asking` settles again: not at each of many polls

    @contextlib.contextmanager
    def asking(self, model: str, version: int, rank: int) -> Iterator[Callable[[object], None]]:
        """While one request is under way. What is yielded is told each answer, also those that the request
        waits past."""
        key = (model, version, rank)
        opening = self._known.setdefault(key, _Opening(self._clock()))
        opening.asking += 1
        waits = False

        def told(answer: object) -> None:
            nonlocal waits
            waits = isinstance(answer, Wait)
            opening.reason = answer.reason if isinstance(answer, Wait) else ""

        try:
            yield told
        except IndexUnavailable:
            waits = bool(opening.reason)  # it asks again, for the same
            raise
        except Exception:
            waits = False
            raise
        finally:
            opening.asking -= 1
            opening.heard = self._clock()
            if not waits and self._known.get(key) is opening:
                del self._known[key]
            if opening.heard >= self._next:
                self.settle()

    def settle(self) -> None:
        """Count those who gave up, and forget them."""
        now = self._clock()
        self._next = now + 1.0
        for key, opening in list(self._known.items()):
            if not opening.asking and now - opening.heard > GIVEN_UP_S:
                del self._known[key]
                self._gave_up(key[0], opening.reason)

    def longest(self) -> dict[tuple[str, str], float]:
        """For how many seconds the rank that waits longest has waited, by model and reason."""
        found: dict[tuple[str, str], float] = defaultdict(float)
        now = self._clock()
        for (model, _, _), opening in self._known.items():
            if opening.reason:
                found[model, opening.reason] = max(found[model, opening.reason], now - opening.since)
        return dict(found)
