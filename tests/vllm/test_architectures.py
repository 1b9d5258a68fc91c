"""A model filled by weightdepot is, bit by bit, the one that vLLM's own loader fills from the files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weightdepot.consumers.layout_report import pattern

from .filling import both_ways
from .zoo import CONFIGS, PROMISED, spreads

TABLE = Path(__file__).parents[2] / "docs" / "architectures.md"

# what is not there yet: architecture, and why
NOT_YET: dict[str, str] = {}

# what no layout can say: checkpoint tensors, by pattern, that go through the loader
WHOLE = {
    "mamba": {"backbone.layers.*.mixer.A_log"},
    "mamba2": {"backbone.layers.*.mixer.A_log"},
    "falcon_h1": {"model.layers.*.mamba.A_log"},
    "nemotron_h": {"backbone.layers.*.mixer.A_log"},
    "jamba": {"model.layers.*.mamba.A_log"},
}
# what moves otherwise than by views: probed
PROBED = {
    ("llama4", True): {
        "model.layers.*.feed_forward.experts.down_proj",
        "model.layers.*.feed_forward.experts.gate_up_proj",
    }
}


def cases() -> list[Any]:
    found = []
    for name in CONFIGS:
        for tensor, expert, rank in spreads(name):
            why = NOT_YET.get(name)
            marks = [pytest.mark.xfail(reason=why, strict=True)] if why else []
            label = f"{name}-tp{tensor}{'-ep' if expert else ''}-rank{rank}"
            found.append(pytest.param(name, tensor, expert, rank, id=label, marks=marks))
    return found


@pytest.mark.parametrize(("name", "tensor", "expert", "rank"), cases())
def test_every_parameter_is_bit_equal(
    config_of: Callable[..., Any], name: str, tensor: int, expert: bool, rank: int
) -> None:
    filled = both_ways(config_of(name, tensor, expert), rank)
    assert filled.trace.faults == ()
    assert filled.different == ()
    assert filled.trace.left == ()
    tiers = filled.trace.tiers
    assert {pattern(n) for n, t in tiers.items() if t == "whole"} == WHOLE.get(name, set())
    assert {pattern(n) for n, t in tiers.items() if t == "probed"} == PROBED.get((name, expert), set())
    unused = {pattern(n) for n in filled.trace.unused}
    if name == "gpt_oss" and tensor == 2 and rank and not expert:
        assert unused == {"model.layers.*.mlp.experts.down_proj_bias"}  # added by rank 0 only
    elif expert:
        assert all("experts.*" in n for n in unused)  # those of the other rank
    else:
        assert unused == set()


def test_the_table_in_the_documentation_lists_every_architecture_that_is_promised() -> None:
    rows = {line.split("|")[1].strip() for line in TABLE.read_text().splitlines() if line.startswith("|")}
    assert set(PROMISED) <= rows
