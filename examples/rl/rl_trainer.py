"""One trainer rank: FSDP2 over gloo, a policy-gradient step on what the rollout engine sent, a publish."""

from __future__ import annotations

import argparse
import json
import sys
from collections import OrderedDict
from typing import Any

import task
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM

import weightdepot

KEPT = 12  # versions whose weights are kept, to compare log-probabilities with


def logprobs(model: torch.nn.Module, sequences: torch.Tensor) -> torch.Tensor:
    """(n, LENGTH) log-probabilities of the answers' tokens."""
    logits = model(input_ids=sequences[:, :-1]).logits.float()
    answer = sequences[:, -task.LENGTH :]
    found: torch.Tensor = logits.log_softmax(-1)[:, -task.LENGTH :].gather(-1, answer[..., None])[..., 0]
    return found


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The full weights, gathered."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def advantages(found: list[dict[str, Any]], samples: int) -> torch.Tensor:
    """(n, LENGTH): each token's reward less the mean of its prompt's samples at that place."""
    reward = torch.tensor([task.rewards(f["prompt"], f["answer"]) for f in found])
    groups = reward.view(-1, samples, task.LENGTH)
    return (groups - groups.mean(dim=1, keepdim=True)).view(-1, task.LENGTH)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--controller", required=True)
    parser.add_argument("--directory", required=True)
    parser.add_argument("--rendezvous", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1e-3)
    a = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{a.rendezvous}", rank=a.rank, world_size=a.world_size
    )
    model = Qwen3ForCausalLM.from_pretrained(a.directory, dtype=torch.float32)
    twin = Qwen3ForCausalLM(Qwen3Config(**task.MODEL)).float()  # takes the weights of older versions
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=a.rate, weight_decay=0.0, foreach=False)
    versions: OrderedDict[int, dict[str, torch.Tensor]] = OrderedDict()
    with weightdepot.Producer(
        a.controller, model="policy", weights=model, rank=a.rank, world_size=a.world_size
    ) as producer:
        version = 0
        while True:
            versions[version] = whole(model)
            while len(versions) > KEPT:
                versions.popitem(last=False)
            producer.publish(version)
            if a.rank == 0:
                print(json.dumps({"kind": "published", "version": version}), flush=True)
            line = sys.stdin.readline()
            if not line.startswith("{"):
                break
            batch = json.loads(line)
            found, at = batch["found"], batch["version"]
            sequences = torch.tensor([f["prompt"] + f["answer"] for f in found])
            behaviour = torch.tensor([f["logprobs"] for f in found])
            advantage = advantages(found, a.samples)
            if a.rank == 0:
                right = [r for f in found for r in task.rewards(f["prompt"], f["answer"])]
                seen = compare(twin, versions, at, version, sequences, behaviour)
                print(json.dumps({"kind": "step", "reward": sum(right) / len(right), **seen}), flush=True)
            mine = slice(a.rank, None, a.world_size)
            now = logprobs(model, sequences[mine])
            # what was sampled by an older version is weighted by how likely the present one is to say it
            ratio = (now - behaviour[mine]).exp()
            gain = torch.minimum(ratio * advantage[mine], ratio.clamp(0.8, 1.25) * advantage[mine])
            loss = -gain.mean() * task.LENGTH
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            version += 1
    dist.destroy_process_group()


@torch.no_grad()
def compare(
    twin: torch.nn.Module,
    versions: OrderedDict[int, dict[str, torch.Tensor]],
    at: int,
    newest: int,
    sequences: torch.Tensor,
    behaviour: torch.Tensor,
) -> dict[str, Any]:
    """How far the engine's log-probabilities are from the trainer's at the recorded version, and at another
    one: the version that is furthest from it among those kept."""
    out: dict[str, Any] = {"at": at, "newest": newest, "same": None, "other": None, "other_version": None}
    if at in versions:
        twin.load_state_dict(versions[at])
        out["same"] = (logprobs(twin, sequences) - behaviour).abs().max().item()
    other = next(iter(versions))
    if other != at:
        twin.load_state_dict(versions[other])
        out |= {"other": (logprobs(twin, sequences) - behaviour).abs().max().item(), "other_version": other}
    return out


if __name__ == "__main__":
    main()
