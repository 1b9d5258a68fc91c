"""Whatever is sent to any route: no 5xx, and no answer outside of the controller's own document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings

schemathesis = pytest.importorskip("schemathesis")

from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.system.harness import Server  # noqa: E402

TOKEN = "an-admin-token-of-this-test"
EXAMPLES = 12  # of each operation
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
ENDLESS = ("/v1/events", "/v1/models/{model}/events")  # streams of events; see test_events


@pytest.fixture(scope="module", params=["open", "tokens"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    words = ["--port", "0"]
    if request.param == "tokens":
        file = tmp_path_factory.mktemp("tokens") / "tokens.json"
        file.write_text(json.dumps([{"name": "admin", "token": TOKEN, "roles": ["admin"]}]))
        words += ["--tokens", str(file)]
    running = Server(*words)
    try:
        yield running.url
    finally:
        running.stop()


@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore")
def test_no_input_gives_an_error_of_ours_or_an_answer_outside_the_document(server: str) -> None:
    document = httpx.get(f"{server}/openapi.json", headers={"Authorization": f"Bearer {TOKEN}"}).json()
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=server)
    tried = 0
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path in ENDLESS:
            continue
        tried += 1

        @settings(
            max_examples=EXAMPLES, deadline=None, database=None, derandomize=True,
            phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(case=operation.as_strategy())
        def answered(case: Any) -> None:
            if case.query and "wait" in case.query:
                case.query["wait"] = 0.01
            if case.headers:  # those of another run are refused, all of them: see test_access
                case.headers.pop("Weightdepot-Run", None)
            case.call_and_validate(
                headers={"Authorization": f"Bearer {TOKEN}"}, timeout=20, checks=CHECKS,
                # 503 is stated: the index is away, or no slot is free
            )  # fmt: skip

        answered()
    assert tried > 30
