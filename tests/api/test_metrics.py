"""What Prometheus is told, by a real controller, and the alerts that follow from it."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml

import weightdepot
from weightdepot.api.client import ControllerClient
from weightdepot.api.metrics import Metrics

from ..system.harness import Redis, Server

RULES = Path(__file__).parents[2] / "deploy" / "observability" / "alerts.yaml"
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian's package prometheus)"
)


def scraped(controller: str) -> dict[str, float]:
    """Samples by name and labels, without the run: every one has that."""
    answer = httpx.get(f"{controller}/metrics")
    assert answer.status_code == 200
    lines = [line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#")]
    assert [name for name, _ in lines if 'run="default"' not in name] == []
    return {
        re.sub(r'(?<=\{)run="default",?|,run="default"', "", name).removesuffix("{}"): float(value)
        for name, value in lines
    }


def test_publishes_updates_and_what_there_is_are_told(controller: str) -> None:
    model = "metered"
    held = {"w": torch.ones(64, 64)}
    got = {"w": torch.zeros(64, 64)}
    with (
        weightdepot.Producer(controller, model=model, weights=held) as producer,
        weightdepot.Consumer(controller, model=model, weights=got, group="g") as consumer,
    ):
        for version in (1, 2, 3):
            producer.publish(version, wait="ready")
            if version < 3:
                assert consumer.update() == version
        seen = scraped(controller)
    of = f'model="{model}"'
    assert seen[f"weightdepot_latest_version{{{of}}}"] == 3
    assert seen[f'weightdepot_group_version{{group="g",{of}}}'] == 2
    assert seen[f'weightdepot_group_lag{{group="g",{of}}}'] == 1
    assert seen[f"weightdepot_parts_sealed_total{{{of}}}"] == 3
    assert seen[f"weightdepot_published_bytes_total{{{of}}}"] == 3 * 64 * 64 * 4
    assert seen[f'weightdepot_updates_total{{group="g",{of}}}'] == 2
    assert seen[f"weightdepot_needed_bytes_total{{{of}}}"] == 2 * 64 * 64 * 4
    assert seen[f'weightdepot_moved_bytes_total{{{of},transport="shm"}}'] == 2 * 64 * 64 * 4
    assert seen[f'weightdepot_publish_seconds_count{{{of},phase="pack"}}'] == 3
    assert seen[f'weightdepot_update_seconds_count{{group="g",{of},phase="pull"}}'] == 2
    assert seen["weightdepot_index_up"] == 1


def test_problems_are_counted_by_kind(controller: str) -> None:
    name = 'weightdepot_problems_total{kind="unknown-model"}'
    before = scraped(controller).get(name, 0)
    with ControllerClient(controller) as client, pytest.raises(weightdepot.UnknownModel):
        client.model("nobody-has-this")
    assert scraped(controller)[name] == before + 1


def test_what_members_report_cannot_break_the_exposition() -> None:
    metrics = Metrics("default")
    for stats in ({"pack": float("nan")}, {"pack": "soon"}, {"pack": -1}, {"wait": True}):
        metrics.sealed('a"b\n', 1, stats)
    metrics.finished("m", "g", "", {"pull": float("inf"), "moved": -5, "transports": 'x"\n' * 99})
    text = metrics.exposition([], 0, None).decode()
    assert 'weightdepot_index_up{run="default"} 0.0' in text
    assert all(line.startswith("#") or " " in line for line in text.splitlines())


def test_an_index_that_hangs_is_told_before_prometheus_loses_patience(tmp_path: Path) -> None:
    """Also while calls that hang as well hold every connection to it."""
    redis = Redis(tmp_path)
    server = Server("--port", "0", "--redis-url", redis.url)

    def ask(path: str) -> tuple[float, str]:
        begun = time.monotonic()
        text = httpx.get(f"{server.url}{path}", timeout=30).text
        return time.monotonic() - begun, text

    try:
        assert 'weightdepot_index_up{run="default"} 1.0' in ask("/metrics")[1]
        redis.signal(signal.SIGSTOP)
        with ThreadPoolExecutor(100) as pool:
            others = [pool.submit(ask, "/v1/models") for _ in range(99)]
            time.sleep(1)
            seconds, text = ask("/metrics")
            assert 'weightdepot_index_up{run="default"} 0.0' in text
            assert seconds < 8, "Prometheus' own is 10 s"
            redis.signal(signal.SIGCONT)
            assert all(other.result()[1] for other in others)
        assert 'weightdepot_index_up{run="default"} 1.0' in ask("/metrics")[1]
    finally:
        server.stop()
        redis.stop()


@needs_promtool
def test_promtool_accepts_the_metrics_and_the_rules(controller: str) -> None:
    text = httpx.get(f"{controller}/metrics").content
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
    assert checked.returncode in (0, 3), checked.stdout + checked.stderr  # 3: advice about names
    assert not checked.stderr, checked.stderr
    for what, file in (("rules", RULES), ("config", RULES.with_name("prometheus.yaml"))):
        done = subprocess.run(["promtool", "check", what, str(file)], capture_output=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def names_of(controller: str) -> set[str]:
    return {
        line.split()[2]
        for line in httpx.get(f"{controller}/metrics").text.splitlines()
        if line.startswith("# TYPE ")
    }


def test_the_page_on_operations_names_every_metric(controller: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    listed = {f"weightdepot_{name}" for name in re.findall(r"`(\w+)`", text)}
    assert names_of(controller) - listed == set()


def alert_series() -> dict[str, tuple[list[dict[str, str]], str, dict[str, str]]]:
    """For each alert: series that cause it, when it is looked at, and its labels."""
    of = 'model="policy",group="g"'
    return {
        "WeightdepotGroupLags": (
            [
                {"series": f"weightdepot_group_lag{{{of}}}", "values": "4x10"},
                {"series": f"weightdepot_group_live{{{of}}}", "values": "1x10"},
            ],
            "5m",
            {"model": "policy", "group": "g", "severity": "warning"},
        ),
        "WeightdepotGroupHalf": (
            [{"series": f"weightdepot_group_half{{{of}}}", "values": "1x10"}],
            "3m",
            {"model": "policy", "group": "g", "severity": "critical"},
        ),
        "WeightdepotStuckReader": (
            [{"series": 'weightdepot_overdue_version{model="policy"}', "values": "1 2 2x10"}],
            "5m",
            {"model": "policy", "severity": "warning"},
        ),
        "WeightdepotNoFreeSlot": (
            [
                {
                    "series": 'weightdepot_opening_wait_seconds{model="policy",reason="slot"}',
                    "values": "_ 20 40 59 61x10",
                }
            ],
            "4m",
            {"model": "policy", "severity": "critical"},
        ),
        "WeightdepotPublishAborted": (
            [{"series": 'weightdepot_aborted_versions_total{model="policy"}', "values": "0 0 1x10"}],
            "4m",
            {"model": "policy", "severity": "warning"},
        ),
        "WeightdepotProducersMissing": (
            [
                {"series": 'weightdepot_producers{model="policy"}', "values": "2x10"},
                {"series": 'weightdepot_producers_alive{model="policy"}', "values": "1x10"},
                {"series": 'weightdepot_producers_joined{model="policy"}', "values": "2x10"},
            ],
            "5m",
            {"model": "policy", "severity": "warning"},
        ),
        "WeightdepotIndexAway": (
            [{"series": 'weightdepot_index_up{instance="a"}', "values": "0x10"}],
            "2m",
            {"instance": "a", "severity": "critical"},
        ),
        "WeightdepotControllerAway": (
            [{"series": 'up{job="weightdepot",instance="a"}', "values": "0x10"}],
            "2m",
            {"instance": "a", "severity": "critical"},
        ),
    }


def test_every_alert_is_of_a_metric_that_there_is(controller: str) -> None:
    rules = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    assert {rule["alert"] for rule in rules} == set(alert_series())
    names = names_of(controller) | {"up"}  # Prometheus' own
    for rule in rules:
        used = set(re.findall(r"weightdepot_\w+|\bup\b", rule["expr"]))
        assert used, rule
        assert used <= names, rule


@needs_promtool
@pytest.mark.parametrize("alert", sorted(alert_series()))
def test_every_alert_fires_when_it_should_and_not_before(alert: str, tmp_path: Path) -> None:
    series, when, labels = alert_series()[alert]
    test: dict[str, Any] = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "30s",
        "tests": [
            {
                "interval": "1m",
                "input_series": series,
                "promql_expr_test": [
                    {
                        "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)',
                        "eval_time": at,
                        "exp_samples": [{"labels": "{}", "value": value}],
                    }
                    for at, value in (("0m", 0), (when, 1))
                ],
            }
        ],
    }
    assert labels["severity"]
    file = tmp_path / "test.yaml"
    file.write_text(json.dumps(test))
    ran = subprocess.run(
        ["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


@needs_promtool
def test_runs_with_models_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    """One run's dead group is far behind, another's lives and is not: nobody lags."""
    a, b = (f'run="{run}",model="policy",group="g"' for run in "ab")
    values = {f"lag{{{a}}}": 5, f"live{{{a}}}": 0, f"lag{{{b}}}": 0, f"live{{{b}}}": 1}
    test = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "30s",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": f"weightdepot_group_{name}", "values": f"{value}x10"}
                    for name, value in values.items()
                ],
                "alert_rule_test": [
                    {"eval_time": "5m", "alertname": "WeightdepotGroupLags", "exp_alerts": []}
                ],
            }
        ],
    }
    file = tmp_path / "test.yaml"
    file.write_text(json.dumps(test))
    ran = subprocess.run(
        ["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
