"""StateRing: the states of recurrent layers at several lengths of each row, so that a rollback is the choice of one of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pipespec.config import WIDTH
from pipespec.models.layout import STATES, StateLayout


class LayerStates:
    """The states of one recurrent layer during a forward.

    Args:
        ring: in which a forward has begun.
        index: of the layer, among the recurrent ones.

    Attributes:
        columns: columns, counted from 1, whose states :meth:`store` takes, ascending.
        stepwise: whether the recurrence runs column by column, as plain decoding does, and not in chunks.
    """

    def __init__(self, ring: StateRing, index: int) -> None:
        self._ring, self._parts = ring, (ring.inputs[index], ring.states[index])
        self.columns, self.stepwise = tuple(ring.places), ring.stepwise

    def load(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The states before the forward.

        Returns:
            The last inputs of the convolution ``[rows, channels, taps]`` in the model's dtype, and float32
            ``[rows, heads, key_dim, value_dim]``.
        """
        inputs, state = self._parts
        return inputs[self._ring.begins], state[self._ring.begins]

    def store(self, column: int, inputs: torch.Tensor, state: torch.Tensor) -> None:
        """Keep the states after the first ``column`` columns, one of :attr:`columns`. Shapes as for :meth:`load`."""
        slots, rows = self._ring.places[column]
        for part, new in zip(self._parts, (inputs, state), strict=True):
            part[slots, rows] = new[rows].to(part.dtype)


