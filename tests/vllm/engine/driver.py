"""A real vLLM engine, offline, in a process of its own: told what to do in lines of JSON, and answering so.

Run as `python -m tests.vllm.engine.driver OPTIONS`, where OPTIONS is JSON for `vllm.LLM`. Answers go to the
file descriptor that was standard output; what vLLM and its workers print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

PROMPTS = [[1, 5, 9, 33, 7, 21, 60], [2, 90, 41], [100, 3, 17, 64, 12, 11, 10, 9, 8, 7, 6, 5], [55]]


def generate(llm: Any, tokens: int, prompts: list[list[int]]) -> list[list[list[float]]]:
    """For each prompt the tokens, greedily chosen, and the bits of their log-probabilities."""
    from vllm import SamplingParams, TokensPrompt

    asked = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=2, detokenize=False)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], asked, use_tqdm=False)
    return [
        [
            [token, *(x for other in sorted(known) for x in (other, known[other].logprob.hex()))]
            for token, known in zip(o.outputs[0].token_ids, o.outputs[0].logprobs, strict=True)
        ]
        for o in outputs
    ]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM

    begun = time.monotonic()
    llm = LLM(**json.loads(sys.argv[1]))

    def say(**what: Any) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    say(started=time.monotonic() - begun)
    for line in sys.stdin:
        ask = json.loads(line)
        begun = time.monotonic()
        try:
            match ask.pop("do"):
                case "generate":
                    answer: Any = generate(llm, ask.get("tokens", 12), ask.get("prompts", PROMPTS))
                case "init":
                    answer = llm.init_weight_transfer_engine({"init_info": ask})
                case "update":
                    label = ask.pop("label", None)
                    llm.start_weight_update()
                    llm.update_weights({"update_info": ask})
                    answer = llm.finish_weight_update(weight_version=label)
                case "version":
                    answer = llm.llm_engine.get_weight_version()
                case "run":  # code that sees `llm`
                    scope: dict[str, Any] = {"llm": llm}
                    exec(ask["code"], scope)
                    answer = scope.get("answer")
                case other:
                    raise ValueError(other)
        except Exception as error:  # noqa: BLE001  the test sees it
            say(error=f"{type(error).__name__}: {error}", seconds=time.monotonic() - begun)
        else:
            say(value=answer, seconds=time.monotonic() - begun)


if __name__ == "__main__":
    main()
