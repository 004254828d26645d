"""What one forward needs of a cache: positions and masks of its columns, and where their keys and values go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from pipespec.engine.attention import MaskKind, lengths_only, mask_kind
from pipespec.engine.cache_storage import RowStorage
from pipespec.engine.states import LayerStates
from pipespec.models.layout import FULL, SLIDING

_BAND_WIDTH = 64
"""Most columns whose mask is a view of the precomputed band. Masks of wider forwards (a prefill in chunks) are computed each time."""

_ALIGNED_KEYS = 16
"""So many boolean keys are 16 bytes."""


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
            view = band[:q, self._capacity - self._top : self._capacity + q]
            return _aligned(view).expand(self._rows, 1, q, top)
        return _aligned(self._make_mask(self._indices(q), top, dtype, window)[:, None])

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

    def open(self, q: int) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Begin a forward of ``q`` columns, for code that loops over the layers itself. ``close()`` ends it.

        Args:
            q: columns.

        Returns:
            ``new`` and ``used``, views per layer: keys at ``[layer]``, values at ``[layers + layer]``. ``new`` is where new keys and values
            belong, ``[rows, kv_heads, q, head_dim]``. It is empty if the lengths
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

    def _update_device(self) -> None:
        if self._stale and self._capturing():
            raise RuntimeError(
                "the lengths on the device are out of date: call the RowCache's sync() before the capture"
            )
        self.sync()
