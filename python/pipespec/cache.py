"""RowCache: a HuggingFace ``Cache`` at fixed addresses, with a length per row and O(1) truncate."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from pipespec.attention import ATTENTION, attach_lengths, lengths_only
from pipespec.compat import MaskKind, compute_dtype, cropped_length, mask_kind, query_length, text_config
from pipespec_kernels import ops

# Widest feed whose masks are cut out of the precomputed band; wider ones (prefill in chunks) are made on the spot.
_BAND_WIDTH = 64


def _head_shape(config: Any) -> tuple[int, int]:
    """Key/value heads of a layer, and their size."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return heads, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


class _RowLayer(CacheLayerMixin):
    """What HuggingFace code sees in ``cache.layers``: the whole storage of one layer. The cache does the work."""

    is_sliding = False
    is_compileable = False
    is_croppable = True

    def __init__(self, owner: RowCache, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self._owner = weakref.ref(owner)  # no cycle: the storage goes with the last reference to the cache
        self._index = index
        self.keys, self.values = keys, values
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

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


class RowCache(Cache):
    """Keys and values of ``rows`` sequences at fixed addresses, each row with a length of its own.

    One tensor ``[2 * layers, rows, kv_heads, capacity, head_dim]`` is allocated once. A forward of ``q`` columns writes
    the keys and values of row ``r`` at ``lengths[r] .. lengths[r] + q - 1`` and attends over the used prefix ``[rows,
    kv_heads, max(lengths) + q, head_dim]`` (views, no copy). After the last layer every length grows by ``q``; the
    caller then truncates to what it committed. What lies beyond a row's length is never visible and is overwritten by
    the next feed, so padding columns to the right of a row's real tokens are harmless: column ``i`` of row ``r`` sees
    the keys ``0 .. lengths[r] + i``, always at least itself, and therefore no softmax runs over nothing.

    With equal lengths it behaves as ``DynamicCache``: ``model(..., past_key_values=cache)`` and
    ``model.generate(past_key_values=cache)`` work, left padding with a 2-D mask included. With different lengths the
    mask and the positions that HuggingFace derives from the cache would be silently wrong, so it refuses to derive
    them: use ``forward(model, tokens, cache, keep=...)``, or pass both ``mask(q)`` and ``positions(q)`` to the model.

    **Lengths on the device.** With ``model.set_attn_implementation("pipespec")`` on a GPU, and with ``fixed=True``
    anywhere, the lengths are kept in ``device_lengths`` as well, where the attention reads them: no mask is made, and
    ``mask(q)`` only says so. With ``fixed`` the model is handed the whole storage, always at the same addresses, so that its
    forward can be captured in a CUDA graph: ``sync()`` before the capture, and inside of it nothing waits for the device or
    looks at the host's lengths. After a replay the device's lengths are what its kernels made of them, and
    ``read_lengths()`` tells the host. Such a cache does not grow, and takes no other attention. Where the device decides
    before each forward (``lead()``), the host's lengths mean nothing until ``hold()`` says what was kept.

    ``text``: the tokens held, int32 per row, as far as they are known: those that a call of ``Pipeline.generate`` left; else None.

    Capacity: a feed of ``q`` columns needs ``max(lengths) + q <= capacity``, padding columns included, so allocate the
    longest sequence plus the widest feed. For inference only: update it under ``torch.no_grad`` or
    ``torch.inference_mode``.

    A value that is not finite (a model that overflows its dtype) and lies beyond a row's length can still reach that
    row while it is shorter than another one, since masked scores are added to and not replaced. No finite model can
    leave one.
    """

    def __init__(
        self,
        config: Any,
        rows: int,
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        fixed: bool = False,
    ) -> None:
        """``config``: of a model with full attention in every layer; ValueError on any other, and on sizes below 1."""
        if rows < 1 or capacity < 1:
            raise ValueError(f"RowCache needs at least one row and a capacity of one, not {rows} and {capacity}")
        config = text_config(config)
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
        if kinds or (not getattr(config, "layer_types", None) and getattr(config, "sliding_window", None)):
            raise ValueError(
                f"RowCache holds full attention layers only; this {config.model_type} model has "
                f"{', '.join(sorted(kinds)) or 'sliding_attention'} layers"
            )
        self._config = config
        self._rows, self._depth = rows, config.num_hidden_layers
        self._heads, self._head_dim = _head_shape(config)
        self.text: Sequence[np.ndarray] | None = None
        self._fixed = fixed
        self._stale = True
        self._device = torch.empty(0, device=device).device
        with torch.inference_mode(False), torch.no_grad():
            self._device_lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        self._check_attention()
        whole = self._allocate(capacity, dtype, device)
        self._set([0] * rows)
        depth = self._depth
        super().__init__(layers=[_RowLayer(self, i, whole[i], whole[depth + i]) for i in range(depth)])

    def _allocate(self, capacity: int, dtype: torch.dtype, device: torch.device | str) -> Sequence[torch.Tensor]:
        """New storage, and the views that depend on it. Returns the storage per layer: keys, then values."""
        # Normal tensors even when made under inference_mode: inference tensors could not be written outside of it.
        # Zeroed because a masked value still enters a product with zero, which must not be 0 * NaN.
        with torch.inference_mode(False), torch.no_grad():
            shape = (2 * self._depth, self._rows, self._heads, capacity, self._head_dim)
            self._store = torch.zeros(shape, dtype=dtype, device=device)
            self._capacity = capacity
            self._columns_first = self._store.transpose(2, 3)  # [2 * layers, rows, capacity, heads, head_dim]
            whole = self._store.unbind(0)
            self._flat = self._store.view(2 * self._depth, -1, self._head_dim).unbind(
                0
            )  # the target of ragged scatters
            self._arange = torch.arange(capacity, device=device)
        self._index_base: torch.Tensor | None = None
        self._band: dict[torch.dtype, tuple[int, torch.Tensor]] = {}
        return whole

    def reserve(self, capacity: int) -> None:
        """Make room for ``capacity`` tokens per row, if there is less: new storage, to which what is held is copied.

        ValueError for a fixed cache that would have to grow.
        """
        if capacity <= self._capacity:
            return
        if self._fixed:
            raise ValueError(f"a fixed RowCache keeps its capacity of {self._capacity}: make one for {capacity} tokens")
        old, top = self._store, self._top
        whole = self._allocate(capacity, self.dtype, self.device)
        with torch.inference_mode(False), torch.no_grad():
            self._store[:, :, :, :top].copy_(old[:, :, :, :top])
        for i, layer in enumerate(self.layers):
            layer.keys, layer.values = whole[i], whole[self._depth + i]
        self._set(list(self._lengths))

    @staticmethod
    def bytes_for(config: Any, rows: int, capacity: int, dtype: torch.dtype) -> int:
        """Bytes of key and value storage that such a cache takes."""
        config = text_config(config)
        heads, head_dim = _head_shape(config)
        return int(2 * config.num_hidden_layers * rows * heads * capacity * head_dim * dtype.itemsize)

    @classmethod
    def for_model(cls, model: PreTrainedModel, rows: int, capacity: int, *, fixed: bool = False) -> RowCache:
        """A cache for ``model``, in its dtype and on its device. ValueError where its parts lie on several devices."""
        devices = {p.device for p in model.parameters()}
        if len(devices) > 1:
            raise ValueError(
                f"the model's parts lie on {', '.join(sorted(map(str, devices)))}; RowCache needs one device"
            )
        return cls(model.config, rows, capacity, dtype=compute_dtype(model), device=model.device, fixed=fixed)

    # ---- what it is

    @property
    def rows(self) -> int:
        return self._rows

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def nbytes(self) -> int:
        """Bytes of key and value storage."""
        return self._store.nbytes

    @property
    def dtype(self) -> torch.dtype:
        return self._store.dtype

    @property
    def device(self) -> torch.device:
        return self._store.device

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens held per row, on the host."""
        return tuple(self._lengths)

    @property
    def by_rows(self) -> bool:
        """Whether attention reads ``device_lengths`` instead of a mask."""
        return self._fixed or (self._device.type == "cuda" and self._config._attn_implementation == ATTENTION)

    @property
    def device_lengths(self) -> torch.Tensor:
        """Tokens held per row, int32 ``[rows]`` on the device, for ever the same tensor; see ``sync()``."""
        return self._device_lengths

    def lead(self, lengths: torch.Tensor) -> None:
        """The next forward begins at ``lengths``, int32 ``[rows]`` on the device, whatever the host knows; of a fixed cache.

        A copy on the device, which can be captured. From here on the host's lengths are unknown, and no forward changes them: ``hold()``.
        """
        assert self._fixed
        self._device_lengths.copy_(lengths)
        self._stale, self._led = False, True

    def hold(self, lengths: Sequence[int]) -> None:
        """What the rows hold after the device has led: known to whoever planned its steps. ValueError beyond the capacity."""
        if len(lengths) != self._rows or not all(0 <= n <= self._capacity for n in lengths):
            raise ValueError(f"lengths {list(lengths)} for {self._rows} rows of a capacity of {self._capacity}")
        self.text = None  # known to those who wrote it
        self._set(list(lengths))

    def copy_from(self, other: RowCache, lengths: Sequence[int]) -> None:
        """Take over the first ``lengths[r]`` tokens of each row of a cache of the same shape; addresses stay.

        ValueError where that has another shape or holds less.
        """
        if (other._depth, other._heads, other._head_dim, other._rows) != (
            self._depth,
            self._heads,
            self._head_dim,
            self._rows,
        ):
            raise ValueError(f"{other!r} cannot be copied into {self!r}")
        if not all(0 <= n <= have for n, have in zip(lengths, other._lengths, strict=True)):
            raise ValueError(f"lengths {list(lengths)} of a cache that holds {other._lengths}")
        self.reset()
        top = self._need(max(lengths))
        with torch.inference_mode(False), torch.no_grad():
            self._store[:, :, :, :top].copy_(other._store[:, :, :, :top])
        self._set(list(lengths))

    def sync(self) -> None:
        """Bring the device's lengths to the host's, if these have changed since. A forward does so by itself."""
        if self._stale:
            lengths = torch.tensor(self._lengths, dtype=torch.int32, device="cpu")
            self._device_lengths.copy_(lengths, non_blocking=True)
            self._stale = False

    def read_lengths(self) -> None:
        """Bring the host's lengths to the device's, after something there has written them. Waits for the device.

        RuntimeError, and no change, where they are none.
        """
        lengths: list[int] = self._device_lengths.tolist()
        if not all(0 <= n <= self._capacity for n in lengths):
            raise RuntimeError(f"the lengths on the device are {lengths}: each must be 0 .. {self._capacity}")
        self.text = None  # known to those who wrote it
        self._set(lengths)
        self._stale = False

    def _check_attention(self) -> None:
        if self._fixed and self._config._attn_implementation != ATTENTION:
            raise ValueError(
                f"a fixed RowCache works with attention by lengths only, and this model has "
                f"{self._config._attn_implementation}: call model.set_attn_implementation({ATTENTION!r}) first"
            )

    def _capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    @property
    def ragged(self) -> bool:
        """Whether the rows differ in length."""
        return not self._even

    def load(self, states: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Take over keys and values ``[rows, kv_heads, n, head_dim]`` per layer; every row then holds ``n`` tokens.

        ValueError where they do not fit.
        """
        n = states[0][0].shape[2]
        self.reset()
        self._need(n)
        shape = (self._rows, self._heads, n, self._head_dim)
        for keys, values in states:
            if keys.shape != shape or values.shape != shape:
                raise ValueError(f"keys and values of shape {list(keys.shape)} cannot be loaded as {list(shape)}")
        with torch.inference_mode(False), torch.no_grad():
            for layer, (keys, values) in enumerate(states):
                self._store[layer, :, :, :n].copy_(keys)
                self._store[self._depth + layer, :, :, :n].copy_(values)
        self._set([n] * self._rows)

    def states(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Per layer the keys and values of the used prefix, views ``[rows, kv_heads, max(lengths), head_dim]``."""
        used = self._store.narrow(3, 0, self._top).unbind(0)
        return [(used[i], used[self._depth + i]) for i in range(self._depth)]

    def suits(self, model: PreTrainedModel) -> bool:
        """Whether this cache could hold that model's keys and values: shapes, dtype, device."""
        config = text_config(model.config)
        shape = (config.num_hidden_layers, *_head_shape(config))
        return (
            shape == (self._depth, self._heads, self._head_dim)
            and compute_dtype(model) == self.dtype
            and model.device == self.device
        )

    def fits(self, rows: int, capacity: int) -> bool:
        """Whether this cache (after ``reset()``) can serve a generation of that many rows and that capacity."""
        return rows == self._rows and capacity <= self._capacity

    def __repr__(self) -> str:
        return f"RowCache(layers={self._depth}, rows={self._rows}, capacity={self._capacity}, lengths={self._lengths})"

    def __deepcopy__(self, memo: dict[int, Any]) -> RowCache:
        """A copy with storage of its own: HuggingFace's recipe for reusing the cache of a common prefix."""
        copy = RowCache(
            self._config, self._rows, self._capacity, dtype=self.dtype, device=self.device, fixed=self._fixed
        )
        copy._store.copy_(self._store)
        copy._set(list(self._lengths))
        copy.text = None if self.text is None else [tokens.copy() for tokens in self.text]
        memo[id(self)] = copy
        return copy

    # ---- lengths

    def _set(self, lengths: list[int]) -> None:
        first = lengths[0]
        self._lengths = lengths
        self._stale = True  # the device has not heard of it
        self._led = False
        if self.text is not None:  # what is taken back is no longer held, whatever comes in its place
            self.text = [tokens[:n] for tokens, n in zip(self.text, lengths, strict=True)]
        self._even = len(lengths) == 1 or all(n == first for n in lengths)
        self._top = first if self._even else max(lengths)
        self._open_q = 0  # columns of the forward that is under way, 0: none
        # For uneven lengths: q and the positions made for it; q of the mask handed out.
        self._ragged: tuple[int, torch.Tensor] | None = None
        self._masked_q = 0

    def truncate(self, lengths: Sequence[int] | np.ndarray | torch.Tensor) -> None:
        """Forget what lies beyond ``lengths`` (one per row): a store per row, nothing is copied or allocated.

        ValueError, and no change, unless there is one length per row and each is between 0 and the present one. Where the device has led,
        the present ones are those that the host knew before.
        """
        new: list[int] = lengths.tolist() if isinstance(lengths, (np.ndarray, torch.Tensor)) else list(lengths)
        if new == self._lengths and not self._led:
            return
        if len(new) != self._rows:
            raise ValueError(f"{len(new)} lengths for a cache of {self._rows} rows")
        for row, (n, held) in enumerate(zip(new, self._lengths, strict=True)):
            if not 0 <= n <= held:
                raise ValueError(f"row {row} holds {held} tokens and cannot be truncated to {n}")
        self._set(new)

    def reset(self) -> None:
        """Length 0 in every row. The storage stays where it is."""
        self._set([0] * self._rows)

    def crop(self, n: int) -> None:
        """``Cache.crop`` with exactly the meaning (and errors) that the installed transformers gives to ``n``.

        Negative: remove ``-n`` tokens from each row. Zero and positive differ by version; see
        ``compat.cropped_length``.
        """
        top = self._top
        new = cropped_length(top, n)
        self._set([min(have, new) if n >= 0 else max(0, have - (top - new)) for have in self._lengths])

    # ---- what a forward needs beside the tokens

    def _need(self, q: int) -> int:
        """The prefix that a feed of ``q`` columns uses; ValueError where the storage has no room for it."""
        top = (0 if self._led else self._top) + q
        if top > self._capacity:
            row = self._lengths.index(self._top)
            raise ValueError(
                f"RowCache is full: its capacity is {self._capacity}, and feeding {q} columns to row {row}, which "
                f"holds {self._top} tokens, needs {top}"
            )
        return top

    def positions(self, q: int) -> torch.Tensor:
        """Of the next ``q`` columns: int64 ``[rows, q]``, ``lengths[r] + i``. ValueError beyond the capacity."""
        self._need(q)
        if self.by_rows:
            self._update_device()
            self._ragged = (q, self._device_lengths.to(torch.int64)[:, None] + self._arange[:q])
            return self._ragged[1]
        if self._even:
            return self._arange.narrow(0, self._top, q).expand(self._rows, q)
        if self._ragged is None or self._ragged[0] != q:
            lengths = torch.tensor(self._lengths, device=self.device)
            self._ragged = (q, lengths[:, None] + self._arange[:q])
        return self._ragged[1]

    def mask(self, q: int, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """The 4-D mask for feeding ``q`` columns at the present lengths: ``[rows, 1, q, max(lengths) + q]``.

        Key ``j`` is visible to column ``i`` of row ``r`` iff ``j <= lengths[r] + i``. ``dtype``: ``torch.bool`` gives
        True for visible, which sdpa understands and eager attention silently does not; a floating dtype gives 0 for
        visible and -inf otherwise, which both understand. The default is the cache's own dtype (sdpa would convert a
        bool mask in each layer).

        Where attention goes by ``device_lengths``, and no dtype is asked for: a tensor that says no more than that.

        None where the model needs none: equal lengths, and one column or (with sdpa) an empty cache. ValueError beyond
        the capacity; NotImplementedError where the lengths differ and the model's attention takes no such mask.
        """
        top = self._need(q)
        if self.by_rows and dtype is None:
            self._masked_q = q
            return lengths_only(self._rows, q, self.device)
        if self._even:
            if q == 1:
                return None
            if self._top == 0 and dtype is None and mask_kind(self._config) is MaskKind.SDPA:
                return None  # plain causal: sdpa has a flag for that, and HuggingFace sets it
        if dtype is None:
            dtype = self.dtype
            if mask_kind(self._config) is MaskKind.NONE:
                raise NotImplementedError(
                    f"{self._config._attn_implementation} attention takes no 4-D mask, which rows of different lengths "
                    'and feeds of several tokens need: call model.set_attn_implementation("sdpa")'
                )
        self._masked_q = q
        if self._even and q <= _BAND_WIDTH:
            # Row i of the band is visible up to column capacity + i, so the window that begins at capacity - length is
            # the mask at that length: a view, whatever the length.
            width, band = self._band.get(dtype, (0, self._arange))
            if width < q:
                width = min(_BAND_WIDTH, max(16, 1 << (q - 1).bit_length()))
                band = self._make_mask(
                    torch.arange(width, device=self.device)[None] + self._capacity, self._capacity + width, dtype
                )[0]
                self._band[dtype] = (width, band)
            # [q, top], seen as [rows, 1, q, top]
            return band[:q, self._capacity - self._top : self._capacity + q].expand(self._rows, 1, q, top)
        return self._make_mask(self.positions(q), top, dtype)[:, None]

    def _make_mask(self, positions: torch.Tensor, keys: int, dtype: torch.dtype) -> torch.Tensor:
        """``[rows, q, keys]`` for columns at ``positions [rows, q]``."""
        # Normal tensors, for the band is kept and may be used inside and outside of inference_mode.
        with torch.inference_mode(False), torch.no_grad():
            visible = torch.arange(keys, device=self.device) <= positions[:, :, None]
            if dtype == torch.bool:
                return visible
            return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, -torch.inf)

    # ---- what a model's forward calls

    def open(self, q: int, *, columns_first: bool = False) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Begin a forward of ``q`` columns; ``close()`` ends it. For code that walks the layers itself.

        Returns ``new`` and ``used``, views per layer: keys at ``[layer]``, values at ``[layers + layer]``. ``new`` is
        where the new ones belong, ``[rows, kv_heads, q, head_dim]``, or ``[rows, q, kv_heads, head_dim]`` with
        ``columns_first``; it is empty where the lengths differ, for then ``scatter()`` must write them. ``used`` is
        what to attend over, ``[rows, kv_heads, max(lengths) + q, head_dim]``. ValueError where the capacity does not
        suffice.

        Where attention goes by ``device_lengths``, ``new`` is empty: ``update()`` writes.
        """
        top = self._need(q)
        if self.by_rows:
            self._check_attention()
            self._update_device()
            self._open_q = q
            return (), (self._store if self._fixed else self._store.narrow(3, 0, top)).unbind(0)
        used = self._store.narrow(3, 0, top).unbind(0)
        new: Sequence[torch.Tensor] = ()
        if not self._even:
            # Once per forward: where in the storage of any layer, seen as [rows * kv_heads * capacity, head_dim], the
            # states [rows, q, kv_heads] belong.
            if self._index_base is None:
                starts = torch.arange(self._rows * self._heads, device=self.device) * self._capacity
                self._index_base = starts.view(self._rows, 1, self._heads)
            self._index = (self._index_base + self.positions(q)[:, :, None]).view(-1)
        elif columns_first:
            new = self._columns_first.narrow(2, self._top, q).unbind(0)
        else:
            new = self._store.narrow(3, self._top, q).unbind(0)
        self._open_q = q
        return new, used

    def scatter(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> None:
        """Write the new states ``[rows, q, kv_heads, head_dim]`` of one layer where rows differ in length."""
        self._flat[layer].index_copy_(0, self._index, keys.reshape(-1, self._head_dim))
        self._flat[self._depth + layer].index_copy_(0, self._index, values.reshape(-1, self._head_dim))

    def close(self) -> None:
        """End a forward: every length grows by the columns it fed. Not while a graph is captured: nothing has been fed.

        Nor while the device leads, which decides how much of it counts.
        """
        if self._led or self._capturing():
            self._open_q = 0
            return
        q = self._open_q
        self._set([n + q for n in self._lengths])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store ``[rows, kv_heads, q, head_dim]`` and return the used prefix of keys and values, as views.

        The lengths grow when the last layer is updated. ValueError, before anything is written, for states of another
        shape or dtype, and where the capacity does not suffice; RuntimeError where rows of different lengths are fed
        without ``mask(q)`` and ``positions(q)``, where autograd would record, and where layers come out of order.
        """
        if layer_idx == 0:
            self._check(key_states)
            self._new, self._used = self.open(key_states.shape[2])
        elif self._open_q != key_states.shape[2]:
            raise RuntimeError(f"RowCache: layer {layer_idx} is updated, but its forward did not begin with layer 0")
        used, depth = self._used, self._depth
        if self.by_rows:
            layer = self.layers[layer_idx]
            values = value_states.to(self._store.dtype)
            ops.kv_append(key_states, values, layer.keys, layer.values, self._device_lengths)
            attach_lengths(used[layer_idx], self._device_lengths)
        elif self._even:
            new = self._new
            new[layer_idx].copy_(key_states)
            new[depth + layer_idx].copy_(value_states)
        else:
            values = value_states.to(self._store.dtype)  # under autocast only the keys have the model's dtype
            self.scatter(key_states.transpose(1, 2), values.transpose(1, 2), layer_idx)
        keys, values = used[layer_idx], used[depth + layer_idx]
        if layer_idx == depth - 1:
            self.close()
            self._new = self._used = ()
        return keys, values

    def _update_device(self) -> None:
        if self._stale and self._capturing():
            raise RuntimeError("the lengths on the device are old: call the RowCache's sync() before the capture")
        self.sync()

    def _check(self, states: torch.Tensor) -> None:
        rows, heads, q, head_dim = states.shape
        if (rows, heads, head_dim) != (self._rows, self._heads, self._head_dim) or q < 1:
            raise ValueError(
                f"RowCache of {self._rows} rows, {self._heads} heads, head_dim {self._head_dim}: cannot hold new keys "
                f"of shape [rows, heads, columns, head_dim] = {list(states.shape)}"
            )
        if states.dtype != self.dtype or states.device != self.device:
            raise ValueError(
                f"RowCache holds {self.dtype} on {self.device}, the new keys are {states.dtype} on {states.device}"
            )
        if states.requires_grad:
            raise RuntimeError(
                "RowCache is for inference: call the model under torch.no_grad() or torch.inference_mode()"
            )
        if not self._even and (self._masked_q != q or self._ragged is None or self._ragged[0] != q):
            raise RuntimeError(self._trap())

    def _trap(self) -> str:
        return (
            f"the rows of this RowCache hold {self._lengths} tokens: what HuggingFace derives from one length would be "
            "silently wrong. Pass attention_mask=cache.mask(q) and position_ids=cache.positions(q) for a feed of q "
            "tokens, or use pipespec.forward.forward(model, tokens, cache, keep=...)"
        )

    # ---- the rest of the Cache interface

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The longest row's length."""
        return self._top

    def get_mask_sizes(self, query: Any, layer_idx: int = 0) -> tuple[int, int]:
        """``(max(lengths) + q, 0)``. HuggingFace asks where it builds the mask: RuntimeError if lengths differ."""
        if not self._even:
            raise RuntimeError(self._trap())
        return self._top + query_length(query), 0

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
        """False: the lengths are on the host, so HuggingFace must not compile a decoding step around them."""
        return False

    @property
    def is_initialized(self) -> bool:
        return True

    def early_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the storage exists."""

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row ``r`` becomes what row ``beam_idx[r]`` was (beam search). Copies the used prefix; addresses stay."""
        order: list[int] = beam_idx.tolist()
        if len(order) != self._rows:
            raise ValueError(f"{len(order)} row indices for a cache of {self._rows} rows")
        with torch.no_grad():
            prefix = self._store.narrow(3, 0, self._top)
            prefix.copy_(prefix.index_select(1, beam_idx.to(self.device)))
        if self.text is not None:
            self.text = [self.text[row] for row in order]
        self._set([self._lengths[row] for row in order])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """NotImplementedError: the number of rows is fixed."""
        raise NotImplementedError(
            f"batch_repeat_interleave({repeats}): a RowCache has a fixed number of rows ({self._rows}); make one of "
            f"{self._rows * repeats} rows before the prefill"
        )

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """NotImplementedError: the number of rows is fixed."""
        raise NotImplementedError(f"batch_select_indices: a RowCache has a fixed number of rows ({self._rows})")
