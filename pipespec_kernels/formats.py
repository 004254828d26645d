"""The formats of quantised weight matrices: one table, the block layouts of GGUF files, and references in plain torch.

A row of a matrix is a sequence of blocks. A block holds the same number of weights everywhere: small integers, and one or two
float16 scales that turn them into weights. The K formats divide a block of 256 into groups with 6- or 8-bit scales of their own.

:func:`dequantize` gives the bits of the ``gguf`` package. :func:`quantize` gives its bits for the formats with blocks of 32; for the
K formats it searches scales as llama.cpp does without an importance matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipespec_kernels import block_layouts as layouts
from pipespec_kernels import encoding
from pipespec_kernels.block_layouts import Parts

__all__ = [
    "FORMATS",
    "QUANTIZERS",
    "QuantizedMatrix",
    "WeightFormat",
    "dequantize",
    "format_of",
    "from_codes",
    "from_e2m1",
    "quantize",
]

_CHUNK = 1 << 17  # weights of a chunk: its intermediate tensors stay in the caches


@dataclass(frozen=True)
class WeightFormat:
    """One block layout.

    Attributes:
        name: As users write it.
        block: Weights of a block, consecutive in a row.
        block_bytes: Bytes of a block.
        ggml_type: Its number in GGUF files; None for blocks of our own, which files of other types become.
        halves: The bytes of a block at which its float16 numbers begin.
        read: The numbers of blocks, uint8 ``[n, block_bytes]``.
        encode: Blocks of weights, float32 ``[n, block]``, to bytes, uint8 ``[n, block_bytes]``; None where nothing is quantised to it.
    """

    name: str
    block: int
    block_bytes: int
    ggml_type: int | None = field(repr=False)
    halves: tuple[int, ...] = field(repr=False)
    read: Callable[[Tensor], Parts] = field(repr=False, compare=False)
    encode: Callable[[Tensor], Tensor] | None = field(default=None, repr=False, compare=False)

    @property
    def bytes_per_weight(self) -> float:
        """Bytes per weight, scales included."""
        return self.block_bytes / self.block

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of ``columns`` weights; ``ValueError`` where the blocks do not fill it."""
        if columns <= 0 or columns % self.block:
            raise ValueError(f"{self.name} has blocks of {self.block} weights, which do not fill rows of {columns}")
        return columns // self.block * self.block_bytes


