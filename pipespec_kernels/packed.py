"""Products with quantised matrices on the CPU, the weights packed for passes that read them front to back.

Inputs are rounded to 8 bits in blocks, of 32 for the formats with blocks of 32 and of 256 for the K formats. Sums within a block are exact integers,
and the sum over the blocks is one sequence of float32 operations (:func:`matmul_reference`). A result therefore depends neither on the other columns of
a call nor on threads nor on instructions (``PIPESPEC_SIMD``).
"""

from __future__ import annotations

from operator import index

import torch
from torch import Tensor

from pipespec_kernels import _native
from pipespec_kernels import formats as f
from pipespec_kernels.formats import QuantizedMatrix

__all__ = ["PackedMatrix", "matmul_reference", "num_threads", "round_inputs"]


def num_threads(threads: int | None) -> int:
    """An upper bound of threads, the calling one included: as given, or ``torch.get_num_threads()``."""
    count = torch.get_num_threads() if threads is None else index(threads)
    if count < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    return count


def format_code(matrix: QuantizedMatrix) -> int:
    """The number of a matrix's format in the native code."""
    names: tuple[str, ...] = _native.WEIGHT_FORMATS
    return names.index(matrix.format.name)


class PackedMatrix:
    """A packed copy of a quantised matrix.

    Args:
        matrix: ``[rows, columns]``; is copied.
        threads: Upper bound while it is packed; default ``torch.get_num_threads()``.

    Attributes:
        shape: ``(rows, columns)``.
        nbytes: Bytes of the packed weights.
    """

    def __init__(self, matrix: QuantizedMatrix, threads: int | None = None) -> None:
        self.shape = matrix.shape
        self._native = _native.PackedMatrix(
            format_code(matrix), matrix.data.data_ptr(), *matrix.shape, num_threads(threads)
        )
        self.nbytes: int = self._native.bytes

    def matmul(self, x: Tensor, *, threads: int | None = None) -> Tensor:
        """``x @ matrix.T``.

        Args:
            x: float32 ``[..., columns]`` on the CPU.
            threads: Upper bound, the calling thread included; default ``torch.get_num_threads()``.

        Returns:
            float32 ``[..., rows]``.

        Raises:
            TypeError: ``x`` is not float32.
            ValueError: Its shape or device does not fit.
        """
        if x.dtype is not torch.float32:
            raise TypeError(f"x must be float32, got {x.dtype}")
        if x.dim() < 1 or x.shape[-1] != self.shape[1] or not x.is_cpu:
            raise ValueError(f"x must be [..., {self.shape[1]}] on the CPU, got {list(x.shape)} on {x.device}")
        source = x.detach().contiguous()
        out = torch.empty((*x.shape[:-1], self.shape[0]), dtype=torch.float32, device="cpu")
        columns = source.numel() // self.shape[1]
        self._native.product(source.data_ptr(), columns, out.data_ptr(), num_threads(threads))
        return out

    def row(self, i: int) -> Tensor:
        """The weights of a row: float32 ``[columns]``."""
        if not 0 <= i < self.shape[0]:
            raise ValueError(f"row must be 0 .. {self.shape[0] - 1}, got {i}")
        out = torch.empty(self.shape[1], dtype=torch.float32, device="cpu")
        self._native.row(i, out.data_ptr())
        return out


