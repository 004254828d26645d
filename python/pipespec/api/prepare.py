"""Preparation: a call of ``generate()``, as transformers has prepared it, becomes the request that a decoder runs.

transformers counts the columns of a caller's cache, padding included. A RowCache holds the tokens of each row. Only copies pass between the two: the RowCache
stays the target's, and the ``DynamicCache`` the caller's. The way back is in :mod:`pipespec.api.output`.

What comes in is continued exactly whatever is in it, because a later token sees the same keys and has the same position as in transformers: the
position is the number of ones that ``attention_mask`` has before it. A sliding window counts columns, so rows must have no holes there. Any other
state is left to transformers.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from pipespec.api.arguments import MAX_TOKENS, check_logprobs, check_positions
from pipespec.api.text import CommittedText, Criteria, Progress
from pipespec.engine.attention import MaskKind, mask_kind
from pipespec.engine.cache import RowCache
from pipespec.engine.callers import check_of_model, check_row_wise
from pipespec.engine.chain import StageInputs, prefill_chunk
from pipespec.engine.sampling import Prompt, SamplingParams, ScoreRecord, row_seeds, with_penalties
from pipespec.errors import NotKnown, Unsupported, UnsupportedInput
from pipespec.models.compat import (
    empty_layer,
    mask_columns_of_call,
    positions_of_call,
    recurrent_layer,
    recurrent_states,
)
from pipespec.models.layout import CacheLayout
from pipespec.models.properties import head_size, input_device
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


_LAYERS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    *(kind for kind in (recurrent_layer, empty_layer) if kind is not None),
)

_texts: weakref.WeakKeyDictionary[Cache, list[np.ndarray]] = weakref.WeakKeyDictionary()
"""Per row, the text whose keys and values a call left in a DynamicCache. Only drafts read it: a later change of the cache costs them acceptance."""


class Columns:
    """Where the tokens of each row are in the columns of the call's mask.

    Args:
        mask: ``[B, S]``, 0 for padding.
        width: Columns of ``input_ids``, the last ones of the mask.
        held: Columns that the caller's cache holds, the first ones.

    Attributes:
        count: Columns of the mask.
        cached: How many of them are before those of ``input_ids``.
        held: As given.
        places: Per row, the columns that are no padding.
        hidden: Row and column of each padding that the cache does not hold, int64 ``[n, 2]``.

    Raises:
        UnsupportedInput: A row is all padding, or ends with padding.
    """

    def __init__(self, mask: torch.Tensor, width: int, held: int = 0) -> None:
        self.count = mask.shape[1]
        self.cached = self.count - width
        self.held = held
        given = mask.cpu().numpy()
        self.places = [np.flatnonzero(row) for row in given]
        self.hidden = np.argwhere(given[:, held:] == 0) + np.array([0, held])
        for row, places in enumerate(self.places):
            if len(places) == 0:
                raise UnsupportedInput(
                    "attention_mask", f"attention_mask: row {row} is all padding; the prompt is empty"
                )
            if places[-1] != self.count - 1:
                raise UnsupportedInput(
                    "attention_mask",
                    f"attention_mask: row {row} ends with padding; pad on the left (padding_side='left')",
                )

    def tokens(self, columns: int) -> list[int]:
        """Per row, the number of tokens in the first columns."""
        return [int((places < columns).sum()) for places in self.places]

    def has_holes(self) -> bool:
        """Whether a row has padding after its first token."""
        return any(int(places[0]) + len(places) != self.count for places in self.places)


def columns_held(cache: Cache | None) -> int:
    """Columns that the caller's cache holds.

    Raises:
        Unsupported: It is no cache of transformers.
        NotKnown: It is no plain ``DynamicCache``, so what it does is not known.
    """
    if cache is None:
        return 0
    if not isinstance(cache, Cache):
        raise Unsupported(
            "past_key_values", f"past_key_values: {type(cache).__name__} is not supported; pass a DynamicCache"
        )
    if type(cache) is not DynamicCache:
        raise _state(f"is a {type(cache).__name__}")
    if not _is_plain(cache):
        raise _state("is a DynamicCache with methods or layers of its own")
    return int(cache.get_seq_length())


def _is_plain(cache: Cache) -> bool:
    """Whether a ``DynamicCache`` stores what it is given, and nothing else: it has the layers and methods of transformers."""
    if getattr(cache, "offloading", False):
        return False
    layers = getattr(cache, "layer_class_to_replicate", None)
    return (layers is None or layers is DynamicLayer) and all(
        kind in (*_LAYERS, DynamicCache) and not any(callable(getattr(kind, name, None)) for name in vars(part))
        for part in (cache, *cache.layers)
        for kind in [type(part)]
    )


def converted(target: PreTrainedModel, cache: Cache, columns: Columns, capacity: int) -> RowCache | None:
    """A copy of the caller's plain cache, with the rows of the call. ``capacity``: positions per row.

    Returns:
        A cache that holds at least one token less than each prompt; None where the caller's is empty.

    Raises:
        NotKnown: Cache and call do not fit, or what the target would see is not what transformers shows it.
    """
    layout, rows, held = CacheLayout.of(target.config), len(columns.places), columns.held
    if held != (columns.cached or held) or held >= columns.count:
        raise _state("holds other columns than attention_mask has before the new tokens")
    if not _has_layers_of(cache, layout):
        raise _state("has other layers than the target")
    if not held and not any(map(_holds, cache.layers)):
        return None
    if len(columns.hidden) and held and (layout.states is not None or any(layout.windows)):
        raise _state("goes on with padding, which counts in sliding windows and recurrent states")
    tokens = columns.tokens(held)
    own = RowCache.for_model(target, rows, max(capacity, held))
    if layout.states is not None and not all(tokens):
        raise _state("has recurrent states of rows without tokens")
    at = [torch.from_numpy(places[:n]) for places, n in zip(columns.places, tokens, strict=True)]
    loaded: list[tuple[torch.Tensor, torch.Tensor] | None] = []
    for i, device in enumerate(own.layer_devices):
        if i in layout.readers:
            loaded.append(None)
            continue
        is_own = i in layout.attention
        pair = _of_layer(cache.layers[i], held) if is_own else recurrent_states(cache.layers[i])
        keys, values = pair = _checked(pair, rows, device, own.compute_dtype if is_own else None)
        loaded.append((_gathered(keys, at, held), _gathered(values, at, held)) if is_own else pair)
    try:
        own.load(loaded, tokens)
    except (ValueError, RuntimeError) as error:  # of other sizes
        raise _state("has other sizes than the target's keys and values") from error
    if any(window is not None and window <= held for window in layout.windows):
        own.set_floors(tokens)
    return own


def _checked(
    pair: tuple[torch.Tensor, torch.Tensor] | None, rows: int, device: torch.device, dtype: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a layer holds, if it fits the call. ``dtype``: None: any."""
    if pair is None:
        raise _state("holds other columns in some layers")
    if any(len(x) != rows for x in pair):
        raise _state("has other rows than input_ids")
    if any(x.device != device or dtype not in (None, x.dtype) for x in pair):
        raise _state(f"is not of {dtype or 'its dtype'} on {device} in all layers")
    return pair


