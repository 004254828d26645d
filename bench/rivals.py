"""Kernels of other libraries next to ours, where these are installed: the rejection samplers of vLLM (Triton) and FlashInfer, flash-attn, and products of torch's inductor.

Each begins with what ours begins with, and takes the libraries' own steps from there: probabilities from logits, too. Draft tokens have no distribution of their own, as in our case.
"""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernel_timing import Call

compiled = False
"""Whether inductor chooses among its products, which takes half a minute for a shape."""


def samplers(logits: Tensor, tokens: Tensor, coupled: bool) -> dict[str, Call]:
    """Verification of draft tokens ``tokens [copies, B, 1:]`` by ``logits [copies, B, Q, V]``, ``coupled``: by a draw, which FlashInfer always does."""
    _, batch, width, _ = logits.shape
    if width == 1:
        return {}
    drafts, found = tokens[:, :, 1:].int().contiguous(), dict[str, Call]()
    if coupled and find_spec("flashinfer"):
        from flashinfer.sampling import chain_speculative_sampling

        of_drafts = torch.zeros_like(logits[:, :, 1:], dtype=torch.float32).scatter_(-1, drafts[..., None].long(), 1.0)
        found["FlashInfer"] = lambda i: chain_speculative_sampling(
            of_drafts[i], drafts[i], torch.softmax(logits[i].float(), -1)
        )
    if find_spec("vllm"):
        from vllm.v1.sample.rejection_sampler import rejection_sample

        ones = torch.ones(batch, device=logits.device)
        how = {"all_greedy": not coupled, "all_random": coupled, "temperature": ones, "generators": {}}
        settings = SimpleNamespace(**how, top_k=None, top_p=None)
        counts, ends = [width - 1] * batch, torch.arange(1, batch + 1, device=logits.device).int() * (width - 1)
        # Newer versions take logits.
        takes_logits = "target_logits" in inspect.signature(rejection_sample).parameters

        def vllm(i: int) -> Any:
            rows, last = logits[i, :, :-1].flatten(0, 1).float(), logits[i, :, -1].float()
            if coupled:
                last = torch.softmax(last, -1) / torch.empty_like(last).exponential_()
                rows = rows if takes_logits else torch.softmax(rows, -1)
            bonus = last.argmax(-1, keepdim=True).int()
            return rejection_sample(drafts[i].flatten(), counts, width - 1, ends, None, rows, bonus, settings)

        found["vLLM"] = vllm
    return found


def attentions(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Call]:
    """Attention of ``q [copies, B, Hq, Q, D]`` over all of ``k`` and ``v [copies, B, Hkv, S, D]``, whose last ``Q`` keys are the columns' own. flash-attn takes 16 bits."""
    if q.dtype not in (torch.float16, torch.bfloat16) or not find_spec("flash_attn"):
        return {}
    from flash_attn import flash_attn_with_kvcache

    lengths = torch.full((k.shape[1],), k.shape[3], dtype=torch.int32, device=k.device)
    heads_last = [x.transpose(2, 3) for x in (q, k, v)]
    return {
        "flash-attn": lambda i: flash_attn_with_kvcache(
            *(x[i] for x in heads_last), None, None, cache_seqlens=lengths, causal=True
        )
    }


def products(x: Tensor, weights: Tensor) -> dict[str, Call]:
    """Rows ``x [M, K]`` times each of ``weights [copies, N, K]``."""
    if not compiled:
        return {}
    made = torch.compile(F.linear, mode="max-autotune-no-cudagraphs", dynamic=False)
    return {"inductor": lambda i: made(x, weights[i])}
