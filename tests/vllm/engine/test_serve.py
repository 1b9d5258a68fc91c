"""`vllm serve` and its HTTP routes: updates with requests in flight, in each pause mode."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from .conftest import Checkpoints
from .process import Engine, ServedEngine, Trainer, fault_file

PROMPT = [1, 5, 9, 33, 7, 21, 60]
LONG = 1200  # tokens of a request that is in flight for some seconds, see STEP
SHORT = 12


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="module")
def fresh(checkpoints: Checkpoints, directory: Path) -> list[Any]:
    """Of each checkpoint: what an engine that was started from it computes for PROMPT."""
    found = []
    for weights in checkpoints("qwen3"):
        with Engine(weights, directory) as engine:
            [rows] = engine.ask("generate", tokens=SHORT, prompts=[PROMPT])
            found.append([(token, rest[rest.index(token) + 1]) for token, *rest in rows])
    return found


@pytest.fixture(scope="module")
def trainer(controller: str, checkpoints: Checkpoints) -> Iterator[Trainer]:
    with Trainer(controller, checkpoints("qwen3")[0]) as trainer:
        yield trainer


@pytest.fixture(scope="module")
def server(trainer: Trainer, checkpoints: Checkpoints, directory: Path) -> Iterator[ServedEngine]:
    with ServedEngine(checkpoints("qwen3")[0], directory) as server:
        server.post("/init_weight_transfer_engine", init_info=trainer.info())
        yield server


def choice(answer: Any) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def computed(found: Any) -> list[tuple[int, str]]:
    """The first tokens, and the bits of their log-probabilities."""
    content = found["logprobs"]["content"][:SHORT]
    return [(c["token_id"], float(c["logprob"]).hex()) for c in content]


def spans(found: Any) -> list[tuple[str, int, int]]:
    return [(s["version"], s["start"], s["end"]) for s in found["weight_versions"]]


def update(server: ServedEngine, **info: Any) -> None:
    server.post("/start_weight_update")
    server.post("/update_weights", update_info=info)
    server.post("/finish_weight_update")


@pytest.mark.parametrize(("mode", "version"), [("keep", 10), ("wait", 20), ("abort", 30)])
def test_requests_in_flight_and_new_ones_report_the_versions_that_computed_them(
    server: ServedEngine,
    trainer: Trainer,
    checkpoints: Checkpoints,
    fresh: list[Any],
    mode: str,
    version: int,
) -> None:
    weights = checkpoints("qwen3")
    old, new = str(version), str(version + 1)
    trainer.publish(version, weights[1])
    update(server, min_version=version)
    assert server.version() == old
    with ThreadPoolExecutor(2) as pool:
        begun = threading.Event()
        flying = pool.submit(server.stream, PROMPT, LONG, lambda n: begun.set() if n >= 20 else None)
        assert begun.wait(60)
        assert server.http.post("/pause", params={"mode": mode}).status_code == 200
        late = pool.submit(server.generate, PROMPT, SHORT)  # waits for /resume
        trainer.publish(version + 1, weights[2])
        update(server, version=version + 1)
        assert server.version() == new
        assert not late.done()
        server.post("/resume")
        first, second = flying.result(120), choice(late.result(120))

    tokens = first["token_ids"]
    assert tokens[:SHORT] == [token for token, _ in fresh[1]]
    if mode == "keep":
        (a, start, middle), (b, resumed, end) = spans(first)
        assert (a, b, start, end) == (old, new, 0, LONG)
        assert 20 <= middle == resumed < LONG
        assert first["finish_reason"] == "length"
    elif mode == "wait":
        assert spans(first) == [(old, 0, LONG)]
        assert first["finish_reason"] == "length"
    else:
        assert spans(first) == [(old, 0, len(tokens))]
        assert first["finish_reason"] == "abort"
        assert SHORT < len(tokens) < LONG
    assert spans(second) == [(new, 0, SHORT)]
    assert computed(second) == fresh[2]


def test_after_a_failed_update_requests_and_resume_are_refused_until_a_whole_version_is_in(
    server: ServedEngine, trainer: Trainer, checkpoints: Checkpoints, fresh: list[Any], directory: Path
) -> None:
    weights = checkpoints("qwen3")
    trainer.publish(40, weights[1])
    update(server, min_version=40)
    fault_file(directory).write_text("0")
    server.http.post("/pause", params={"mode": "keep"})
    trainer.publish(41, weights[2])
    server.post("/start_weight_update")
    failed = server.http.post("/update_weights", json={"update_info": {}})
    assert failed.status_code == 500
    assert server.http.post("/resume").status_code == 500
    assert server.generate(PROMPT, SHORT).status_code == 500
    assert server.http.get("/health").status_code == 200, "which says nothing of the weights"
    fault_file(directory).unlink()
    update(server)
    server.post("/resume")
    answer = choice(server.generate(PROMPT, SHORT))
    assert spans(answer) == [("41", 0, SHORT)]
    assert computed(answer) == fresh[2]
