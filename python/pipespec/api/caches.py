"""The caller's ``past_key_values`` on its way in: the columns of a ``DynamicCache`` become the rows of a :class:`RowCache`.

transformers counts columns, padding included. A RowCache holds the tokens of each row. Only copies pass between the two: the RowCache stays the
target's, and the ``DynamicCache`` the caller's. The way back is in :mod:`pipespec.api.output`.

What comes in is continued exactly whatever is in it, because a later token sees the same keys and has the same position as in transformers: the
position is the number of ones that ``attention_mask`` has before it. A sliding window counts columns, so rows must have no holes there. Any other
state is left to transformers.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from pipespec.engine.cache import RowCache
from pipespec.errors import NotKnown, Unsupported, UnsupportedInput
from pipespec.models.compat import empty_layer, recurrent_layer, recurrent_states
from pipespec.models.layout import CacheLayout

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
