"""The traced map of any program of views, copies and writes is what running it does, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weightdepot.store.errors import LayoutError
from weightdepot.store.tracing import content, coverage, lattice, memory, recorder, trace_load

from .execution import apply, bits, checkpoint, holes, parameter, specs, twins
from .programs import CHECKPOINT, PARAMETERS, run


def agree(numbers: Sequence[int], transposed: bool = False) -> bool:
    """Whether trace and execution give the same bits. A refused program agrees; wrong bits, or an unnamed
    part that differs, do not."""
    weights = checkpoint(CHECKPOINT)
    parameters = {n: parameter(*shape) for n, shape in PARAMETERS.items()}
    parameters["q"] = parameter(*PARAMETERS["q"], dtype=torch.bfloat16)
    if transposed:
        parameters["p"] = torch.nn.Parameter(parameters["p"].data.t().clone().t(), requires_grad=False)
    really, traced = twins(parameters), twins(parameters)
    with torch.no_grad():
        run(numbers, really, ((n, w.clone()) for n, w in weights.items()))
    try:
        trace = trace_load(lambda w: run(numbers, parameters, w), specs(weights), parameters, optional=("*",))
    except LayoutError as error:
        return all("cast twice" in f.reason for f in error.faults)
    apply(trace.layout, weights, traced)
    assert holes(coverage(trace.layout, optional=("*",))) == holes(trace.left)
    return all(bits(really[n]) == bits(traced[n]) for n in parameters)


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.integers(0, 5000), min_size=6, max_size=160), st.booleans())
def test_any_program_is_traced_as_it_runs(numbers: list[int], transposed: bool) -> None:
    assert agree(numbers, transposed)


def random_programs(count: int) -> list[list[int]]:
    generator = random.Random(2024)
    return [[generator.randrange(5000) for _ in range(generator.randrange(20, 240))] for _ in range(count)]


def test_long_random_programs_are_traced_as_they_run() -> None:
    for numbers in random_programs(150):
        assert agree(numbers)


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
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, broken = BUGS[bug]
    monkeypatch.setattr(owner, name, broken(getattr(owner, name)))

    def fails(numbers: Sequence[int]) -> bool:
        try:
            return not agree(numbers)
        except Exception:  # noqa: BLE001 - a crash finds the bug as well
            return True

    assert any(fails(numbers) for numbers in random_programs(400)), "the programs are blind to this bug"
