"""`weightdepot layout`: what it prints, what it refuses, its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from weightdepot.cli import app
from weightdepot.store.layout import Layout

save_file = pytest.importorskip("safetensors.torch").save_file

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _beside_the_loaders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    tensors = {f"layers.{i}.{k}.weight": torch.zeros(8, 4) for i in range(3) for k in "qk"}
    save_file({**tensors, "norm": torch.zeros(4), "surplus": torch.zeros(2)}, tmp_path / "model.safetensors")
    return str(tmp_path)


def command(*arguments: str, width: int = 120) -> Result:
    return CliRunner().invoke(app, ["layout", *arguments], env={"COLUMNS": str(width)})


def test_repeated_layers_are_one_line_and_say_where_each_slice_goes(checkpoint: str) -> None:
    shown = command(checkpoint, "--loader", "loaders:fused", "--tp", "2", "--rank", "1")
    assert shown.exit_code == 0, shown.output
    lines = [line.split() for line in shown.stdout.splitlines()]
    assert "rank 1 of 2 8 tensors (7 traced, 1 unused)" in shown.stdout
    (k,) = [line for line in lines if line[:1] == ["layers.*.k.weight"]]
    assert k == [
        "layers.*.k.weight",
        "×3",
        "float32",
        "[8,",
        "4]",
        "traced",
        "[4:8,",
        ":]",
        "…weight[4:8,",
        ":]",
    ]
    (norm,) = [line for line in lines if line[:1] == ["norm"]]
    assert norm[-4:] == ["traced", "all", "same", "name"]
    assert ["surplus", "float32", "[2]", "unused"] in lines


def test_what_does_not_map_is_said_with_its_reason_and_fails(checkpoint: str) -> None:
    shown = command(checkpoint, "--loader", "loaders:asked", width=200)
    assert shown.exit_code == 1
    assert "does not map:" in shown.stdout
    assert "! norm: the loader asks for a value" in shown.stdout
    plain = json.loads(command(checkpoint, "--loader", "loaders:asked", "--json").stdout)
    assert not plain["mapped"]
    faults = plain["ranks"][0]["faults"]
    assert ["norm"] in [f["tensors"] for f in faults]
    assert "norm" in [f["parameter"] for f in faults]  # is not filled


def test_what_goes_through_the_loader_maps_and_says_why(checkpoint: str) -> None:
    shown = command(checkpoint, "--loader", "loaders:shifted", width=200)
    assert shown.exit_code == 0
    assert "1 whole" in shown.stdout
    assert "written by the loader: norm" in shown.stdout
    (rank,) = json.loads(command(checkpoint, "--loader", "loaders:shifted", "--json").stdout)["ranks"]
    (whole,) = rank["whole"]
    assert whole["tensor"] == "norm"
    assert "add" in whole["reason"]
    assert rank["written_by_loader"] == ["norm"]


def test_parameters_with_a_loader_do_as_well_as_a_module(checkpoint: str) -> None:
    shown = command(checkpoint, "--loader", "loaders:pair", "--json")
    assert shown.exit_code == 0
    (rank,) = json.loads(shown.stdout)["ranks"]
    assert {t["name"]: t["tier"] for t in rank["tensors"]}["layers.0.q.weight"] == "traced"
    assert rank["unused"] == ["surplus"]


def test_saved_layouts_and_ranks_can_be_compared(checkpoint: str, tmp_path: Path) -> None:
    for size in ("1", "2"):
        saved = command(checkpoint, "--loader", "loaders:fused", "--tp", size, "--save", str(tmp_path / size))
        assert saved.exit_code == 0
    one, two = str(tmp_path / "1" / "rank-0.layout"), str(tmp_path / "2" / "rank-1.layout")
    assert isinstance(Layout.from_bytes(Path(one).read_bytes()), Layout)
    same = command("--diff", one, one)
    assert (same.exit_code, same.stdout) == (0, "the layouts are the same\n")
    differ = command("--diff", one, two)
    assert differ.exit_code == 1
    assert (
        "layers.*.k.weight: all in layers.*.weight[8:16, :], and [4:8, :] in layers.*.weight[4:8, :]  ×3"
        in differ.stdout.splitlines()
    )
    assert "parameter layers.*.weight: float32 [16, 4]" in differ.stdout
    ranks = command(checkpoint, "--loader", "loaders:fused", "--tp", "2", "--diff", "0", two, "--json")
    assert ranks.exit_code == 1
    assert json.loads(ranks.stdout)["same"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "say whose layout"),
        (["{}"], "say whose layout"),
        (["{}", "--loader", "loaders"], "not of the form MODULE:FUNCTION"),
        (["{}", "--loader", "no_such_module:f"], "'no_such_module' cannot be imported"),
        (["{}", "--loader", "loaders:fusd"], "has no function 'fusd'; it has"),
        (["{}", "--loader", "loaders:NOT_CALLABLE"], "has no function 'NOT_CALLABLE'"),
        (["{}", "--loader", "loaders:nonsense"], "returned a int"),
        (["{}", "--loader", "loaders:pair", "--tp", "2"], "takes no `world_size`"),
        (["{}", "--loader", "loaders:fused", "--rank", "1"], "no rank 1 among 1"),
        (["{}", "--loader", "loaders:fused", "--ep"], "--ep and --pp are for --vllm"),
        (["{}", "--loader", "loaders:fused", "--vllm", "x"], "give one of them"),
        (["no-such-directory", "--loader", "loaders:fused"], "no-such-directory holds neither"),
        (["--diff", "a", "b"], "'a' is neither a file"),
        (["--diff", "{}/model.safetensors", "b"], "is no layout"),
    ],
)
def test_mistyped_arguments_are_explained(checkpoint: str, arguments: list[str], message: str) -> None:
    shown = command(*(a.replace("{}", checkpoint) for a in arguments))
    assert shown.exit_code == 2
    assert message in shown.stderr
    assert "Traceback" not in shown.output


def test_without_vllm_the_option_says_what_to_install(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "weightdepot.consumers.vllm.offline", None)
    shown = command(checkpoint, "--vllm", checkpoint)
    assert shown.exit_code == 2
    assert "pip install vllm" in shown.stderr
