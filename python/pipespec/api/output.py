"""The result of a call, which is what transformers would have returned, and its report."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers.generation import GenerateDecoderOnlyOutput

from pipespec.api.caches import returned
from pipespec.api.prepare import PreparedCall
from pipespec.api.report import Report, stage_report
from pipespec.engine.cache import RowCache
from pipespec.engine.sampling import ScoreRecord
from pipespec.errors import user_stacklevel
from pipespec.schedules.base import Decoder, SpeedWarning


class Logprobs(NamedTuple):
    """Log-probabilities of the new tokens, by the target's processed scores: what ``compute_transition_scores(normalize_logits=True)`` of transformers computes
    from ``scores``, and vLLM with ``logprobs_mode="processed_logprobs"``.

    Attributes:
        chosen: Float32 ``[B, new]``, of the generated tokens; 0 after the end of a row, so that the sum of a row is that of its text.
        top_ids: Int64 ``[B, new, n]``, the likeliest tokens, likeliest first; -1 where processors and filters leave fewer, and after the end of a row.
        top: Float32 ``[B, new, n]``, theirs; -inf where ``top_ids`` is -1.
    """

    chosen: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor


@dataclass
class LogprobsOutput(GenerateDecoderOnlyOutput):
    """What a call with ``logprobs=`` returns: transformers' fields, and ``logprobs`` as the last one. All other calls return transformers' own class."""

    logprobs: Logprobs | None = None


def report_of(call: PreparedCall, decoder: Decoder) -> Report:
    """The report of a call that ``decoder`` has run."""
    progress, rows, names, traces = call.progress, len(call.request.inputs.prompts), decoder.names, decoder.traces()
    translated = decoder.translated
    return Report(
        schedule=decoder.ran_as,
        rows=rows,
        tokens=sum(progress.text.counts()),
        seconds=progress.seconds,
        seconds_to_first_token=progress.seconds_to_first,
        stages=tuple(
            stage_report(name, decoder.block, i, rows, form, translated.get(i))
            for i, (name, form) in enumerate(zip(names, decoder.forms, strict=True))
        ),
        seeds=None if call.seeds is None else tuple(call.seeds),
        decisions=decoder.remarks or None,
        prompt_tokens_reused=decoder.prompt_tokens_reused,
        trace=traces or None,
    )


def warn_of_room(decoder: Decoder) -> None:
    """Warn of stages whose native form had no room. Nothing else says that a call ran much slower, and rounded otherwise."""
    for name, form in zip(decoder.names, decoder.forms, strict=True):
        if "there is no room for a packed copy" in form:
            warnings.warn(
                f"{name}: there is no room for a packed copy of its weights, so its own modules run, which is slower, and they round otherwise; free "
                "memory, or give it smaller weights (weights='q8_0')",
                SpeedWarning,
                stacklevel=user_stacklevel(),
            )


def output_of(call: PreparedCall, completed: RowCache | None) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """The result of a call that has run. ``completed``: what :func:`pipespec.api.caches.complete` has returned."""
    text = call.progress.text
    sequences = text.sequences()
    cache = None if completed is None else returned(call, completed)
    if not call.config.return_dict_in_generate:
        return sequences
    steps = sequences.shape[1] - text.input_ids.shape[1]
    if (record := call.request.record) is None:
        return GenerateDecoderOnlyOutput(sequences, past_key_values=cache)
    scores, logits = _per_token(call, record.scores, steps), _per_token(call, record.logits, steps)
    logprobs = _logprobs(call, record, steps)
    if logprobs is None:
        return GenerateDecoderOnlyOutput(sequences, scores, logits, past_key_values=cache)
    return LogprobsOutput(sequences, scores, logits, past_key_values=cache, logprobs=logprobs)


def _logprobs(call: PreparedCall, record: ScoreRecord, steps: int) -> Logprobs | None:
    both, ids = _per_token(call, record.logprobs, steps), _per_token(call, record.top_ids, steps)
    if both is None or ids is None:
        return None
    stacked, top_ids = torch.stack(both, 1), torch.stack(ids, 1).long()
    counts = torch.tensor(call.progress.text.counts(), device=stacked.device)
    over = (torch.arange(steps, device=stacked.device) >= counts[:, None])[:, :, None]
    return Logprobs(stacked[:, :, 0], top_ids.masked_fill(over, -1), stacked[:, :, 1:].masked_fill(over, -torch.inf))


def _per_token(
    call: PreparedCall, rows: list[list[torch.Tensor]] | None, steps: int
) -> tuple[torch.Tensor, ...] | None:
    """Per generated token ``[B, V]``."""
    return None if rows is None else tuple(call.progress.text.column(rows, i) for i in range(steps))
