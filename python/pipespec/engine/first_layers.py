"""FirstLayers: a cache that is the first layers of another one, for a draft made of the target's first layers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from pipespec.engine.cache import RowCache
from pipespec.engine.cache_storage import DeviceStorage
from pipespec.models.properties import text_config


class FirstLayers(RowCache):
    """The first layers of another cache, with lengths of their own: what is written here is written there.

    Args:
        whole: a cache without recurrent layers, on one device.
        config: of a model that consists of the first layers of that of ``whole``.
    """

    def __init__(self, whole: RowCache, config: Any) -> None:
        self._whole = whole
        layers = text_config(config).num_hidden_layers
        super().__init__(
            config,
            whole.rows,
            whole.capacity,
            dtype=whole.dtype,
            device=whole.device,
            layer_devices=whole._layer_devices[:layers],
            kv_heads=whole._heads,
        )
        whole._views.add(self)

    def _make_storages(self, capacity: int, dtype: torch.dtype) -> list[DeviceStorage]:
        (storage,) = self._whole._storages
        layers, device = range(self._depth), storage.device
        return [
            DeviceStorage(layers, [half[: len(layers)] for half in storage.halves], device, self._lengths_on[device])
        ]

    def _follow(self) -> None:
        """Take the views of a new storage of the whole cache."""
        self._allocate(self._whole.capacity, self._whole.dtype)
        self._set(list(self._lengths))

    def reserve(self, capacity: int) -> None:
        self._whole.reserve(capacity)

    def nbytes_on(self) -> Counter[str]:
        """None: the bytes are those of the whole cache."""
        return Counter()

    def open_whole(self, q: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """:meth:`open_storage`, with the layers behind these, too. They must not be written."""
        *_, lengths = self.open_storage(q)
        (storage,) = self._whole._storages
        return *storage.halves, lengths
