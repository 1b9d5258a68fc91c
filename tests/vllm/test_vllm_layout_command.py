"""`weightdepot layout --vllm`: every rank, on a machine without a GPU and without weights."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from typer.testing import CliRunner, Result

from weightdepot.cli import app

from .zoo import make


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["layout", *arguments], env={"COLUMNS": "160"})


def test_each_rank_is_answered_from_config_json_alone(tmp_path: Path) -> None:
    make("qwen3_moe", tmp_path / "m", weights=False)
    shown = command("--vllm", str(tmp_path / "m"), "--tp", "2", "--ep")
    assert shown.exit_code == 0, shown.output
    assert "rank 0 of 2 57 tensors (39 traced, 18 unused)" in shown.stdout
    assert "rank 1 of 2 57 tensors" in shown.stdout
    (gate,) = [
        line
        for line in shown.stdout.split("rank 1")[0].splitlines()
        if "experts.*.gate_proj.weight" in line and "traced" in line
    ]
    assert "×6" in gate
    assert "…routed_experts.w13_weight[*, 0:32, :]" in gate


def test_json_names_every_placement_and_two_ranks_can_be_compared(model_of: Callable[[str], Path]) -> None:
    directory = str(model_of("llama"))
    shown = command("--vllm", directory, "--tp", "2", "--rank", "1", "--json")
    assert shown.exit_code == 0
    plain = json.loads(shown.stdout)
    (rank,) = plain["ranks"]
    assert plain["mapped"]
    assert rank["rank"] == 1
    (o_proj,) = [t for t in rank["tensors"] if t["name"] == "model.layers.0.self_attn.o_proj.weight"]
    assert o_proj["tier"] == "traced"
    assert o_proj["placements"] == [
        {
            "parameter": "model.layers.0.self_attn.o_proj.weight",
            "offset": [0, 32],
            "shape": [64, 32],
            "start": 0,
            "strides": [32, 1],
        }
    ]
    compared = command("--vllm", directory, "--tp", "2", "--diff", "0", "1")
    assert compared.exit_code == 1
    assert "model.layers.*.self_attn.o_proj.weight: [:, 0:32] in" in compared.stdout
    assert command("--vllm", directory, "--tp", "2", "--diff", "0", "0").exit_code == 0


def test_what_vllm_does_not_serve_is_said_in_one_message(model_of: Callable[[str], Path]) -> None:
    shown = command("--vllm", str(model_of("llama")), "--tp", "3")
    assert shown.exit_code == 2
    assert "attention heads" in shown.stderr
    assert "Traceback" not in shown.output


def test_a_vllm_for_gpus_answers_on_a_machine_without_one(model_of: Callable[[str], Path]) -> None:
    code = (
        "import sys, vllm.platforms as p; p.builtin_platform_plugins.clear()\n"
        "assert p.current_platform.is_unspecified()\n"
        "from weightdepot.cli import main; main()"
    )
    arguments = ["layout", "--vllm", str(model_of("llama")), "--tp", "2", "--rank", "1", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["mapped"]
