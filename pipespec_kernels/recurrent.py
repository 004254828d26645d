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

    def native(self, name: str, hidden: int, at: Callable[..., tuple[int, ...]]) -> tuple[Any, ...]:
        """What the native code takes. ``at``: the address of a weight, by its name and the shape that it must have."""
        (channels, taps), (key_heads, heads, key_dim, value_dim) = self.kernel.shape, self.heads
        values, rows = heads * value_dim, channels if heads else 3 * channels
        if heads and (channels != 2 * key_heads * key_dim + values or heads % key_heads):
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
        return [at(f"{name}.{part}", weight, size) for part, weight, size in weights], (*self.heads, channels, taps)


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

    def native(self, rows: int, columns: int) -> tuple[Any, ...]:
        """What the native code takes, for a forward of ``columns`` columns."""
        _, slots, held, *_ = self.inputs.shape
        code = {torch.float32: _native.FLOAT32, torch.bfloat16: _native.BFLOAT16}.get(self.inputs.dtype)
        if code is None or self.states.dtype is not torch.float32:
            raise TypeError(
                f"states must be float32, their inputs also bfloat16, got {self.states.dtype} and {self.inputs.dtype}"
            )
        places = [slot for row in self.places for slot in row]
        if not (
            self.inputs.is_contiguous() and self.states.is_contiguous() and self.inputs.is_cpu and self.states.is_cpu
        ):
            raise ValueError("states must be contiguous, and on the CPU")
        if held != rows or len(places) != rows * (columns + 1) or not -1 <= min(places) <= max(places) < slots:
            raise ValueError(f"the places of {rows} rows and {columns} columns must be slots of {slots} of {held} rows")
        return self.inputs.data_ptr(), code, self.states.data_ptr(), slots, rows, places
