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

__all__ = [
    "FORMATS",
    "QuantizedMatrix",
    "WeightFormat",
    "dequantize",
    "format_of",
    "from_codes",
    "from_q3_k",
    "quantize",
]

_CHUNK = 1 << 17  # weights of a chunk: its intermediate tensors stay in the caches
_TINY = 1e-15  # a group with smaller weights is stored as zeros


@dataclass(frozen=True)
class WeightFormat:
    """One block layout.

    Attributes:
        name: As users write it.
        block: Weights of a block, consecutive in a row.
        block_bytes: Bytes of a block.
        ggml_type: Its number in GGUF files.
        encode: Blocks of weights, float32 ``[n, block]``, to bytes, uint8 ``[n, block_bytes]``.
        decode: The inverse, up to rounding.
    """

    name: str
    block: int
    block_bytes: int
    ggml_type: int = field(repr=False)
    encode: Callable[[Tensor], Tensor] = field(repr=False, compare=False)
    decode: Callable[[Tensor], Tensor] = field(repr=False, compare=False)

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
    if matrix.dim() != 2:
        raise ValueError(f"a matrix has two dimensions, got shape {list(matrix.shape)}")
    rows, columns = matrix.shape
    data = torch.empty((rows, form.row_bytes(columns)), dtype=torch.uint8, device="cpu")

    def work(part: slice) -> None:
        weights = matrix[part].detach().to(device="cpu", dtype=torch.float32)
        if not float(weights.abs().amax()) <= 65504:
            raise ValueError(f"{name} holds finite weights of at most 65504, and this matrix has others")
        data[part] = form.encode(weights.reshape(-1, form.block)).view(len(weights), -1)

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
    stored = _as_stored(scales)
    # Where all codes are zero, so are the weights.
    matters = (codes.view(rows, groups, -1) != 0).any(2)
    if not bool(((stored == scales.float()) & stored.isfinite() | ~matters).all()):
        raise ValueError("it has a scale that float16 does not hold, in which blocks keep theirs")
    half = _half_bytes(torch.where(matters, stored, 0).repeat_interleave(columns // groups // 32, 1).view(-1, 1))
    form = FORMATS[f"q{bits}_0"]
    numbers = (codes.to(torch.int16) + (0 if bits == 8 else 1 << bits - 1)).to(torch.uint8).view(-1, 32)
    packed = numbers if bits == 8 else _pack_five(numbers) if bits == 5 else _pack_nibbles(numbers, 16)
    return QuantizedMatrix(form, torch.cat((half, packed), 1).view(rows, -1), (rows, columns))


def from_q3_k(blocks: Tensor, weights: Tensor) -> QuantizedMatrix:
    """A matrix of GGUF's type Q3_K in ``q6_k``, whose blocks hold the same weights: both have 16 scales per block.

    Args:
        blocks: uint8 ``[rows, columns // 256 * 110]``.
        weights: Those of the blocks, float32 ``[rows, columns]``.
    """
    stored = blocks.reshape(-1, 110)
    low, high = stored[:, 96:104], stored[:, 104:108]
    low = torch.cat((low & 15, low >> 4), 1)
    high = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], 1)
    scales = (low | high << 4).to(torch.int8) - 32
    head, (rows, columns) = _half(stored, 108), weights.shape
    codes = (weights.reshape(-1, 16) * _inverse((head * scales).view(-1, 1))).round()
    return QuantizedMatrix(FORMATS["q6_k"], _q6_k(codes, scales, head).view(rows, -1), (rows, columns))


def dequantize(matrix: QuantizedMatrix) -> Tensor:
    """The weights of a matrix: float32 ``[rows, columns]`` on the device of its blocks."""
    rows, columns = matrix.shape
    form = matrix.format
    out = torch.empty((rows, columns), dtype=torch.float32, device=matrix.data.device)

    def work(part: slice) -> None:
        out[part] = form.decode(matrix.data[part].reshape(-1, form.block_bytes)).view(-1, columns)

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


# --- parts of blocks ---------------------------------------------------------------------------------------------------


def _half(block: Tensor, at: int) -> Tensor:
    """The float16 at byte ``at`` of each block, as float32 ``[n, 1]``."""
    return block[:, at : at + 2].contiguous().view(torch.float16).float()


def _half_bytes(values: Tensor) -> Tensor:
    """Values ``[n, 1]`` as bytes of float16."""
    return values.to(torch.float16).view(torch.uint8)


def _as_stored(values: Tensor) -> Tensor:
    return values.to(torch.float16).float()


def _inverse(values: Tensor) -> Tensor:
    return torch.where(values == 0, torch.zeros_like(values), 1 / values)


