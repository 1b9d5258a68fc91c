"""What is wired for Prometheus and Grafana, in Kubernetes and Compose, agrees with what there is."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import yaml

from weightdepot.api.app import create_app
from weightdepot.api.settings import DEFAULT_PORT, Settings

from .prometheus import OBSERVABILITY, RULES, needs_prometheus
from .test_kubernetes import DEPLOY, built, needs_kubectl

COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
JOB = "weightdepot"  # the name that an alert looks for


def of_kind(build: str, kind: str) -> list[dict[str, Any]]:
    return [one for one in built(build) if one["kind"] == kind]


@needs_kubectl
def test_what_needs_the_operator_is_in_no_other_build() -> None:
    for build in ("base", "examples", "overlays/laptop", "overlays/rdma", "overlays/ha"):
        assert not [one for one in built(build) if one["apiVersion"].startswith("monitoring.coreos.com/")]


@needs_kubectl
def test_the_operator_is_given_the_same_rules() -> None:
    (rule,) = of_kind("overlays/monitoring", "PrometheusRule")
    assert rule["spec"] == yaml.safe_load(RULES.read_text())
    source = (DEPLOY / "kubernetes/components/monitoring/rules.yaml").read_text()
    groups = RULES.read_text().partition("groups:")[2]
    assert source.partition("  groups:")[2].replace("\n  ", "\n") == groups, "word for word, comments too"


@needs_kubectl
def test_the_operator_scrapes_the_controllers_with_a_token() -> None:
    build = "overlays/monitoring"
    (monitor,) = of_kind(build, "ServiceMonitor")
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    (service,) = [s for s in of_kind(build, "Service") if wanted <= s["metadata"].get("labels", {}).items()]
    assert service["metadata"]["name"] == JOB, "the operator names the job after it"
    assert service["metadata"]["namespace"] == monitor["metadata"]["namespace"]
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert endpoint["path"] in create_app(Settings()).openapi()["paths"]
    key = endpoint["authorization"]["credentials"]
    (secret,) = [s for s in of_kind(build, "Secret") if s["metadata"]["name"] == key["name"]]
    assert key["key"] in secret["stringData"]


def test_compose_watches_its_own_controllers() -> None:
    config = yaml.safe_load(COMPOSE["configs"]["prometheus"]["content"])
    (job,) = config["scrape_configs"]
    assert job["job_name"] == JOB
    controllers = {name for name in COMPOSE["services"] if name.startswith("controller-")}
    assert set(job["static_configs"][0]["targets"]) == {f"{name}:{DEFAULT_PORT}" for name in controllers}
    shipped = yaml.safe_load((OBSERVABILITY / "prometheus.yaml").read_text())
    assert shipped["scrape_configs"][0]["job_name"] == JOB


def test_composes_services_are_given_files_and_configs_that_there_are() -> None:
    for name in ("prometheus", "grafana"):
        service = COMPOSE["services"][name]
        assert service["profiles"] == ["monitoring"], "nobody gets it unasked"
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source in COMPOSE["volumes"] or (DEPLOY / source).is_file(), source
        for config in service["configs"]:
            assert yaml.safe_load(COMPOSE["configs"][config["source"]]["content"])
    datasource = yaml.safe_load(COMPOSE["configs"]["grafana-datasource"]["content"])["datasources"][0]
    assert datasource["url"] == "http://prometheus:9090"
    dashboards = yaml.safe_load(COMPOSE["configs"]["grafana-dashboards"]["content"])["providers"][0]
    mounted = COMPOSE["services"]["grafana"]["volumes"][0].split(":")[1]
    assert str(Path(mounted).parent) == dashboards["options"]["path"]


@needs_prometheus
def test_promtool_accepts_composes_configuration(tmp_path: Path) -> None:
    (tmp_path / "prometheus.yaml").write_text(COMPOSE["configs"]["prometheus"]["content"])
    (tmp_path / "alerts.yaml").write_text(RULES.read_text())
    done = subprocess.run(
        ["promtool", "check", "config", str(tmp_path / "prometheus.yaml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
