"""How fast is rejection sampling? ``python -m bench.bench_rejection_sample [--device cuda] [--quick] [--json FILE]``

``rejection_sample`` with a drawn draft token in every column but the first, against the same in torch: two softmaxes in float32,
the test, and a draw from the residual for the one column of each row that needs it; on a GPU also FlashInfer's
``chain_speculative_sampling`` behind two softmaxes, where it is installed. Bytes: both models' rows of all draft tokens once, and the
pair of rows that is drawn from, once more.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.harness import KernelCase, Shape, normal
from bench.kernels import Benchmark, logits_bytes, main, rivals
from pipespec_kernels import ops
from pipespec_kernels.noise import DRAFT, Noise


def eager(
    logits: torch.Tensor, draft: torch.Tensor, tokens: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Rejection sampling in plain torch, for rows of full width in which all tokens but the first are draft tokens."""
    p = torch.softmax(logits.float() * scale[:, None, None], -1)
    q = torch.softmax(draft.float() * scale[:, None, None], -1)
    draft_tokens = tokens[:, 1:, None]
    p_draft_token, q_draft_token = (
        p[:, :-1].gather(-1, draft_tokens)[..., 0],
        q[:, :-1].gather(-1, draft_tokens)[..., 0],
    )
    accepted = (torch.rand_like(p_draft_token) * q_draft_token < p_draft_token).int().cumprod(1).sum(1)
    here = accepted[:, None, None].expand(-1, 1, p.shape[-1])
    residual = (p.gather(1, here) - q.gather(1, here)).clamp(min=0)[:, 0]
    # Without q: behind the last draft token, and where the residual is empty.
    whole = (accepted == tokens.shape[1] - 1)[:, None] | (residual.sum(-1, keepdim=True) <= 0)
    residual = torch.where(whole, p.gather(1, here)[:, 0], residual)
    drawn = (residual / torch.empty_like(residual).exponential_()).argmax(-1)
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    selected = torch.where(columns < accepted[:, None], tokens.roll(-1, 1), -1)
    return selected.scatter(1, accepted[:, None], drawn[:, None]), accepted


def flashinfer_chain() -> Callable[..., object] | None:
    """FlashInfer's kernel with the two softmaxes that it needs before it; None where it is not installed."""
    try:
        from flashinfer.sampling import chain_speculative_sampling
    except ImportError:
        return None

    def chain(logits: torch.Tensor, draft: torch.Tensor, tokens: torch.Tensor, scale: torch.Tensor) -> object:
        p = torch.softmax(logits.float() * scale[:, None, None], -1)
        q = torch.softmax(draft[:, :-1].float() * scale[:, None, None], -1)
        return chain_speculative_sampling(q, tokens[:, 1:].int(), p)

    return chain


def make(device: str, quick: bool):
    others = rivals(device, quick, eager)
    chain = flashinfer_chain() if device == "cuda" else None
    if chain is not None:
        others["flashinfer"] = chain

    def case(shape: tuple[int, int, int], dtype: torch.dtype, copies: int) -> KernelCase:
        batch, width, vocab = shape
        logits = normal((copies, *shape), dtype, device)
        draft = normal((copies, *shape), dtype, device).add_(logits)
        seeds = torch.arange(batch, device=device)
        noise = Noise(seeds, seeds * 100, torch.ones(batch, device=device))
        # Draft tokens as the draft draws them, so that they are accepted as often as in a run.
        drawing = Noise(seeds, seeds * 100, noise.inv_temperature, stream=DRAFT)
        tokens = torch.zeros((copies, batch, width), dtype=torch.int64, device=device)
        for i in range(copies):
            tokens[i, :, 1:] = ops.sample(draft[i], drawing)[:, :-1]
        query_lens = torch.full((batch,), width, dtype=torch.int32, device=device)
        num_draft_tokens = query_lens - 1
        if device == "cuda":
            from pipespec_kernels.triton import Workspace, rejection_sample

            workspace = Workspace(batch, width, device)

            def ours(i: int) -> object:
                return rejection_sample(
                    logits[i], tokens[i], query_lens, num_draft_tokens, draft[i], noise, workspace=workspace
                )
        else:

            def ours(i: int) -> object:
                return ops.rejection_sample(logits[i], tokens[i], query_lens, num_draft_tokens, draft[i], noise)

        row = vocab * dtype.itemsize
        return KernelCase(
            batch * (2 * (width - 1) + 2) * row,
            ours,
            {
                name: lambda i, rival=rival: rival(logits[i], draft[i], tokens[i], noise.inv_temperature)
                for name, rival in others.items()
                if width > 1
            },
        )

    return case


def input_bytes(shape: Shape, dtype: torch.dtype) -> int:
    return 2 * logits_bytes(shape, dtype)


BENCHMARKS = [Benchmark("rejection_sample", make, input_bytes=input_bytes)]

if __name__ == "__main__":
    main(BENCHMARKS, "Speed of rejection_sample against torch.")
