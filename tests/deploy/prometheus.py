"""A real Prometheus that scrapes real controllers, several times a second."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from ..system.harness import eventually

OBSERVABILITY = Path(__file__).parents[2] / "deploy" / "observability"
RULES = OBSERVABILITY / "alerts.yaml"
BINARY = shutil.which("prometheus")
needs_prometheus = pytest.mark.skipif(
    BINARY is None or shutil.which("promtool") is None,
    reason="prometheus is not installed (Debian: apt-get install prometheus)",
)


def quick_rules() -> str:
    """The alert rules, with one second for each of their `for`."""
    return re.sub(r"for: \w+", "for: 1s", RULES.read_text())


class Prometheus:
    """Its alert rules are the repository's, but for how long a condition must last."""

    def __init__(self, folder: Path, controllers: Sequence[str]) -> None:
        assert BINARY is not None
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        (folder / "alerts.yaml").write_text(quick_rules())
        config = {
            "global": {"scrape_interval": "200ms", "scrape_timeout": "200ms", "evaluation_interval": "200ms"},
            "rule_files": ["alerts.yaml"],
            "scrape_configs": [
                {
                    "job_name": "weightdepot",
                    "metrics_path": "/metrics",
                    "static_configs": [{"targets": [urlsplit(url).netloc for url in controllers]}],
                }
            ],
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        with (folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    BINARY, f"--config.file={folder / 'prometheus.yaml'}",
                    f"--storage.tsdb.path={folder / 'tsdb'}", f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdout=log,
                stderr=log,
            )  # fmt: skip
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=10)
        eventually(self._answers)

    def _answers(self) -> bool:
        assert self._process.poll() is None, "Prometheus ended: see prometheus.log"
        try:
            return self._http.get("/status/runtimeinfo").is_success
        except httpx.TransportError:
            return False

    def query(self, expression: str) -> list[dict[str, Any]]:
        """What an instant query finds."""
        answer = self._http.get("/query", params={"query": expression}).raise_for_status().json()
        return list(answer["data"]["result"])

    def alerts(self, state: str = "firing") -> list[dict[str, str]]:
        """The labels of the alerts in this state."""
        found = self._http.get("/alerts").raise_for_status().json()["data"]["alerts"]
        return [alert["labels"] for alert in found if alert["state"] == state]

    def fires(self, alert: str, **labels: str) -> bool:
        wanted = {"alertname": alert, **labels}
        return any(wanted.items() <= found.items() for found in self.alerts())

    def stop(self) -> None:
        self._http.close()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
