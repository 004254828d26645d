"""Hidden states and attentions of a finished text, in the form of transformers' ``generate()``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel


class Features(NamedTuple):
    """Per generated token, per layer, as in transformers' ``GenerateDecoderOnlyOutput``; None: not asked for.

    The first token has the columns of the prompt, each further one the column that it was computed from: hidden states ``[B, S, hidden]``, then
    ``[B, 1, hidden]``; attentions ``[B, heads, S, S]``, then ``[B, heads, 1, S + i]``. Without a cache each token has the columns of all before it.
    """

    hidden_states: tuple[tuple[torch.Tensor, ...], ...] | None
    attentions: tuple[tuple[torch.Tensor, ...], ...] | None


def features_of(
    model: PreTrainedModel,
    sequences: torch.Tensor,
    mask: torch.Tensor,
    *,
    hidden_states: bool,
    attentions: bool,
    cached: bool = True,
) -> Features:
    """Run a model once over a text, and cut its features into those of the single steps.

    They equal those of decoding token by token up to rounding, but for the columns of padding, whose values mean nothing.

    Args:
        model: the model that generated the text.
        sequences: int64 ``[B, S + new]``.
        mask: ``[B, S]``, 0 for padding, of the prompt.
        hidden_states: whether to return them.
        cached: whether each step computes its newest column only, as with a cache. Otherwise it has those of the whole text so far.
        attentions: whether to return them. Empty per token with an attention implementation that does not compute them, as in transformers.
    """
    (rows, width), last = mask.shape, sequences.shape[1] - 1
    whole = torch.cat([mask, mask.new_ones((rows, last - width))], 1) if last > width else mask
    positions = (whole.long().cumsum(-1) - 1).clamp(min=0)
    out: Any = model(
        input_ids=sequences[:, :last],
        attention_mask=whole,
        position_ids=positions,
        use_cache=False,
        output_hidden_states=hidden_states,
        output_attentions=attentions,
    )
    ends = range(width, last + 1)
    begins = [0, *range(width, last)] if cached else [0] * len(ends)
    hidden = attended = None
    if hidden_states:
        hidden = tuple(
            tuple(layer[:, begin:end] for layer in out.hidden_states) for begin, end in zip(begins, ends, strict=True)
        )
    if attentions:
        attended = tuple(
            tuple(layer[:, :, begin:end, :end] for layer in out.attentions or ())
            for begin, end in zip(begins, ends, strict=True)
        )
    return Features(hidden, attended)
