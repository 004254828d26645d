"""Copies and comparisons of caches."""

import copy
from typing import Any

import torch

from pipespec.engine.cache import RowCache


def copied(cache: RowCache) -> RowCache:
    """A cache with storage of its own, and all of the recurrent states."""
    twin = RowCache(
        cache._config,
        cache.rows,
        cache.capacity,
        dtype=cache.compute_dtype,
        device=cache.device,
        static=cache.is_static,
    )
    twin.load(cache.states(), cache.lengths)
    twin._ring = copy.deepcopy(cache._ring)
    return twin


def content(cache: Any) -> tuple[int, list[torch.Tensor]]:
    """Columns and all tensors of a cache of transformers, copied."""
    found = []
    for layer in cache.layers:
        if hasattr(layer, "conv_states"):
            found += [layer.conv_states[0], layer.recurrent_states[0]]
        else:
            found += [layer.keys, layer.values]
    # Layers that read what others keep hold nothing.
    return int(cache.get_seq_length()), [x.clone() for x in found if x is not None]


def same_content(ours: Any, theirs: Any) -> None:
    """Two caches have the same layers, columns, and numbers up to rounding, padding included."""
    assert type(ours) is type(theirs)
    assert list(map(type, ours.layers)) == list(map(type, theirs.layers))
    (columns, mine), (wanted, its) = content(ours), content(theirs)
    assert columns == wanted
    for a, b in zip(mine, its, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
