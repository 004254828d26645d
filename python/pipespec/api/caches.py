"""The caller's ``past_key_values``: the columns of a ``DynamicCache`` to the rows of a :class:`RowCache`, and back.

transformers counts columns, padding included. A RowCache holds the tokens of each row.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from pipespec.api.arguments import as_ids, effective_config
from pipespec.engine.cache import RowCache
from pipespec.errors import NotKnown, Unsupported, UnsupportedInput
from pipespec.models.compat import keep_window
from pipespec.models.layout import CacheLayout

_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)

_texts: weakref.WeakKeyDictionary[Cache, list[np.ndarray]] = weakref.WeakKeyDictionary()
"""Per row, the text whose keys and values a call left in the caller's DynamicCache. Later changes of the cache are not noticed."""


class Columns:
    """Where the tokens of each row are in the columns of the call's mask.

    Args:
        mask: ``[B, S]``, 0 for padding.
        width: Columns of ``input_ids``, the last ones of the mask.

    Attributes:
        count: Columns of the mask.
        cached: How many of them are before those of ``input_ids``.
        places: Per row, the columns that are no padding.

    Raises:
        UnsupportedInput: A row is all padding, or ends with padding.
    """

    def __init__(self, mask: torch.Tensor, width: int) -> None:
        self.count = mask.shape[1]
        self.cached = self.count - width
        self.places = [np.flatnonzero(row) for row in mask.cpu().numpy()]
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

    def of_text(self, row: int, length: int) -> torch.Tensor:
        """The columns of the first tokens of a row, new ones included: int64 ``[length]``."""
        places = self.places[row][:length]
        new = np.arange(self.count, self.count + length - len(places))
        return torch.from_numpy(np.concatenate([places, new]))


def adopt(
    target: PreTrainedModel, cache: Cache, columns: Columns, prompts: Sequence[np.ndarray], limits: Sequence[int]
) -> RowCache:
    """Convert the caller's cache to a RowCache that holds a part of every prompt, int32 ids. ``limits``: per row, the length that it may reach.

    Raises:
        ValueError: The cache does not fit the call.
        NotImplementedError: A cache of this class, or in this state, cannot be continued.
    """
    if type(cache) is RowCache:
        own = cache
        if own.rows != len(prompts):
            raise ValueError(f"past_key_values holds {own.rows} rows, input_ids {len(prompts)}")
        if not own.matches(target):
            raise ValueError(f"past_key_values does not fit the target, it is another model's: {own!r}")
    elif isinstance(cache, (RowCache, DynamicCache)) and not _is_plain(cache, CacheLayout.of(target.config)):
        raise NotKnown(
            "past_key_values",
            f"generate(): past_key_values is a {type(cache).__name__} with methods or layers of its own",
        )
    elif isinstance(cache, DynamicCache):
        own = _from_dynamic(target, cache, columns, prompts, limits)
    else:
        raise Unsupported(
            "past_key_values",
            f"past_key_values: {type(cache).__name__} is not supported; pass a DynamicCache, or the cache that a call of this "
            "pipeline returned",
        )
    expected = columns.tokens(columns.cached)
    for row, (n, prompt) in enumerate(zip(own.lengths, prompts, strict=True)):
        if n > len(prompt):
            _refuse_longer(n, row, prompt)
        if columns.cached and n != expected[row]:
            raise ValueError(
                f"past_key_values holds {n} tokens of row {row}, and attention_mask has {expected[row]} before input_ids: they must be equal "
                "where input_ids are the new tokens only"
            )
        known = own.text[row] if own.text is not None else prompt[:0]
        if not np.array_equal(known, prompt[: len(known)]):
            raise ValueError(f"past_key_values was made with another text than row {row} of input_ids")
    return own


def _is_plain(cache: Cache, layout: CacheLayout) -> bool:
    """Whether a cache stores what it is given, and nothing else: one of transformers' classes, with its layers and methods."""
    if layout.states is not None:
        return True  # refused for that
    if type(cache) is not DynamicCache or getattr(cache, "offloading", False):
        return False
    layers = getattr(cache, "layer_class_to_replicate", None)
    return (layers is None or layers in _LAYERS) and all(
        kind in (*_LAYERS, DynamicCache) and not any(callable(getattr(kind, name, None)) for name in vars(part))
        for part in (cache, *cache.layers)
        for kind in [type(part)]
    )


