"""What the tokens of several sequences leave at fixed addresses: keys and values, recurrent states, and hidden states for a draft. Lengths are lowered in O(1)."""

from __future__ import annotations

import errno
import math
import mmap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pipespec.config import WIDTH
from pipespec.models.layout import CacheLayout, LayerSizes
from pipespec.models.properties import kv_dtype
from pipespec_kernels.decoder import Taps
from pipespec_kernels.kept import KEPT, kept

HUGE_PAGE = 2 << 20
"""Bytes of a huge page on Linux."""


def store(into: torch.Tensor, given: torch.Tensor) -> None:
    """Copy keys or values into storage of a cache. In 8 bits those beyond its range become its largest numbers."""
    into.copy_(kept(given, into.dtype) if given.dtype != into.dtype else given)


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``torch.zeros``. On a CPU in huge pages where Linux has them: attention reads keys and values with fewer look-ups of addresses, and so sooner. Not small
    ones, which have few addresses: some virtual machines take milliseconds to give a huge page."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < 4 * HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    # Errors by their numbers: a signal handler's TimeoutError is an OSError, too.
    try:
        memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            raise
        # Callers that do with less memory know torch's error, not the system's.
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a system that was built without them uses small pages
            raise
    # The tensor keeps the memory.
    everything = torch.frombuffer(memory, dtype=torch.uint8)
    first = -everything.data_ptr() % HUGE_PAGE
    return everything[first : first + size].view(dtype).view(tuple(shape))


class Features:
    """Hidden states of some layers, position by position, with the keys and values of a :class:`pipespec.engine.cache.RowCache`.

    They follow the rules of the keys and values: a forward writes those of its columns at the lengths of the rows, and what lies beyond a length
    does not count. So a rollback is a lower length for them, too. With a static cache they lie at a fixed address, after :meth:`reserve`.

    Args:
        layers: indices in transformers' ``hidden_states`` (0: the embedding, k: the output of layer k - 1; of the last layer that after the last norm).
        begin: per row, the first position whose features will be recorded: what the cache held before has none.
        dtype: in which they are kept.
    """

    def __init__(self, layers: Sequence[int], begin: Sequence[int], dtype: torch.dtype) -> None:
        self.layers, self.begin, self.dtype = tuple(layers), list(begin), dtype
        self._stored: torch.Tensor | None = None

    @property
    def stored(self) -> torch.Tensor:
        """The storage ``[rows, capacity, layers * H]``. What lies beyond a row's length does not count."""
        assert self._stored is not None
        return self._stored

    @property
    def nbytes(self) -> int:
        return 0 if self._stored is None else self._stored.nbytes

    def record(
        self, lengths: Sequence[int] | torch.Tensor, streams: Mapping[int, torch.Tensor], first: int = 0
    ) -> None:
        """Keep the features of a forward.

        Args:
            lengths: per row of the forward, the position of its first column. As a tensor of the device, nothing waits for it.
            streams: by layer, ``[rows, q, H]``. Where a layer is missing, as in the outputs of a patched model, nothing is kept.
            first: the row of the cache that is the forward's first one.
        """
        if not streams.keys() >= set(self.layers):
            return
        parts = [streams[layer] for layer in self.layers]
        columns = torch.cat([part.to(parts[0].device, self.dtype) for part in parts], dim=-1)
        rows, q, size = columns.shape
        if isinstance(lengths, torch.Tensor):
            each, column = (torch.arange(n, device=columns.device) for n in (rows, q))
            self.stored[first + each[:, None], lengths[:, None] + column] = columns
            return
        stored = self.reserve(max(lengths) + q, size, columns.device)
        for row, at in enumerate(lengths, first):
            stored[row, at : at + q] = columns[row - first]

    def taps(self, lengths: Sequence[int], q: int, hidden: int) -> Taps:
        """Where a native forward of ``q`` columns, with hidden states of size ``hidden``, writes its features by itself."""
        return Taps(
            self.layers, self.reserve(max(lengths) + q, len(self.layers) * hidden, torch.device("cpu")), lengths
        )

    def change(self, layer: int, how: Callable[[torch.Tensor], torch.Tensor], lengths: Sequence[int], q: int) -> None:
        """Replace the hidden states of a layer, if it is one of :attr:`layers`, in the ``q`` columns of the last forward, which began at ``lengths[r]``."""
        if layer in self.layers:
            stored = self.stored.unflatten(-1, (len(self.layers), -1))[:, :, self.layers.index(layer)]
            for row, at in enumerate(lengths):
                stored[row, at : at + q] = how(stored[row, at : at + q])

    def reserve(self, need: int, size: int, device: torch.device) -> torch.Tensor:
        """Room for ``need`` positions, with ``size`` numbers each."""
        stored = self._stored
        if stored is None or stored.shape[1] < need:
            room = need if stored is None else max(need, 2 * stored.shape[1])
            grown = torch.zeros((len(self.begin), room, size), dtype=self.dtype, device=device)
            if stored is not None:
                grown[:, : stored.shape[1]] = stored
            self._stored = stored = grown
        return stored

    def read(self, row: int, begin: int, end: int) -> torch.Tensor:
        """The features of positions, ``[end - begin, layers * H]``. Raises ``RuntimeError`` where the forwards gave none."""
        if self._stored is None or self._stored.shape[1] < end:
            raise RuntimeError(f"the target's forward gives no hidden states of the layers {list(self.layers)}")
        return self._stored[row, begin:end]

    def take_row(self, row: int, other: object, other_row: int, length: int) -> None:
        """Take over the features of the first ``length`` tokens of another one's row, as far as it has them. The address stays if there is room."""
        self.begin[row] = length
        if not isinstance(other, Features) or other.layers != self.layers or other._stored is None:
            return
        if other._stored.shape[1] >= length:
            stored = self.reserve(length, other._stored.shape[2], other._stored.device)
            stored[row, :length] = other._stored[other_row, :length]
            self.begin[row] = min(other.begin[other_row], length)


