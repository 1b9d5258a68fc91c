"""Writes grafana.json beside it, to be imported into Grafana: `python deploy/observability/dashboard.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("grafana.json")
MOST_ABREAST = 4
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
OF_RUN = 'run=~"$run"'
OF_MODEL = OF_RUN + ',model=~"$model"'
OF_GROUP = OF_MODEL + ',group=~"$group"'
MODEL, GROUP = "{{run}}/{{model}}", "{{run}}/{{model}} {{group}}"  # legends

Panel = dict[str, Any]
Query = tuple[str, str]  # expression, legend


def gauge(metric: str, labels: str, by: str = "run, model") -> str:
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
        number("Current version", (gauge("current_version", OF_MODEL), MODEL)),
        number(
            "Producers missing",
            (
                f"max by (run, model) (weightdepot_producers{{{OF_MODEL}}} "
                f"- weightdepot_producers_alive{{{OF_MODEL}}}) "
                f"and {gauge('producers_joined', OF_MODEL)} > 0",
                MODEL,
            ),
            bad_from=1,
        ),
        number(
            "Groups half-way",
            (f"sum by (run, model) ({gauge('group_half', OF_GROUP, 'run, model, group')})", MODEL),
            bad_from=1,
        ),
        number(
            "Furthest behind",
            (f"max by (run, model) ({gauge('group_lag', OF_GROUP, 'run, model, group')})", MODEL),
        ),
    ],
    "Versions and groups": [
        graph(
            "Version that each group holds",
            "none",
            (gauge("latest_version", OF_MODEL), MODEL + ": newest"),
            (gauge("group_version", OF_GROUP, "run, model, group"), GROUP),
        ),
        graph(
            "Lag of each group",
            "none",
            (gauge("group_lag", OF_GROUP, "run, model, group"), GROUP),
            text="Versions published since the one that the group holds.",
        ),
        graph(
            "Versions applied",
            "ops",
            (rate("updates_total", OF_GROUP, "run, model, group"), GROUP),
            text="Rounds that ranks reported applied, a second.",
        ),
    ],
    "Time": [
        graph(
            "A rank's publish",
            "s",
            *(
                (
                    quantile(q, "publish_seconds", OF_MODEL, "run, model, phase"),
                    f"{MODEL} {{{{phase}}}} p{q * 100:g}",
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
                    quantile(q, "update_seconds", OF_GROUP, "run, model, group, phase"),
                    f"{GROUP} {{{{phase}}}} p{q * 100:g}",
                )
                for q in (0.5, 0.95)
            ),
            text="wait: for the version and the other ranks; pull: reading, checking; place: from staging.",
        ),
    ],
    "Bytes": [
        graph("Published", "Bps", (rate("published_bytes_total", OF_MODEL, "run, model"), MODEL)),
        graph(
            "Pulled, by transport", "Bps", (rate("moved_bytes_total", OF_MODEL, "transport"), "{{transport}}")
        ),
        graph(
            "Moved for each byte needed",
            "none",
            (
                f"{rate('moved_bytes_total', OF_MODEL, 'run, model')} "
                f"/ {rate('needed_bytes_total', OF_MODEL, 'run, model')}",
                MODEL,
            ),
            text="1 is the least that there is.",
        ),
    ],
    "Memory": [
        graph(
            "Slots",
            "none",
            (gauge("slots_used", OF_MODEL), MODEL + ": used"),
            (gauge("slots", OF_MODEL), MODEL + ": there are"),
        ),
        graph(
            "Versions by state",
            "none",
            (gauge("versions", OF_MODEL, "run, model, state"), MODEL + " {{state}}"),
        ),
        graph(
            "Leases",
            "none",
            (gauge("leases", OF_MODEL, "run, model, state"), MODEL + " on {{state}}"),
            text="Leases on a retired version keep its memory from being used again.",
        ),
    ],
    "What goes wrong": [
        graph(
            "Failed rounds",
            "ops",
            (rate("failed_rounds_total", OF_GROUP, "run, model, group"), GROUP),
        ),
        graph(
            "Aborted versions",
            "none",
            (
                f"max by (run, model) (increase(weightdepot_aborted_versions_total{{{OF_MODEL}}}[$__range]))",
                MODEL,
            ),
        ),
        graph(
            "Longest wait for a slot",
            "s",
            (gauge("opening_wait_seconds", OF_MODEL, "run, model, reason"), MODEL + ": {{reason}}"),
            text="For how long the producer rank that waits longest has waited, by what it waits for.",
        ),
        graph(
            "Openings given up",
            "none",
            (
                f"sum by (run, model, reason) "
                f"(increase(weightdepot_openings_given_up_total{{{OF_MODEL}}}[$__range]))",
                MODEL + ": {{reason}}",
            ),
            text="Producer ranks that stopped asking for a slot, by what they waited for.",
        ),
        graph("Problems answered", "ops", (rate("problems_total", OF_RUN, "run, kind"), "{{run}}: {{kind}}")),
        graph(
            "Waits that gave nothing",
            "ops",
            (rate("waits_total", OF_MODEL, "run, model, reason"), MODEL + ": {{reason}}"),
            text="Long polls that ended without an answer: slot, lag, ranks, version, ...",
        ),
    ],
    "Controllers": [
        graph("A round trip to the index", "s", (f"weightdepot_index_seconds{{{OF_RUN}}}", "{{instance}}")),
        graph("Requests that wait", "none", (f"weightdepot_waiting_requests{{{OF_RUN}}}", "{{instance}}")),
        graph("The index answers", "bool_yes_no", (f"weightdepot_index_up{{{OF_RUN}}}", "{{instance}}")),
    ],
}


def laid_out() -> list[Panel]:
    panels: list[Panel] = []
    y = 0
    for title, row in ROWS.items():
        at = {"x": 0, "y": y, "w": 24, "h": 1}
        panels.append({"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": at})
        y += 1
        height = 4 if title == "Now" else 8
        abreast = len(row) if len(row) <= MOST_ABREAST else 3
        for first in range(0, len(row), abreast):
            for i, panel in enumerate(row[first : first + abreast]):
                width = 24 // abreast
                place = {"x": i * width, "y": y, "w": width, "h": height}
                panels.append({**panel, "datasource": SOURCE, "gridPos": place})
            y += height
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
                variable("run", "label_values(weightdepot_index_up, run)"),
                variable("model", f"label_values(weightdepot_versions{{{OF_RUN}}}, model)"),
                variable("group", f"label_values(weightdepot_group_live{{{OF_MODEL}}}, group)"),
            ]
        },
        "panels": laid_out(),
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(dashboard(), indent=1) + "\n")
