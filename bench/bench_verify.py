"""How fast is verification? ``python -m bench.bench_verify [--device cuda] [--quick] [--only "verify greedy"] [--json FILE]``

With all draft tokens right, so that every row is read: greedy and coupled. Rivals: the same in torch with ``argmax``; with a draw
from the softmax in every column, by ``multinomial`` or, on a GPU, an exponential race. On a GPU the kernel itself is measured,
in the fast form of its noise. Bytes: the logits once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.bench_select import eager_argmax, multinomial, race
from bench.harness import KernelCase, normal
from bench.kernels import Benchmark, main, rivals
from pipespec_kernels import ops
from pipespec_kernels.noise import Noise


def eager(choose: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]):
    """Verification in plain torch, for rows of full width in which all tokens but the first are draft tokens."""

    def verify(logits: torch.Tensor, tokens: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        choice = choose(logits, scale)
        accepted = (choice[:, :-1] == tokens[:, 1:]).int().cumprod(1).sum(1)
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        return torch.where(columns <= accepted[:, None], choice, -1), accepted

    return verify


def maker(coupled: bool):
    def make(device: str, quick: bool):
        choose = eager_argmax if not coupled else race if device == "cuda" else multinomial
        others = rivals(device, quick, eager(choose))

        def case(shape: tuple[int, int, int], dtype: torch.dtype, copies: int) -> KernelCase:
            batch, width, _ = shape
            logits = normal((copies, *shape), dtype, device)
            scale = torch.ones(batch, device=device)
            seeds = torch.arange(batch, device=device)
            noise = Noise(seeds, seeds * 100, scale) if coupled else None
            tokens = torch.zeros((copies, batch, width), dtype=torch.int64, device=device)
            query_lens = torch.full((batch,), width, dtype=torch.int32, device=device)
            num_draft_tokens = query_lens - 1
            if device == "cuda":
                from pipespec_kernels.triton import Workspace, select, verify

                workspace = Workspace(batch, width, device)
                choices = [select(x, noise=noise, workspace=workspace) for x in logits]

                def ours(i: int) -> tuple[torch.Tensor, torch.Tensor]:
                    return verify(logits[i], tokens[i], query_lens, num_draft_tokens, noise=noise, workspace=workspace)
            else:
                choices = [ops.argmax(x) if noise is None else ops.sample(x, noise) for x in logits]

                def ours(i: int) -> tuple[torch.Tensor, torch.Tensor]:
                    return ops.verify(logits[i], tokens[i], query_lens, num_draft_tokens, noise=noise)

            for i, choice in enumerate(choices):
                tokens[i, :, 1:] = choice[:, :-1]
            assert ours(0)[1].tolist() == [width - 1] * batch
            return KernelCase(
                logits[0].numel() * dtype.itemsize,
                ours,
                {name: lambda i, rival=rival: rival(logits[i], tokens[i], scale) for name, rival in others.items()},
            )

        return case

    return make


BENCHMARKS = [Benchmark("verify greedy", maker(False)), Benchmark("verify coupled", maker(True))]

if __name__ == "__main__":
    main(BENCHMARKS, "Speed of verify against a plain read or copy and torch.")
