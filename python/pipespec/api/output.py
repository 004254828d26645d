"""The result of a call, which is what transformers would have returned, and its report."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.generation import GenerateDecoderOnlyOutput

from pipespec.api.caches import Columns, remember_texts
from pipespec.api.prepare import PreparedCall
from pipespec.api.report import Report, stage_report
from pipespec.engine.attention import MaskKind, mask_kind
from pipespec.engine.cache import RowCache
from pipespec.engine.sampling import ScoreRecord
from pipespec.errors import user_stacklevel
from pipespec.models.compat import new_cache
from pipespec.models.devices import input_device
from pipespec.models.layout import CacheLayout
from pipespec.schedules.base import CacheOwner, Decoder, SpeedWarning


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
        prompt_tokens=sum(map(len, call.request.inputs.prompts)),
        plain_step_seconds=decoder.plain_step_seconds,
        prompt_tokens_reused=decoder.prompt_tokens_reused,
        packing_seconds=progress.packing_seconds,
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
    """The result of a call that has run. ``completed``: what :func:`complete` has returned."""
    text = call.progress.text
    sequences = text.sequences()
    cache = None if completed is None else _returned(call, completed)
    if not call.config.return_dict_in_generate:
        return sequences
    steps = sequences.shape[1] - text.input_ids.shape[1]
    scores = logits = logprobs = None
    if (record := call.request.record) is not None:
        scores, logits = _per_token(call, record.scores, steps), _per_token(call, record.logits, steps)
        logprobs = _logprobs(call, record, steps)
    if call.options.logprobs is None:
        return GenerateDecoderOnlyOutput(sequences, scores, logits, past_key_values=cache)
    # Ranks that follow have the class, too, and no scores.
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


# ---- the cache of the result, see :mod:`pipespec.api.caches`


def complete(call: PreparedCall, owner: CacheOwner) -> RowCache | None:
    """Let ``owner`` hold what transformers would hold after the call: all columns but the last, those after the end of a row included.

    Returns:
        None where the caller gets no cache.
    """
    if not call.request.returns_cache:
        return None
    return owner.complete(_texts_after(call), [n - 1 for n in call.progress.text.lengths])


def _texts_after(call: PreparedCall) -> list[np.ndarray]:
    text = call.progress.text
    new = text.sequences()[:, text.input_ids.shape[1] : -1].to("cpu", torch.int32).numpy()
    return [np.concatenate(pair) for pair in zip(call.request.inputs.prompts, new, strict=True)]


def _returned(call: PreparedCall, own: RowCache) -> Cache:
    """The caller's cache, with the columns of the call appended; a new one if the caller gave none. One copy of them."""
    columns, cache, text = call.columns, call.options.cache, call.progress.text
    width = text.sequences().shape[1] - 1 + columns.cached - columns.held
    begins = columns.tokens(columns.held)
    # Not inference tensors, whose gradients could not be computed.
    with torch.inference_mode(False), torch.no_grad():
        padding = _padding(call) if len(columns.hidden) else None
        cache = new_cache(call.target) if cache is None else cache
        for i, pair in enumerate(own.states()):
            if pair is None:
                continue  # the layer reads what another one has stored
            if i not in own.layout.attention:
                cache.update_conv_state(pair[0], i)
                cache.update_recurrent_state(pair[1], i)
                continue
            if padding is None and len(set(begins)) == 1:
                new = [x[:, :, begins[0] :].to(own.compute_dtype) for x in pair]
            else:
                new = [_placed(x, columns, begins, width).to(own.compute_dtype) for x in pair]
            if padding is not None:
                rows, at = columns.hidden.T
                for placed, states in zip(new, padding[i], strict=True):
                    placed[torch.from_numpy(rows), :, torch.from_numpy(at - columns.held)] = states.to(placed)
            cache.update(*new, i)
    if call.is_text_known:
        remember_texts(cache, _texts_after(call))
    return cache


def _placed(states: torch.Tensor, columns: Columns, begins: Sequence[int], width: int) -> torch.Tensor:
    """The tokens of each row from ``begins[row]`` on, in ``width`` columns after those that the caller's cache held. Padding is zero."""
    placed = states.new_zeros((*states.shape[:2], width, states.shape[3]))
    for row, (begin, places) in enumerate(zip(begins, columns.places, strict=True)):
        read = columns.count - columns.held
        at = torch.from_numpy(places[begin:] - columns.held).to(states.device)
        placed[row][:, at] = states[row, :, begin : len(places)]
        placed[row, :, read:] = states[row, :, len(places) : len(places) + width - read]
    return placed


def _padding(call: PreparedCall) -> list[list[torch.Tensor]]:
    """What transformers leaves in the ``n`` columns of :attr:`Columns.hidden`, which a later mask may show: a forward of the target's own says it.

    Returns:
        Per layer, keys and values ``[n, kv_heads, head_dim]``; nothing of recurrent layers.
    """
    columns, target, device = call.columns, call.target, input_device(call.target)
    first = columns.held
    new = [x[:, first - columns.count :].cpu() for x in (call.progress.text.input_ids, call.position_ids)]
    rows, at = (torch.from_numpy(x) for x in (columns.hidden - [0, first]).T)
    is_recurrent = CacheLayout.of(target.config).states is not None
    begins = np.array([places[0] for places in columns.places])
    sees_nothing = bool((columns.hidden[:, 1] < begins[columns.hidden[:, 0]]).all())
    if sees_nothing and not is_recurrent and mask_kind(target.config) is MaskKind.SDPA:
        # Such a column depends on its token and its position only.
        different, which = torch.stack([x[rows, at] for x in new], 1).unique(dim=0, return_inverse=True)
        new, mask, seen = list(different[:, :, None].transpose(0, 1)), torch.zeros(len(different), 1), DynamicCache()
        rows, at = which, torch.zeros_like(which)
    else:
        mask, seen = call.mask, new_cache(target) if is_recurrent else DynamicCache()
        for i, layer in enumerate(call.options.cache.layers if call.options.cache is not None and first else ()):
            if layer.keys is not None:
                seen.update(layer.keys, layer.values, i)
        at = at + first
    target(
        input_ids=new[0].to(device),
        attention_mask=mask.to(device, torch.long),
        position_ids=new[1].to(device),
        past_key_values=seen,
        use_cache=True,
        logits_to_keep=1,
    )
    pairs = ((layer.keys, layer.values) if isinstance(layer, DynamicLayer) else () for layer in seen.layers)
    return [[x[rows, :, at] for x in pair] for pair in pairs]