@dataclass(frozen=True, eq=False)
class QuantizedMatrix:
    """A matrix ``[out, in]`` in blocks.

    Attributes:
        format: The block layout.
        data: uint8 ``[rows, columns // block * block_bytes]``, contiguous: a row's blocks one after the other.
        shape: ``(rows, columns)``.

    Raises:
        TypeError: ``data`` is not uint8.
        ValueError: Its shape does not fit.
    """

    format: WeightFormat
    data: Tensor
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        rows, columns = self.shape
        expected = (rows, self.format.row_bytes(columns))
        if self.data.dtype is not torch.uint8:
            raise TypeError(f"data must be uint8, got {self.data.dtype}")
        if tuple(self.data.shape) != expected or not self.data.is_contiguous():
            raise ValueError(
                f"data of a {self.format.name} matrix {list(self.shape)} must be contiguous {list(expected)}, got {list(self.data.shape)}"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks."""
        return self.data.numel()

    def rows(self, order: Tensor | slice) -> QuantizedMatrix:
        """The matrix of some rows, in the order given; a slice shares memory."""
        data = self.data[order]
        return QuantizedMatrix(self.format, data, (data.shape[0], self.shape[1]))


def format_of(name: str) -> WeightFormat:
    """The format of a name; ``ValueError`` lists the names where there is none."""
    if name not in FORMATS:
        raise ValueError(f"there is no weight format {name!r}; the formats are {', '.join(FORMATS)}")
    return FORMATS[name]


def quantize(matrix: Tensor, name: str) -> QuantizedMatrix:
    """Quantise a matrix.

    Args:
        matrix: ``[rows, columns]`` of any floating dtype.
        name: A name of :data:`FORMATS`.

    Returns:
        Its blocks, in memory of their own.

    Raises:
        ValueError: An unknown name, columns that the blocks do not fill, or weights that are not finite or too large for float16 scales.
    """
    form = format_of(name)
    encode = form.encode
    if encode is None:
        raise ValueError(f"nothing is quantised to {name}; the formats are {', '.join(QUANTIZERS)}")
    if matrix.dim() != 2:
        raise ValueError(f"a matrix has two dimensions, got shape {list(matrix.shape)}")
    rows, columns = matrix.shape
    data = torch.empty((rows, form.row_bytes(columns)), dtype=torch.uint8, device="cpu")

    def work(part: slice) -> None:
        weights = matrix[part].detach().to(device="cpu", dtype=torch.float32)
        if not float(weights.abs().amax()) <= 65504:
            raise ValueError(f"{name} holds finite weights of at most 65504, and this matrix has others")
        data[part] = encode(weights.reshape(-1, form.block)).view(len(weights), -1)

    _share(rows, columns, work)
    return QuantizedMatrix(form, data, (rows, columns))


def from_codes(codes: Tensor, scales: Tensor) -> QuantizedMatrix:
    """A matrix of the weights ``scale * code``, exactly, in the smallest of ``q4_0``, ``q5_0`` and ``q8_0`` that holds them.

    Args:
        codes: Integers ``[rows, columns]``.
        scales: ``[rows, groups]`` of any floating dtype: each for ``columns / groups`` codes of its row.

    Raises:
        ValueError: Groups that are no whole blocks of 32, codes beyond 8 bits, or a scale that float16 does not hold.
    """
    rows, columns = codes.shape
    groups = scales.shape[1]
    if scales.shape[0] != rows or columns % (32 * groups):
        raise ValueError(
            f"groups must be whole blocks of 32: {list(codes.shape)} codes have {list(scales.shape)} scales"
        )
    smallest, largest = int(codes.min()), int(codes.max())
    bits = next((n for n in (4, 5, 8) if -(1 << n - 1) <= smallest and largest < 1 << n - 1), None)
    if bits is None:
        raise ValueError(f"its codes are {smallest} .. {largest}, and a block holds -128 .. 127")
    stored = encoding.as_stored(scales)
    # Where all codes are zero, so are the weights.
    matters = (codes.view(rows, groups, -1) != 0).any(2)
    if not bool(((stored == scales.float()) & stored.isfinite() | ~matters).all()):
        raise ValueError("it has a scale that float16 does not hold, in which blocks keep theirs")
    half = layouts.half_bytes(torch.where(matters, stored, 0).repeat_interleave(columns // groups // 32, 1).view(-1, 1))
    form = FORMATS[f"q{bits}_0"]
    numbers = (codes.to(torch.int16) + (0 if bits == 8 else 1 << bits - 1)).to(torch.uint8).view(-1, 32)
    packed = numbers if bits == 8 else layouts.pack_five(numbers) if bits == 5 else layouts.pack_nibbles(numbers, 16)
    return QuantizedMatrix(form, torch.cat((half, packed), 1).view(rows, -1), (rows, columns))


def from_e2m1(numbers: Tensor, scales: Tensor) -> QuantizedMatrix:
    """A matrix of floats of 4 bits (E2M1) with scales, exactly: of MXFP4 or NVFP4.

    Args:
        numbers: uint8 ``[rows, columns]``: a sign, two bits of exponent and one of fraction.
        scales: for 32 weights each, uint8 ``[rows, columns // 32]``, powers of two (E8M0); or for 16 each, float32 ``[rows, columns // 16]``.

    Raises:
        ValueError: Shapes that do not fit, or rows that are no whole blocks of 32.
    """
    (rows, columns), size = numbers.shape, 32 if scales.dtype is torch.uint8 else 16
    if columns % 32 or tuple(scales.shape) != (rows, columns // size):
        raise ValueError(f"{list(numbers.shape)} numbers in blocks of 32 have {list(scales.shape)} scales")
    # Codes are twice the numbers, and so E8M0 is read as half of its power.
    head = scales.reshape(-1, 1) if size == 32 else (scales.float() * 0.5).view(-1, 2).view(torch.uint8)
    blocks = torch.cat((head, layouts.pack_nibbles(numbers.reshape(-1, 32), 16)), 1)
    return QuantizedMatrix(FORMATS["mxfp4" if size == 32 else "nvfp4"], blocks.view(rows, -1), (rows, columns))


def dequantize(matrix: QuantizedMatrix) -> Tensor:
    """The weights of a matrix: float32 ``[rows, columns]`` on the device of its blocks."""
    rows, columns = matrix.shape
    form = matrix.format
    out = torch.empty((rows, columns), dtype=torch.float32, device=matrix.data.device)

    def work(part: slice) -> None:
        out[part] = form.read(matrix.data[part].reshape(-1, form.block_bytes)).weights().view(-1, columns)

    if out.device.type == "cpu":
        _share(rows, columns, work)
    else:
        work(slice(None))
    return out


def _share(rows: int, columns: int, work: Callable[[slice], None]) -> None:
    """Call ``work`` for chunks of rows, on as many threads as torch uses: each does its chunks alone, without a barrier per operation."""
    step = max(1, _CHUNK // columns)
    chunks = [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
    torchs, mode = torch.get_num_threads(), torch.is_inference_mode_enabled()
    threads = min(torchs, len(chunks))

    def some(first: int) -> None:
        with torch.inference_mode(mode), torch.no_grad():
            for chunk in chunks[first::threads]:
                work(chunk)

    if threads == 1:
        some(0)
        return
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            list(pool.map(some, range(threads)))
    finally:
        torch.set_num_threads(torchs)  # threads that begin later take the number that was set last


FORMATS: Mapping[str, WeightFormat] = {
    row.name: row
    for row in (
        WeightFormat("q8_0", 32, 34, 8, (0,), layouts.read_q8_0, encoding.encode_q8_0),
        WeightFormat("q6_k", 256, 210, 14, (208,), layouts.read_q6_k, encoding.encode_q6_k),
        WeightFormat("q5_1", 32, 24, 7, (0, 2), layouts.read_q5_1, encoding.encode_q5_1),
        WeightFormat("nvfp4", 32, 24, None, (), layouts.read_nvfp4),
        WeightFormat("q5_k", 256, 176, 13, (0, 2), layouts.read_q5_k, encoding.encode_q5_k),
        WeightFormat("q5_0", 32, 22, 6, (0,), layouts.read_q5_0, encoding.encode_q5_0),
        WeightFormat("q4_1", 32, 20, 3, (0, 2), layouts.read_q4_1, encoding.encode_q4_1),
        WeightFormat("table_iq3_s", 256, 146, None, (0,), layouts.read_table_iq3_s),
        WeightFormat("table_iq3_xxs", 256, 146, None, (0,), layouts.read_table_iq3_xxs),
        WeightFormat("table_iq2", 256, 146, None, (0,), layouts.read_table_iq2),
        WeightFormat("q4_k", 256, 144, 12, (0, 2), layouts.read_q4_k, encoding.encode_q4_k),
        WeightFormat("q4_0", 32, 18, 2, (0,), layouts.read_q4_0, encoding.encode_q4_0),
        WeightFormat("iq4_nl", 32, 18, 20, (0,), layouts.read_iq4_nl, encoding.encode_iq4_nl),
        WeightFormat("iq4_xs", 256, 136, 23, (0,), layouts.read_iq4_xs, encoding.encode_iq4_xs),
        WeightFormat("mxfp4", 32, 17, 39, (), layouts.read_mxfp4, encoding.encode_mxfp4),
        WeightFormat("q3_k", 256, 110, 11, (108,), layouts.read_q3_k, encoding.encode_q3_k),
        WeightFormat("q2_k", 256, 84, 10, (80, 82), layouts.read_q2_k, encoding.encode_q2_k),
    )
}
"""All formats by name, those with more bytes per weight first."""

QUANTIZERS = tuple(name for name, row in FORMATS.items() if row.encode is not None)
"""The formats to which :func:`quantize` quantises."""
