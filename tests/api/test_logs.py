"""What the controller says can be read by machines: one JSON object a line, with model, version and rank."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

from weightdepot.api.logs import JsonFormatter


def test_every_line_of_a_controller_is_one_object() -> None:
    command = [sys.executable, "-m", "weightdepot.api", "serve", "--port", "0", "--log-format", "json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.terminate()
        _, said = process.communicate(timeout=20)
    lines = [json.loads(line) for line in said.splitlines()]
    assert any("controller of run" in line["message"] for line in lines)
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)


def test_what_a_record_knows_is_a_field() -> None:
    record = logging.makeLogRecord(
        {
            "msg": "half-way\n",
            "levelno": logging.WARNING,
            "levelname": "WARNING",
            "model": "policy",
            "rank": 0,
        }
    )
    entry = json.loads(JsonFormatter().format(record))
    assert (entry["model"], entry["rank"], entry["level"]) == ("policy", 0, "warning")
    assert "version" not in entry
    assert "\n" not in JsonFormatter().format(record)
