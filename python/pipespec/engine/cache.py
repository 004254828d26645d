"""RowCache: a HuggingFace ``Cache`` at fixed addresses, with a length per row and O(1) truncate."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from pipespec.engine.cache_forward import ForwardCache
from pipespec.engine.cache_storage import Features, RowFeatures, store
from pipespec.models.compat import query_length
from pipespec.models.devices import LayerDevices, local_kv_heads
from pipespec.models.layout import CacheLayout, UnsupportedLayers
from pipespec.models.properties import compute_dtype, kv_dtype, text_config


class _RowLayer(CacheLayerMixin):
    """One layer in ``cache.layers``, for code of transformers. The cache does the work."""

    is_sliding = False
    is_compileable = False
    is_croppable = False

    def __init__(self, owner: RowCache, index: int) -> None:
        super().__init__()
        # Weak: the storage is freed with the last reference to the cache.
        self._owner = weakref.ref(owner)
        self._index = index
        self.is_initialized = True

    @property
    def owner(self) -> RowCache:
        owner = self._owner()
        if owner is None:
            raise ReferenceError("the RowCache of this layer no longer exists")
        return owner

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the storage exists."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.owner.update(key_states, value_states, self._index)

    def get_mask_sizes(self, query: Any) -> tuple[int, int]:
        return self.owner.get_mask_sizes(query, self._index)

    def get_seq_length(self) -> int:
        return self.owner.get_seq_length(self._index)

    def get_max_length(self) -> int:
        return self.owner.capacity

    get_max_cache_shape = get_max_length


class RowCache(ForwardCache, Cache):
    """Keys and values of ``rows`` sequences at fixed addresses, each row with a length of its own.

    Per device one tensor ``[layers, rows, kv_heads, capacity, head_dim]`` is allocated for keys, and one for values. A forward of ``q`` columns
    writes the keys and values of row ``r`` at ``lengths[r] .. lengths[r] + q - 1`` and attends over the used prefix
    ``[rows, kv_heads, max(lengths) + q, head_dim]`` (views, no copy). After the last layer every length grows by ``q``; the caller then truncates to what it committed. Column ``i`` of row ``r`` sees
    the keys ``0 .. lengths[r] + i``, which always include its own. What lies beyond a row's length is never visible, and the next forward
    overwrites it, so padding columns to the right of a row's tokens are harmless.

    **Sliding windows.** A layer with a window keeps all of its keys and values, as the others do, so that a rollback of any depth is a store
    to a length. The mask hides what lies before the window: column ``i`` sees the keys ``lengths[r] + i - window + 1 .. lengths[r] + i``.

    It stays inside of the package: callers give and get transformers' ``DynamicCache``, see :mod:`pipespec.api.caches`. With equal lengths,
    ``model(..., past_key_values=cache)`` works as with a ``DynamicCache``. With different lengths, the mask and the positions that transformers
    derives from one length would be wrong, so the cache refuses to give one. Use ``forward(model, tokens, cache, keep=...)``, or pass both
    ``mask(q)`` and ``positions(q)`` to the model.

    **Recurrent layers** keep states in place of keys and values, several per row in a :class:`pipespec.engine.recurrent.StateRing`. A rollback
    chooses one of them: see ``restorable()`` and ``aim()``. Such layers run in ``forward(model, tokens, cache, keep=...)`` only.

    **Lengths on the device.** With ``model.set_attn_implementation("pipespec")`` on a GPU, and with ``static=True`` on any device, attention
    reads the lengths from ``device_lengths`` and needs no mask. A static cache returns its whole storage, always at the same addresses, so
    that a forward can be captured in a CUDA graph after ``sync()``. It does not grow. Where the device sets the lengths before each forward
    (``follow()``), those of the host are unknown until ``set_lengths()``.

    **Several devices.** The keys and values of each layer lie where its attention computes.

    Capacity: a forward of ``q`` columns needs ``max(lengths) + q <= capacity``, padding columns included, so allocate the longest sequence
    plus the widest forward. For inference only: update it under ``torch.no_grad`` or ``torch.inference_mode``.

    A value that is not finite (the model overflowed its dtype) beyond a row's length can still reach that row while it is shorter than
    another one, since a mask is added to scores and does not replace them. A model with finite values leaves none.

    Args:
        config: of a model whose layers have full attention or sliding windows, or are recurrent as those of
            :data:`pipespec.models.layout.GATED_DELTA`.
        rows: number of sequences.
        capacity: positions per row.
        dtype: of the model's hidden states, and of keys and values unless :func:`pipespec.models.properties.kv_dtype` says otherwise.
        device: of token ids, masks and positions, and of the storage.
        static: fixed addresses and lengths on the device, see above. On one device only. A dtype: likewise, and keys and values are kept in it.
        layer_devices: per layer, where its keys and values lie; None: all on ``device``.
        kv_heads: key/value heads per layer; None: as the configuration says. A process of a tensor-parallel group holds a part of them.

    Attributes:
        dtype: of keys and values; ``compute_dtype``: of the model's hidden states.
        is_static: as given, like ``rows``, ``capacity``, ``device`` and ``layer_devices``.

    Raises:
        ValueError: a model with layers of other types, sizes below 1, or ``static`` without ``attn_implementation="pipespec"`` or on several
            devices, or recurrent layers with ``static`` or on several devices.
    """

    def __init__(
        self,
        config: Any,
        rows: int,
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        static: bool | torch.dtype = False,
        layer_devices: Sequence[torch.device] | None = None,
        kv_heads: int | None = None,
    ) -> None:
        if rows < 1 or capacity < 1:
            raise ValueError(f"RowCache needs at least one row and a capacity of one, not {rows} and {capacity}")
        config = text_config(config)
        try:
            layout = CacheLayout.of(config, kv_heads)
        except UnsupportedLayers as error:
            raise ValueError(f"RowCache: {error}") from error
        device = torch.empty(0, device=device).device
        layer_devices = tuple(layer_devices or [device] * config.num_hidden_layers)
        devices = ", ".join(sorted(map(str, set(layer_devices))))
        is_split = set(layer_devices) != {device}
        if layout.states is not None and (static or is_split):
            where = "a static cache" if static else f"layers on {devices}"
            raise ValueError(
                f"RowCache: the states of recurrent layers are kept on one device, by the host: no {where}"
            )
        if static and is_split:
            raise ValueError(f"a static RowCache lies on one device, not on {devices}")
        ForwardCache.__init__(
            self,
            config,
            layout,
            rows,
            capacity,
            dtype=dtype,
            device=device,
            static=static,
            layer_devices=layer_devices,
        )
        self._check_attention()
        Cache.__init__(self, layers=[_RowLayer(self, i) for i in range(config.num_hidden_layers)])

    @classmethod
    def for_model(
        cls, model: PreTrainedModel, rows: int, capacity: int, *, static: bool | torch.dtype = False
    ) -> RowCache:
        """A cache for ``model``, in its dtype, on the devices of its layers. Other arguments and errors are those of the class."""
        at = LayerDevices.of(model)
        return cls(
            model.config,
            rows,
            capacity,
            dtype=compute_dtype(model),
            device=at.inputs,
            static=static,
            layer_devices=at.layers,
            kv_heads=local_kv_heads(model),
        )

    def matches(self, model: PreTrainedModel) -> bool:
        """Whether this cache can hold the keys and values of ``model``: shapes, dtype, devices."""
        at = LayerDevices.of(model)
        return (
            CacheLayout.of(model.config, local_kv_heads(model)) == self._layout
            and compute_dtype(model) == self.compute_dtype
            and (self.is_static or kv_dtype(model.config, self.compute_dtype, self.device) == self.dtype)
            and (at.inputs, at.layers) == (self.device, self.layer_devices)
        )

    @contextmanager
    def row_alone(self, row: int, more: int) -> Iterator[RowCache]:
        """A cache of one row with its keys and values, and room for ``more`` tokens. This cache takes over what they become.

        Raises:
            ValueError: there is no room.
        """
        begin = self._lengths[row]
        end = begin + more
        if end > self.capacity:
            raise ValueError(f"RowCache is full: row {row} holds {begin} of {self.capacity} tokens, not {more} more")
        alone = RowCache(self._config, 1, end, dtype=self.compute_dtype, device=self.device)
        for own, other in zip(alone._stores, self._stores, strict=True):
            store(own[:, 0, :, :begin], other[:, row, :, :begin])
        alone._set([begin])
        if isinstance(self.features, Features):
            alone.features = RowFeatures(self.features, row)
        yield alone
        for own, other in zip(alone._stores, self._stores, strict=True):
            store(other[:, row, :, begin:end], own[:, 0, :, begin:end])
        self._set([end if r == row else n for r, n in enumerate(self._lengths)])

    def __repr__(self) -> str:
        return (
            f"RowCache(layers={len(self.layers)}, rows={self.rows}, capacity={self.capacity}, lengths={self._lengths})"
        )

    def _without_forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            "the recurrent layers of this model keep a state per column here, which its own forward does not: call "
            "pipespec.engine.forward.forward(model, tokens, cache, keep=...) in place of the model"
        )

    get_conv_state = get_recurrent_state = update_conv_state = update_recurrent_state = _without_forward
    has_previous_state = _without_forward
    # The attributes that transformers 5.0 reads.
    conv_states = recurrent_states = property(_without_forward)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The longest row's length."""
        return self._top

    def get_mask_sizes(self, query: Any, layer_idx: int = 0) -> tuple[int, int]:
        """``(max(lengths) + q, 0)``, for transformers' masks. Raises ``RuntimeError`` if the lengths differ."""
        if not self._even:
            raise RuntimeError(self._trap())
        return self._top + query_length(query), 0