def _from_dynamic(
    target: PreTrainedModel, cache: DynamicCache, columns: Columns, prompts: Sequence[np.ndarray], limits: Sequence[int]
) -> RowCache:
    """The rows of a DynamicCache, whose columns are those of the call's mask."""
    rows, n = len(prompts), int(cache.get_seq_length())
    if CacheLayout.of(target.config).states is not None:
        raise Unsupported(
            "past_key_values",
            "past_key_values: a DynamicCache has one recurrent state per row, and a rollback needs those of several columns: pass the "
            "cache that a call of this pipeline returned (return_dict_in_generate=True), or none",
        )
    if n and cache.layers[0].keys.shape[0] != rows:
        raise ValueError(f"past_key_values holds {cache.layers[0].keys.shape[0]} rows, input_ids {rows}")
    if n > columns.count:
        _refuse_longer(n, 0, prompts[0])
    if columns.cached and n != columns.cached:
        raise ValueError(
            f"past_key_values holds {n} columns, and attention_mask has {columns.cached} before those of input_ids: they must be "
            "equal where input_ids are the new tokens only"
        )
    own, held = RowCache.for_model(target, rows, max(n, *limits) + 1), columns.tokens(n)
    if not n:
        return own
    if len(cache.layers) != len(own.layers):
        raise ValueError(f"past_key_values has {len(cache.layers)} layers, the target {len(own.layers)}")
    if any(layer.keys.shape[2] < n for layer in cache.layers):
        raise UnsupportedInput(
            "past_key_values",
            f"past_key_values holds only the last tokens of {n} in its sliding-window layers, and a rollback needs them all: pass the "
            "cache that a call of this pipeline returned (return_dict_in_generate=True), or a new DynamicCache()",
        )
    sources, targets = [columns.of_text(row, h) for row, h in enumerate(held)], [torch.arange(h) for h in held]
    states = [[_moved(x, sources, targets, n) for x in (layer.keys, layer.values)] for layer in cache.layers]
    try:
        own.load([(keys, values) for keys, values in states])
    except ValueError as error:
        raise ValueError(f"past_key_values does not fit the target: {error}") from error
    own.set_lengths(held)
    return own


def give_back(own: RowCache, cache: Cache, columns: Columns) -> None:
    """Write the rows of ``own`` to the columns of the caller's DynamicCache, which grows in place, as in transformers."""
    if own.text is not None:
        _texts[cache] = list(own.text)
    sources = [torch.arange(n) for n in own.lengths]
    targets = [columns.of_text(row, n) for row, n in enumerate(own.lengths)]
    width = 1 + max(int(to[-1]) for to in targets)
    for i, states in enumerate(own.states()):
        keys, values = (_moved(x, sources, targets, width) for x in states)
        layer = cache.layers[i] if i < len(cache.layers) else None
        if layer is None or not layer.is_initialized:
            cache.update(keys, values, i)
        else:
            layer.keys, layer.values = keys, values
            keep_window(layer)


def _moved(
    states: torch.Tensor, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], width: int
) -> torch.Tensor:
    """Copy columns of ``states [rows, kv_heads, columns, head_dim]``, per row from ``sources`` to ``targets``. Of ``width`` columns the others are zero."""
    moved = states.new_zeros((*states.shape[:2], width, states.shape[3]))
    for row, (of, to) in enumerate(zip(sources, targets, strict=True)):
        moved[row][:, to.to(states.device)] = states[row][:, of.to(states.device)]
    return moved


def cached_texts(cache: Cache | None, counts: Sequence[int]) -> list[np.ndarray]:
    """Per row int32 ids of the first tokens in a cache, up to ``counts[row]`` of them, without those that are unknown."""
    texts = None
    if isinstance(cache, RowCache):
        texts = cache.text
    elif isinstance(cache, DynamicCache):
        texts = _texts.get(cache)
    if texts is None or len(texts) != len(counts):
        texts = [np.zeros(0, dtype=np.int32)] * len(counts)
    return [text[:n] for text, n in zip(texts, counts, strict=True)]


def for_transformers(
    model: PreTrainedModel,
    inputs: Any = None,
    generation_config: GenerationConfig | None = None,
    *_: Any,
    past_key_values: RowCache,
    input_ids: Any = None,
    inputs_embeds: Any = None,
    attention_mask: Any = None,
    **kwargs: Any,
) -> Cache:
    """:func:`in_columns` for a call of ``generate()`` with these arguments that transformers decodes."""
    given = inputs_embeds if inputs_embeds is not None else inputs if input_ids is None else input_ids
    mask = attention_mask
    if not isinstance(given, torch.Tensor) or given.ndim < 2:
        return past_key_values
    if mask is None:
        mask = torch.ones(given.shape[:2], dtype=torch.long, device=given.device)
        tokens: dict[str, Any] = {name: kwargs[name] for name in ("pad_token_id", "eos_token_id") if name in kwargs}
        config = effective_config(model, generation_config, tokens)
        pad, ends = config.pad_token_id, as_ids("eos_token_id", config.eos_token_id)
        if inputs_embeds is None and pad is not None and int(pad) not in ends:
            mask = (given != int(pad)).long()
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        return past_key_values
    return in_columns(past_key_values, mask, given.shape[1])


def in_columns(cache: RowCache, mask: torch.Tensor, width: int) -> Cache:
    """The cache for a call that transformers decodes, which counts columns, padding included. ``width``: the columns of ``input_ids``.

    Raises:
        NotImplementedError: The cache cannot have the call's columns.
    """
    lengths, cached = set(cache.lengths), mask.shape[1] - width
    if (
        cache.is_recurrent
        and len(lengths) == 1
        and not cache.had_padding
        and bool((mask[:, : max(lengths)] != 0).all())
    ):
        return cache  # tokens are columns
    try:
        return cache.as_dynamic(mask, cached if cached > 0 else None)
    except (ValueError, NotImplementedError) as error:
        raise UnsupportedInput(
            "past_key_values", f"past_key_values: {error}; transformers would take other columns for its tokens"
        ) from error


def _refuse_longer(n: int, row: int, prompt: np.ndarray) -> None:
    raise UnsupportedInput(
        "past_key_values",
        f"past_key_values holds {n} tokens of row {row}, input_ids only {len(prompt)}: pass the whole text, the cached part included, or the "
        "new tokens with the attention_mask of the whole text",
    )
