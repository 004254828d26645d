"""How fast are thresholds? ``python -m bench.bench_cutoff [--device cuda] [--quick] [--json FILE]``

``cutoff`` for top-k 50 and top-p 0.9 together, against a sort and a cumulative sum in torch. Bytes: the logits once. What the search reads
again comes from a cache and does not count.
"""

from __future__ import annotations

import torch

from bench.harness import KernelCase, normal
from bench.kernels import Benchmark, main, rivals
from pipespec_kernels import ops

TOP_K, TOP_P = 50, 0.9


def eager(logits: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The smallest kept logit of each row, by sorting."""
    x = logits.float().sort(-1, descending=True).values
    weights = torch.where(x >= x[..., TOP_K - 1 : TOP_K], torch.softmax(x * scale[:, None, None], -1), 0.0)
    sums = weights.cumsum(-1)
    last = (sums < TOP_P * sums[..., -1:]).sum(-1, keepdim=True).clamp(max=x.shape[-1] - 1)
    return x.gather(-1, last)[..., 0]


def make(device: str, quick: bool):
    others = rivals(device, quick, eager)

    def case(shape: tuple[int, int, int], dtype: torch.dtype, copies: int) -> KernelCase:
        batch = shape[0]
        logits = normal((copies, *shape), dtype, device).mul_(3)
        scale = torch.ones(batch, device=device)
        out = torch.empty(shape[:2], device=device)
        if device == "cuda":
            from pipespec_kernels.triton import cutoff

            k = torch.full((batch,), TOP_K, dtype=torch.int32, device=device)
            p = torch.full((batch,), TOP_P, device=device)
        else:
            cutoff, k, p = ops.cutoff, TOP_K, TOP_P

        return KernelCase(
            torch.Size(shape).numel() * dtype.itemsize,
            lambda i: cutoff(logits[i], inv_temperature=scale, top_k=k, top_p=p, out=out),
            {name: lambda i, rival=rival: rival(logits[i], scale) for name, rival in others.items()},
        )

    return case


BENCHMARKS = [Benchmark("cutoff", make)]

if __name__ == "__main__":
    main(BENCHMARKS, "Speed of cutoff against torch.")
