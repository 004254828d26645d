"""How fast are thresholds on a GPU? ``python -m bench.bench_cutoff [--quick] [--json FILE]``

``cutoff`` for top-k 50 and top-p 0.9 together, against a sort and a cumulative sum in torch. Bytes: the logits once,
though the search goes over them many times; what it finds in L2 is not counted.
"""

from __future__ import annotations

import argparse

import torch

from bench import gpu

TOP_K, TOP_P = 50, 0.9


def eager(logits: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The smallest kept logit of each row, by sorting."""
    x = logits.float().sort(-1, descending=True).values
    weights = torch.where(x >= x[..., TOP_K - 1 : TOP_K], torch.softmax(x * scale[:, None, None], -1), 0.0)
    sums = weights.cumsum(-1)
    last = (sums < TOP_P * sums[..., -1:]).sum(-1, keepdim=True).clamp(max=x.shape[-1] - 1)
    return x.gather(-1, last)[..., 0]


def make(quick: bool):
    from pipespec_kernels.triton import cutoff

    rivals = {"eager": eager} if quick else {"eager": eager, "compile": gpu.compiled(eager)}

    def case(shape: tuple[int, int, int], dtype: torch.dtype, copies: int) -> gpu.Case:
        batch = shape[0]
        logits = torch.empty((copies, *shape), dtype=dtype, device="cuda").normal_().mul_(3)
        scale = torch.ones(batch, device="cuda")
        k = torch.full((batch,), TOP_K, dtype=torch.int32, device="cuda")
        p = torch.full((batch,), TOP_P, device="cuda")
        out = torch.empty(shape[:2], device="cuda")
        return gpu.Case(
            torch.Size(shape).numel() * dtype.itemsize,
            lambda i: cutoff(logits[i], inv_temperature=scale, top_k=k, top_p=p, out=out),
            {name: lambda i, rival=rival: rival(logits[i], scale) for name, rival in rivals.items()},
        )

    return case


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of cutoff on a GPU against torch.")
    gpu.add_options(parser)
    gpu.run_benchmark(parser.parse_args(), "bench_cutoff", 1, make)


if __name__ == "__main__":
    main()
