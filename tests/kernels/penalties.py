"""Cases and oracles for the tests of ``penalize``."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers.generation import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from pipespec_kernels.penalties import Penalties

from .selection import make_logits, ragged_counts


def case(seed: int, *, batch: int = 5, width: int = 4, vocab: int = 70, most: int = 40, kind: str = "normal") -> Any:
    """Arguments of ``penalize``: ragged rows, repeated tokens, ids outside of the vocabulary, biases of -inf."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    logits = make_logits(kind, (batch, width, vocab), torch.float32, generator)
    query_lens, num_draft_tokens = ragged_counts(batch, width, generator)
    bias = torch.randn(batch, 6, generator=generator)
    bias[:, 0] = -math.inf
    ids = torch.stack([torch.randperm(vocab, generator=generator)[:6] for _ in range(batch)]).int()
    ids[:, 5] = -1
    penalties = Penalties(
        repetition=torch.rand(batch, generator=generator) * 1.5 + 0.5,
        presence=torch.randn(batch, generator=generator),
        frequency=torch.randn(batch, generator=generator),
        prompt_lengths=integers(0, most // 2, batch),
        bias_ids=ids,
        bias=bias,
    )
    bitmask = integers(-(2**31), 2**31 - 1, batch, width, -(-vocab // 32))
    return {
        "logits": logits,
        "tokens": integers(-1, vocab + 3, batch, width),
        "history": integers(-1, vocab // 2, batch, most + width - 2),
        "lengths": integers(0, most, batch),
        "penalties": penalties,
        "query_lens": query_lens,
        "num_draft_tokens": num_draft_tokens,
        "bitmask": bitmask,
    }


def flat(penalties: Penalties) -> tuple[Any, ...]:
    return tuple(getattr(penalties, name) for name in Penalties.__slots__)


def by_processors(given: dict[str, Any]) -> torch.Tensor:
    """The logits by transformers' processors and by the formulas of vLLM's documentation, column by column."""
    out = given["logits"].clone()
    p = given["penalties"]
    vocab = out.shape[2]
    for row, fed in enumerate(given["query_lens"].tolist()):
        first = fed - 1 - int(given["num_draft_tokens"][row])
        for column in range(first if fed else 0, fed):
            scores = out[row, column][None]
            seen = torch.cat(
                [given["history"][row, : given["lengths"][row]], given["tokens"][row, : column + 1]]
            ).long()
            biases = {(int(i),): float(b) for i, b in zip(p.bias_ids[row], p.bias[row], strict=True) if 0 <= i < vocab}
            scores = SequenceBiasLogitsProcessor(biases)(None, scores)
            inside = seen[(seen >= 0) & (seen < vocab)]
            if len(inside):
                scores = RepetitionPenaltyLogitsProcessor(float(p.repetition[row]))(inside[None], scores)
            generated = seen[int(p.prompt_lengths[row]) :]
            counts = torch.bincount(generated[(generated >= 0) & (generated < vocab)], minlength=vocab)
            scores = scores - p.frequency[row] * counts - p.presence[row] * (counts > 0)
            bits = given["bitmask"][row, column][torch.arange(vocab) // 32] >> (torch.arange(vocab) % 32) & 1
            out[row, column] = scores[0].masked_fill(bits == 0, -math.inf)
    return out


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all numbers are the same, -0 and 0 too, and NaNs in the same places."""
    return torch.equal(a.nan_to_num(0.25) + 0.0, b.nan_to_num(0.25) + 0.0) and torch.equal(a.isnan(), b.isnan())
