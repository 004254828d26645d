"""Scoring: log-probabilities of generated tokens and of prompts, as APIs show them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from pipespec.models.compat import new_cache

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


class Likelihood(NamedTuple):
    """Of one token: its log-probability (None: nothing comes before it), and the likeliest tokens at its place with theirs."""

    token: int
    logprob: float | None
    top: list[tuple[int, float]]


Likelihoods = list[Likelihood]


def likelihoods_of(found: Any, tokens: list[int]) -> Likelihoods:
    """Of generated ``tokens``, by the :class:`pipespec.api.output.Logprobs` of their call."""
    chosen, ids, values = found.chosen[0].tolist(), found.top_ids[0].tolist(), found.top[0].tolist()
    return [
        Likelihood(
            token, _finite(chosen[n]), [(i, _finite(v)) for i, v in zip(ids[n], values[n], strict=True) if i >= 0]
        )
        for n, token in enumerate(tokens)
    ]


def _finite(value: float) -> float:
    return max(value, LOWEST)


@torch.no_grad()
def prompt_likelihoods(model: Any, prompt: list[int], top: int, chunk: int, pause: Callable[[], None]) -> Likelihoods:
    """Of the tokens of a prompt, by forwards of the target's own modules.

    Args:
        top: How many of the likeliest tokens are wanted at each place.
        chunk: Tokens per forward.
        pause: Called before each one.
    """
    ids = torch.tensor([prompt], dtype=torch.long, device=model.device)
    found, cache = [Likelihood(prompt[0], None, [])], new_cache(model)
    for begin in range(0, len(prompt) - 1, chunk):
        pause()
        end = min(begin + chunk, len(prompt) - 1)
        output = model(ids[:, begin:end], past_key_values=cache, use_cache=True)
        scores = output.logits[0].float().log_softmax(-1)
        chosen = scores.gather(1, ids[0, begin + 1 : end + 1, None])[:, 0].tolist()
        values, places = (x.tolist() for x in scores.topk(max(top, 1)))
        for n, token in enumerate(prompt[begin + 1 : end + 1]):
            pairs = [(i, _finite(v)) for i, v in zip(places[n], values[n], strict=True)][:top]
            found.append(Likelihood(token, _finite(chosen[n]), pairs))
    return found
