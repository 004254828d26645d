"""Cases and oracle for the tests of ``logprobs``."""

from __future__ import annotations

import math
from typing import Any

import torch

from .selection import make_logits, ragged_counts


def case(
    seed: int, *, batch: int = 5, width: int = 4, vocab: int = 70, kind: str = "normal", dtype: Any = torch.float32
) -> dict[str, Any]:
    """Arguments of ``logprobs``: ragged rows, columns without a selected token, tokens below the cutoff, and ids outside of the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    logits = make_logits(kind, (batch, width, vocab), dtype, generator)
    query_lens, num_draft_tokens = ragged_counts(batch, width, generator)
    selected = torch.randint(0, vocab, (batch, width), generator=generator, dtype=torch.int32)
    selected[torch.rand(batch, width, generator=generator) < 0.2] = -1
    selected[0, 0] = vocab
    return {
        "logits": logits,
        "selected": selected,
        "query_lens": query_lens,
        "num_draft_tokens": num_draft_tokens,
        "inv_temperature": torch.rand(batch, generator=generator) + 0.5,
        "cutoff": torch.randn(batch, width, generator=generator) * 0.7,
        "top_n": 4,
    }


def oracle(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Column after column by ``torch.log_softmax`` in float64 and a stable sort."""
    batch, width, vocab = given["logits"].shape
    n = given["top_n"]
    chosen = torch.full((batch, width), -math.inf)
    ids, top = torch.full((batch, width, n), -1, dtype=torch.int32), torch.full((batch, width, n), -math.inf)
    for row in range(batch):
        fed, drafts = int(given["query_lens"][row]), int(given["num_draft_tokens"][row])
        for j in range(drafts + 1 if fed else 0):
            token, column = int(given["selected"][row, j]), fed - 1 - drafts + j
            if not 0 <= token < vocab:
                continue
            x = given["logits"][row, column].double()
            if given["cutoff"] is not None:
                x = x.masked_fill(x < given["cutoff"][row, column].double(), -math.inf)
            y = x
            if given["inv_temperature"] is not None:
                y = torch.where(x == -math.inf, x, x * given["inv_temperature"][row].double())
            p = torch.log_softmax(y, -1)
            chosen[row, j] = p[token]
            best = torch.sort(x, descending=True, stable=True).indices[:n]
            top[row, j] = p[best]
            ids[row, j] = torch.where(p[best] > -math.inf, best, -1)
    return chosen, ids, top


def check_close(got: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> None:
    """The same ids, and numbers within float32's rounding."""
    assert torch.equal(got[1].cpu(), wanted[1])
    for mine, theirs in ((got[0], wanted[0]), (got[2], wanted[2])):
        torch.testing.assert_close(mine.cpu(), theirs, atol=3e-6, rtol=3e-6, equal_nan=True)
