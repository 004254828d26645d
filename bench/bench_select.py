"""How fast are ``argmax`` and ``sample``? ``python -m bench.bench_select [--device cuda] [--quick] [--json FILE]``

A choice in every column. Rivals: ``torch.argmax``; a softmax in float32 and ``multinomial``, on a GPU an exponential race
instead. On a GPU the kernel itself is measured, in the fast form of its noise. Bytes: the logits once.
"""

from __future__ import annotations

import torch

from bench.harness import KernelCase, normal
from bench.kernels import Benchmark, main, rivals
from pipespec_kernels import ops
from pipespec_kernels.noise import Noise


def race(logits: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A draw in every column as samplers on a GPU do it, without a wait for the device."""
    p = torch.softmax(logits.float() * scale[:, None, None], -1)
    return (p / torch.empty_like(p).exponential_()).argmax(-1)


def multinomial(logits: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A draw in every column as samplers in torch do it on the CPU."""
    p = torch.softmax(logits.float() * scale[:, None, None], -1)
    return torch.multinomial(p.flatten(0, 1), 1).view(logits.shape[:2])


def eager_argmax(logits: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def maker(sampled: bool):
    def make(device: str, quick: bool):
        eager = eager_argmax if not sampled else race if device == "cuda" else multinomial
        others = rivals(device, quick, eager)

        def case(shape: tuple[int, int, int], dtype: torch.dtype, copies: int) -> KernelCase:
            batch, width, _ = shape
            logits = normal((copies, *shape), dtype, device)
            scale = torch.ones(batch, device=device)
            seeds = torch.arange(batch, device=device)
            noise = Noise(seeds, seeds * 100, scale)
            if device == "cuda":
                from pipespec_kernels.triton import Workspace, select

                workspace = Workspace(batch, width, device)
                given = noise if sampled else None

                def ours(i: int) -> object:
                    return select(logits[i], noise=given, workspace=workspace)
            else:

                def ours(i: int) -> object:
                    return ops.sample(logits[i], noise) if sampled else ops.argmax(logits[i])

            return KernelCase(
                logits[0].numel() * dtype.itemsize,
                ours,
                {name: lambda i, rival=rival: rival(logits[i], scale) for name, rival in others.items()},
            )

        return case

    return make


BENCHMARKS = [Benchmark("argmax", maker(False)), Benchmark("sample", maker(True))]

if __name__ == "__main__":
    main(BENCHMARKS, "Speed of argmax and sample against torch.")
