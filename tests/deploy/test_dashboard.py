"""The Grafana dashboard: a real Prometheus that scrapes a real controller answers every panel's query."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weightdepot import UnknownModel
from weightdepot.api.client import ControllerClient

from ..api.helpers import unique
from ..system.fleet import publish, ranks, trainer
from ..system.harness import eventually
from .prometheus import OBSERVABILITY, Prometheus, needs_prometheus

FILE = OBSERVABILITY / "grafana.json"
DASHBOARD: dict[str, Any] = json.loads(FILE.read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]


def filled(expression: str) -> str:
    """With what Grafana puts in for its variables."""
    for name, value in {
        "$__rate_interval": "1m", "$__range": "1h", "$run": ".*", "$model": ".*", "$group": ".*",
    }.items():  # fmt: skip
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression


def test_the_file_is_what_its_script_writes() -> None:
    spec = importlib.util.spec_from_file_location("dashboard", OBSERVABILITY / "dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.dashboard() == DASHBOARD


def test_its_panels_have_places_and_numbers_of_their_own() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


@pytest.fixture
def prometheus(controller: str, tmp_path: Path) -> Iterator[Prometheus]:
    running = Prometheus(tmp_path, [controller])
    yield running
    running.stop()


@needs_prometheus
def test_every_panel_shows_something_once_there_is_something_to_show(
    controller: str, prometheus: Prometheus
) -> None:
    model = unique("drawn")
    broken = [False]

    def before_write(_: int) -> None:
        if broken[0]:
            raise RuntimeError("not now")

    with (
        trainer(controller, model) as producer,
        ranks(controller, model, 1, before_write=before_write) as [one],
    ):
        for version in (1, 2):
            publish(producer, version)
            one.update()
            eventually(lambda: bool(prometheus.query(f'weightdepot_updates_total{{model="{model}"}}')))
        publish(producer, 3)
        broken[0] = True
        with pytest.raises(RuntimeError, match="not now"):
            one.update()
        with pytest.raises(Exception, match="version 99"):
            one.update(version=99, timeout=0.3)
        with ControllerClient(controller) as client, pytest.raises(UnknownModel):
            client.model("nobody-has-this")
        eventually(lambda: bool(prometheus.query(f'weightdepot_failed_rounds_total{{model="{model}"}}')))
        broken[0] = False
        one.update()
        # a rate needs two looks
        eventually(lambda: not unanswered(prometheus, model))


def unanswered(prometheus: Prometheus, model: str) -> list[str]:
    mine = [filled(query).replace('model=~".*"', f'model="{model}"') for query in QUERIES]
    return [query for query in mine if not prometheus.query(query)]


@needs_prometheus
def test_its_variables_are_labels_that_there_are(controller: str, prometheus: Prometheus) -> None:
    with trainer(controller, unique("drawn")) as producer, ranks(controller, producer.model, 1) as [one]:
        publish(producer, 1)
        one.update()
        for variable in DASHBOARD["templating"]["list"][1:]:
            found = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"])
            assert found is not None
            query, label = filled(found[1]), found[2]
            eventually(lambda query=query, label=label: any(  # type: ignore[misc]
                label in one["metric"] for one in prometheus.query(query)
            ))  # fmt: skip
