"""The rollout engine: a real vLLM that generates answers with the newest weights it has."""

from __future__ import annotations

import argparse
import json
import random
import sys
from typing import Any

import task
from vllm.config.weight_transfer import WeightTransferConfig

from vllm import LLM, SamplingParams


def answers(llm: LLM, prompts: list[list[int]], samples: int, seed: int) -> list[dict[str, Any]]:
    """`samples` answers to each prompt, with the log-probability of every token at temperature 1."""
    parameters = SamplingParams(
        n=samples, temperature=1.0, max_tokens=task.LENGTH, min_tokens=task.LENGTH, logprobs=0,
        seed=seed, detokenize=False, ignore_eos=True,
    )  # fmt: skip
    found = []
    for prompt, output in zip(
        prompts,
        llm.generate([{"prompt_token_ids": p} for p in prompts], parameters, use_tqdm=False),
        strict=True,
    ):
        for sample in output.outputs:
            tokens = list(sample.token_ids)
            logprobs = [step[token].logprob for step, token in zip(sample.logprobs, tokens, strict=True)]
            found.append({"prompt": prompt, "answer": tokens, "logprobs": logprobs})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--controller", required=True)
    parser.add_argument("--directory", required=True, help="a model directory with config and first weights")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()

    # what the libraries print must not come between the lines of JSON
    out, sys.stdout = sys.stdout, sys.stderr
    llm = LLM(
        model=a.directory, skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=32,
        weight_transfer_config=WeightTransferConfig(backend="weightdepot"),
    )  # fmt: skip
    llm.init_weight_transfer_engine({"init_info": {"controller": a.controller, "model": "policy"}})
    rng = random.Random(a.seed)
    print(json.dumps({"kind": "ready"}), file=out, flush=True)
    for batch, line in enumerate(sys.stdin):
        words = line.split()
        if not words or words[0] != "go":
            break
        # the newest version, at least the one that was asked for; the same until the answers are there
        llm.start_weight_update()
        llm.update_weights({"update_info": {"min_version": int(words[1])}})
        version = llm.llm_engine.collective_rpc(held_version)[0]
        llm.finish_weight_update(str(version))
        found = answers(llm, [task.prompt(rng) for _ in range(a.prompts)], a.samples, a.seed + batch)
        print(json.dumps({"kind": "batch", "version": version, "found": found}), file=out, flush=True)


def held_version(worker: Any) -> int:
    return int(worker.weight_transfer_engine.version)


if __name__ == "__main__":
    main()
