"""How fast is the ratio test on a GPU? ``python -m bench.bench_verify_ratio [--quick] [--json FILE]``

``verify_ratio`` with a drawn hint in every column but the first, against the same in torch: two softmaxes in float32,
the test, and a draw from the residual for the one column of each row that needs it. Bytes: both models' rows of all
hints once, and the pair of rows that is drawn from, once more.
"""

from __future__ import annotations

import argparse

import torch

from bench import gpu
from pipespec_kernels.noise import Noise


def eager(
    logits: torch.Tensor, draft: torch.Tensor, tokens: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Torch's own way for rows that are fed full width, all but the first token hints."""
    p = torch.softmax(logits.float() * scale[:, None, None], -1)
    q = torch.softmax(draft.float() * scale[:, None, None], -1)
    hints = tokens[:, 1:, None]
    p_hint, q_hint = p[:, :-1].gather(-1, hints)[..., 0], q[:, :-1].gather(-1, hints)[..., 0]
    accepted = (torch.rand_like(p_hint) * q_hint < p_hint).int().cumprod(1).sum(1)
    here = accepted[:, None, None].expand(-1, 1, p.shape[-1])
    residual = (p.gather(1, here) - q.gather(1, here)).clamp(min=0)[:, 0]
    # Behind the last hint there is no q; nor where nothing is left.
    whole = (accepted == tokens.shape[1] - 1)[:, None] | (residual.sum(-1, keepdim=True) <= 0)
    residual = torch.where(whole, p.gather(1, here)[:, 0], residual)
    drawn = (residual / torch.empty_like(residual).exponential_()).argmax(-1)
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    selected = torch.where(columns < accepted[:, None], tokens.roll(-1, 1), -1)
    return selected.scatter(1, accepted[:, None], drawn[:, None]), accepted


def make(quick: bool):
    from pipespec_kernels.triton import Workspace, verify_ratio

    rivals = {"eager": eager} if quick else {"eager": eager, "compile": gpu.compiled(eager)}

    def case(shape: tuple[int, int, int], dtype: torch.dtype, copies: int) -> gpu.Case:
        batch, width, vocab = shape
        logits = torch.empty((copies, *shape), dtype=dtype, device="cuda").normal_()
        draft = torch.empty_like(logits).normal_().add_(logits)
        tokens = torch.randint(0, vocab, (batch, width), device="cuda")
        n_fed = torch.full((batch,), width, dtype=torch.int32, device="cuda")
        n_hint = n_fed - 1
        seeds = torch.arange(batch, device="cuda")
        noise = Noise(seeds, seeds * 0, torch.ones(batch, device="cuda"))
        workspace = Workspace(batch, width, "cuda")
        row = vocab * dtype.itemsize
        return gpu.Case(
            batch * (2 * (width - 1) + 2) * row,
            lambda i: verify_ratio(logits[i], tokens, n_fed, n_hint, draft[i], noise, workspace=workspace),
            {
                name: lambda i, rival=rival: rival(logits[i], draft[i], tokens, noise.inv_temperature)
                for name, rival in rivals.items()
                if width > 1
            },
        )

    return case


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of verify_ratio on a GPU against torch.")
    gpu.add_options(parser)
    gpu.run_benchmark(parser.parse_args(), "bench_verify_ratio", 2, make)


if __name__ == "__main__":
    main()