def _state(what: str) -> NotKnown:
    return NotKnown("past_key_values", f"generate(): past_key_values {what}")


def _has_layers_of(cache: Cache, layout: CacheLayout) -> bool:
    """Whether the layers of a cache are those of a target. One that was made without a configuration has them up to the last one that has stored something."""
    there, count = len(cache.layers), len(layout.windows)
    is_whole = set(range(there, count)) <= set(layout.readers) or (there == 0 and layout.states is None)
    return there <= count and is_whole and all(_fits(layer, i, layout) for i, layer in enumerate(cache.layers))


def _fits(layer: Any, i: int, layout: CacheLayout) -> bool:
    """Whether layer ``i`` of a cache is of the kind that the target's is, with its window or without one."""
    if i in layout.readers:
        return not _holds(layer)
    if i not in layout.attention:
        return recurrent_layer is not None and isinstance(layer, recurrent_layer)
    return isinstance(layer, DynamicLayer) and getattr(layer, "sliding_window", None) in (None, layout.windows[i])


def _holds(layer: Any) -> bool:
    return bool(layer.get_seq_length()) if isinstance(layer, DynamicLayer) else recurrent_states(layer) is not None


def _of_layer(layer: Any, held: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Keys and values of a layer that holds ``held`` columns, or the last ones that its window needs; None of another one."""
    if layer.get_seq_length() != held or layer.keys is None:
        return None
    there, values = layer.keys.shape[-2], layer.values.shape[-2]
    least = min(held, getattr(layer, "sliding_window", held + 1) - 1)
    return (layer.keys, layer.values) if there == values and least <= there <= held else None


def _gathered(states: torch.Tensor, at: Sequence[torch.Tensor], held: int) -> torch.Tensor:
    """The columns ``at[r]`` of each row, first ones first: ``[rows, heads, tokens, head_dim]``.

    ``states`` are the last of ``held`` columns. Zeros stand for the others, which no window reaches.
    """
    lacking = held - states.shape[-2]
    if lacking == 0 and all(len(places) == held for places in at):
        return states
    with torch.inference_mode(False), torch.no_grad():
        gathered = states.new_zeros((*states.shape[:2], max(map(len, at)), states.shape[-1]))
        for row, places in enumerate(at):
            there = places[places >= lacking].to(states.device)
            gathered[row, :, len(places) - len(there) : len(places)] = states[row][:, there - lacking]
    return gathered


def cached_texts(cache: Cache | None, counts: Sequence[int]) -> list[np.ndarray]:
    """Per row int32 ids of the first tokens in a cache, up to ``counts[row]`` of them, without those that are unknown."""
    texts = None if cache is None else _texts.get(cache)
    if texts is None or len(texts) != len(counts):
        texts = [np.zeros(0, dtype=np.int32)] * len(counts)
    return [text[:n] for text, n in zip(texts, counts, strict=True)]


def remember_texts(cache: Cache, texts: list[np.ndarray]) -> None:
    """Note the int32 ids per row whose keys and values a call leaves in ``cache``, for :func:`cached_texts` of a later call."""
    _texts[cache] = texts
