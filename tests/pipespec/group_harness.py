"""Tensor-parallel groups without torchrun's start-up: one process that has imported everything forks them.

``python -m tests.pipespec.group_harness SIZE ...`` runs :func:`scenario` in groups of these sizes and prints one line of JSON for each. The model is
sharded here as transformers shards it: by rows for the projections into the heads and the MLP, by columns for those out of them, whose partial sums are
added over the group. So it needs neither accelerate nor a plan. With folders of models instead of sizes it runs :func:`loaded` in a group of two.
"""

import copy
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.generation import StoppingCriteria, StoppingCriteriaList

from pipespec import Pipeline, trust
from pipespec.checks import calls as checks
from pipespec.checks.calls import DeviceFacts
from tests.conftest import left_pad, noisy, random_llama, random_prompts
from tests.support.forks import fork_drafts_here
from tests.support.processes import everywhere
from tests.support.streamers import Recorder, failing

BY_ROWS, BY_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")


def _reduced(module, given, out):
    dist.all_reduce(out)
    return out


trust(_reduced)


def whole_model() -> LlamaForCausalLM:
    return random_llama(3, kv_heads=4)


def sharded(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """A copy with this rank's part of the projections."""
    other, rank, size = copy.deepcopy(model), dist.get_rank(), dist.get_world_size()
    for layer in other.model.layers:
        for name, module in layer.named_modules():
            if (own := name.rpartition(".")[2]) in BY_ROWS + BY_COLUMNS:
                part = module.weight.detach().chunk(size, dim=int(own in BY_COLUMNS))[rank]
                module.weight = nn.Parameter(part.contiguous(), requires_grad=False)
            if own in BY_COLUMNS:
                module.register_forward_hook(_reduced)
    other._tp_size, other._device_mesh = size, init_device_mesh("cpu", (size,))
    return other


def calls() -> list[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]:
    """Batches of different lengths, greedy and sampled; a prompt that takes several chunks."""
    found = []
    for seed, options in ((1, {"do_sample": False}), (2, {"do_sample": True, "seed": 7, "top_k": 40})):
        ids, mask = left_pad(random_prompts(3, seed=seed))
        found.append((ids, mask, {"max_new_tokens": 14, **options}))
    long = random_prompts(1, seed=5, shortest=90, longest=90)[0][None]
    found.append((long, torch.ones_like(long), {"max_new_tokens": 6, "do_sample": False, "prefill_chunk_size": 40}))
    return found


class StopAfter(StoppingCriteria):
    """Ends all rows after a number of columns. On rank 0 alone; elsewhere it must not be asked."""

    def __init__(self, columns: int) -> None:
        self.columns = columns

    def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        assert dist.get_rank() == 0
        return torch.full((ids.shape[0],), ids.shape[1] >= self.columns)


def error_of(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def scenario(schedules: Sequence[str]) -> dict[str, Any]:
    """What one rank sees."""
    whole, rank, found = whole_model(), dist.get_rank(), {}
    target, draft = sharded(whole), noisy(whole, 0.02)
    found["texts"] = []
    for schedule in schedules:
        with Pipeline(target, draft, schedule=schedule, lookahead=4) as pipe:
            for ids, mask, options in calls():
                found["texts"].append(pipe.generate(ids, attention_mask=mask, **options).tolist())
            found["form"] = pipe.report.stages[-1].forward
            found["schedule"] = pipe.report.schedule
    pipe = Pipeline(target, draft, schedule="lockstep", lookahead=4)
    ids = random_prompts(1, seed=3, shortest=6, longest=6)[0][None]
    first = pipe.generate(ids, max_new_tokens=9, return_dict_in_generate=True)
    cache = first.past_key_values
    found["shard"] = list(cache.layers[0].keys.shape)
    found["goes on"] = pipe.generate(first.sequences, past_key_values=cache, max_new_tokens=9).tolist()
    streamer = Recorder()
    criteria = StoppingCriteriaList([StopAfter(12)])
    found["stopped"] = pipe.generate(ids, max_new_tokens=20, stopping_criteria=criteria, streamer=streamer).tolist()
    found["streamed"] = streamer.record
    scored = pipe.generate(ids, max_new_tokens=4, return_dict_in_generate=True, output_scores=True, logprobs=1)
    found["scored"] = [part is not None and len(part) for part in (scored.scores, scored.logprobs)]
    reader = failing(2, OSError, "the reader has gone") if rank == 0 else Recorder()
    found["failed"] = error_of(lambda: pipe.generate(ids, max_new_tokens=20, streamer=reader))
    found["differ"] = error_of(lambda: pipe.generate(ids + rank, max_new_tokens=4))

    facts = checks.device_facts
    if rank == dist.get_world_size() - 1:
        checks.device_facts = lambda names: [DeviceFacts("cpu", 1, 1)]
    found["no memory"] = error_of(lambda: pipe.generate(ids, max_new_tokens=400))
    checks.device_facts = facts
    padded = torch.tensor([[5, 6, 0], [5, 6, 7]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    found["right padding"] = error_of(lambda: pipe.generate(padded, attention_mask=mask, max_new_tokens=2))
    # The ranks of a chain are processes with a model each.
    found["ranks"] = error_of(lambda: Pipeline(target, draft, schedule="ranks"))
    found["again"] = pipe.generate(ids, max_new_tokens=9).tolist()
    if rank == 0:
        found["accepted"] = pipe.report.stages[-1].accepted
    return found


def loaded(folders: Sequence[str]) -> list[Any]:
    """What one rank sees of models that transformers shards as it loads them: texts, and the form of the target."""
    found = []
    for folder in folders:
        target = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
        whole = AutoModelForCausalLM.from_pretrained(folder).to(target.device)
        with Pipeline(target, whole, schedule="lockstep") as pipe:
            texts = [pipe.generate(ids, attention_mask=mask, **options).tolist() for ids, mask, options in calls()]
        found.append([texts, pipe.report.stages[-1].forward])
    dist.destroy_process_group()
    return found


def main() -> None:
    if not sys.argv[1].isdigit():
        everywhere(lambda rank: loaded(sys.argv[1:]), 2)
        return
    for at, size in enumerate(map(int, sys.argv[1:])):

        def work(
            rank: int, schedules: tuple[str, ...] = ("plain", "lockstep", "workers") if at == 0 else ("lockstep",)
        ) -> Any:
            fork_drafts_here()
            dist.init_process_group("gloo")
            found = scenario(schedules)
            dist.barrier()
            dist.destroy_process_group()
            return found

        everywhere(work, size)


if __name__ == "__main__":
    main()
