"""RowCache: a HuggingFace ``Cache`` at fixed addresses, with a length per row and O(1) truncate."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from pipespec.config import WIDTH
from pipespec.engine.attention import ATTENTION, MaskKind, attach_lengths, lengths_only, mask_kind
from pipespec.engine.states import LayerStates, StateRing
from pipespec.models.compat import cropped_length, query_length
from pipespec.models.devices import LayerDevices, local_kv_heads
from pipespec.models.layout import FULL, SLIDING, CacheLayout, UnsupportedLayers
from pipespec.models.properties import compute_dtype, text_config
from pipespec_kernels import ops

_BAND_WIDTH = 64
"""Most columns whose mask is a view of the precomputed band. Masks of wider forwards (a prefill in chunks) are computed each time."""


def _unbound(stores: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The tensors of all layers, those of the first storage first."""
    if len(stores) == 1:
        return stores[0].unbind(0)
    return [tensor for store in stores for tensor in store.unbind(0)]


class _RowLayer(CacheLayerMixin):
    """One layer in ``cache.layers``, for code of transformers. The cache does the work.

    Attributes:
        keys: What the layer holds, a view ``[rows, kv_heads, max(lengths), head_dim]``; of a static cache, all of its storage.
        values: As ``keys``.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True

    def __init__(self, owner: RowCache, index: int) -> None:
        # Weak: the storage is freed with the last reference to the cache.
        self._owner = weakref.ref(owner)
        self._index = index
        self.dtype, self.device = owner.dtype, owner.device_of(index)
        self.is_initialized = True

    @property
    def keys(self) -> torch.Tensor:
        return self.owner._held(self._index)[0]

    @property
    def values(self) -> torch.Tensor:
        return self.owner._held(self._index)[1]

    @property
    def owner(self) -> RowCache:
        owner = self._owner()
        if owner is None:
            raise ReferenceError("the RowCache of this layer no longer exists")
        return owner

    @property
    def batch_size(self) -> int:
        return self.owner.rows

    max_batch_size = batch_size

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

    def _refuse(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("RowCache layers share their lengths: call this on the cache, not on one layer")

    crop = reset = reorder_cache = batch_repeat_interleave = batch_select_indices = _refuse
    offload = prefetch = _refuse


class _Storage:
    """Keys and values of the layers of a cache that lie on one device.

    Attributes:
        layers: their indices in the model, in order.
        stores: ``[2 * len(layers), rows, kv_heads, capacity, head_dim]``, the keys of all layers, then the values; two tensors
            ``[len(layers), rows, kv_heads, capacity, dim]``, where keys and values differ in size.
        halves: views of the keys and of the values.
        columns_first: views of ``stores``, ``[.., rows, capacity, kv_heads, dim]``.
        flat: per layer views ``[rows * kv_heads * capacity, dim]``: ragged scatters write here.
        lengths: int32 ``[rows]``: the cache's lengths on this device.
        index: where a forward of different lengths writes its states ``[rows, q, kv_heads]`` in ``flat``.
    """

    __slots__ = ("columns_first", "device", "flat", "halves", "index", "index_base", "layers", "lengths", "stores")

    def __init__(
        self, layers: Sequence[int], stores: Sequence[torch.Tensor], device: torch.device, lengths: torch.Tensor
    ) -> None:
        self.layers, self.stores, self.device, self.lengths = layers, tuple(stores), device, lengths
        depth = len(layers)
        self.halves = self.stores[0][:depth], self.stores[-1][-depth:]
        self.columns_first = tuple(store.transpose(2, 3) for store in self.stores)
        self.flat = _unbound([store.view(len(store), -1, store.shape[-1]) for store in self.stores])
        self.index_base: torch.Tensor | None = None
        self.index: torch.Tensor | None = None

    @staticmethod
    def allocated(
        layers: int, shape: Sequence[int], dims: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Sequence[torch.Tensor]:
        """New ``stores``."""
        count = 2 * layers // len(dims)
        # Zeroed, because a masked value enters a product with zero, and 0 * NaN is NaN.
        return [torch.zeros((count, *shape, dim), dtype=dtype, device=device) for dim in dims]

    def narrowed(self, begin: int, length: int, *, columns_first: bool) -> Sequence[torch.Tensor]:
        """Per layer a part of the keys, then per layer a part of the values."""
        if columns_first:
            return _unbound([store.narrow(2, begin, length) for store in self.columns_first])
        return _unbound([store.narrow(3, begin, length) for store in self.stores])

    def point(self, indices: torch.Tensor) -> None:
        """Set ``index`` for columns at ``indices [rows, q]`` of the cache."""
        if self.index_base is None:
            _, rows, heads, capacity, _ = self.stores[0].shape
            self.index_base = (torch.arange(rows * heads, device=self.device) * capacity).view(rows, 1, heads)
        self.index = (self.index_base + indices.to(self.device)[:, :, None]).view(-1)


class RowCache(Cache):
    """Keys and values of ``rows`` sequences at fixed addresses, each row with a length of its own.

    One tensor ``[2 * layers, rows, kv_heads, capacity, head_dim]`` is allocated once per device (two, where keys and values differ in size). A forward of ``q`` columns writes the keys and values of
    row ``r`` at ``lengths[r] .. lengths[r] + q - 1`` and attends over the used prefix ``[rows, kv_heads, max(lengths) + q, head_dim]`` (views,
    no copy). After the last layer every length grows by ``q``; the caller then truncates to what it committed. Column ``i`` of row ``r`` sees
    the keys ``0 .. lengths[r] + i``, which always include its own. What lies beyond a row's length is never visible, and the next forward
    overwrites it, so padding columns to the right of a row's tokens are harmless.

    **Sliding windows.** A layer with a window keeps all of its keys and values, as the others do, so that a rollback of any depth is a store
    to a length. The mask hides what lies before the window: column ``i`` sees the keys ``lengths[r] + i - window + 1 .. lengths[r] + i``.

    With equal lengths it behaves as ``DynamicCache``: ``model(..., past_key_values=cache)`` and ``model.generate(past_key_values=cache)`` work,
    left padding with a 2-D mask included. With different lengths, the mask and the positions that transformers derives from one length would
    be wrong, so the cache refuses to give one. Use ``forward(model, tokens, cache, keep=...)``, or pass both ``mask(q)`` and ``positions(q)``
    to the model.

    **Recurrent layers** keep states in place of keys and values, several per row in a :class:`pipespec.engine.states.StateRing`. A rollback
    chooses one of them. ``restorable()`` says how far back they reach, and the tokens after that are to be fed again. ``aim()`` before a prefill
    says which states it keeps. The modules of such layers run in ``forward(model, tokens, cache, keep=...)`` only.

    **Lengths on the device.** With ``model.set_attn_implementation("pipespec")`` on a GPU, and with ``static=True`` on any device, attention
    reads the lengths from ``device_lengths`` and needs no mask. A static cache returns its whole storage, always at the same addresses, so
    that a forward can be captured in a CUDA graph: call ``sync()`` before the capture; within it nothing waits for the device or reads the
    host's lengths. After a replay ``read_lengths()`` copies the device's lengths to the host. A static cache does not grow and takes no other
    attention. Where the device sets the lengths before each forward (``follow()``), those of the host are unknown until ``set_lengths()``.

    **Several devices.** The keys and values of each layer lie where its attention computes. The lengths are on the host, and where attention
    reads them on the device, once on each device. So a rollback costs the same as on one device.

    Capacity: a forward of ``q`` columns needs ``max(lengths) + q <= capacity``, padding columns included, so allocate the longest sequence
    plus the widest forward. For inference only: update it under ``torch.no_grad`` or ``torch.inference_mode``.

    A value that is not finite (the model overflowed its dtype) beyond a row's length can still reach that row while it is shorter than
    another one, since a mask is added to scores and does not replace them. A model with finite values leaves none.

    Args:
        config: of a model whose layers have full attention or sliding windows, or are recurrent as those of
            :data:`pipespec.models.layout.GATED_DELTA`.
        rows: number of sequences.
        capacity: positions per row.
        dtype: of keys and values.
        device: of token ids, masks and positions, and of the storage.
        static: fixed addresses and lengths on the device, see above. On one device only.
        layer_devices: per layer, where its keys and values lie; None: all on ``device``.
        kv_heads: key/value heads per layer; None: as the configuration says. A process of a tensor-parallel group holds a part of them.

    Attributes:
        text: per row, int32 ids of the tokens held, where a call of ``Pipeline.generate`` left the cache; else None.

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
        static: bool = False,
        layer_devices: Sequence[torch.device] | None = None,
        kv_heads: int | None = None,
    ) -> None:
        if rows < 1 or capacity < 1:
            raise ValueError(f"RowCache needs at least one row and a capacity of one, not {rows} and {capacity}")
        config = text_config(config)
        try:
            self._layout = layout = CacheLayout.of(config, kv_heads)
        except UnsupportedLayers as error:
            raise ValueError(f"RowCache: {error}") from error
        self._config = config
        self._rows, self._layers = rows, config.num_hidden_layers
        # Per layer with keys and values, its index among those.
        self._attention = {layer: i for i, layer in enumerate(layout.attention)}
        self._depth = len(self._attention)
        self._heads = layout.heads
        self._views: weakref.WeakSet[FirstLayers] = weakref.WeakSet()
        # One tensor for keys and values of equal size, else one for each.
        self._dims = (layout.key_dim,) if layout.key_dim == layout.value_dim else (layout.key_dim, layout.value_dim)
        self.text: Sequence[np.ndarray] | None = None
        self._static = static
        self._stale = True
        self._followed: torch.Tensor | None = None
        self._device = torch.empty(0, device=device).device
        self._layer_devices = tuple(layer_devices or [self._device] * self._layers)
        devices = set(self._layer_devices)
        if layout.states is not None and (static or devices != {self._device}):
            where = "a static cache" if static else f"layers on {', '.join(sorted(map(str, devices)))}"
            raise ValueError(
                f"RowCache: the states of recurrent layers are kept on one device, by the host: no {where}"
            )
        if static and devices != {self._device}:
            raise ValueError(f"a static RowCache lies on one device, not on {', '.join(sorted(map(str, devices)))}")
        self._on_gpus = all(at.type == "cuda" for at in (self._device, *devices))
        self._make_lengths()
        self._check_attention()
        self._ring: StateRing | None = None
        self._aim: Sequence[int] | None = None
        self._allocate(capacity, dtype)
        if layout.states is not None:
            self._ring = StateRing(layout.states, rows, dtype, self._device)
        self._set([0] * rows)
        super().__init__(layers=[_RowLayer(self, i) for i in range(self._layers)])

    def _make_lengths(self) -> None:
        """Allocate the lengths on each device."""
        with torch.inference_mode(False), torch.no_grad():
            self._lengths_on = {
                device: torch.zeros(self._rows, dtype=torch.int32, device=device)
                for device in dict.fromkeys((self._device, *self._layer_devices))
            }

    def _allocate(self, capacity: int, dtype: torch.dtype) -> None:
        """Allocate the storage and the views that depend on it."""
        # Not inference tensors, which could not be written outside of inference_mode.
        with torch.inference_mode(False), torch.no_grad():
            storages = self._make_storages(capacity, dtype)
            arange = torch.arange(capacity, device=self._device)
            # Nothing has changed where there was no memory.
            self._storages, self._arange = storages, arange
            # Per layer its storage, and its index there.
            places = {layer: (s, at) for s in self._storages for at, layer in enumerate(s.layers)}
            self._places = [places[layer] for layer in range(self._depth)]
            self._flat = self._by_layer([storage.flat for storage in self._storages])
            self._stores = [store for storage in self._storages for store in storage.stores]
            self._dtype, self._capacity = dtype, capacity
        self._band: dict[tuple[torch.dtype, int | None], tuple[int, torch.Tensor]] = {}
        for view in self._views:
            view._follow()

    def _make_storages(self, capacity: int, dtype: torch.dtype) -> list[_Storage]:
        shape = (self._rows, self._heads, capacity)
        storages = []
        attention = [self._layer_devices[layer] for layer in self._attention]
        for device in dict.fromkeys(attention):
            layers = [i for i, at in enumerate(attention) if at == device]
            stores = _Storage.allocated(len(layers), shape, self._dims, dtype, device)
            storages.append(_Storage(layers, stores, device, self._lengths_on[device]))
        return storages

    def _by_layer(self, views: Sequence[Sequence[torch.Tensor]]) -> Sequence[torch.Tensor]:
        """Views of each storage, keys and then values of its layers, in the order of the model: keys of all layers, then values."""
        if len(views) <= 1:
            return views[0] if views else ()
        found: dict[int, torch.Tensor] = {}
        for storage, its in zip(self._storages, views, strict=True):
            places = [*storage.layers, *(self._depth + layer for layer in storage.layers)]
            found |= zip(places, its, strict=True)
        return [found[i] for i in range(2 * self._depth)]

    def _narrowed(self, begin: int, length: int, *, columns_first: bool = False) -> Sequence[torch.Tensor]:
        """Per layer a part of the keys, then per layer a part of the values."""
        return self._by_layer([s.narrowed(begin, length, columns_first=columns_first) for s in self._storages])

    def _held(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, see :class:`_RowLayer`."""
        if layer not in self._attention:
            raise NotImplementedError(f"layer {layer} is recurrent and has no keys and values")
        columns = self._capacity if self._static else self._top
        storage, at = self._places[self._attention[layer]]
        keys, values = storage.halves
        return keys[at, :, :, :columns], values[at, :, :, :columns]

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, None]]:
        """Per layer keys, values, and None, as a ``DynamicCache`` of full attention gives them."""
        return ((layer.keys, layer.values, None) for layer in self.layers)

    def reserve(self, capacity: int) -> None:
        """Grow to ``capacity`` positions per row, if there are fewer: new storage, and a copy of what is held.

        Raises:
            ValueError: a static cache would have to grow.
        """
        if capacity <= self._capacity:
            return
        if self._static:
            raise ValueError(
                f"a static RowCache keeps its capacity of {self._capacity}: make one for {capacity} tokens"
            )
        # A view may hold more of its layers.
        old, top = self._stores, max([self._top, *(view._top for view in self._views)])
        before = dict(self.__dict__)
        try:
            self._allocate(capacity, self.dtype)
            self._copy_prefix(old, top)
        except BaseException:  # an interrupt: the new storage does not hold what the lengths say
            self.__dict__.update(before)
            for view in self._views:
                view._follow()
            raise
        self._set(list(self._lengths))

    def _copy_prefix(self, stores: Sequence[torch.Tensor], top: int) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for store, other in zip(self._stores, stores, strict=True):
                store[:, :, :, :top].copy_(other[:, :, :, :top])

    @staticmethod
    def bytes_for(config: Any, rows: int, capacity: int, dtype: torch.dtype) -> int:
        """Bytes of keys and values, and of states, of such a cache when it is new, exactly.

        Args:
            config: of the model.
            rows: number of sequences.
            capacity: positions per row.
            dtype: of keys and values.
        """
        return CacheLayout.of(config).bytes_for(rows, capacity, dtype)

    @classmethod
    def for_model(cls, model: PreTrainedModel, rows: int, capacity: int, *, static: bool = False) -> RowCache:
        """A cache for ``model``, in its dtype, on the devices of its layers.

        Args:
            model: whose layers have full attention or sliding windows.
            rows: number of sequences.
            capacity: positions per row.
            static: see :class:`RowCache`.

        Raises:
            ValueError: as for the class.
        """
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

    # ---- properties and content

    @property
    def rows(self) -> int:
        """Number of sequences."""
        return self._rows

    @property
    def capacity(self) -> int:
        """Positions per row."""
        return self._capacity

    @property
    def nbytes(self) -> int:
        """Bytes of key and value storage, and of states, on all devices."""
        return sum(self.nbytes_on().values())

    def nbytes_on(self) -> Counter[str]:
        """Bytes of key and value storage, and of states, per device."""
        counted: Counter[str] = Counter()
        for store in self._stores:
            counted[str(store.device)] += store.nbytes
        if self._ring is not None:
            counted[str(self._device)] += self._ring.nbytes
        return counted

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Per layer, the number of last positions that a column sees, its own included; None: all."""
        return self._layout.windows

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Of token ids, masks and positions."""
        return self._device

    def device_of(self, layer: int) -> torch.device:
        """Where the keys and values of a layer lie."""
        return self._layer_devices[layer]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens held per row, on the host."""
        return tuple(self._lengths)

    @property
    def is_recurrent(self) -> bool:
        """Whether some layers keep states, so that a rollback reaches back to :meth:`restorable` only."""
        return self._ring is not None

    @property
    def is_static(self) -> bool:
        """Whether addresses and capacity are fixed, and lengths lie on the device."""
        return self._static

    @property
    def uses_device_lengths(self) -> bool:
        """Whether attention reads ``device_lengths`` instead of a mask."""
        return self._static or (self._on_gpus and self._config._attn_implementation == ATTENTION)

    @property
    def device_lengths(self) -> torch.Tensor:
        """Tokens held per row, int32 ``[rows]`` on ``device``: those that it follows, else always the same tensor; see ``sync()``."""
        return self._lengths_on[self._device] if self._followed is None else self._followed

    def follow(self, lengths: torch.Tensor) -> None:
        """Read the lengths at which forwards begin from a tensor that the device writes, without a copy. For a static cache.

        From here on the host's lengths are unknown, and no forward changes them, until ``set_lengths()``.

        Args:
            lengths: int32 ``[rows]`` on the device, contiguous.
        """
        assert self._static
        self._followed, self._stale = lengths, False

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Set the host's lengths to what the rows hold, after the device has set its own.

        Raises:
            ValueError: another number of rows, or a length beyond the capacity.
        """
        if len(lengths) != self._rows or not all(0 <= n <= self._capacity for n in lengths):
            raise ValueError(f"lengths {list(lengths)} for {self._rows} rows of a capacity of {self._capacity}")
        self.text = None
        self._set(list(lengths))

    def copy_from(self, other: RowCache, lengths: Sequence[int]) -> None:
        """Copy the first tokens of each row of another cache. Addresses stay.

        Args:
            other: of the same shape.
            lengths: per row, tokens to copy.

        Raises:
            ValueError: the other cache has another shape or holds less.
        """
        if (other._layer_devices, other._heads, other._dims, other._rows) != (
            self._layer_devices,
            self._heads,
            self._dims,
            self._rows,
        ):
            raise ValueError(f"{other!r} cannot be copied into {self!r}")
        if not all(0 <= n <= have for n, have in zip(lengths, other._lengths, strict=True)):
            raise ValueError(f"lengths {list(lengths)} of a cache that holds {other._lengths}")
        self.reset()
        top = self._need(max(lengths))
        self._copy_prefix(other._stores, top)
        self._set(list(lengths))

    @contextmanager
    def row_alone(self, row: int, more: int) -> Iterator[RowCache]:
        """A cache of one row with its keys and values, and room for ``more`` tokens. This cache takes over what they become.

        Raises:
            ValueError: there is no room.
        """
        begin = self._lengths[row]
        end = begin + more
        if end > self._capacity:
            raise ValueError(f"RowCache is full: row {row} holds {begin} of {self._capacity} tokens, not {more} more")
        alone = RowCache(self._config, 1, end, dtype=self.dtype, device=self._device)
        for store, other in zip(alone._stores, self._stores, strict=True):
            store[:, 0, :, :begin].copy_(other[:, row, :, :begin])
        alone._set([begin])
        yield alone
        for store, other in zip(alone._stores, self._stores, strict=True):
            other[:, row, :, begin:end].copy_(store[:, 0, :, begin:end])
        self._set([end if r == row else n for r, n in enumerate(self._lengths)])

    def sync(self) -> None:
        """Copy the host's lengths to each device, if they have changed. A forward does so, too."""
        if self._stale:
            lengths = torch.tensor(self._lengths, dtype=torch.int32, device="cpu")
            for there in self._lengths_on.values():
                there.copy_(lengths, non_blocking=True)
            self._stale = False

    def read_lengths(self) -> None:
        """Copy the device's lengths to the host, after kernels have written them. Waits for the device.

        Raises:
            RuntimeError: they are out of range; nothing has changed.
        """
        lengths: list[int] = self.device_lengths.tolist()
        if not all(0 <= n <= self._capacity for n in lengths):
            raise RuntimeError(f"the lengths on the device are {lengths}: each must be 0 .. {self._capacity}")
        self.text = None
        stale = self._followed is not None
        self._set(lengths)
        self._stale = stale

    def _check_attention(self) -> None:
        if self._static and self._config._attn_implementation != ATTENTION:
            raise ValueError(
                f"a static RowCache works with attention by lengths only, and this model has "
                f"{self._config._attn_implementation}: call model.set_attn_implementation({ATTENTION!r}) first"
            )

    def _capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    @property
    def ragged(self) -> bool:
        """Whether the rows differ in length."""
        return not self._even

    def load(self, states: Sequence[tuple[torch.Tensor, torch.Tensor]], lengths: Sequence[int] | None = None) -> None:
        """Copy what :meth:`states` returns into the cache.

        Args:
            states: per layer, keys and values ``[rows, kv_heads, n, head_dim]``, each with its own size; of a recurrent layer its states.
            lengths: tokens that the rows then hold; None: ``n`` each. With recurrent layers, those that their states belong to.

        Raises:
            ValueError: another shape, or more than the capacity.
        """
        pairs = [states[layer] for layer in self._attention]
        n = pairs[0][0].shape[2] if pairs else max(lengths or [0])
        self.reset()
        self._need(n)
        for pair in pairs:
            for given, dim in zip(pair, (self._dims[0], self._dims[-1]), strict=True):
                shape = (self._rows, self._heads, n, dim)
                if given.shape != shape:
                    raise ValueError(f"keys and values of shape {list(given.shape)} cannot be loaded as {list(shape)}")
        with torch.inference_mode(False), torch.no_grad():
            for i, pair in enumerate(pairs):
                storage, at = self._places[i]
                for half, given in zip(storage.halves, pair, strict=True):
                    half[at, :, :, :n].copy_(given)
        lengths = [n] * self._rows if lengths is None else list(lengths)
        self._set(lengths)
        if self._ring is not None:
            self._ring.load([pair for layer, pair in enumerate(states) if layer not in self._attention], lengths)

    def states(self, lengths: Sequence[int] | None = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What the layers hold, in their order.

        Args:
            lengths: per row, those of the states of recurrent layers, from :meth:`restorable`; None: the present ones.

        Returns:
            The keys and values of the used prefix, views ``[rows, kv_heads, max(lengths), head_dim]``; of a recurrent layer the last inputs
            of its convolution ``[rows, channels, taps]`` and its state ``[rows, heads, key_dim, value_dim]``, copies.
        """
        used = self._narrowed(0, self._top)
        recurrent = iter(() if self._ring is None else self._ring.export(lengths or self._lengths))
        return [
            (used[self._attention[i]], used[self._depth + self._attention[i]])
            if i in self._attention
            else next(recurrent)
            for i in range(self._layers)
        ]

    def as_dynamic(self, attention_mask: torch.Tensor, columns: int | None = None) -> DynamicCache:
        """A copy for transformers, with columns for padding, which this cache does not have.

        Args:
            attention_mask: ``[B, S]`` of the whole text, 0 for padding; each of its rows stands for ``rows / B`` of the cache.
            columns: The columns that the copy must have; None: as many as all rows hold, and fewer than the mask has.

        Raises:
            ValueError: The mask does not fit the rows, or a row does not hold the tokens of ``columns``.
            NotImplementedError: The cache has recurrent layers, of which transformers keeps one state per row.
        """
        if self._ring is not None:
            raise NotImplementedError(
                "RowCache: the states of recurrent layers have no form with columns for padding; pass the whole text without a cache"
            )
        if attention_mask.ndim != 2 or self._rows % len(attention_mask):
            raise ValueError(f"attention_mask of shape {list(attention_mask.shape)} for a cache of {self._rows} rows")
        kept = (attention_mask != 0).cpu().repeat_interleave(self._rows // len(attention_mask), 0)
        # Per row, the columns before its first token that is not there.
        ends = [int((row.cumsum(0) <= n).sum()) for row, n in zip(kept, self._lengths, strict=True)]
        if columns is None:
            columns = min(*ends, kept.shape[1] - 1)
        elif min(ends) < columns:
            raise ValueError(
                f"the RowCache holds {self._lengths} tokens, and attention_mask has {kept[:, :columns].sum(1).tolist()} in {columns} columns"
            )
        kept = kept[:, :columns]
        copy = DynamicCache(config=self._config)
        if columns == 0:
            return copy
        with torch.inference_mode(False), torch.no_grad():
            for layer, pair in enumerate(self.states()):
                moved = [held.new_zeros((*held.shape[:2], columns, held.shape[3])) for held in pair]
                for held, to in zip(pair, moved, strict=True):
                    for row, at in enumerate(kept):
                        to[row][:, at.to(to.device)] = held[row, :, : int(at.sum())]
                copy.update(*moved, layer)
        return copy

    def matches(self, model: PreTrainedModel) -> bool:
        """Whether this cache can hold the keys and values of ``model``: shapes, dtype, devices."""
        at = LayerDevices.of(model)
        return (
            CacheLayout.of(model.config, local_kv_heads(model)) == self._layout
            and compute_dtype(model) == self.dtype
            and (at.inputs, at.layers) == (self._device, self._layer_devices)
        )

    def fits(self, rows: int, capacity: int) -> bool:
        """Whether this cache, once empty, is large enough for ``capacity`` positions of exactly ``rows`` rows."""
        return rows == self._rows and capacity <= self._capacity

    def __repr__(self) -> str:
        return f"RowCache(layers={self._layers}, rows={self._rows}, capacity={self._capacity}, lengths={self._lengths})"

    def __deepcopy__(self, memo: dict[int, Any]) -> RowCache:
        """A copy with storage of its own, as transformers' recipe for the cache of a common prefix needs it."""
        copy = RowCache(
            self._config,
            self._rows,
            self._capacity,
            dtype=self.dtype,
            device=self.device,
            static=self._static,
            layer_devices=self._layer_devices,
            kv_heads=self._heads,
        )
        copy._copy_prefix(self._stores, self._capacity)
        if self._ring is not None and copy._ring is not None:
            copy._ring.copy_from(self._ring)
        copy._set(list(self._lengths))
        copy.text = None if self.text is None else [tokens.copy() for tokens in self.text]
        memo[id(self)] = copy
        return copy

    def __reduce__(self) -> Any:
        """A pickled copy is a cache of its own, which is not static."""
        options = {
            "dtype": self.dtype,
            "device": self.device,
            "layer_devices": self._layer_devices,
            "kv_heads": self._heads,
        }
        states = [tuple(held.clone() for held in pair) for pair in self.states()]
        return _unpickled, (self._config, self._rows, self._capacity, options, states, self._lengths, self.text)

    # ---- lengths

    def _set(self, lengths: list[int]) -> None:
        first = lengths[0]
        self._lengths = lengths
        # The device has the lengths before.
        self._stale = True
        self._followed = None
        if self.text is not None:
            # The cache no longer holds tokens that are rolled back.
            self.text = [tokens[:n] for tokens, n in zip(self.text, lengths, strict=True)]
        self._even = len(lengths) == 1 or all(n == first for n in lengths)
        self._top = first if self._even else max(lengths)
        # Columns of the running forward; 0: none runs.
        self._open_q = 0
        self._aim = None
        if self._ring is not None:
            self._ring.truncate(lengths)
        # For different lengths: q and the indices computed for it; q of the mask and of the positions returned.
        self._ragged: tuple[int, torch.Tensor] | None = None
        self._masked_q = self._placed_q = 0

    def truncate(self, lengths: Sequence[int] | np.ndarray | torch.Tensor) -> None:
        """Lower the lengths to ``lengths``, one per row: O(1) per row, no copy and no allocation.

        Raises:
            ValueError: another number of rows, or a length that is not between 0 and the present one (after ``follow()``, the last one
                that the host had), or not one of :meth:`restorable`. Nothing has changed.
        """
        new: list[int] = lengths.tolist() if isinstance(lengths, (np.ndarray, torch.Tensor)) else list(lengths)
        if new == self._lengths and self._followed is None:
            return
        if len(new) != self._rows:
            raise ValueError(f"{len(new)} lengths for a cache of {self._rows} rows")
        for row, (n, held) in enumerate(zip(new, self._lengths, strict=True)):
            if not 0 <= n <= held:
                raise ValueError(f"row {row} holds {held} tokens and cannot be truncated to {n}")
        for row, (n, there) in enumerate(zip(new, self.restorable(new), strict=True)):
            if n != there:
                raise ValueError(
                    f"row {row} has no recurrent states at {n} tokens any more: truncate it to {there}, and feed the tokens after that again"
                )
        self._set(new)

    def recover(self, lengths: Sequence[int], text: Sequence[np.ndarray] | None) -> None:
        """After an error at any place: hold at most ``lengths`` tokens per row, which are those of ``text`` (None: they are not known)."""
        # Not truncate(): what depends on the lengths may not have been set with them.
        ends = self.restorable([min(n, now) for n, now in zip(lengths, self._lengths, strict=True)])
        self.text = None
        self._set(ends)
        self.text = text and [tokens[:n] for tokens, n in zip(text, ends, strict=True)]

    def restorable(self, lengths: Sequence[int]) -> list[int]:
        """Per row the largest length up to that of ``lengths`` that :meth:`truncate` takes. Without recurrent layers, ``lengths``."""
        return list(lengths) if self._ring is None else self._ring.restorable(lengths)

    def reserve_states(self, states: int | None = None) -> None:
        """Room for more states per row of recurrent layers.

        Args:
            states: how many; None: twice as many, up to twice the widest step, after a rollback has found one overwritten.
        """
        if self._ring is not None:
            self._ring.reserve(min(2 * self._ring.slots, 2 * WIDTH) if states is None else states)

    def aim(self, lengths: Sequence[int]) -> None:
        """Announce that the rows will be truncated to ``lengths`` after the next forward, a prefill: only those states are kept."""
        self._aim = list(lengths)

    def reset(self) -> None:
        """Set every length to 0. Addresses stay."""
        self._set([0] * self._rows)

    def crop(self, n: int) -> None:
        """``Cache.crop``, with the meaning and the errors of the installed transformers.

        Args:
            n: negative: remove ``-n`` tokens from each row. Zero and positive differ by version, see
                :func:`pipespec.models.compat.cropped_length`.
        """
        top = self._top
        new = cropped_length(top, n)
        self._set([min(have, new) if n >= 0 else max(0, have - (top - new)) for have in self._lengths])

    # ---- mask and positions of a forward

    def _need(self, q: int) -> int:
        """Positions that a forward of ``q`` columns attends over. Raises ``ValueError`` beyond the capacity."""
        top = (self._top if self._followed is None else 0) + q
        if top > self._capacity:
            row = self._lengths.index(self._top)
            raise ValueError(
                f"RowCache is full: its capacity is {self._capacity}, and feeding {q} columns to row {row}, which "
                f"holds {self._top} tokens, needs {top}"
            )
        return top

    def positions(self, q: int) -> torch.Tensor:
        """Positions of the next ``q`` columns: int64 ``[rows, q]``, ``lengths[r] + i``.

        Raises:
            ValueError: beyond the capacity.
        """
        self._placed_q = q
        return self._indices(q)

    def _indices(self, q: int) -> torch.Tensor:
        """Indices of the next ``q`` columns in the cache: int64 ``[rows, q]``."""
        self._need(q)
        if self.uses_device_lengths:
            self._update_device()
            # One kernel: the sum of int64 and int32 is int64. Not kept, since in a capture it lies in the graph's memory.
            return self._arange[:q] + self.device_lengths[:, None]
        if self._even:
            return self._arange.narrow(0, self._top, q).expand(self._rows, q)
        if self._ragged is None or self._ragged[0] != q:
            lengths = torch.tensor(self._lengths, device=self.device)
            self._ragged = (q, lengths[:, None] + self._arange[:q])
        return self._ragged[1]

    def mask(self, q: int, dtype: torch.dtype | None = None, *, window: int | None = None) -> torch.Tensor | None:
        """The 4-D mask of a forward of ``q`` columns at the present lengths.

        Key ``j`` is visible to column ``i`` of row ``r`` iff ``j <= lengths[r] + i``, and with a window ``j > lengths[r] + i - window``.

        Args:
            q: columns.
            dtype: ``torch.bool``: True for visible, which sdpa takes; eager attention would add it. A floating dtype: 0 for visible, else
                -inf, which both take. None: the cache's own dtype, since sdpa would convert a boolean mask in each layer.
            window: of the layers that the mask is for; None: they see all keys.

        Returns:
            ``[rows, 1, q, max(lengths) + q]``. None where the model needs none: equal lengths within the window, and one column or (with sdpa)
            an empty cache. Without ``dtype``, and with attention that reads ``device_lengths``: a mask of no keys.

        Raises:
            ValueError: beyond the capacity.
            NotImplementedError: the lengths differ, and the model's attention takes no such mask.
        """
        top = self._need(q)
        if window is not None and top <= window:
            window = None
        if self.uses_device_lengths and dtype is None:
            self._masked_q = q
            return lengths_only(self._rows, q, self.device)
        if self._even and window is None:
            if q == 1:
                return None
            if self._top == 0 and dtype is None and mask_kind(self._config) is MaskKind.SDPA:
                # Causal: transformers sets sdpa's flag for it.
                return None
        if dtype is None:
            dtype = self.dtype
            if mask_kind(self._config) is MaskKind.NONE:
                raise NotImplementedError(
                    f"{self._config._attn_implementation} attention takes no 4-D mask, which rows of different lengths "
                    'and feeds of several tokens need: call model.set_attn_implementation("sdpa")'
                )
        self._masked_q = q
        if self._even and q <= _BAND_WIDTH:
            # Row i of the band is visible up to column capacity + i. So the view that begins at capacity - length is the mask at that length.
            width, band = self._band.get((dtype, window), (0, self._arange))
            if width < q:
                width = min(_BAND_WIDTH, max(16, 1 << (q - 1).bit_length()))
                rows = torch.arange(width, device=self.device)[None] + self._capacity
                band = self._make_mask(rows, self._capacity + width, dtype, window)[0]
                self._band[dtype, window] = (width, band)
            # [q, top], expanded to [rows, 1, q, top].
            return band[:q, self._capacity - self._top : self._capacity + q].expand(self._rows, 1, q, top)
        return self._make_mask(self._indices(q), top, dtype, window)[:, None]

    def masks(self, q: int) -> list[torch.Tensor | None]:
        """Per layer the mask of a forward of ``q`` columns, see :meth:`mask`. Layers with the same window share it."""
        windows = self.windows
        made = {window: self.mask(q, window=window) for window in dict.fromkeys(windows)}
        return [made[window] for window in windows]

    def masks_by_type(self, q: int) -> dict[str, torch.Tensor | None]:
        """:meth:`mask` of the two types of layers, as transformers names them."""
        window = next((window for window in self.windows if window is not None), None)
        return {FULL: self.mask(q), SLIDING: self.mask(q, window=window)}

    def _make_mask(self, indices: torch.Tensor, keys: int, dtype: torch.dtype, window: int | None) -> torch.Tensor:
        """``[rows, q, keys]`` for columns at ``indices [rows, q]``."""
        # Not inference tensors: the band is kept, and used inside and outside of inference_mode.
        with torch.inference_mode(False), torch.no_grad():
            at = torch.arange(keys, device=self.device)
            visible = at <= indices[:, :, None]
            if window is not None:
                visible &= at > indices[:, :, None] - window
            if dtype == torch.bool:
                return visible
            return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, -torch.inf)

    # ---- called by a model's forward

    def open(self, q: int, *, columns_first: bool = False) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Begin a forward of ``q`` columns, for code that loops over the layers itself. ``close()`` ends it.

        Args:
            q: columns.
            columns_first: the layout of ``new``.

        Returns:
            ``new`` and ``used``, views per layer: keys at ``[layer]``, values at ``[layers + layer]``. ``new`` is where new keys and values
            belong, ``[rows, kv_heads, q, head_dim]``, or ``[rows, q, kv_heads, head_dim]`` with ``columns_first``. It is empty if the lengths
            differ, since ``scatter()`` must write then, and if attention reads ``device_lengths``, since ``update()`` writes. ``used`` is what
            to attend over, ``[rows, kv_heads, max(lengths) + q, head_dim]``.

        Raises:
            ValueError: beyond the capacity.
        """
        top = self._need(q)
        aim, self._aim = self._aim, None
        if self._ring is not None:
            self._ring.begin(self._lengths, q, aim)
        if self.uses_device_lengths:
            self._check_attention()
            self._update_device()
            self._open_q = q
            return (), self._narrowed(0, self._capacity if self._static else top)
        used = self._narrowed(0, top)
        new: Sequence[torch.Tensor] = ()
        if not self._even:
            # Once per forward and device.
            indices = self._indices(q)
            for storage in self._storages:
                storage.point(indices)
        elif columns_first:
            new = self._narrowed(self._top, q, columns_first=True)
        else:
            new = self._narrowed(self._top, q)
        self._open_q = q
        return new, used

    def open_storage(self, q: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Begin a forward of ``q`` columns, for code that writes into the storage itself. ``close()`` ends it.

        Args:
            q: columns.

        Returns:
            All keys and all values, views ``[layers, rows, kv_heads, capacity, head_dim]``, and the lengths per row. The keys and values of
            column ``i`` of row ``r`` belong at position ``lengths[r] + i``.

        Raises:
            ValueError: beyond the capacity.
        """
        self._need(q)
        self._open_q = q
        (storage,) = self._storages
        return *storage.halves, self._lengths

    def scatter(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> None:
        """Write the new keys and values of one layer, if the lengths differ. Between ``open()`` and ``close()``.

        Args:
            keys: ``[rows, q, kv_heads, head_dim]``.
            values: as ``keys``.
            layer: index of the layer, among those with keys and values.
        """
        index = self._places[layer][0].index
        assert index is not None
        self._flat[layer].index_copy_(0, index, keys.reshape(-1, self._dims[0]))
        self._flat[self._depth + layer].index_copy_(0, index, values.reshape(-1, self._dims[-1]))

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
            self._new, self._used = self.open(q)
        elif self._open_q != q:
            raise RuntimeError(f"RowCache: layer {layer} is updated, but its forward did not begin with layer 0")

    def _leave(self, layer: int) -> None:
        if layer == self._layers - 1:
            self.close()
            self._new = self._used = ()

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
            Keys and values, views ``[rows, kv_heads, max(lengths) + q, head_dim]``; all of a static cache's storage.

        Raises:
            ValueError: another shape or dtype, or beyond the capacity; nothing was written.
            RuntimeError: rows of different lengths without ``mask(q)`` and ``positions(q)``, states that require gradients, or layers out
                of order.
        """
        i, depth = self._attention[layer_idx], self._depth
        if i == 0:
            self._check(key_states, value_states)
        self._enter(layer_idx, key_states.shape[2])
        used = self._used
        if self.uses_device_lengths:
            values = value_states.to(self._dtype)
            storage, at = self._places[i]
            lengths = storage.lengths if self._followed is None else self._followed
            ops.kv_append(key_states, values, storage.halves[0][at], storage.halves[1][at], lengths)
            attach_lengths(used[i], lengths, self.windows[layer_idx])
        elif self._even:
            new = self._new
            new[i].copy_(key_states)
            new[depth + i].copy_(value_states)
        else:
            # Under autocast only the keys have the model's dtype.
            values = value_states.to(self._dtype)
            self.scatter(key_states.transpose(1, 2), values.transpose(1, 2), i)
        keys, values = used[i], used[depth + i]
        self._leave(layer_idx)
        return keys, values

    def _update_device(self) -> None:
        if self._stale and self._capturing():
            raise RuntimeError(
                "the lengths on the device are out of date: call the RowCache's sync() before the capture"
            )
        self.sync()

    def _check(self, states: torch.Tensor, values: torch.Tensor) -> None:
        rows, heads, q, dim = states.shape
        shape, sizes = (rows, heads, dim, values.shape[3]), (self._dims[0], self._dims[-1])
        if shape != (self._rows, self._heads, *sizes) or values.shape[:3] != states.shape[:3] or q < 1:
            raise ValueError(
                f"RowCache of {self._rows} rows, {self._heads} heads, keys of {sizes[0]} and values of {sizes[1]}: cannot hold new keys and "
                f"values of shape [rows, heads, columns, head_dim] = {list(states.shape)} and {list(values.shape)}"
            )
        if states.dtype != self.dtype or states.device != self.device_of(0):
            raise ValueError(
                f"RowCache holds {self.dtype} on {self.device_of(0)}, the new keys are {states.dtype} on {states.device}"
            )
        if states.requires_grad:
            raise RuntimeError(
                "RowCache is for inference: call the model under torch.no_grad() or torch.inference_mode()"
            )
        if not self._even and not self._masked_q == self._placed_q == q:
            raise RuntimeError(self._trap())

    def _without_forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            "the recurrent layers of this model keep a state per column here, which its own forward does not: call "
            "pipespec.engine.forward.forward(model, tokens, cache, keep=...) in place of the model"
        )

    get_conv_state = get_recurrent_state = update_conv_state = update_recurrent_state = _without_forward
    has_previous_state = _without_forward
    # The attributes that transformers 5.0 reads.
    conv_states = recurrent_states = property(_without_forward)

    def _trap(self) -> str:
        return (
            f"the rows of this RowCache hold {self._lengths} tokens: what transformers derives from one length would be "
            "wrong. Pass attention_mask=cache.mask(q) and position_ids=cache.positions(q) for a feed of q "
            "tokens, give transformers cache.as_dynamic(attention_mask), or use pipespec.engine.forward.forward(model, tokens, cache, keep=...)"
        )

    # ---- the rest of the Cache interface

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The longest row's length."""
        return self._top

    def get_mask_sizes(self, query: Any, layer_idx: int = 0) -> tuple[int, int]:
        """``(max(lengths) + q, 0)``, for transformers' masks. Raises ``RuntimeError`` if the lengths differ, or the mask has padding before cached tokens."""
        if not self._even:
            raise RuntimeError(self._trap())
        columns = self._top + query_length(query)
        if self._static or torch.compiler.is_compiling():  # torch.compile cannot trace what follows
            return columns, 0
        # Only the caller knows the mask, whose columns would silently be taken for those of other tokens.
        mask = sys._getframe(1).f_locals.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.ndim == 2:
            is_wider = mask.shape[1] > columns
            if is_wider or (self.text is not None and not bool((mask[:, : self._top] != 0).all())):
                raise RuntimeError(
                    f"this RowCache holds {self._top} tokens per row and no columns for padding, which attention_mask counts: pass "
                    "past_key_values.as_dynamic(attention_mask)"
                )
        return columns, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self._capacity

    get_max_cache_shape = get_max_length

    @property
    def max_cache_len(self) -> int:
        return self._capacity

    @property
    def batch_size(self) -> int:
        return self._rows

    max_batch_size = batch_size

    @property
    def is_compileable(self) -> bool:
        """False: the lengths are on the host, so transformers must not compile a decoding step around them."""
        return False

    @property
    def is_initialized(self) -> bool:
        return True

    def early_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the storage exists."""

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Move row ``beam_idx[r]`` to row ``r`` (beam search). Copies the used prefix; addresses stay.

        Args:
            beam_idx: int64 ``[rows]``.

        Raises:
            ValueError: another number of rows.
        """
        order: list[int] = beam_idx.tolist()
        if len(order) != self._rows:
            raise ValueError(f"{len(order)} row indices for a cache of {self._rows} rows")
        with torch.no_grad():
            for store in self._stores:
                prefix = store.narrow(3, 0, self._top)
                prefix.copy_(prefix.index_select(1, beam_idx.to(store.device)))
        if self._ring is not None:
            self._ring.select(order)
        if self.text is not None:
            self.text = [self.text[row] for row in order]
        self._set([self._lengths[row] for row in order])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times, as ``torch.repeat_interleave``. In new storage; not for a static cache."""
        self.batch_select_indices(torch.arange(self._rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows ``indices``, in this order; one may occur several times. In new storage; not for a static cache.

        Args:
            indices: int64 ``[new rows]``.

        Raises:
            ValueError: the cache is static, or there are no such rows.
        """
        if self._static:
            raise ValueError(f"a static RowCache keeps its {self._rows} rows: make another one")
        order: list[int] = indices.tolist()
        if not order or not all(0 <= row < self._rows for row in order):
            raise ValueError(f"rows {order} of a cache of {self._rows} rows")
        old, top = self._stores, self._top
        self._rows = len(order)
        lengths, text = [self._lengths[row] for row in order], self.text
        self._make_lengths()
        self._allocate(self._capacity, self.dtype)
        if self._ring is not None:
            self._ring.select(order)
        with torch.inference_mode(False), torch.no_grad():
            for store, other in zip(self._stores, old, strict=True):
                store[:, :, :, :top].copy_(other[:, :, :, :top].index_select(1, indices.to(store.device)))
        self.text = None if text is None else [text[row] for row in order]
        self._set(lengths)


def _unpickled(
    config: Any,
    rows: int,
    capacity: int,
    options: dict[str, Any],
    states: Sequence[tuple[torch.Tensor, torch.Tensor]],
    lengths: Sequence[int],
    text: Sequence[np.ndarray] | None,
) -> RowCache:
    cache = RowCache(config, rows, capacity, **options)
    cache.load(states, lengths)
    cache.text = text
    return cache


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

    def _make_storages(self, capacity: int, dtype: torch.dtype) -> list[_Storage]:
        (storage,) = self._whole._storages
        layers, device = range(self._depth), storage.device
        return [_Storage(layers, [half[: len(layers)] for half in storage.halves], device, self._lengths_on[device])]

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
