"""RowCache: a HuggingFace ``Cache`` at fixed addresses, with a length per row and O(1) truncate, and what a forward reads and writes of it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from pipespec.engine.attention import ATTENTION, MaskKind, attach_lengths, lengths_only, mask_kind
from pipespec.engine.cache_storage import Features, RowFeatures, RowStorage, store
from pipespec.models.compat import query_length
from pipespec.models.layout import CacheLayout, UnsupportedLayers
from pipespec.models.properties import LayerDevices, compute_dtype, kv_dtype, local_kv_heads, text_config
from pipespec_kernels import ops
from pipespec_kernels.kept import KEPT, kept
from pipespec_kernels.recurrent import States

if TYPE_CHECKING:
    from pipespec.engine.recurrent import LayerStates


_ALIGNED_KEYS = 16
"""So many keys of a mask are a multiple of 16 bytes."""


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """A mask ``[..., keys]`` whose rows begin at multiples of 16 bytes: on the CPU the same, elsewhere a copy.

    The memory-efficient attention of torch reads a mask on a GPU in pieces of 16 bytes. It checks the strides, and never where a view begins (2.11
    faults with cudaErrorMisalignedAddress). Masks of other strides it copies in each layer.
    """
    if mask.device.type == "cpu":
        return mask
    keys = mask.shape[-1]
    room = mask.new_zeros((*mask.shape[:-1], -(-keys // _ALIGNED_KEYS) * _ALIGNED_KEYS))
    return room[..., :keys].copy_(mask)


class ForwardCache(RowStorage):
    """A storage with masks and positions, into which the layers of a forward write in order. The lengths grow with the last one."""

    _end = 0  # of the storage that the running forward attends over
    _new_columns: torch.Tensor | None = None

    # ---- lengths on the device

    @property
    def uses_device_lengths(self) -> bool:
        """Whether attention reads ``device_lengths`` instead of a mask."""
        return self.is_static or (self._on_gpus and self._config._attn_implementation == ATTENTION)

    @property
    def device_lengths(self) -> torch.Tensor:
        """Tokens held per row, int32 ``[rows]`` on ``device``: those that it follows, else always the same tensor; see ``sync()``."""
        return self._lengths_on[self.device] if self._followed is None else self._followed

    @property
    def first_positions(self) -> Sequence[int] | torch.Tensor:
        """Per row, the position of a forward's first column; of a static cache a tensor on the device."""
        return self.device_lengths if self.is_static else self.lengths

    @property
    def new_columns(self) -> torch.Tensor | None:
        """Columns of the next forward that are no padding, int32 ``[rows]`` on ``device``; None: all of them."""
        return None if self._followed is None else self._new_columns

    def follow(self, lengths: torch.Tensor, new_columns: torch.Tensor | None = None) -> None:
        """Read the lengths at which forwards begin from a tensor that the device writes, without a copy. For a static cache.

        From here on the host's lengths are unknown, and no forward changes them, until ``set_lengths()``.

        Args:
            lengths: int32 ``[rows]`` on the device, contiguous.
            new_columns: likewise, how many columns of a forward are no padding. None: all of them.
        """
        assert self.is_static
        self._followed, self._new_columns, self._stale = lengths, new_columns, False

    def sync(self) -> None:
        """Copy the host's lengths to each device, if they have changed. A forward does so, too."""
        if self._stale:
            lengths = torch.tensor(self._lengths, dtype=torch.int32, device="cpu")
            for there in self._lengths_on.values():
                there.copy_(lengths, non_blocking=True)
            self._stale = False

    def _check_attention(self) -> None:
        if self.is_static and self._config._attn_implementation != ATTENTION:
            raise ValueError(
                f"a static RowCache works with attention by lengths only, and this model has "
                f"{self._config._attn_implementation}: call model.set_attn_implementation({ATTENTION!r}) first"
            )

    def _capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _update_device(self) -> None:
        if self._stale and self._capturing():
            raise RuntimeError(
                "the lengths on the device are out of date: call the RowCache's sync() before the capture"
            )
        self.sync()

    # ---- masks and positions

    def positions(self, q: int) -> torch.Tensor:
        """Positions of the next ``q`` columns: int64 ``[rows, q]``, ``lengths[r] + i``.

        Raises:
            ValueError: beyond the capacity.
        """
        self._need(q)
        self._placed_q = q
        return self._indices(q)

    def _indices(self, q: int) -> torch.Tensor:
        if self.uses_device_lengths:
            self._update_device()
            # One kernel: the sum of int64 and int32 is int64.
            return self._columns[:q] + self.device_lengths[:, None]
        if self._even:
            return self._columns[self._top : self._top + q].expand(self.rows, q)
        return self._columns[:q] + torch.tensor(self._lengths, device=self.device)[:, None]

    def mask(self, q: int, *, window: int | None = None) -> torch.Tensor | None:
        """The 4-D mask of a forward of ``q`` columns at the present lengths.

        Key ``j`` is visible to column ``i`` of row ``r`` iff ``j <= lengths[r] + i``, and with a window ``j > lengths[r] + i - window``.

        Args:
            q: columns.
            window: of the layers that the mask is for; None: they see all keys.

        Returns:
            ``[rows, 1, q, max(lengths) + q]`` in ``compute_dtype``: 0 for visible, else -inf. None where the model needs none: equal lengths
            within the window, and one column or (with sdpa) an empty cache. With attention that reads ``device_lengths``: a mask of no keys.

        Raises:
            ValueError: beyond the capacity.
            NotImplementedError: the lengths differ, and the model's attention takes no such mask.
        """
        top, kind = self._need(q), mask_kind(self._config)
        if window is not None and top <= window:
            window = None
        if self.uses_device_lengths:
            self._masked_q = q
            return lengths_only(self.rows, q, self.device)
        # Causal: transformers sets sdpa's flag for it.
        is_causal = self._top == 0 and kind is MaskKind.SDPA
        if self._even and window is None and (q == 1 or is_causal):
            return None
        if kind is MaskKind.NONE:
            raise NotImplementedError(
                f"{self._config._attn_implementation} attention takes no 4-D mask, which rows of different lengths "
                'and feeds of several tokens need: call model.set_attn_implementation("sdpa")'
            )
        at = self._indices(q)[: 1 if self._even else self.rows, :, None]
        self._masked_q = q
        hidden = self._columns[:top] > at
        if window is not None:
            hidden |= self._columns[:top] <= at - window
        mask = torch.zeros_like(hidden, dtype=self.compute_dtype).masked_fill_(hidden, -torch.inf)
        return _aligned(mask[:, None]).expand(self.rows, 1, q, top)

    def masks(self, q: int) -> list[torch.Tensor | None]:
        """Per layer the mask of a forward of ``q`` columns, see :meth:`mask`. Layers with the same window share it."""
        windows = self.windows
        made = {window: self.mask(q, window=window) for window in dict.fromkeys(windows)}
        return [made[window] for window in windows]

    # ---- a forward

    def open(self, q: int) -> tuple[Sequence[int] | torch.Tensor, Sequence[torch.Tensor]]:
        """Begin a forward of ``q`` columns, for code that loops over the layers itself. ``close()`` ends it.

        Returns:
            :attr:`first_positions`, and what to attend over: the keys of each layer ``[rows, kv_heads, max(lengths) + q, head_dim]``, then the
            values; of a static cache all of its storage.

        Raises:
            ValueError: beyond the capacity.
        """
        self._begin(q)
        return self.first_positions, [store[:, :, : self._end] for store in (*self._keys, *self._values)]

    def _begin(self, q: int) -> None:
        top = self._need(q)
        aim, self._aim = self._aim, None
        if self._ring is not None:
            self._ring.begin(self._lengths, q, aim)
        if self.uses_device_lengths:
            self._check_attention()
            self._update_device()
        elif not self._even:
            # Once per forward and device.
            rows, at = torch.arange(self.rows, device=self.device)[:, None], self._indices(q)
            self._places = {device: (rows.to(device), at.to(device)) for device in self._lengths_on}
        self._open_q, self._end = q, self.capacity if self.is_static else top

    def open_storage(self, q: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[int]]:
        """Begin a forward of ``q`` columns, for code that writes into the storage itself. ``close()`` ends it.

        Returns:
            For each size that layers have, in the order of their first layers, all keys, and likewise all values, ``[layers, rows, kv_heads, capacity,
            head_dim]``; and the lengths per row. The keys and values of column ``i`` of row ``r`` belong at position ``lengths[r] + i``.

        Raises:
            ValueError: beyond the capacity.
        """
        self._need(q)
        if self._ring is not None:
            self._ring.begin(self._lengths, q, self._aim)
        self._open_q, self._aim = q, None
        if not self._stores:
            # All layers are recurrent.
            layout = self._layout
            keys, values = (
                torch.empty((0, self.rows, layout.heads, self.capacity, size), dtype=self.dtype, device=self.device)
                for size in (layout.key_dim, layout.value_dim)
            )
            return [keys], [values], self._lengths
        return self._stores[::2], self._stores[1::2], self._lengths

    def open_states(self) -> States | None:
        """The states of the recurrent layers in the forward that :meth:`open_storage` has begun; None: there are no such layers."""
        return (
            None if self._ring is None else States(self._ring.inputs, self._ring.states, self._ring.table(self._open_q))
        )

    def close(self) -> None:
        """End a forward: every length grows by its columns.

        Not in the capture of a graph, which feeds nothing, and not after ``follow()``, because the device then sets the lengths.
        """
        if self._followed is not None or self._capturing():
            self._open_q = 0
            return
        q = self._open_q
        self._set([n + q for n in self._lengths])
        if self._ring is not None:
            self._ring.end()

    @contextmanager
    def recurrent(self, layer: int, q: int) -> Iterator[LayerStates]:
        """The states of a recurrent layer, for its forward of ``q`` columns. Layers come in order; the lengths grow with the last one.

        Raises:
            ValueError: beyond the capacity; nothing was written.
            RuntimeError: layers out of order, or states that are no longer there.
        """
        assert self._ring is not None
        self._enter(layer, q)
        yield self._ring.layer(layer)
        self._leave(layer)

    def _enter(self, layer: int, q: int) -> None:
        if layer == 0:
            self._begin(q)
        elif self._open_q != q:
            raise RuntimeError(f"RowCache: layer {layer} is updated, but its forward did not begin with layer 0")

    def _leave(self, layer: int) -> None:
        if layer == self._last:
            self.close()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values and return the used prefix. The lengths grow with the last layer.

        Args:
            key_states: ``[rows, kv_heads, q, head_dim]``.
            value_states: as ``key_states``.
            layer_idx: layers come in order.
            *args: ignored.
            **kwargs: ignored.

        Returns:
            Keys and values ``[rows, kv_heads, max(lengths) + q, head_dim]``, views unless they are kept in another dtype; all of a static cache's
            storage, as it is.

        Raises:
            ValueError: another shape or dtype, or beyond the capacity; nothing was written.
            RuntimeError: rows of different lengths without ``mask(q)`` and ``positions(q)``, states that require gradients, or layers out
                of order.
        """
        i, q = self._attention[layer_idx], key_states.shape[2]
        if i == 0:
            self._check(key_states, value_states)
        self._enter(layer_idx, q)
        keys, values = self._keys[i][:, :, : self._end], self._values[i][:, :, : self._end]
        device = self.layer_devices[layer_idx]
        if self.uses_device_lengths:
            lengths = self._lengths_on[device] if self._followed is None else self._followed
            dtype = key_states.dtype if self.dtype is KEPT else self.dtype
            ops.kv_append(key_states, value_states.to(dtype), keys, values, lengths)
            attach_lengths(keys, lengths, self.windows[layer_idx])
        elif self._even:
            store(keys[:, :, self._top :], key_states)
            store(values[:, :, self._top :], value_states)
        else:
            # Under autocast only the keys have the model's dtype.
            for held, new in ((keys, key_states), (values, value_states)):
                held.transpose(1, 2)[self._places[device]] = kept(new.transpose(1, 2), self.dtype)
        self._leave(layer_idx)
        if self.uses_device_lengths:
            return keys, values  # attention by lengths reads them as they are
        return keys.to(key_states.dtype), values.to(key_states.dtype)

    def _check(self, states: torch.Tensor, values: torch.Tensor) -> None:
        q, (heads, key_dim, value_dim) = states.shape[2], self._layout.sizes(next(iter(self._attention)))
        wanted = [(self.rows, heads, q, dim) for dim in (key_dim, value_dim)]
        if [states.shape, values.shape] != wanted or q < 1:
            raise ValueError(
                f"RowCache of {self.rows} rows, {heads} heads, keys of {key_dim} and values of {value_dim}: cannot hold "
                f"new keys and values of shape [rows, heads, columns, head_dim] = {list(states.shape)} and {list(values.shape)}"
            )
        if states.dtype != self.compute_dtype or states.device != self.layer_devices[0]:
            raise ValueError(
                f"RowCache is for {self.compute_dtype} on {self.layer_devices[0]}, the new keys are {states.dtype} on {states.device}"
            )
        if states.requires_grad:
            raise RuntimeError(
                "RowCache is for inference: call the model under torch.no_grad() or torch.inference_mode()"
            )
        if not self._even and not self._masked_q == self._placed_q == q:
            raise RuntimeError(self._trap())

    def _trap(self) -> str:
        return (
            f"the rows of this RowCache hold {self._lengths} tokens: what transformers derives from one length would be "
            "wrong. Pass attention_mask=cache.mask(q) and position_ids=cache.positions(q) for a feed of q "
            "tokens, or use pipespec.engine.forward.forward(model, tokens, cache, keep=...)"
        )


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

    It stays inside of the package: callers give and get transformers' ``DynamicCache``, see :mod:`pipespec.api.prepare`. With equal lengths,
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
