"""Keys and values of several sequences at fixed addresses: lengths that are lowered in O(1), storage, and the gathering of rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pipespec.config import WIDTH
from pipespec.engine.attention import ATTENTION
from pipespec.engine.features import Features, RowFeatures
from pipespec.engine.states import StateRing
from pipespec.models.layout import CacheLayout


def _unbound(stores: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The tensors of all layers, those of the first storage first."""
    if len(stores) == 1:
        return stores[0].unbind(0)
    return [tensor for store in stores for tensor in store.unbind(0)]


class DeviceStorage:
    """Keys and values of the layers of a cache that lie on one device.

    Attributes:
        layers: their indices in the model, in order.
        stores: ``[2 * len(layers), rows, kv_heads, capacity, head_dim]``, the keys of all layers, then the values; two tensors
            ``[len(layers), rows, kv_heads, capacity, dim]``, where keys and values differ in size.
        halves: views of the keys and of the values.
        flat: per layer views ``[rows * kv_heads * capacity, dim]``: ragged scatters write here.
        lengths: int32 ``[rows]``: the cache's lengths on this device.
        index: where a forward of different lengths writes its states ``[rows, q, kv_heads]`` in ``flat``.
    """

    __slots__ = ("device", "flat", "halves", "index", "index_base", "layers", "lengths", "stores")

    def __init__(
        self, layers: Sequence[int], stores: Sequence[torch.Tensor], device: torch.device, lengths: torch.Tensor
    ) -> None:
        self.layers, self.stores, self.device, self.lengths = layers, tuple(stores), device, lengths
        depth = len(layers)
        self.halves = self.stores[0][:depth], self.stores[-1][-depth:]
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

    def narrowed(self, begin: int, length: int) -> Sequence[torch.Tensor]:
        """Per layer a part of the keys, then per layer a part of the values."""
        return _unbound([store.narrow(3, begin, length) for store in self.stores])

    def point(self, indices: torch.Tensor) -> None:
        """Set ``index`` for columns at ``indices [rows, q]`` of the cache."""
        if self.index_base is None:
            _, rows, heads, capacity, _ = self.stores[0].shape
            self.index_base = (torch.arange(rows * heads, device=self.device) * capacity).view(rows, 1, heads)
        self.index = (self.index_base + indices.to(self.device)[:, :, None]).view(-1)


class RowLengths:
    """How many tokens each row holds: on the host, and on each device where attention reads them.

    Args:
        config: of the model.
        rows: number of sequences.
        device: of token ids, masks and positions.
        static: whether attention reads the lengths on the device.
        layer_devices: per layer, where its keys and values lie.
    """

    text: Sequence[np.ndarray] | None = None
    features: Features | RowFeatures | None = None
    """Where forwards keep hidden states for a draft that reads them; None: nowhere."""
    _capacity: int
    _lengths: list[int]
    _ring: StateRing | None = None

    def __init__(
        self,
        config: Any,
        rows: int,
        *,
        device: torch.device,
        static: bool,
        layer_devices: Sequence[torch.device],
    ) -> None:
        self._config, self._rows, self._static = config, rows, static
        self._device, self._layer_devices = device, tuple(layer_devices)
        self._on_gpus = all(at.type == "cuda" for at in (device, *layer_devices))
        self._stale = True
        self._followed: torch.Tensor | None = None
        self._aim: Sequence[int] | None = None
        self._make_lengths()
        self._check_attention()

    def _make_lengths(self) -> None:
        """Allocate the lengths on each device."""
        with torch.inference_mode(False), torch.no_grad():
            self._lengths_on = {
                device: torch.zeros(self._rows, dtype=torch.int32, device=device)
                for device in dict.fromkeys((self._device, *self._layer_devices))
            }

    @property
    def rows(self) -> int:
        """Number of sequences."""
        return self._rows

    @property
    def capacity(self) -> int:
        """Positions per row."""
        return self._capacity

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
    def ragged(self) -> bool:
        """Whether the rows differ in length."""
        return not self._even

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

    @property
    def first_positions(self) -> Sequence[int] | torch.Tensor:
        """Per row, the position of a forward's first column; of a static cache a tensor on the device."""
        return self.device_lengths if self._static else self.lengths

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


class RowStorage(RowLengths):
    """The tensors behind the lengths: keys and values of all layers, and the states of recurrent ones.

    Args:
        config: as for :class:`RowLengths`, as for all that follow.
        layout: of the model's layers.
        rows: number of sequences.
        capacity: positions per row.
        dtype: of keys and values.
        device: see :class:`RowLengths`.
        static: see :class:`RowLengths`.
        layer_devices: see :class:`RowLengths`.
    """

    def __init__(
        self,
        config: Any,
        layout: CacheLayout,
        rows: int,
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        static: bool,
        layer_devices: Sequence[torch.device],
    ) -> None:
        super().__init__(config, rows, device=device, static=static, layer_devices=layer_devices)
        self._layout, self._heads, self._layers = layout, layout.heads, config.num_hidden_layers
        # Per layer with keys and values, its index among those.
        self._attention = {layer: i for i, layer in enumerate(layout.attention)}
        self._depth = len(self._attention)
        # One tensor for keys and values of equal size, else one for each.
        self._dims = (layout.key_dim,) if layout.key_dim == layout.value_dim else (layout.key_dim, layout.value_dim)
        self._allocate(capacity, dtype)
        if layout.states is not None:
            self._ring = StateRing(layout.states, rows, dtype, device)
        self._set([0] * rows)

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

    def _make_storages(self, capacity: int, dtype: torch.dtype) -> list[DeviceStorage]:
        shape = (self._rows, self._heads, capacity)
        storages = []
        attention = [self._layer_devices[layer] for layer in self._attention]
        for device in dict.fromkeys(attention):
            layers = [i for i, at in enumerate(attention) if at == device]
            stores = DeviceStorage.allocated(len(layers), shape, self._dims, dtype, device)
            storages.append(DeviceStorage(layers, stores, device, self._lengths_on[device]))
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

    def _narrowed(self, begin: int, length: int) -> Sequence[torch.Tensor]:
        """Per layer a part of the keys, then per layer a part of the values."""
        return self._by_layer([s.narrowed(begin, length) for s in self._storages])

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
        old, before = self._stores, dict(self.__dict__)
        try:
            self._allocate(capacity, self.dtype)
            self._copy_prefix(old, self._top)
        except BaseException:  # an interrupt: the new storage does not hold what the lengths say
            self.__dict__.update(before)
            raise
        self._set(list(self._lengths))

    def _copy_prefix(self, stores: Sequence[torch.Tensor], top: int) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for store, other in zip(self._stores, stores, strict=True):
                store[:, :, :, :top].copy_(other[:, :, :, :top])

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

    def fits(self, rows: int, capacity: int) -> bool:
        """Whether this cache, once empty, is large enough for ``capacity`` positions of exactly ``rows`` rows."""
        return rows == self._rows and capacity <= self._capacity

    def copy_from(self, other: RowStorage, lengths: Sequence[int]) -> None:
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