class StateRing:
    """States of the recurrent layers of a cache, at several lengths of each row.

    The states of a row that holds ``n`` tokens lie in slot ``n % slots``. A forward reads one slot and writes one for each column that may be
    rolled back to. A rollback changes nothing but the length that the next forward reads from. The states at length 0 are zeros.

    The number of slots grows: with the widest step, and by a rollback that finds its states overwritten. That costs one recomputation and an
    allocation.

    Args:
        layout: sizes.
        rows: number of sequences.
        dtype: of the model.
        device: of the states.

    Attributes:
        inputs: of the convolutions, ``[layers, slots, rows, channels, taps]``.
        states: float32 ``[layers, slots, rows, heads, key_dim, value_dim]``.
        begins: slots and rows of the states before the forward that has begun.
        places: by column of this forward, counted from 1, slots and rows of the states that it stores.
        stepwise: see :class:`LayerStates`.
    """

    def __init__(self, layout: StateLayout, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layout, self._dtype, self._device = layout, dtype, device
        self._allocate(STATES, rows)
        self.stepwise = False

    def _allocate(self, slots: int, rows: int) -> None:
        layout, count = self.layout, len(self.layout.layers)
        # Not inference tensors, which could not be written outside of inference_mode.
        with torch.inference_mode(False), torch.no_grad():
            inputs = torch.zeros(
                (count, slots, rows, layout.channels, layout.taps), dtype=self._dtype, device=self._device
            )
            states = torch.zeros(
                (count, slots, rows, layout.heads, layout.key_dim, layout.value_dim),
                dtype=torch.float32,
                device=self._device,
            )
        self.inputs, self.states = inputs, states
        # Per slot and row the length whose states it has; -1: none.
        self._held = np.full((slots, rows), -1, dtype=np.int64)

    @property
    def slots(self) -> int:
        """States per row and layer that there is room for."""
        return self._held.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return self.inputs.nbytes + self.states.nbytes

    # ---- lengths

    def restorable(self, lengths: Sequence[int]) -> list[int]:
        """Per row the largest length, up to that of ``lengths``, whose states are there. 0 always is."""
        found = []
        for row, n in enumerate(lengths):
            held = self._held[:, row]
            found.append(max(0, int(held[held <= n].max(initial=-1))))
        return found

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget the states beyond ``lengths``."""
        self._held[self._held > np.asarray(lengths)] = -1

    def reserve(self, slots: int) -> None:
        """Grow to ``slots`` states, if there are fewer, and keep those that are there."""
        if slots <= self.slots:
            return
        inputs, states, held = self.inputs, self.states, self._held
        self._allocate(1 << (slots - 1).bit_length(), held.shape[1])
        slot, row = np.nonzero(held >= 0)
        lengths = held[slot, row]
        to = lengths % self.slots
        self._held[to, row] = lengths
        with torch.inference_mode(False), torch.no_grad():
            self.inputs[:, to, row] = inputs[:, slot, row]
            self.states[:, to, row] = states[:, slot, row]

    # ---- a forward

    def begin(self, lengths: Sequence[int], q: int, keep: Sequence[int] | None) -> None:
        """Begin a forward of ``q`` columns.

        Args:
            lengths: tokens per row before it.
            q: columns.
            keep: per row, the length that the row will be truncated to, whose states alone are kept; a row without new tokens keeps those it
                has. None: those of each column, up to :data:`pipespec.config.WIDTH` columns, else of the last one.

        Raises:
            RuntimeError: the states of a row at its length are not there.
        """
        at, rows = np.asarray(lengths, dtype=np.int64), np.arange(len(lengths))
        keeps_all = keep is None and q <= WIDTH
        self.stepwise = keeps_all or q == 1
        if keeps_all:
            self.reserve(q + 1)
        empty = np.flatnonzero((at == 0) & (self._held[0] != 0))
        if len(empty):
            self._held[0, empty] = 0
            self.inputs[:, 0, empty] = 0
            self.states[:, 0, empty] = 0
        missing = np.flatnonzero(self._held[at % self.slots, rows] != at)
        if len(missing):
            row = int(missing[0])
            raise RuntimeError(
                f"the recurrent states of row {row} at {lengths[row]} tokens are no longer there: truncate to what restorable() returns, and "
                "feed the tokens after that again"
            )
        if keeps_all:
            stored = dict.fromkeys(range(1, q + 1), rows)
        else:
            counts = np.full(len(at), q) if keep is None else np.asarray(keep, dtype=np.int64) - at
            stored = {int(c): np.flatnonzero(counts == c) for c in np.unique(counts) if 0 < c <= q}
        self.begins, self.places, self._new = self._on_device(at % self.slots, rows), {}, []
        for column, which in stored.items():
            length = at[which] + column
            slot = length % self.slots
            # An interrupted forward leaves these slots with states of no length.
            self._held[slot, which] = -1
            self._new.append((slot, which, length))
            self.places[column] = self._on_device(slot, which)

    def _on_device(self, slots: np.ndarray, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(slots).to(self._device), torch.from_numpy(rows).to(self._device)

    def layer(self, layer: int) -> LayerStates:
        """The states of layer ``layer`` of the model, in the forward that has begun."""
        return LayerStates(self, self.layout.layers.index(layer))

    def end(self) -> None:
        """End the forward: what it has stored counts."""
        for slot, rows, length in self._new:
            self._held[slot, rows] = length
        self._new = []

    # ---- the rest of a cache

    def export(self, lengths: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Per layer copies of the states at ``lengths``, which must be there. Shapes as for :meth:`LayerStates.load`."""
        self.begin(lengths, 1, keep=lengths)
        return [self.layer(layer).load() for layer in self.layout.layers]

    def load(self, states: Sequence[tuple[torch.Tensor, torch.Tensor]], lengths: Sequence[int]) -> None:
        """Hold the states of :meth:`export` at ``lengths``, and no others."""
        self._held[:] = -1
        at, rows = np.asarray(lengths, dtype=np.int64), np.arange(len(lengths))
        with torch.inference_mode(False), torch.no_grad():
            for i, (inputs, state) in enumerate(states):
                self.inputs[i, at % self.slots, rows] = inputs.to(self._device)
                self.states[i, at % self.slots, rows] = state.to(self._device)
        self._held[at % self.slots, rows] = at

    def select(self, rows: Sequence[int]) -> None:
        """Keep the rows ``rows``, in this order; one may occur several times."""
        order = torch.tensor(rows, device=self._device)
        with torch.inference_mode(False), torch.no_grad():
            self.inputs, self.states = (x.index_select(2, order) for x in (self.inputs, self.states))
        self._held = self._held[:, list(rows)]
