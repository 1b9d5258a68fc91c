"""The demo on several hosts, played with network namespaces: every bit arrives, no byte more than planned."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "hosts" / "hosts.py"


@pytest.mark.timeout(300)
def test_two_trainers_and_two_engines_on_their_own_hosts_outlive_a_killed_controller() -> None:
    command = [sys.executable, str(SCRIPT), "--size", "tiny", "--steps", "3", "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    if ran.returncode == 3:
        pytest.skip(ran.stderr.strip())
    assert ran.returncode == 0, ran.stderr + ran.stdout
    found = json.loads(ran.stdout)
    assert found["differences"] == []
    assert found["versions"] == 3
    assert found["transports"] == ["tcp"]  # they share no memory
    for link in found["links"]:
        assert link["fits"], link
    assert sum(link["planned"] > 0 for link in found["links"]) == 4
