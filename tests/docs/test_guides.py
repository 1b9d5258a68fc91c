"""The code in the documentation runs, from top to bottom, as a reader would run it."""

from __future__ import annotations

import multiprocessing as mp
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

import weightdepot

from ..system.harness import Server
from .pages import ROOT, run


@pytest.mark.parametrize("page", ["docs/index.md", "docs/connect.md", "docs/loaders.md"])
def test_the_code_on_the_page_runs(page: str, controller: str) -> None:
    run(page, controller)


class Engine(torch.nn.Module):
    """One that fuses what the checkpoint has apart, as engines do."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = torch.nn.Parameter(torch.zeros(8, 4), requires_grad=False)
        self.calls: list[str] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            start = 4 * (name == "up.weight")
            self.gate_up[start : start + 4].copy_(tensor)

    def pause(self) -> None:
        self.calls.append("pause")

    def flush_prefix_cache(self, salt: int) -> None:
        self.calls.append(f"salt {salt}")

    def resume(self) -> None:
        self.calls.append("resume")


def test_the_ten_lines_of_the_readme_run(controller: str) -> None:
    model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4, bias=False) for name in ("gate", "up")})
    engine = Engine()
    alone = {"rank": 0, "world_size": 1, "tp_rank": 0, "tp_size": 1, "step": 7}
    names = run("README.md", controller, URL=controller, model=model, engine_model=engine, **alone)
    assert names["version"] == 7
    assert torch.equal(engine.gate_up, torch.cat([*model.parameters()]))
    for member in (names["consumer"], names["producer"]):
        member.close()  # type: ignore[attr-defined]


def test_the_hooks_are_called_as_the_page_on_concepts_says(controller: str) -> None:
    engine = Engine()
    weights = {"gate_up": torch.ones(8, 4)}
    with weightdepot.Producer(controller, model="policy", weights=weights) as producer:
        producer.publish(8, wait="ready")
        names = run("docs/concepts.md", controller, url=controller, engine=engine, weightdepot=weightdepot)
        with names["consumer"] as consumer:  # type: ignore[attr-defined]
            assert consumer.update() == 8
    assert engine.calls == ["pause", "salt 8", "resume"]


def one_rank(folder: str, controller: str) -> None:
    """The page on FSDP, in a process of its own: a process group is for the whole process."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4, bias=False) for _ in range(2)])

    def train_one_step(trained: torch.nn.Module) -> None:
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.add_(1)

    given = {"model": model, "rank": 0, "world_size": 1, "last": 3, "train_one_step": train_one_step}
    names = run("docs/fsdp.md", controller, url=controller, **given)
    got = {f"layers.{i}.weight": torch.zeros(4, 4) for i in range(2)}
    with weightdepot.Consumer(controller, model="policy", weights=got) as consumer:
        assert consumer.update(min_version=3) == 3
    for name, parameter in model.named_parameters():
        assert torch.equal(got[name], parameter.full_tensor())  # type: ignore[attr-defined]
    names["producer"].close()  # type: ignore[attr-defined]
    torch.distributed.destroy_process_group()


def test_the_page_on_fsdp_runs(tmp_path: Path) -> None:
    server = Server("--port", "0")
    try:
        child = mp.get_context("spawn").Process(target=one_rank, args=(str(tmp_path), server.url))
        child.start()
        child.join(100)
        assert child.exitcode == 0
    finally:
        server.stop()


def test_every_link_between_pages_leads_somewhere() -> None:
    for page in [ROOT / "README.md", *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
