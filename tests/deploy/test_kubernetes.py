"""The manifests build, are valid, and agree with the application: paths, ports, names, variables."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from weightdepot.api.app import create_app
from weightdepot.api.config import ClientSettings, configured, variable
from weightdepot.api.settings import DEFAULT_PORT, Settings

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
BUILDS = ("base", "examples", "overlays/laptop", "overlays/rdma", "overlays/ha", "overlays/monitoring")
VERSIONS = ("1.35", "1.36", "1.37")

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")


@cache
def built(name: str) -> tuple[dict[str, Any], ...]:
    done = subprocess.run(
        ["kubectl", "kustomize", str(KUBERNETES / name)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return tuple(one for one in yaml.safe_load_all(done.stdout) if one)


def pods(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every pod template of a build, with the object's name."""
    for one in built(name):
        template = one.get("spec", {}).get("template")
        if template:
            yield one["metadata"]["name"], template


def known_variables() -> set[str]:
    return {
        variable(origin.key)
        for found in (
            configured(Settings, "controller", {}, {}),
            configured(ClientSettings, "client", {}, {}),
        )
        for origin in found.origins
    }


@needs_kubectl
@pytest.mark.parametrize("name", BUILDS)
def test_every_overlay_builds_and_is_valid(name: str, tmp_path: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for version in VERSIONS:
        for one in built(name):
            if not one["apiVersion"].startswith(
                "monitoring.coreos.com/"
            ):  # of an operator: test_monitoring.py
                validate.validate(one, version, strict=True)


@needs_kubectl
@pytest.mark.parametrize("name", BUILDS[2:])
def test_probes_and_ports_are_those_of_the_application(name: str) -> None:
    routes = set(create_app(Settings()).openapi()["paths"])
    (controller,) = [t["spec"]["containers"][0] for n, t in pods(name) if n == "weightdepot-controller"]
    ports = {port["name"]: port["containerPort"] for port in controller["ports"]}
    assert ports["http"] == DEFAULT_PORT
    for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
        get = controller[probe]["httpGet"]
        assert get["path"] in routes
        assert get["port"] in ports
    (service,) = [o for o in built(name) if o["kind"] == "Service" and o["metadata"]["name"] == "weightdepot"]
    assert service["spec"]["ports"][0]["port"] == DEFAULT_PORT
    assert controller["args"] == ["serve"]


@needs_kubectl
@pytest.mark.parametrize("name", BUILDS[2:])
def test_variables_are_known_and_their_values_are_taken(name: str) -> None:
    environment: dict[str, str] = {}
    for one in built(name):
        if one["kind"] == "ConfigMap":
            environment |= one["data"]
    for _, template in pods(name):
        for container in template["spec"]["containers"]:
            for entry in container.get("env", []):
                if entry["name"].startswith("WEIGHTDEPOT_"):
                    environment[entry["name"]] = entry.get("value", "")
    ours = {key: value for key, value in environment.items() if key.startswith("WEIGHTDEPOT_")}
    assert set(ours) <= known_variables()
    with_values = {key: value for key, value in ours.items() if value}
    settings = configured(Settings, "controller", {}, with_values).settings
    assert (settings.host, settings.port) == ("0.0.0.0", DEFAULT_PORT)


@needs_kubectl
@pytest.mark.parametrize("name", BUILDS[2:])
def test_pods_are_not_given_variables_named_after_services(name: str) -> None:
    """A Service named weightdepot makes Kubernetes set WEIGHTDEPOT_PORT=tcp://...: a wrong port."""
    for owner, template in pods(name):
        assert template["spec"].get("enableServiceLinks") is False, owner


@needs_kubectl
def test_the_controller_ends_within_its_grace_period() -> None:
    for name in BUILDS[2:]:
        for owner, template in pods(name):
            if owner == "weightdepot-controller":
                wait = int(template["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
                assert wait + Settings().timeouts.shutdown < template["spec"]["terminationGracePeriodSeconds"]


@needs_kubectl
def test_redis_keeps_what_it_answered_and_evicts_nothing() -> None:
    (redis,) = [t["spec"]["containers"][0] for n, t in pods("base") if n == "weightdepot-redis"]
    said = " ".join(redis["args"])
    for wanted in ("--appendonly yes", "--appendfsync always", "--maxmemory-policy noeviction"):
        assert wanted in said


@needs_kubectl
def test_only_members_reach_the_data_plane_and_only_controllers_reach_redis() -> None:
    policies = {o["metadata"]["name"]: o["spec"] for o in built("base") if o["kind"] == "NetworkPolicy"}
    allowed = policies["weightdepot-redis"]["ingress"][0]["from"]
    assert [list(rule) for rule in allowed] == [["podSelector"]]
    assert allowed[0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "controller"
    data = policies["weightdepot-data-plane"]
    roles = {"producer", "consumer"}
    assert set(data["podSelector"]["matchExpressions"][0]["values"]) == roles
    assert set(data["ingress"][0]["from"][0]["podSelector"]["matchExpressions"][0]["values"]) == roles
    for owner, template in pods("examples"):
        assert template["metadata"]["labels"]["weightdepot.dev/role"] in roles, owner


@needs_kubectl
def test_rdma_pods_ask_for_a_device_and_locked_memory_and_all_have_shared_memory() -> None:
    members = [t["spec"] for n, t in pods("overlays/rdma") if n in ("trainer", "rollout")]
    assert len(members) == 2
    for spec in members:
        container = spec["containers"][0]
        assert "IPC_LOCK" in container["securityContext"]["capabilities"]["add"]
        assert container["resources"]["limits"]["rdma/hca"] == "1"
        assert {m["mountPath"] for m in container["volumeMounts"]} == {"/dev/shm"}
        (volume,) = spec["volumes"]
        assert volume["emptyDir"]["medium"] == "Memory"
        assert volume["emptyDir"]["sizeLimit"]


def test_compose_and_systemd_use_known_variables_and_commands() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for service in compose["services"].values():
        ours = {name for name in service.get("environment", {}) if not name.startswith("GF_")}
        assert ours <= known_variables()
    unit = (DEPLOY / "systemd" / "weightdepot.service").read_text()
    for line in unit.splitlines():
        if line.startswith("Environment="):
            assert line.removeprefix("Environment=").partition("=")[0] in known_variables()
    assert "ExecStart=/opt/weightdepot/bin/weightdepot serve\n" in unit


def test_the_image_is_made_of_files_that_exist_and_runs_as_nobody() -> None:
    root = DEPLOY.parent
    text = (DEPLOY / "Dockerfile").read_text()
    for line in text.splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert (root / source).exists(), source
    assert "\nUSER 10001\n" in text
    assert f"EXPOSE {DEFAULT_PORT}" in text
