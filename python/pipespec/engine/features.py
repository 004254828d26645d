"""Features: hidden states of a target that a draft reads, one per position of its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pipespec_kernels.decoder import Taps


class Features:
    """Hidden states of some layers, position by position, beside the keys and values of a :class:`pipespec.engine.cache.RowCache`.

    They follow the rules of the keys and values: a forward writes those of its columns at the lengths of the rows, and what lies beyond a length
    does not count. So a rollback is a lower length for them, too. Beside a static cache they lie at a fixed address, after :meth:`reserve`.

    Args:
        layers: indices in transformers' ``hidden_states`` (0: the embedding, k: the output of layer k - 1).
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

    def copy_from(self, other: object, lengths: Sequence[int]) -> None:
        """Take over the features of each row's first tokens, where ``other`` has them. The address stays."""
        self.begin = list(lengths)
        if isinstance(other, Features) and other.layers == self.layers and other._stored is not None:
            n = min(max(lengths), other._stored.shape[1])
            self.stored[:, :n] = other._stored[:, :n]
            self.begin = [min(pair) for pair in zip(other.begin, lengths, strict=True)]

    def of_row(self, row: int) -> RowFeatures:
        """For a cache of that row alone."""
        return RowFeatures(self, row)


class RowFeatures:
    """What the forwards over one row alone record, see :meth:`pipespec.engine.cache.RowCache.row_alone`."""

    def __init__(self, owner: Features, row: int) -> None:
        self.layers, self._owner, self._row = owner.layers, owner, row

    def record(self, lengths: Sequence[int] | torch.Tensor, streams: Mapping[int, torch.Tensor]) -> None:
        """As :meth:`Features.record`, for the one row."""
        self._owner.record(lengths, streams, self._row)
