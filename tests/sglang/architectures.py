"""Writes the tables of docs/sglang.md from a real run: `python -m tests.sglang.architectures`."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Final

from .without_dependencies import available

os.environ |= {"HF_HUB_OFFLINE": "1"}
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

DOCUMENT = Path(__file__).parents[2] / "docs" / "sglang.md"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"

PROMISED: Final = ("llama", "qwen3", "qwen3_moe", "mixtral", "gemma3", "phi3", "glm4_moe")
# whatever else the zoo has and SGLang without its kernels may build
OTHERS: Final = (
    "qwen2", "gemma2", "deepseek_v3", "gpt_oss", "gpt2", "qwen3_next", "mistral", "glm4", "granite", "olmo2",
    "cohere2", "starcoder2", "opt", "gpt_neox", "falcon", "apertus", "phi", "deepseek_v2", "qwen2_moe",
    "olmoe", "granitemoe", "ernie4_5_moe", "llama4", "falcon_h1",
)  # fmt: skip

COLUMNS = "architecture | tensors | tp 1 | tp 2, rank 0 | tp 2, rank 1 | ep 2, rank 0 | ep 2, rank 1 | equal"


def main() -> None:
    if not available():
        sys.exit("SGLang is neither installed nor in SGLANG_SOURCE")
    warnings.simplefilter("ignore")
    import sglang.srt.server_args  # noqa: F401 - sets up logging, which is quiet here
    import torch

    logging.disable(logging.CRITICAL)
    versions = f"SGLang 0.5.23 and torch {torch.__version__}"
    sections = [f"Written by `python -m tests.sglang.architectures`, with {versions}."]
    with tempfile.TemporaryDirectory() as root:
        for title, names in (("Promised", PROMISED), ("Others", OTHERS)):
            rows = [_row(name, Path(root) / name) for name in names]
            ruler = "|---" * (COLUMNS.count("|") + 1) + "|"
            sections.append("\n".join([f"**{title}**", "", f"| {COLUMNS} |", ruler, *rows]))
    text = DOCUMENT.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    DOCUMENT.write_text(before + "\n\n".join([BEGIN, *sections, END]) + after)
    print(f"wrote {DOCUMENT}")


def _row(name: str, directory: Path) -> str:
    from weightdepot.consumers.sglang.shadow import engine_arguments

    from ..filling import Filled
    from ..vllm.zoo import make, spreads
    from .filling import both_ways

    make(name, directory)
    cells, faults, total = [], Counter[str](), "?"
    for tensor, expert, rank in spreads(name):
        try:
            filled: Filled = both_ways(engine_arguments(directory, tensor, tensor if expert else 1), rank)
        except Exception as error:  # noqa: BLE001 - whatever SGLang raises goes into the table
            cells.append("error")
            faults[f"{type(error).__name__}: {error}".replace(str(directory), name)[:160]] += 1
            continue
        total = str(len(filled.trace.layout.tensors))
        tiers = Counter(filled.trace.tier(t.name) for t in filled.trace.layout.tensors)
        cells.append(", ".join(f"{n} {tier}" for tier, n in tiers.most_common()))
        faults.update(_pattern(str(f)) for f in filled.trace.faults)
        faults.update(f"{_pattern(n)} differs" for n in filled.different)
    cells += ["-"] * (5 - len(cells))
    verdict = "no: " + "; ".join(faults) if faults else "yes"
    print(name, cells, verdict, file=sys.stderr)
    verdict = " ".join(verdict.split()).replace("|", "/")
    return f"| {name} | {total} | {' | '.join(cells)} | {verdict} |"


def _pattern(text: str) -> str:
    from weightdepot.consumers.layout_report import pattern

    return pattern(text)


if __name__ == "__main__":
    main()
