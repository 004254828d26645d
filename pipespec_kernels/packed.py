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
    rows, form = matrix.shape[0], matrix.format
    of = form.read(matrix.data.view(-1, form.block_bytes))

    def by_block(numbers: Tensor) -> Tensor:
        """``[columns // block, rows, ...]``."""
        return numbers.view(rows, -1, numbers.shape[-1]).transpose(0, 1)

    codes, scale = round_inputs(x, form.block)
    out = torch.zeros(len(x), rows)
    for b, (numbers, scales) in enumerate(zip(by_block(of.codes.double()), by_block(of.scale), strict=True)):
        inputs, input_scale = codes[:, b].double(), scale[:, b, None]
        if of.group_scales is not None:
            numbers = numbers * by_block(of.group_scales)[b].repeat_interleave(256 // of.group_scales.shape[1], 1)
        # Each scale is of a run of codes.
        for run in range(scales.shape[1]):
            size = form.block // scales.shape[1]
            part = slice(run * size, (run + 1) * size)
            out = out + scales[:, run] * input_scale * (inputs[:, part] @ numbers[:, part].T).float()
        if of.minimum is None:
            continue
        minimum = by_block(of.minimum)[b, :, 0]
        if of.group_minima is None:
            out = out + minimum * (input_scale * inputs.sum(1, keepdim=True).float())
        else:
            minima = by_block(of.group_minima)[b].double()
            sums = inputs.view(len(x), minima.shape[1], -1).sum(2)
            out = out - minimum * input_scale * (sums @ minima.T).float()
    return out
