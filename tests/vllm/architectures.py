"""Writes docs/architectures.md from a real run: `python -m tests.vllm.architectures`, where vLLM is."""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch

import vllm
from weightdepot.consumers.layout_report import pattern
from weightdepot.consumers.vllm.shadow import Parallel, engine_config
from weightdepot.store.errors import WeightDepotError

from .filling import Filled, both_ways
from .zoo import CONFIGS, OTHERS, PROMISED, make, spreads

TABLE = Path(__file__).parents[2] / "docs" / "architectures.md"

HEAD = """\
# Architectures tried with vLLM

Written by `python -m tests.vllm.architectures`, with vLLM {vllm} and torch {torch}; do not edit.

For each a tiny model is made at random and saved. vLLM's own loader fills one model from the files.
weightdepot traces the same loader on a shadow without weights, cuts the checkpoint between two producers,
plans, packs, and fills another model. *Equal* says that all parameters are the same, bit by bit, on every
rank that is listed. The numbers are checkpoint tensors by tier; *unused* are those that a rank does not need,
*refused* those that the map cannot carry yet. `tp 2` has ranks 0 and 1 of two; `ep` shares experts out whole.

"""


def main() -> None:
    sections = [HEAD.format(vllm=vllm.__version__, torch=torch.__version__)]
    with tempfile.TemporaryDirectory() as root:
        for title, configs in (("Promised", PROMISED), ("Others", OTHERS)):
            rows = [_row(name, Path(root) / name) for name in configs]
            sections.append(
                f"## {title}\n\n| architecture | tensors | tp 1 | tp 2, rank 0 | tp 2, rank 1 | "
                "ep 2, rank 0 | ep 2, rank 1 | equal |\n|---|---|---|---|---|---|---|---|\n"
                + "\n".join(rows)
                + "\n\n"
            )
    TABLE.write_text("".join(sections).rstrip() + "\n")
    print(f"wrote {TABLE} ({len(CONFIGS)} architectures)")


def _row(name: str, directory: Path) -> str:
    make(name, directory)
    cells, faults, equal, total = [], Counter[str](), True, "?"
    for tensor, expert, rank in spreads(name):
        try:
            filled = both_ways(engine_config(directory, Parallel(tensor, expert=expert)), rank)
        except (
            WeightDepotError,
            ValueError,
            RuntimeError,
            KeyError,
            AttributeError,
            AssertionError,
        ) as error:
            cells.append("error")
            faults[f"{type(error).__name__}: {str(error)[:200]}"] += 1
            equal = False
            continue
        total = str(len(filled.trace.layout.tensors))
        cells.append(_cell(filled))
        equal &= not filled.different
        faults.update(f"{pattern(f.tensors[0]) if f.tensors else pattern(f.parameter)}: {f.reason}"
                      for f in filled.trace.faults)  # fmt: skip
        faults.update(f"{pattern(n)} differs" for n in filled.different if not filled.trace.faults)
    cells += ["-"] * (5 - len(cells))
    verdict = "yes" if equal else "no: " + "; ".join(dict.fromkeys(faults))
    print(name, cells, verdict, file=sys.stderr)
    return f"| {name} | {total} | {' | '.join(cells)} | {verdict.replace('|', '/')} |"


def _cell(filled: Filled) -> str:
    tiers = Counter(filled.trace.tier(t.name) for t in filled.trace.layout.tensors)
    return ", ".join(f"{n} {tier}" for tier, n in tiers.most_common())


if __name__ == "__main__":
    main()
