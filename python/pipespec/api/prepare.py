"""Preparation: a call of ``generate()``, as transformers has prepared it, becomes the request that a decoder runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from transformers import Cache, GenerationConfig, PreTrainedModel
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from pipespec.api.arguments import MAX_TOKENS, check_logprobs, check_positions
from pipespec.api.caches import Columns, cached_texts, columns_held, converted
from pipespec.api.text import CommittedText, Criteria, Progress
from pipespec.engine.attention import MaskKind, mask_kind
from pipespec.engine.callers import check_of_model, check_row_wise
from pipespec.engine.inputs import StageInputs, prefill_chunk
from pipespec.engine.sampling import Prompt, SamplingParams, ScoreRecord, row_seeds, with_penalties
from pipespec.errors import NotKnown, UnsupportedInput
from pipespec.models.compat import mask_columns_of_call, positions_of_call, recurrent_layer
from pipespec.models.devices import input_device
from pipespec.models.layout import CacheLayout
from pipespec.models.properties import head_size
from pipespec.schedules.base import GenerationRequest
from pipespec_kernels.state import MAX_EOS


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """What a call has in addition to the arguments that transformers prepares, see :meth:`pipespec.Pipeline.generate`.

    Attributes:
        cache: The caller's ``past_key_values``.
        penalties: Arguments of :func:`pipespec.engine.sampling.with_penalties`.
        only_known: Whether a call with unknown code is refused instead of left to transformers' loop.
    """

    streamer: Any = None
    cache: Cache | None = None
    seed: Any = None
    penalties: Mapping[str, Any] = field(default_factory=dict)
    grammar: Any = None
    logprobs: int | None = None
    only_known: bool = False


@dataclass
class PreparedCall:
    """One call, ready to run.

    Attributes:
        target: The model whose text is generated.
        config: The merged configuration.
        mask: ``[B, S]``, 0 for padding, cached columns included.
        position_ids: Of these columns, or of those of ``input_ids``.
        columns: Where the tokens of each row are in the call's mask.
        is_text_known: Whether the text of cached tokens is known.
        seeds: Per row, those of a sampled call; None for a greedy one.
        progress: The text that is committed so far.
        request: What a decoder gets.
    """

    target: PreTrainedModel
    config: GenerationConfig
    options: CallOptions
    mask: torch.Tensor
    position_ids: torch.Tensor
    columns: Columns
    is_text_known: bool
    seeds: list[int] | None
    progress: Progress
    request: GenerationRequest

    def follow(self) -> None:
        """Take the text as the leader of a tensor-parallel group commits it: it has drawn the seeds, applied the criteria, and has the scores."""
        self.seeds = None
        self.request = replace(self.request, record=None)
        self.progress.follow()


def prepare(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    options: CallOptions,
    *,
    generation_config: GenerationConfig,
    logits_processor: Sequence[Any],
    stopping_criteria: Sequence[Any],
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    **_: Any,
) -> PreparedCall:
    """Read the arguments of a call as transformers has prepared them.

    Args:
        input_ids: int64 ``[B, S]``.
        generation_config: The merged configuration.
        stopping_criteria: Those for the length and for ``eos_token_id`` included.
        attention_mask: ``[B, S]``, 0 for padding. With a cache it may have columns for cached tokens before these.
        position_ids: As derived from the mask.

    Raises:
        ValueError: A value cannot work; the message names the argument.
        NotImplementedError: An option of transformers is not supported.
    """
    config, (rows, width) = generation_config, input_ids.shape
    if attention_mask is None:
        attention_mask = input_ids.new_ones((rows, mask_columns_of_call(config, position_ids, width)))
    if position_ids is not None:
        check_positions(position_ids, attention_mask, width)
    columns = Columns(attention_mask, width, columns_held(options.cache))
    ids, cached = input_ids.to("cpu", torch.int32).numpy(), columns.tokens(columns.cached)
    texts, prompts, shown = cached_texts(options.cache, cached), [], []
    for row, (places, held, n) in enumerate(zip(columns.places, texts, cached, strict=True)):
        # Where the text of cached tokens is not known, zeros stand for it, which only drafts see.
        unknown = np.zeros(n - len(held), dtype=np.int32)
        prompts.append(np.concatenate([held, unknown, ids[row, places[n:] - columns.cached]]))
        shown.append(Prompt(ids[row], len(places), max(0, int(places[0]) - columns.cached)))
    is_text_known = [len(held) for held in texts] == cached
    eos, max_length, others = _read_criteria(stopping_criteria, width)
    limits = [len(prompt) + max(int(max_length.max_length), width + 1) - width for prompt in prompts]
    seeds = row_seeds(options.seed, rows) if config.do_sample or options.seed is not None else None
    seeds = seeds if config.do_sample else None  # greedy: a seed is checked, and changes nothing
    check_row_wise(logits_processor, rows)
    processors = with_penalties(logits_processor, width, **options.penalties)
    sampling_params = SamplingParams.of(processors, seeds=seeds, prompts=shown, ends=eos)
    sampling_params.check_ids(head_size(target))
    grammar = None
    if options.grammar is not None:
        from pipespec.engine.grammar import Grammar

        grammar = Grammar.of(options.grammar, [len(prompt) for prompt in prompts])
    inputs = StageInputs(
        prompts,
        limits,
        sampling_params,
        head_size(target),
        chunk=config.prefill_chunk_size or prefill_chunk(rows, str(input_device(target))),
        grammar=grammar,
    )
    record = _record(rows, config, check_logprobs(options.logprobs, config, inputs.vocabulary), sampling_params)
    if options.cache is not None and not config.use_cache:
        raise UnsupportedInput("use_cache", "use_cache=False with past_key_values: pass one of them only")
    returns_cache = options.cache is not None or bool(config.return_dict_in_generate and config.use_cache)
    _check_padding(target, columns, columns.count + int(max_length.max_length) - width, returns_cache)
    row_cache = None if options.cache is None else converted(target, options.cache, columns, inputs.capacity)
    pad = getattr(config, "_pad_token_tensor", None)
    text = CommittedText(input_ids, prompts, limits, eos, (eos or [0])[0] if pad is None else int(pad))
    check_model = check_of_model(target, [*logits_processor, *others, options.streamer]) or (lambda: None)
    # transformers fills finished rows only where a criterion has end tokens.
    pads = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    criteria = Criteria(text, others, pads, record, check_model) if others else None
    progress = Progress(text, criteria, options.streamer, record, max_length, check_model)
    request = GenerationRequest(inputs, eos, progress.on_commit, record, row_cache, returns_cache)
    positions = positions_of_call(position_ids, attention_mask)
    return PreparedCall(
        target, config, options, attention_mask, positions, columns, is_text_known, seeds, progress, request
    )


def _record(
    rows: int, config: GenerationConfig, logprobs: int | None, sampling_params: SamplingParams
) -> ScoreRecord | None:
    """Where the target stores what the call asks for in addition to the text; None: it asks for nothing."""
    has_outputs = config.return_dict_in_generate and (config.output_scores or config.output_logits)
    if not has_outputs and logprobs is None:
        return None
    return ScoreRecord(
        rows,
        scores=bool(config.output_scores),
        logits=bool(config.output_logits),
        top_logprobs=logprobs,
        warpers=sampling_params.warpers,
    )


def _read_criteria(stopping_criteria: Sequence[Any], width: int) -> tuple[list[int], Any, list[Any]]:
    """The token ids that end a row, transformers' criterion for the length, and the criteria that are to be called."""
    # Ids beyond 32 bits are those of no token.
    ends = (
        token for criterion in stopping_criteria if _is_eos(criterion) for token in criterion.eos_token_id.flatten()
    )
    eos = [int(token) for token in ends if 0 <= int(token) < 2**31]
    if len(eos) > MAX_EOS:
        raise UnsupportedInput("eos_token_id", f"eos_token_id: at most {MAX_EOS} ids, got {len(eos)}")
    # The caller's own criteria replace transformers'. They run after a token, so one token is always generated.
    lengths = [criterion for criterion in stopping_criteria if type(criterion) is MaxLengthCriteria]
    max_length = min(lengths, key=lambda criterion: int(criterion.max_length))
    if max_length.max_length > width + MAX_TOKENS:
        raise ValueError(f"MaxLengthCriteria: {max_length.max_length} is more than any row can have ({MAX_TOKENS})")
    return eos, max_length, [c for c in stopping_criteria if type(c) is not MaxLengthCriteria and not _is_eos(c)]


def _is_eos(criterion: Any) -> bool:
    return type(criterion) is EosTokenCriteria and getattr(criterion, "new_token_length", 1) == 1


def _check_padding(target: PreTrainedModel, columns: Columns, limit: int, returns_cache: bool) -> None:
    """Check that the target's attention takes masks, and that its windows and states hold the same tokens as in ``generate()``, which counts columns.

    ``limit``: the columns that the call may reach.
    """
    if len(columns.places) > 1 and mask_kind(target.config) is MaskKind.NONE:
        what = f"{target.config._attn_implementation} attention takes no masks for rows of different lengths"
        raise NotKnown("model", f"generate(): {what}")
    layout = CacheLayout.of(target.config)
    if layout.states is not None and returns_cache and recurrent_layer is None:
        raise NotKnown(
            "past_key_values",
            "generate(): this version of transformers has a cache of its own for the target's recurrent layers, which a pipeline does not fill",
        )
    if layout.states is not None:
        what = "which the target's recurrent layers take for tokens"
    elif layout.restricts(limit):
        what = "which counts in the target's sliding windows"
    else:
        return
    if columns.has_holes():
        raise NotKnown("attention_mask", f"generate(): attention_mask has padding after a row's first token, {what}")
