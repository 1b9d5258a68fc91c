"""A small reinforcement-learning run, asynchronous and real: two FSDP2 trainer ranks and a vLLM rollout
engine learn, from random weights, to say three digits backwards. All weights go through weightdepot.

The rollout engine generates with the newest version it has while the trainers step. For every batch the
engine's log-probabilities are compared with the trainer's at the recorded version (they agree) and at another
one (they do not). Writes a plot and prints a summary; the exit status is non-zero where reward did not rise
or versions did not match.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from queue import Empty, Queue
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "demo"))

from demo import Child, Failed, Message, start_controller  # noqa: E402 - the demo next door, found by the line above

TRAINERS = 2
AHEAD = 2  # batches that may wait for the trainers: how far off-policy a run may be
AGREE = 1e-4  # of log-probabilities, between vLLM's kernels and transformers'
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


class Run:
    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.messages: Queue[Message] = Queue()
        self.controller: Child | None = None
        self.children: dict[str, Child] = {}
        self.steps: list[Message] = []

    def start(self) -> None:
        import task
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(self.options.seed)
        directory = self.folder / "model"
        Qwen3ForCausalLM(Qwen3Config(**task.MODEL)).float().save_pretrained(directory)
        self.controller, at = start_controller(self.folder)
        common = ["--controller", at, "--directory", str(directory), "--samples", str(self.options.samples)]
        for rank in range(TRAINERS):
            self._python(f"trainer-{rank}", "rl_trainer.py", *common, "--rank", str(rank), "--world-size",
                         str(TRAINERS), "--rendezvous", str(self.folder / "rendezvous"))  # fmt: skip
        self._python("rollout", "rl_rollout.py", *common, "--prompts", str(self.options.prompts))

    def _python(self, name: str, script: str, *arguments: str) -> None:
        command = [sys.executable, str(HERE / script), *arguments]
        self.children[name] = Child.start(name, command, self.folder, self.messages)

    def _next(self, deadline: float) -> Message:
        try:
            message = self.messages.get(timeout=max(deadline - time.monotonic(), 0.01))
        except Empty:
            raise Failed("a process did not answer in time") from None
        if message["kind"] == "text":  # a library's, not ours
            return self._next(deadline)
        if message["kind"] == "ended":
            raise Failed(f"{message['name']} ended with status {message['status']}")
        return message

    def run(self, show: Any) -> None:
        self.start()
        deadline = time.monotonic() + 300
        waiting: deque[Message] = deque()  # batches that the trainers have not asked for yet
        idle = False  # whether the trainers wait for a batch
        generating, version = False, None
        rollout_ready = False
        while len(self.steps) < self.options.steps:
            message = self._next(deadline)
            deadline = time.monotonic() + 120
            kind = message["kind"]
            if kind == "ready":
                rollout_ready = True
            elif kind == "published":
                version, idle = message["version"], True
            elif kind == "batch":
                generating = False
                waiting.append(message)
            elif kind == "step":
                self.steps.append(message)
                show(message, len(self.steps))
            if idle and waiting:
                batch = waiting.popleft()
                for rank in range(TRAINERS):
                    self.children[f"trainer-{rank}"].say(json.dumps(batch))
                idle = False
            if rollout_ready and version is not None and not generating and len(waiting) < AHEAD:
                self.children["rollout"].say(f"go {max(0, version - AHEAD)}")
                generating = True

    def stop(self) -> None:
        for child in self.children.values():
            child.say("end")
        for child in self.children.values():
            child.stop(grace=10)
        if self.controller is not None:
            self.controller.process.terminate()
            self.controller.stop(grace=10)

    def summary(self, seconds: float) -> dict[str, Any]:
        tenth = max(len(self.steps) // 10, 1)
        rewards = [s["reward"] for s in self.steps]
        same = [s["same"] for s in self.steps if s["same"] is not None]
        # early on the weights hardly differ, and late they hardly move: the median speaks for the run
        other = sorted(s["other"] for s in self.steps if s["other"] is not None)
        lags = [s["newest"] - s["at"] for s in self.steps]
        return {
            "steps": len(self.steps),
            "reward_first_tenth": round(sum(rewards[:tenth]) / tenth, 3),
            "reward_last_tenth": round(sum(rewards[-tenth:]) / tenth, 3),
            "logprob_difference_at_the_recorded_version_max": max(same, default=None),
            "logprob_difference_at_another_version_median": other[len(other) // 2] if other else None,
            "batches_compared": len(same),
            "versions_behind_mean": round(sum(lags) / len(lags), 2),
            "versions_behind_max": max(lags),
            "seconds": round(seconds, 1),
        }


def plot(steps: list[Message], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(8, 6), constrained_layout=True)
    above.plot([s["reward"] for s in steps], color="tab:blue")
    above.set(ylabel="reward (share of right tokens)", ylim=(0, 1.02), title="Three digits backwards")
    x = range(len(steps))
    below.semilogy(x, [s["same"] for s in steps], label="at the recorded version", color="tab:green")
    other = [s["other"] or float("nan") for s in steps]
    below.semilogy(x, other, label="at another version", color="tab:red")
    below.set(xlabel="optimizer step", ylabel="largest difference of log-probabilities")
    below.legend()
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="./run demo-rl", description=__doc__)
    parser.add_argument("--steps", type=int, default=350, help="optimizer steps (default 350)")
    parser.add_argument("--prompts", type=int, default=16, help="prompts in a batch (default 16)")
    parser.add_argument("--samples", type=int, default=8, help="answers to each prompt (default 8)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, default=Path("demo-rl.png"), help="where the plot goes")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON, and nothing else")
    options = parser.parse_args(arguments)
    if options.steps < 10:
        parser.error("--steps must be at least 10")
    os.environ.update({k: v for k, v in ENVIRONMENT.items() if k not in os.environ})

    def show(step: Message, number: int) -> None:
        if not options.json and (number % 10 == 0 or number == 1):
            print(
                f"step {number:4d}  reward {step['reward']:.3f}  version {step['at']:4d} "
                f"({step['newest'] - step['at']} behind)  log-probabilities differ by {step['same']:.1e} "
                f"there, by {step['other'] or 0:.1e} at version {step['other_version']}",
                flush=True,
            )

    with tempfile.TemporaryDirectory(prefix="weightdepot-rl-") as name:
        run, begun = Run(options, Path(name)), time.monotonic()
        watchdog = threading.Timer(3600, lambda: os._exit(1))  # whatever happens, it ends
        watchdog.daemon = True
        watchdog.start()
        try:
            run.run(show)
        except Failed as error:
            print(f"The run failed: {error}", file=sys.stderr)
            for child in run.children.values():
                print(f"--- {child.name}\n{child.log.read_text()[-3000:]}", file=sys.stderr)
            return 1
        finally:
            run.stop()
        summary = run.summary(time.monotonic() - begun)
    plot(run.steps, options.plot)
    same = summary["logprob_difference_at_the_recorded_version_max"]
    other = summary["logprob_difference_at_another_version_median"]
    good = (
        summary["reward_last_tenth"] > summary["reward_first_tenth"] + 0.3
        and same is not None
        and same < AGREE
        and other is not None
        and other > 10 * AGREE
    )
    print(json.dumps(summary, indent=2))
    if not options.json:
        print(f"The plot is in {options.plot}. " + ("It learned, and versions match." if good else "FAILED"))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