class RowFeatures:
    """What the forwards over one row alone record, see :meth:`pipespec.engine.cache.RowCache.row_alone`."""

    def __init__(self, owner: Features, row: int) -> None:
        self.layers, self._owner, self._row = owner.layers, owner, row

    def record(self, lengths: Sequence[int] | torch.Tensor, streams: Mapping[int, torch.Tensor]) -> None:
        """As :meth:`Features.record`, for the one row."""
        self._owner.record(lengths, streams, self._row)


class RowStorage:
    """Keys and values of all layers, the states of recurrent ones, and how many tokens of them count in each row.

    The lengths are on the host, and on each device where attention reads them. Arguments and attributes are those of
    :class:`pipespec.engine.cache.RowCache`.
    """

    features: Features | RowFeatures | None = None
    """Where forwards keep hidden states for a draft that reads them; None: nowhere."""
    _aim: Sequence[int] | None = None
    _followed: torch.Tensor | None = None
    _floors: list[int] | None = None
    """Per row, the length below which sliding windows would need keys and values that are not there; None: 0 each."""

    def __init__(
        self,
        config: Any,
        layout: CacheLayout,
        rows: int,
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        static: bool | torch.dtype,
        layer_devices: Sequence[torch.device],
    ) -> None:
        self._config, self._layout = config, layout
        self.compute_dtype, self.device, self.layer_devices = dtype, device, tuple(layer_devices)
        own = dtype if static else kv_dtype(config, dtype, device)
        self.dtype = static if isinstance(static, torch.dtype) else own
        self.is_static, self._on_gpus = static is not False, all(at.type == "cuda" for at in (device, *layer_devices))
        # Per layer with keys and values, its index among those.
        self._attention = {layer: i for i, layer in enumerate(layout.attention)}
        # Layers behind it read what it has stored.
        self._last = max((*layout.attention, *(() if layout.states is None else layout.states.layers)))
        self._ring = None
        if layout.states is not None:
            from pipespec.engine.recurrent import StateRing

            self._ring = StateRing(layout.states, rows, dtype, device)
        self._use(rows, capacity, self._allocated(rows, capacity))
        self._set([0] * rows)

    # ---- lengths

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens held per row, on the host."""
        return tuple(self._lengths)

    @property
    def ragged(self) -> bool:
        """Whether the rows differ in length."""
        return not self._even

    @property
    def layout(self) -> CacheLayout:
        """Sizes, windows and recurrent layers."""
        return self._layout

    @property
    def is_recurrent(self) -> bool:
        """Whether some layers keep states, so that a rollback reaches back to :meth:`restorable` only."""
        return self._ring is not None

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Set the host's lengths to what the rows hold, after the device has set its own.

        Raises:
            ValueError: another number of rows, or a length beyond the capacity.
        """
        if len(lengths) != self.rows or not all(0 <= n <= self.capacity for n in lengths):
            raise ValueError(f"lengths {list(lengths)} for {self.rows} rows of a capacity of {self.capacity}")
        self._set(list(lengths))

    def set_floors(self, lengths: Sequence[int]) -> None:
        """Announce that layers with a window hold no more than their window needs at these lengths: :meth:`truncate` goes below to 0 only."""
        self._floors = list(lengths)

    def _set(self, lengths: list[int]) -> None:
        first = lengths[0]
        self._lengths = lengths
        # The device has the lengths before.
        self._stale = True
        self._followed = None
        if self._floors is not None:
            self._floors = [floor if n >= floor else 0 for n, floor in zip(lengths, self._floors, strict=True)]
        self._even = len(lengths) == 1 or all(n == first for n in lengths)
        self._top = first if self._even else max(lengths)
        # Columns of the running forward; 0: none runs.
        self._open_q = 0
        self._aim = None
        if self._ring is not None:
            self._ring.truncate(lengths)
        # For different lengths: q of the mask and of the positions returned.
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
        if len(new) != self.rows:
            raise ValueError(f"{len(new)} lengths for a cache of {self.rows} rows")
        for row, (n, held, there) in enumerate(zip(new, self._lengths, self.restorable(new), strict=True)):
            if not 0 <= n <= held:
                raise ValueError(f"row {row} holds {held} tokens and cannot be truncated to {n}")
            if n != there:
                raise ValueError(
                    f"row {row} has no recurrent states, or not all of its windows, at {n} tokens: truncate it to {there}, and feed the tokens "
                    "after that again"
                )
        self._set(new)

    def restorable(self, lengths: Sequence[int]) -> list[int]:
        """Per row the largest length up to that of ``lengths`` that :meth:`truncate` takes: ``lengths``, but for recurrent layers and :meth:`set_floors`."""
        there = list(lengths) if self._ring is None else self._ring.restorable(lengths)
        if self._floors is None:
            return there
        return [n if n >= floor else 0 for n, floor in zip(there, self._floors, strict=True)]

    def recoverable(self, row: int, length: int) -> int:
        """The largest length up to ``length`` at which :meth:`take_row` can begin. Without recurrent layers, ``length``."""
        return length if self._ring is None else self._ring.recoverable(row, length)

    def mark(self, row: int) -> None:
        """Keep the states of a row's recurrent layers at its present length, beside those that rollbacks need."""
        if self._ring is not None and self._lengths[row]:
            self._ring.mark(row, self._lengths[row])

    def reserve_states(self, states: int | None = None) -> None:
        """Room for more states per row of recurrent layers.

        ``states``: how many; None: twice as many, up to twice the widest step, after a rollback has found one overwritten.
        """
        if self._ring is not None:
            self._ring.reserve(min(2 * self._ring.slots, 2 * WIDTH) if states is None else states)

    def aim(self, lengths: Sequence[int]) -> None:
        """Announce that the rows will be truncated to ``lengths`` after the next forward, a prefill: only those states are kept."""
        self._aim = list(lengths)

    def reset(self) -> None:
        """Set every length to 0. Addresses stay."""
        self._set([0] * self.rows)

    # ---- storage

    def _allocated(self, rows: int, capacity: int) -> list[torch.Tensor]:
        """New storage: per device and size the keys of its layers ``[layers, rows, kv_heads, capacity, head_dim]``, then their values."""
        stores = []
        # Not inference tensors, which could not be written outside of inference_mode.
        with torch.inference_mode(False), torch.no_grad():
            # Zeroed, because a masked value enters a product with zero, and 0 * NaN is NaN.
            for (at, (heads, *dims)), count in Counter(self._layer_places()).items():
                if self._layout.is_latent:
                    # The native form reads both parts of a latent as one.
                    stores += zeros((count, rows, heads, capacity, sum(dims)), self.dtype, at).split(dims, -1)
                else:
                    stores += [zeros((count, rows, heads, capacity, dim), self.dtype, at) for dim in dims]
        return stores

    def _layer_places(self) -> list[tuple[torch.device, LayerSizes]]:
        """Per layer with keys and values, where they lie and their sizes: layers that are alike share a tensor."""
        return [(self.layer_devices[layer], self._layout.sizes(layer)) for layer in self._attention]

    def _use(self, rows: int, capacity: int, stores: list[torch.Tensor]) -> None:
        """Keep what :meth:`_allocated` has returned."""
        places = self._layer_places()
        halves = []
        for half in (stores[::2], stores[1::2]):
            parts = {place: iter(store) for place, store in zip(dict.fromkeys(places), half, strict=True)}
            halves.append([next(parts[place]) for place in places])
        with torch.inference_mode(False), torch.no_grad():
            devices = dict.fromkeys((self.device, *self.layer_devices))
            lengths_on = {at: torch.zeros(rows, dtype=torch.int32, device=at) for at in devices}
            columns = torch.arange(capacity, device=self.device)
        # Nothing has changed where there was no memory.
        self._stores, self._lengths_on, self._columns = stores, lengths_on, columns
        # Per layer ``[rows, kv_heads, capacity, head_dim]``.
        self._keys, self._values = halves
        self.rows, self.capacity = rows, capacity

    def reserve(self, capacity: int) -> None:
        """Grow to ``capacity`` positions per row, if there are fewer: new storage, and a copy of what is held.

        Raises:
            ValueError: a static cache would have to grow.
        """
        if capacity <= self.capacity:
            return
        if self.is_static:
            raise ValueError(f"a static RowCache keeps its capacity of {self.capacity}: make one for {capacity} tokens")
        stores = self._allocated(self.rows, capacity)
        with torch.no_grad():
            for store, old in zip(stores, self._stores, strict=True):
                store[:, :, :, : self._top].copy_(old[:, :, :, : self._top])
        self._use(self.rows, capacity, stores)
        self._set(list(self._lengths))

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
            counted[str(self.device)] += self._ring.nbytes
        return counted

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Per layer, the number of last positions that a column sees, its own included; None: all."""
        return self._layout.windows

    def fits(self, rows: int, capacity: int) -> bool:
        """Whether this cache, once empty, is large enough for ``capacity`` positions of exactly ``rows`` rows."""
        return rows == self.rows and capacity <= self.capacity

    def take_rows(self, sources: Sequence[tuple[RowStorage, int] | None], lengths: Sequence[int]) -> None:
        """Begin the rows with the first ``lengths[r]`` tokens of rows of other caches of this model, or of this one's own. Addresses stay.

        Args:
            sources: per row, a cache and the row of it; None for an empty row.
            lengths: each from :meth:`recoverable`.

        Raises:
            ValueError: the other cache has another shape or holds less, or there is no room.
        """
        for source, n in zip(sources, lengths, strict=True):
            if source is not None and not 0 <= n <= min(source[0]._lengths[source[1]], self.capacity):
                raise ValueError(f"{n} tokens of row {source[1]} of a cache that holds {source[0]._lengths}")
            if source is not None and source[0]._layout != self._layout:
                raise ValueError("keys and values of another shape cannot be taken over")
        with torch.inference_mode(False), torch.no_grad():
            for row, (source, n) in enumerate(zip(sources, lengths, strict=True)):
                if source is None or not n:
                    continue
                other, of = source
                if other is not self:
                    mine, theirs = (*self._keys, *self._values), (*other._keys, *other._values)
                    for to, held in zip(mine, theirs, strict=True):
                        store(to[row, :, :n], held[of, :, :n])
                    if isinstance(self.features, Features):
                        self.features.take_row(row, other.features, of, n)
                if self._ring is not None and other._ring is not None:
                    self._ring.take_row(row, other._ring, of, n)
        floors = [source[0]._floors[source[1]] if source and source[0]._floors else 0 for source in sources]
        self._floors = floors if any(floors) else None
        self._set(list(lengths))

    def load(
        self, states: Sequence[tuple[torch.Tensor, torch.Tensor] | None], lengths: Sequence[int] | None = None
    ) -> None:
        """Copy what :meth:`states` returns into the cache.

        Args:
            states: per layer, keys and values ``[rows, kv_heads, n, head_dim]``, each with its own size; of a recurrent layer its states;
                None of a layer that has neither.
            lengths: tokens that the rows then hold; None: ``n`` each. With recurrent layers, those that their states belong to.

        Raises:
            ValueError: another shape, or more than the capacity.
        """
        stored = [pair for layer in self._attention if (pair := states[layer]) is not None]
        keys, values = zip(*stored, strict=True) if stored else ((), ())
        n = keys[0].shape[2] if keys else max(lengths or [0])
        self.reset()
        self._need(n)
        pairs = list(zip([*self._keys, *self._values], [*keys, *values], strict=True))
        for held, given in pairs:
            shape = (*held.shape[:2], n, held.shape[3])
            if given.shape != shape:
                raise ValueError(f"keys and values of shape {list(given.shape)} cannot be loaded as {list(shape)}")
        with torch.inference_mode(False), torch.no_grad():
            for held, given in pairs:
                store(held[:, :, :n], given)
        lengths = [n] * self.rows if lengths is None else list(lengths)
        self._set(lengths)
        if self._ring is not None:
            others = (pair for layer, pair in enumerate(states) if layer not in self._attention)
            self._ring.load([pair for pair in others if pair is not None], lengths)

    def states(self, lengths: Sequence[int] | None = None) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
        """What the layers hold, in their order.

        Args:
            lengths: per row, those of the states of recurrent layers, from :meth:`restorable`; None: the present ones.

        Returns:
            The keys and values of the used prefix, views, or copies of those in 8 bits, ``[rows, kv_heads, max(lengths), head_dim]``; of a recurrent layer the last inputs
            of its convolution ``[rows, channels, taps]`` and its state ``[rows, heads, key_dim, value_dim]``, copies; None of a layer that has neither.
        """
        pairs = (
            tuple(
                part.to(self.compute_dtype) if self.dtype is KEPT else part
                for part in (keys[:, :, : self._top], values[:, :, : self._top])
            )
            for keys, values in zip(self._keys, self._values, strict=True)
        )
        recurrent = () if self._ring is None else self._ring.export(lengths or self._lengths)
        kept = {layer: next(pairs) for layer in self._attention}
        kept |= {} if self._layout.states is None else dict(zip(self._layout.states.layers, recurrent, strict=True))
        return [kept.get(i) for i in range(len(self.windows))]

    def _need(self, q: int) -> int:
        """Positions that a forward of ``q`` columns attends over. Raises ``ValueError`` beyond the capacity."""
        top = (self._top if self._followed is None else 0) + q
        if top > self.capacity:
            row = self._lengths.index(self._top)
            raise ValueError(
                f"RowCache is full: its capacity is {self.capacity}, and feeding {q} columns to row {row}, which "
                f"holds {self._top} tokens, needs {top}"
            )
        return top
