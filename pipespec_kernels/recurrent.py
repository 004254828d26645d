"""Recurrent layers, as the native decoder takes them: gated delta nets (arXiv 2412.06464), and short convolutions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipespec_kernels import _native
from pipespec_kernels.formats import QuantizedMatrix
from pipespec_kernels.rows import OrderedRows

__all__ = ["Recurrent", "States"]


class StateSizes(NamedTuple):
    """The sizes of the states of one row in one layer.

    Attributes:
        inputs: of the convolution, ``(C, taps)``.
        states: ``(V, key_dim, value_dim)``.
    """

    inputs: tuple[int, ...]
    states: tuple[int, ...]


@dataclass(frozen=True)
class Recurrent:
    """What a layer has in place of its attention. Matrices are those of :class:`pipespec_kernels.decoder.LayerWeights`.

    A gated delta net has ``K`` heads of queries and keys, ``V`` heads of values, and ``C = 2 K key_dim + V value_dim`` channels. A short convolution has
    neither heads nor what belongs to them.

    Attributes:
        inputs: ``[C, H]``: queries, keys and values. Of a short convolution ``[3 C, H]``: a factor of its inputs, one of its outputs, and the inputs.
        out: ``[H, V value_dim]``, or ``[H, C]``.
        kernel: ``[C, taps]``.
        heads: ``(K, V, key_dim, value_dim)``.
        gates: ``[V value_dim, H]``, of the outputs.
        beta: ``[V, H]``.
        decay: ``[V, H]``.
        decay_log: ``[V]``.
        decay_bias: ``[V]``.
        norm: ``[value_dim]``.
        inputs_bias: An entry per row of ``inputs``.
        out_bias: ``[H]``.
        kernel_bias: ``[C]``.
        is_tiled: The columns of ``out`` go by the place of a head among those of its head of keys, and by the head of keys then.
    """

    inputs: Tensor | QuantizedMatrix | OrderedRows
    out: Tensor | QuantizedMatrix
    kernel: Tensor
    heads: tuple[int, int, int, int] = (0, 0, 0, 0)
    gates: Tensor | QuantizedMatrix | OrderedRows | None = None
    beta: Tensor | QuantizedMatrix | OrderedRows | None = None
    decay: Tensor | QuantizedMatrix | OrderedRows | None = None
    decay_log: Tensor | None = None
    decay_bias: Tensor | None = None
    norm: Tensor | None = None
    inputs_bias: Tensor | None = None
    out_bias: Tensor | None = None
    kernel_bias: Tensor | None = None
    is_tiled: bool = False

    @property
    def state_sizes(self) -> StateSizes:
        """The sizes of the states of a row."""
        return StateSizes(tuple(self.kernel.shape), self.heads[1:])

    def native(self, name: str, hidden: int, at: Callable[..., tuple[int, ...]]) -> tuple[Any, ...]:
        """What the native code takes. ``at``: the address of a weight, by its name and the shape that it must have."""
        (channels, taps), (key_heads, heads, key_dim, value_dim) = self.kernel.shape, self.heads
        values, rows = heads * value_dim, channels if heads else 3 * channels
        of_delta = (self.gates, self.beta, self.decay, self.decay_log, self.decay_bias, self.norm)
        if not channels or not taps or {weight is not None for weight in of_delta} != {bool(heads)}:
            raise ValueError(f"{name}: a kernel has channels and taps, and with heads the weights of a delta net")
        if heads and (min(self.heads) < 1 or heads % key_heads or channels != 2 * key_heads * key_dim + values):
            raise ValueError(f"{name}: {channels} channels do not fit the heads {self.heads}")
        weights = (
            ("inputs", self.inputs, (rows, hidden)),
            ("gates", self.gates, (values, hidden)),
            ("beta", self.beta, (heads, hidden)),
            ("decay", self.decay, (heads, hidden)),
            ("out", self.out, (hidden, values or channels)),
            ("inputs_bias", self.inputs_bias, (rows,)),
            ("out_bias", self.out_bias, (hidden,)),
            ("kernel", self.kernel, (channels, taps)),
            ("kernel_bias", self.kernel_bias, (channels,)),
            ("decay_log", self.decay_log, (heads,)),
            ("decay_bias", self.decay_bias, (heads,)),
            ("norm", self.norm, (value_dim,)),
        )
        return [at(f"{name}.{part}", weight, size) for part, weight, size in weights], (
            *self.heads,
            channels,
            taps,
            int(self.is_tiled),
        )


class States(NamedTuple):
    """The states of all recurrent layers of a decoder, in slots.

    Attributes:
        inputs: float32 or bfloat16 ``[layers, slots, rows, C, taps]``, contiguous: the last inputs of the convolutions.
        states: float32 ``[layers, slots, rows, V, key_dim, value_dim]``, contiguous.
        places: Per row, the slot of its states before a forward of ``q`` columns, and those for its states after each column; -1: they are not kept.
    """

    inputs: Tensor
    states: Tensor
    places: Sequence[Sequence[int]]

    def native(self, rows: int, columns: int, layers: int, sizes: StateSizes) -> tuple[Any, ...]:
        """What the native code takes, for a forward of ``columns`` columns. ``sizes``: of the states of each of the ``layers``."""
        slots = self.inputs.shape[1]
        for tensor, size in ((self.inputs, sizes.inputs), (self.states, sizes.states)):
            if tuple(tensor.shape) != (layers, slots, rows, *size):
                raise ValueError(f"states must be {(layers, slots, rows, *size)}, got {tuple(tensor.shape)}")
        code = {torch.float32: _native.FLOAT32, torch.bfloat16: _native.BFLOAT16}.get(self.inputs.dtype)
        if code is None or self.states.dtype is not torch.float32:
            raise TypeError(
                f"states must be float32, their inputs also bfloat16, got {self.states.dtype} and {self.inputs.dtype}"
            )
        if not all(t.is_contiguous() and t.is_cpu for t in (self.inputs, self.states)):
            raise ValueError("states must be contiguous, and on the CPU")
        if [len(row) for row in self.places] != [columns + 1] * rows or any(row[0] < 0 for row in self.places):
            raise ValueError(f"places must be {columns + 1} for each of {rows} rows, and the first one a slot")
        places = [slot for row in self.places for slot in row]
        if places and not -1 <= min(places) <= max(places) < slots:
            raise ValueError(f"places must be slots of {slots}, or -1, got {places}")
        return self.inputs.data_ptr(), code, self.states.data_ptr(), slots, rows, places
