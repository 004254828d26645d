"""How fast are log-probabilities? ``python -m bench.bench_logprobs [--device cuda] [--quick] [--json FILE]``

``logprobs`` of one token per column and of the 5 likeliest, against ``log_softmax``, ``gather`` and ``topk`` in torch. Bytes: the logits once.
"""

from __future__ import annotations

import torch

from bench.harness import KernelCase, normal
from bench.kernels import Benchmark, main, rivals
from pipespec_kernels import ops

TOP_N = 5


def eager(logits: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    every = logits.float().log_softmax(-1)
    top, top_ids = every.topk(TOP_N, -1)
    return every.gather(-1, ids[..., None])[..., 0], top_ids, top


def make(device: str, quick: bool):
    others = rivals(device, quick, eager)

    def case(shape: tuple[int, int, int], dtype: torch.dtype, copies: int) -> KernelCase:
        batch, width, vocab = shape
        logits = normal((copies, *shape), dtype, device).mul_(3)
        ids = torch.randint(vocab, (batch, width), device=device)
        selected = ids.int()
        query_lens = torch.full((batch,), width, dtype=torch.int32, device=device)
        num_draft_tokens = query_lens - 1
        return KernelCase(
            torch.Size(shape).numel() * dtype.itemsize,
            lambda i: ops.logprobs(logits[i], selected, query_lens, num_draft_tokens, top_n=TOP_N),
            {name: lambda i, rival=rival: rival(logits[i], ids) for name, rival in others.items()},
        )

    return case


BENCHMARKS = [Benchmark("logprobs", make)]

if __name__ == "__main__":
    main(BENCHMARKS, "Speed of log-probabilities against torch.")