def _nibbles(packed: Tensor, group: int) -> Tensor:
    """The 4-bit numbers of bytes ``[n, b]``: of each ``group`` bytes first the low ones, then the high ones."""
    pairs = packed.reshape(len(packed), -1, 1, group)
    return torch.cat((pairs & 15, pairs >> 4), 2).view(len(packed), -1)


def _pack_nibbles(numbers: Tensor, group: int) -> Tensor:
    pairs = numbers.view(len(numbers), -1, 2, group)
    return (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).reshape(len(numbers), -1)


def _fields(packed: Tensor, bits: int) -> Tensor:
    """The ``bits``-bit numbers of bytes ``[n, b]``, lowest first: ``[n, b, 8 // bits]``."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return (packed[:, :, None] >> shifts) & ((1 << bits) - 1)


def _pack_fields(numbers: Tensor, bits: int) -> Tensor:
    """The inverse of :func:`_fields`."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=numbers.device)
    return (numbers << shifts).sum(-1, dtype=torch.uint8)


def _largest(groups: Tensor) -> Tensor:
    """The entry of largest size of each last dimension, with its sign; the first of equals."""
    return groups.gather(-1, groups.abs().argmax(-1, keepdim=True))


# --- blocks of 32 ------------------------------------------------------------------------------------------------------


def _encode_q8_0(x: Tensor) -> Tensor:
    scale = x.abs().amax(1, keepdim=True) / 127
    scaled = x * _inverse(scale)
    size = scaled.abs()
    whole = size.floor()
    numbers = scaled.sign() * (whole + (2 * (size - whole)).floor())  # halves away from zero
    return torch.cat((_half_bytes(scale), numbers.to(torch.int8).view(torch.uint8)), 1)


def _decode_q8_0(block: Tensor) -> Tensor:
    return block[:, 2:].contiguous().view(torch.int8).float() * _half(block, 0)


