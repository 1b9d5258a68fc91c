"""Writes grafana.json beside it, to be imported into Grafana: `python deploy/observability/dashboard.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("grafana.json")
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
OF_MODEL = 'model=~"$model"'
OF_GROUP = 'model=~"$model",group=~"$group"'

Panel = dict[str, Any]
Query = tuple[str, str]  # expression, legend


def gauge(metric: str, labels: str, by: str = "model") -> str:
    """Of what is read from the index every controller tells the same."""
    return f"max by ({by}) (weightdepot_{metric}{{{labels}}})"


def rate(metric: str, labels: str, by: str) -> str:
    """Each controller counts what it served itself."""
    return f"sum by ({by}) (rate(weightdepot_{metric}{{{labels}}}[$__rate_interval]))"


def quantile(q: float, metric: str, labels: str, by: str) -> str:
    buckets = rate(f"{metric}_bucket", labels, f"{by}, le")
    return f"histogram_quantile({q}, {buckets})"


def graph(title: str, unit: str, *queries: Query, text: str = "") -> Panel:
    return {
        "type": "timeseries",
        "title": title,
        "description": text,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": {"fillOpacity": 8}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets(queries),
    }


def number(title: str, *queries: Query, bad_from: float | None = None) -> Panel:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if bad_from is not None:
        steps.append({"color": "red", "value": bad_from})
    return {
        "type": "stat",
        "title": title,
        "fieldConfig": {"defaults": {"thresholds": {"mode": "absolute", "steps": steps}}, "overrides": []},
        "options": {"reduceOptions": {"calcs": ["lastNotNull"]}, "textMode": "value_and_name"},
        "targets": targets(queries),
    }


def targets(queries: tuple[Query, ...]) -> list[dict[str, Any]]:
    return [
        {"refId": chr(ord("A") + i), "expr": expression, "legendFormat": legend, "datasource": SOURCE}
        for i, (expression, legend) in enumerate(queries)
    ]


ROWS: dict[str, list[Panel]] = {
    "Now": [
        number("Current version", (gauge("current_version", OF_MODEL), "{{model}}")),
        number(
            "Producers missing",
            (
                f"max by (model) (weightdepot_producers{{{OF_MODEL}}} "
                f"- weightdepot_producers_alive{{{OF_MODEL}}})",
                "{{model}}",
            ),
            bad_from=1,
        ),
        number(
            "Groups half-way",
            (f"sum by (model) ({gauge('group_half', OF_GROUP, 'model, group')})", "{{model}}"),
            bad_from=1,
        ),
        number(
            "Furthest behind",
            (f"max by (model) ({gauge('group_lag', OF_GROUP, 'model, group')})", "{{model}}"),
        ),
    ],
    "Versions and groups": [
        graph(
            "Version that each group holds",
            "none",
            (gauge("latest_version", OF_MODEL), "{{model}}: newest"),
            (gauge("group_version", OF_GROUP, "model, group"), "{{model}} {{group}}"),
        ),
        graph(
            "Lag of each group",
            "none",
            (gauge("group_lag", OF_GROUP, "model, group"), "{{model}} {{group}}"),
            text="Versions published since the one that the group holds.",
        ),
        graph(
            "Versions applied",
            "ops",
            (rate("updates_total", OF_GROUP, "model, group"), "{{model}} {{group}}"),
            text="Rounds that ranks reported applied, a second.",
        ),
    ],
    "Time": [
        graph(
            "A rank's publish",
            "s",
            *(
                (
                    quantile(q, "publish_seconds", OF_MODEL, "model, phase"),
                    f"{{{{model}}}} {{{{phase}}}} p{q * 100:g}",
                )
                for q in (0.5, 0.95)
            ),
            text="wait: for the slot; pack: the copy; digest: in the background, before the seal.",
        ),
        graph(
            "A rank's update",
            "s",
            *(
                (
                    quantile(q, "update_seconds", OF_GROUP, "group, phase"),
                    f"{{{{group}}}} {{{{phase}}}} p{q * 100:g}",
                )
                for q in (0.5, 0.95)
            ),
            text="wait: for the version and the other ranks; pull: reading, checking; place: from staging.",
        ),
    ],
    "Bytes": [
        graph("Published", "Bps", (rate("published_bytes_total", OF_MODEL, "model"), "{{model}}")),
        graph(
            "Pulled, by transport", "Bps", (rate("moved_bytes_total", OF_MODEL, "transport"), "{{transport}}")
        ),
        graph(
            "Moved for each byte needed",
            "none",
            (
                f"{rate('moved_bytes_total', OF_MODEL, 'model')} "
                f"/ {rate('needed_bytes_total', OF_MODEL, 'model')}",
                "{{model}}",
            ),
            text="1 is the least that there is.",
        ),
    ],
    "Memory": [
        graph(
            "Slots",
            "none",
            (gauge("slots_used", OF_MODEL), "{{model}}: used"),
            (gauge("slots", OF_MODEL), "{{model}}: there are"),
        ),
        graph(
            "Versions by state", "none", (gauge("versions", OF_MODEL, "model, state"), "{{model}} {{state}}")
        ),
        graph(
            "Leases",
            "none",
            (gauge("leases", OF_MODEL, "model, state"), "{{model}} on {{state}}"),
            text="Leases on a retired version keep its memory from being used again.",
        ),
    ],
    "What goes wrong": [
        graph(
            "Failed rounds",
            "ops",
            (rate("failed_rounds_total", OF_GROUP, "model, group"), "{{model}} {{group}}"),
        ),
        graph(
            "Aborted versions",
            "none",
            (
                f"max by (model) (increase(weightdepot_aborted_versions_total{{{OF_MODEL}}}[$__range]))",
                "{{model}}",
            ),
        ),
        graph("Problems answered", "ops", (rate("problems_total", "", "kind"), "{{kind}}")),
        graph(
            "Waits that gave nothing",
            "ops",
            (rate("waits_total", OF_MODEL, "model, reason"), "{{model}}: {{reason}}"),
            text="Long polls that ended without an answer: slot, lag, ranks, version, ...",
        ),
    ],
    "Controllers": [
        graph("A round trip to the index", "s", ("weightdepot_index_seconds", "{{instance}}")),
        graph("Requests that wait", "none", ("weightdepot_waiting_requests", "{{instance}}")),
        graph("The index answers", "bool_yes_no", ("weightdepot_index_up", "{{instance}}")),
    ],
}


def laid_out() -> list[Panel]:
    panels: list[Panel] = []
    y = 0
    for title, row in ROWS.items():
        panels.append({"type": "row", "title": title, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}})
        height = 4 if title == "Now" else 8
        for i, panel in enumerate(row):
            width = 24 // len(row)
            place = {"x": i * width, "y": y + 1, "w": width, "h": height}
            panels.append({**panel, "datasource": SOURCE, "gridPos": place})
        y += 1 + height
    return [{"id": i, **panel} for i, panel in enumerate(panels, 1)]


def variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name, "label": name, "type": "query", "datasource": SOURCE, "query": query, "refresh": 2,
        "includeAll": True, "multi": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"},
    }  # fmt: skip


def dashboard() -> dict[str, Any]:
    return {
        "title": "weightdepot",
        "uid": "weightdepot",
        "tags": ["weightdepot"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "label": "source", "type": "datasource", "query": "prometheus"},
                variable("model", "label_values(weightdepot_latest_version, model)"),
                variable("group", 'label_values(weightdepot_group_live{model=~"$model"}, group)'),
            ]
        },
        "panels": laid_out(),
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(dashboard(), indent=1) + "\n")
