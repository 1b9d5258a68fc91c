"""The traced map of any program of views, copies and writes is what running it does, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from weightdepot.store.errors import LayoutError
from weightdepot.store.tracing import content, coverage, lattice, memory, moves, recorder, through, trace_load

from .execution import bits, checkpoint, deliver, holes, others, parameter, specs, twins
from .programs import CHECKPOINT, PARAMETERS, run

REFUSED = ("depends on what a parameter held before",)


def agree(numbers: Sequence[int], transposed: bool = False, each: bool = False) -> bool:
    """Whether trace and execution give the same bits, for two versions in a row. A refused program agrees;
    wrong bits, or an unnamed part that differs, do not."""
    weights = checkpoint(CHECKPOINT)
    parameters = {n: parameter(*shape) for n, shape in PARAMETERS.items()}
    parameters["q"] = parameter(*PARAMETERS["q"], dtype=torch.bfloat16)
    if transposed:
        parameters["p"] = torch.nn.Parameter(parameters["p"].data.t().clone().t(), requires_grad=False)
    really, traced = twins(parameters), twins(parameters)

    def load(parameters: Mapping[str, Tensor], weights: Iterable[tuple[str, Tensor]]) -> None:
        run(numbers, parameters, weights, each)

    with torch.no_grad():
        load(really, ((n, w.clone()) for n, w in weights.items()))
    try:
        trace = trace_load(lambda w: load(parameters, w), specs(weights), parameters, optional=("*",))
    except LayoutError as error:
        return all(any(text in f.reason for text in REFUSED) for f in error.faults)
    deliver(trace, load, others(weights), traced)
    deliver(trace, load, weights, traced)
    aside = trace.whole_parameters
    assert holes(coverage(trace.layout, optional=("*",)), aside) == holes(trace.left, aside)
    return all(bits(really[n]) == bits(traced[n]) for n in parameters)


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.integers(0, 5000), min_size=6, max_size=160), st.booleans(), st.booleans())
def test_any_program_is_traced_as_it_runs(numbers: list[int], transposed: bool, each: bool) -> None:
    assert agree(numbers, transposed, each)


def random_programs(count: int) -> list[list[int]]:
    generator = random.Random(2024)
    return [[generator.randrange(5000) for _ in range(generator.randrange(20, 240))] for _ in range(count)]


def test_long_random_programs_are_traced_as_they_run() -> None:
    for numbers in random_programs(100):
        assert agree(numbers)
        assert agree(numbers, each=True)


def _no_tail(original: Callable[..., None]) -> Callable[..., None]:
    def carry(todo, *args):  # type: ignore[no-untyped-def]
        length = len(todo)
        original(todo, *args)
        if len(todo) - length > 1:
            del todo[length]

    return carry


def _oldest_wins(original: Callable[..., list[memory._Layer]]) -> Callable[..., list[memory._Layer]]:
    return lambda self, piece: original(self, piece)[::-1]


def _joined_too_often(dims, frame):  # type: ignore[no-untyped-def]
    """Dimensions joined by their positions alone, whatever their images do."""
    found: list[tuple[int, int, int]] = []
    for n, step, image_step in sorted((d for d in dims if d[0] != 1), key=lambda d: d[1]):
        if found and step == found[-1][0] * found[-1][1]:
            found[-1] = (found[-1][0] * n, *found[-1][1:])
        else:
            found.append((n, step, image_step))
    return tuple(found)


def _never_differing(original: Callable[..., set[int]]) -> Callable[..., set[int]]:
    def run(self, described):  # type: ignore[no-untyped-def]
        original(self, described)
        self.differing.clear()
        return set()

    return run


def _forwards(original: Callable[..., None]) -> Callable[..., None]:
    return lambda self, target, run, bounds: original(
        self, target, run._replace(steps=tuple(map(abs, run.steps))), bounds
    )


BUGS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "a run loses what is beyond the end of its digit": (lattice, "_carry", _no_tail),
    "the first write wins": (memory._Layers, "meeting", _oldest_wins),
    "what a write hides is not taken away": (memory, "subtract", lambda _: lambda part, common: [part]),
    "the offset within an entry is forgotten": (memory, "_dot", lambda _: lambda *args: 0),
    "dimensions are joined by position alone": (lattice, "normal", lambda _: _joined_too_often),
    "overlapping writes are taken for disjoint": (memory, "disjoint", lambda _: lambda *args: True),
    "a cast that rounds is forgotten": (content, "exact", lambda _: lambda *args: True),
    "writes to incoming tensors are ignored": (
        recorder.Recorder,
        "write",
        lambda original: lambda self, place, what: (
            None if isinstance(place.memory.initial, content.Source) else original(self, place, what)
        ),
    ),
    "a write of a whole memory leaves older ones": (
        memory, "_linear", lambda original: lambda entry: (0, 1, entry.content),
    ),
    "a box that is read backwards is read forwards": (moves._Probe, "_copy", _forwards),
    "a dimension that passes through is another one in the result": (
        moves._Probe,
        "_narrow",
        lambda original: lambda operand, through: original(operand, {d: d for d in through}),
    ),
    "all that is computed is the same": (through, "_same", lambda _: lambda *args: True),
    "the order of what the loader does and what the layout does is ignored": (
        through._Comparison, "run", _never_differing,
    ),
    "what depends on former values goes through the loader": (
        through, "_hopeless", lambda _: lambda *args: [],
    ),
}  # fmt: skip


# about where the random programs find those that are hard to find, to save time
NEAR = {
    "a cast that rounds is forgotten": 98,
    "overlapping writes are taken for disjoint": 103,
    "a box that is read backwards is read forwards": 57,
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, broken = BUGS[bug]
    monkeypatch.setattr(owner, name, broken(getattr(owner, name)))

    def fails(numbers: Sequence[int]) -> bool:
        try:
            return not (agree(numbers) and agree(numbers, each=True))
        except Exception:  # noqa: BLE001 - a crash finds the bug as well
            return True

    programs = random_programs(400)
    near = NEAR.get(bug, 0)
    assert any(fails(numbers) for numbers in [*programs[near:], *programs[:near]]), (
        "the programs are blind to this bug"
    )