def _symmetric(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The scale of blocks and their numbers, with an offset of half the range; the largest entry takes the lowest number."""
    middle = 1 << (bits - 1)
    scale = _largest(x) / -middle
    return scale, (x * _inverse(scale) + (middle + 0.5)).trunc().clamp(0, 2 * middle - 1).to(torch.uint8)


def _affine(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """The scale and the minimum entry of blocks, and their numbers."""
    top = (1 << bits) - 1
    minimum = x.amin(1, keepdim=True)
    scale = (x.amax(1, keepdim=True) - minimum) / top
    return scale, minimum, ((x - minimum) * _inverse(scale) + 0.5).trunc().clamp(0, top).to(torch.uint8)


def _encode_q4_0(x: Tensor) -> Tensor:
    scale, numbers = _symmetric(x, 4)
    return torch.cat((_half_bytes(scale), _pack_nibbles(numbers, 16)), 1)


def _decode_q4_0(block: Tensor) -> Tensor:
    return _half(block, 0) * (_nibbles(block[:, 2:], 16).float() - 8)


def _encode_q4_1(x: Tensor) -> Tensor:
    scale, minimum, numbers = _affine(x, 4)
    return torch.cat((_half_bytes(scale), _half_bytes(minimum), _pack_nibbles(numbers, 16)), 1)


def _decode_q4_1(block: Tensor) -> Tensor:
    return _half(block, 0) * _nibbles(block[:, 4:], 16).float() + _half(block, 2)


def _fifth_bits(packed: Tensor) -> Tensor:
    return _fields(packed, 1).view(len(packed), -1) << 4


def _pack_five(numbers: Tensor) -> Tensor:
    """32 5-bit numbers: 4 bytes of their highest bits, 16 bytes of the others."""
    high = _pack_fields((numbers >> 4).view(len(numbers), 4, 8), 1)
    return torch.cat((high, _pack_nibbles(numbers & 15, 16)), 1)


def _encode_q5_0(x: Tensor) -> Tensor:
    scale, numbers = _symmetric(x, 5)
    return torch.cat((_half_bytes(scale), _pack_five(numbers)), 1)


def _decode_q5_0(block: Tensor) -> Tensor:
    return _half(block, 0) * ((_nibbles(block[:, 6:], 16) | _fifth_bits(block[:, 2:6])).float() - 16)


def _encode_q5_1(x: Tensor) -> Tensor:
    scale, minimum, numbers = _affine(x, 5)
    return torch.cat((_half_bytes(scale), _half_bytes(minimum), _pack_five(numbers)), 1)


def _decode_q5_1(block: Tensor) -> Tensor:
    numbers = _nibbles(block[:, 8:], 16) | _fifth_bits(block[:, 4:8])
    return _half(block, 0) * numbers.float() + _half(block, 2)


# --- blocks of 256: 8 groups of 32 with a scale and a least entry, or 16 groups of 16 with a scale ----------------------


def _search_affine(x: Tensor, top: int, first: float, steps: int) -> tuple[Tensor, Tensor]:
    """Scale and offset of groups ``[n, g]`` such that ``scale * number - offset`` is near, both not negative: ``[n, 1]`` each.

    Of ``steps`` grids around the one that spans the group, 0.1 apart, each refitted by least squares, the one with the least error,
    where large entries weigh more.
    """
    size = x.abs()
    weight = size + (x * x).mean(1, keepdim=True).sqrt()
    weighted = weight * x
    total, sum_x = weight.sum(1, keepdim=True), weighted.sum(1, keepdim=True)
    sum_xx = (weighted * x).sum(1, keepdim=True)
    minimum = x.amin(1, keepdim=True).clamp(max=0)
    above = x - minimum
    span = above.amax(1, keepdim=True)
    per_span = _inverse(span)
    scale, offset = span / top, -minimum
    numbers, product = torch.empty_like(x), torch.empty_like(x)

    def moments(levels: float) -> tuple[Tensor, Tensor, Tensor]:
        torch.mul(above, levels * per_span, out=numbers).round_().clamp_(max=top)
        torch.mul(weight, numbers, out=product)
        total_l = product.sum(1, keepdim=True)
        sum_l2 = product.mul_(numbers).sum(1, keepdim=True)
        return total_l, sum_l2, torch.mul(weighted, numbers, out=product).sum(1, keepdim=True)

    def error(scale: Tensor, offset: Tensor, sums: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """The weighted sum of squares of ``scale * number - offset - x``."""
        sum_l, sum_l2, sum_xl = sums
        inner = scale * sum_l2 - 2 * (offset * sum_l + sum_xl)
        return scale * inner + offset * (offset * total + 2 * sum_x) + sum_xx

    best = error(scale, offset, moments(top))
    for step in range(steps + 1):
        sums = sum_l, sum_l2, sum_xl = moments(top + first + 0.1 * step)
        determinant = total * sum_l2 - sum_l * sum_l
        fit = (total * sum_xl - sum_x * sum_l) / determinant
        low = (sum_l2 * sum_x - sum_l * sum_xl) / determinant
        fit = torch.where(low > 0, sum_xl / sum_l2, fit)
        low = -low.clamp(max=0)
        found = error(fit, low, sums)
        better = (determinant > 0) & (found < best)
        scale, offset = torch.where(better, fit, scale), torch.where(better, low, offset)
        best = torch.where(better, found, best)
    return scale, offset


def _pack_scales(scales: Tensor, offsets: Tensor) -> Tensor:
    """8 6-bit scales and 8 offsets in 12 bytes: the first four of each, then low halves of the others, their high bits above the first."""
    low = scales[:, :4] | ((scales[:, 4:] >> 4) << 6)
    middle = offsets[:, :4] | ((offsets[:, 4:] >> 4) << 6)
    return torch.cat((low, middle, (scales[:, 4:] & 15) | ((offsets[:, 4:] & 15) << 4)), 1)


def _scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of :func:`_pack_scales`."""
    low, middle, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    return (
        torch.cat((low & 63, (rest & 15) | ((low >> 2) & 48)), 1),
        torch.cat((middle & 63, (rest >> 4) | ((middle >> 2) & 48)), 1),
    )


def _affine_groups(x: Tensor, bits: int, first: float, steps: int) -> tuple[Tensor, Tensor]:
    """The first 16 bytes of blocks and their numbers ``[n, 256]``."""
    top = (1 << bits) - 1
    groups = x.reshape(-1, 32)
    scale, offset = (part.view(-1, 8) for part in _search_affine(groups, top, first, steps))
    head, stored = [], []
    for part in (scale, offset):
        largest = part.amax(1, keepdim=True)
        number = (63 * _inverse(largest) * part).round().clamp(0, 63).to(torch.uint8)
        head.append(largest / 63)
        stored.append(number)
    scale, offset = ((_as_stored(h) * s).view(-1, 1) for h, s in zip(head, stored, strict=True))
    numbers = ((groups + offset) * _inverse(scale)).round().clamp(0, top).to(torch.uint8)
    return torch.cat((*(map(_half_bytes, head)), _pack_scales(*stored)), 1), numbers.view(len(x), 256)


def _of_affine_groups(block: Tensor, numbers: Tensor) -> Tensor:
    scales, offsets = _scales(block[:, 4:16])
    scale, offset = (_half(block, 0) * scales)[:, :, None], (_half(block, 2) * offsets)[:, :, None]
    return (scale * numbers.view(-1, 8, 32) - offset).view(-1, 256)


def _encode_q4_k(x: Tensor) -> Tensor:
    head, numbers = _affine_groups(x, 4, -1.0, 20)
    return torch.cat((head, _pack_nibbles(numbers, 32)), 1)


def _decode_q4_k(block: Tensor) -> Tensor:
    return _of_affine_groups(block, _nibbles(block[:, 16:], 32))


def _encode_q5_k(x: Tensor) -> Tensor:
    head, numbers = _affine_groups(x, 5, -0.5, 15)
    high = _pack_fields((numbers >> 4).view(-1, 8, 32).transpose(1, 2), 1)
    return torch.cat((head, high, _pack_nibbles(numbers & 15, 32)), 1)


def _decode_q5_k(block: Tensor) -> Tensor:
    high = _fields(block[:, 16:48], 1).transpose(1, 2).reshape(-1, 256)
    return _of_affine_groups(block, _nibbles(block[:, 48:], 32) | (high << 4))


def _search_symmetric(x: Tensor, top: int) -> Tensor:
    """The scale of groups ``[n, g]`` such that ``scale * number`` is near, numbers from ``-top`` to ``top - 1``: ``[n, 1]``.

    Of 19 grids around the one that gives the largest entry the lowest number, each refitted by least squares, the one with the least
    error, where an entry weighs its square.
    """
    largest = _largest(x)
    per_largest = torch.where(largest.abs() < _TINY, torch.zeros_like(x[:, :1]), -1 / largest)
    weighted = x * x
    cubes = weighted * x
    scale, best = torch.zeros_like(largest), torch.zeros_like(largest)
    numbers, product = torch.empty_like(x), torch.empty_like(x)
    for step in (0, *range(-9, 0), *range(1, 10)):
        torch.mul(x, (top + 0.1 * step) * per_largest, out=numbers).round_().clamp_(-top, top - 1)
        sum_xl = torch.mul(cubes, numbers, out=product).sum(1, keepdim=True)
        sum_l2 = torch.mul(weighted, numbers, out=product).mul_(numbers).sum(1, keepdim=True)
        better = (sum_l2 > 0) & (sum_xl * sum_xl > best * sum_l2)
        found = sum_xl / sum_l2
        scale = torch.where(better, found, scale)
        best = torch.where(better, found * sum_xl, best)
    return scale


def _encode_q6_k(x: Tensor) -> Tensor:
    groups = x.reshape(-1, 16)
    scale = _search_symmetric(groups, 32).view(-1, 16)
    largest = _largest(scale)
    largest = torch.where(largest.abs() < _TINY, torch.zeros_like(largest), largest)
    stored = (-128 * _inverse(largest) * scale).round().clamp(-128, 127).to(torch.int8)
    head = largest / -128
    step = (_as_stored(head) * stored).view(-1, 1)
    return _q6_k((groups * _inverse(step)).round().clamp(-32, 31), stored, head)


def _q6_k(codes: Tensor, scales: Tensor, head: Tensor) -> Tensor:
    """Blocks of the weights ``head * scale * code``: -32 to 31 for each of 256, int8 ``[n, 16]``, and float16 values ``[n, 1]``."""
    numbers = (codes + 32).to(torch.uint8).view(-1, 2, 4, 32)
    low = (numbers[:, :, :2] & 15) | ((numbers[:, :, 2:] & 15) << 4)
    high = _pack_fields((numbers >> 4).transpose(2, 3), 2)
    return torch.cat((low.reshape(-1, 128), high.reshape(-1, 64), scales.view(torch.uint8), _half_bytes(head)), 1)


def _decode_q6_k(block: Tensor) -> Tensor:
    low = _nibbles(block[:, :128], 64).view(-1, 2, 4, 32)
    high = _fields(block[:, 128:192], 2).view(-1, 2, 32, 4).transpose(2, 3)
    numbers = (low | (high << 4)).reshape(-1, 16, 16).float() - 32
    scale = _half(block, 208) * block[:, 192:208].contiguous().view(torch.int8)
    return (scale[:, :, None] * numbers).view(-1, 256)


FORMATS: Mapping[str, WeightFormat] = {
    row.name: row
    for row in (
        WeightFormat("q8_0", 32, 34, 8, _encode_q8_0, _decode_q8_0),
        WeightFormat("q6_k", 256, 210, 14, _encode_q6_k, _decode_q6_k),
        WeightFormat("q5_1", 32, 24, 7, _encode_q5_1, _decode_q5_1),
        WeightFormat("q5_k", 256, 176, 13, _encode_q5_k, _decode_q5_k),
        WeightFormat("q5_0", 32, 22, 6, _encode_q5_0, _decode_q5_0),
        WeightFormat("q4_1", 32, 20, 3, _encode_q4_1, _decode_q4_1),
        WeightFormat("q4_k", 256, 144, 12, _encode_q4_k, _decode_q4_k),
        WeightFormat("q4_0", 32, 18, 2, _encode_q4_0, _decode_q4_0),
    )
}
"""All formats by name, those with more bytes per weight first."""
