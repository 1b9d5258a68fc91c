"""The API's own description: complete, with examples that are valid, and problems for every route."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from weightdepot.api.app import create_app
from weightdepot.api.schemas import answers, requests
from weightdepot.api.settings import Settings

SCHEMA: dict[str, Any] = create_app(Settings()).openapi()
OPERATIONS = [
    (f"{method} {path}", operation)
    for path, methods in SCHEMA["paths"].items()
    for method, operation in methods.items()
]


def refs(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        for inner in value.values():
            yield from refs(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from refs(inner)


def test_every_reference_resolves() -> None:
    for ref in refs(SCHEMA):
        assert ref.startswith("#/components/schemas/")
        assert ref.rsplit("/", 1)[-1] in SCHEMA["components"]["schemas"], ref


def test_operations_have_names_of_their_own_tags_and_summaries() -> None:
    names = [operation["operationId"] for _, operation in OPERATIONS]
    assert len(set(names)) == len(names)
    for name, operation in OPERATIONS:
        assert operation["tags"], name
        assert operation["summary"], name
    tags = {tag["name"] for tag in SCHEMA["tags"]}
    assert {tag for _, operation in OPERATIONS for tag in operation["tags"]} == tags


def test_failures_are_described_as_problems_and_nothing_else() -> None:
    assert "HTTPValidationError" not in SCHEMA["components"]["schemas"]
    for name, operation in OPERATIONS:
        failures = {status: r for status, r in operation["responses"].items() if status >= "400"}
        if name != "get /v1/health":
            assert {"422", "503"} <= set(failures), name
        for status, response in failures.items():
            assert list(response["content"]) == ["application/problem+json"], (name, status)
            assert response["description"], (name, status)


@pytest.mark.parametrize(
    "model",
    [
        requests.ProducerIn, requests.ConsumerIn, requests.LayoutChange, requests.HeartbeatIn,
        requests.OpenIn, requests.SealIn, requests.EndIn, requests.LostIn, requests.RoundIn,
        requests.FinishIn, requests.StagedIn, requests.PolicyIn, requests.VersionIn, requests.AnnounceIn,
        answers.Problem,
    ],
    ids=lambda model: model.__name__,
)  # fmt: skip
def test_the_examples_of_bodies_are_valid(model: type[answers.Problem]) -> None:
    for example in model.model_json_schema()["examples"]:
        model.model_validate(example)


def test_every_body_has_an_example() -> None:
    for name, operation in OPERATIONS:
        for media, content in operation.get("requestBody", {}).get("content", {}).items():
            if media == "application/json":
                schema = SCHEMA["components"]["schemas"][content["schema"]["$ref"].rsplit("/", 1)[-1]]
                assert schema["examples"], name