def round_inputs(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Inputs in 8 bits.

    Args:
        x: float32 ``[n, columns]``.
        block: Inputs that share a scale.

    Returns:
        ``(codes, scale)``: int32 ``[n, columns // block, block]`` of -127 .. 127, and float32 ``[n, columns // block]``. The scale is the largest
        magnitude / 127, and a code ``x * (127 / largest magnitude)``, to the nearest, ties to even. A block of less than 1e-30 is zero; one
        with an infinity or a NaN has NaN for scale.
    """
    blocks = x.view(len(x), -1, block)
    largest = blocks.abs().amax(2)
    factor = torch.where(largest < 1e-30, torch.zeros_like(largest), torch.full_like(largest, 127) / largest)
    codes = torch.round(blocks * factor[:, :, None])
    scale = torch.where(largest < 1e-30, torch.zeros_like(largest), largest / 127)
    broken = ~torch.isfinite(largest)
    codes.masked_fill_(broken[:, :, None], 0)
    return codes.int(), scale.masked_fill(broken, torch.nan)


def matmul_reference(x: Tensor, matrix: QuantizedMatrix) -> Tensor:
    """The bits of :meth:`PackedMatrix.matmul` for ``x[n, columns]``, in plain torch."""
    rows, columns = matrix.shape
    form = matrix.format
    blocks = matrix.data.view(-1, form.block_bytes)
    codes, scale = round_inputs(x, form.block)
    out = torch.zeros(len(x), rows)
    if form.block == 32:
        weights, scales, minima = _of_32(form.name, blocks)
        for b in range(columns // 32):
            dots = torch.einsum("nk,rk->nr", codes[:, b].double(), weights.view(rows, -1, 32)[:, b].double()).float()
            out = out + scales.view(rows, -1)[:, b] * scale[:, b, None] * dots
            if minima is not None:
                sums = scale[:, b, None] * codes[:, b].sum(1, keepdim=True).float()
                out = out + minima.view(rows, -1)[:, b] * sums
        return out
    weights, scales, subs, minima, sub_minima = _of_256(form.name, blocks)
    groups = subs.shape[1]
    scaled = (weights.view(-1, groups, 256 // groups) * subs[:, :, None]).view(rows, -1, 256).double()
    sub_minima = sub_minima.view(rows, -1, 8).double()
    for b in range(columns // 256):
        dots = torch.einsum("nk,rk->nr", codes[:, b].double(), scaled[:, b]).float()
        out = out + scales.view(rows, -1)[:, b] * scale[:, b, None] * dots
        if minima is not None:
            sums = codes[:, b].view(-1, 8, 32).sum(2).double()
            dots = torch.einsum("nk,rk->nr", sums, sub_minima[:, b]).float()
            out = out - minima.view(rows, -1)[:, b] * scale[:, b, None] * dots
    return out


def _of_32(name: str, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes less their offset ``[n, 32]``, scales ``[n]`` and minima ``[n]`` of blocks."""
    scales = f._half(blocks, 0)[:, 0]
    if name == "q8_0":
        return blocks[:, 2:].contiguous().view(torch.int8).int(), scales, None
    at = 4 if name.endswith("_1") else 2
    minima = f._half(blocks, 2)[:, 0] if at == 4 else None
    five = name.startswith("q5")
    codes = f._nibbles(blocks[:, at + 4 * five :], 16)
    if five:
        codes = codes | f._fifth_bits(blocks[:, at : at + 4])
    return codes.int() - (0 if at == 4 else 16 if five else 8), scales, minima


def _of_256(name: str, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Codes ``[n, 256]``, scales ``[n]``, sub-scales ``[n, groups]``, minima ``[n]`` and sub-minima ``[n, 8]`` of blocks."""
    if name == "q6_k":
        low = f._nibbles(blocks[:, :128], 64).view(-1, 2, 4, 32)
        high = f._fields(blocks[:, 128:192], 2).view(-1, 2, 32, 4).transpose(2, 3)
        codes = (low | (high << 4)).reshape(-1, 256).int() - 32
        subs = blocks[:, 192:208].contiguous().view(torch.int8).int()
        return codes, f._half(blocks, 208)[:, 0], subs, None, subs[:, :8]
    subs, sub_minima = f._scales(blocks[:, 4:16])
    codes = f._nibbles(blocks[:, 16 if name == "q4_k" else 48 :], 32)
    if name == "q5_k":
        codes = codes | f._fields(blocks[:, 16:48], 1).transpose(1, 2).reshape(-1, 256) << 4
    return codes.int(), f._half(blocks, 0)[:, 0], subs.int(), f._half(blocks, 2)[:, 0], sub_minima.int()
