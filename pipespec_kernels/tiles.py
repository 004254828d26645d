"""Quantised matrices on a GPU: the weights of :class:`QuantizedMatrix`, in the order in which tensor cores take them.

A tile has 8 rows and 128 columns. Its codes lie in the order of the operands of ``mma.m16n8k16``: thread ``4 * g + t`` of a warp takes of row ``g`` the columns
``32 * c + 8 * t + n``, ``n = 0 .. 7``, for ``c = 0 .. 3``. So it loads its codes with 16 bytes at a time, and no thread needs those of another one. Behind the codes are the
scales of the 8 rows. Those in float16 are divided into their low and their high bytes: where a kernel loads single bytes, Triton gives each thread 8 columns in a row. The tiles of 8 rows, a band, are one row of :attr:`TiledMatrix.data`: matrices of one format are merged as others are, row below row.

A weight is ``scale * number + minimum`` in float32, rounded once to the dtype of the products. Before that rounding the weights have the bits of
:func:`pipespec_kernels.formats.dequantize`: scales keep their parts (float16 times a small integer), and are not rounded to float16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pipespec_kernels.block_layouts import E2M1, IQ2, IQ3_S, IQ3_XXS, IQ4, Parts, looked_up, power
from pipespec_kernels.formats import QuantizedMatrix

__all__ = ["LAYOUTS", "TileLayout", "TiledMatrix", "float8_in_tiles", "in_tiles"]

BAND = 8
"""Rows of a tile."""

WIDTH = 128
"""Columns of a tile."""

HALF, STEPS, PAIRS, POWERS, WORDS, ONE = range(6)
"""Kinds of scales. One float16 for 32 columns; or a float16 for the tile, times an integer of 8 bits for 32 or 16 columns, or one of 4 bits, beside which are those of the
minimum; or a power of two for 32 columns; or a float32 for 16, or for the tile."""

LINEAR, FLOATS, TABLE, E4M3 = range(4)
"""Kinds of codes: numbers less an offset, floats of 4 bits, places in a table, floats of 8 bits."""

_CHUNK = 1 << 22  # weights that are brought into tiles at a time


class TileLayout(NamedTuple):
    """How the tiles of a format hold weights. The kernels are compiled for it.

    Attributes:
        low: bits of a code in the first plane of codes: 2 or 4.
        high: bits above them, in the second plane: 0, 1, 2 or 4. 0: there is none.
        zero: the code of the number 0.
        scales: :data:`HALF`, :data:`STEPS`, :data:`PAIRS`, :data:`POWERS`, :data:`WORDS` or :data:`ONE`.
        group: columns of one scale: 32, 16 or 128.
        minima: whether a minimum is added, of which there are as many as scales.
        signed: whether the integers of :data:`STEPS` have a sign.
        codes: :data:`LINEAR`, :data:`FLOATS`, :data:`TABLE` or :data:`E4M3`.
        words: a table's 16 numbers plus 128, four in each word of 32 bits.
        factor: what all scales are multiplied by, a power of two.
    """

    low: int
    high: int = 0
    zero: int = 0
    scales: int = HALF
    group: int = 32
    minima: bool = False
    signed: bool = False
    codes: int = LINEAR
    words: tuple[int, ...] = ()
    factor: float = 1.0

    @property
    def values(self) -> tuple[int, ...]:
        """The numbers of 16 codes; none where they are linear or have 8 bits."""
        bytes_of = (word >> shift & 255 for word in self.words for shift in (0, 8, 16, 24))
        return E2M1 if self.codes == FLOATS else tuple(byte - 128 for byte in bytes_of)

    @property
    def pieces(self) -> tuple[int, ...]:
        """Bytes per row of a tile of each kind of number behind the codes: low and high bytes of scales, likewise of minima; or the four bytes of
        scales; or the float16 heads of scale and minimum, scales, minima."""
        if self.scales in (POWERS, ONE):
            return (4,)
        if self.scales == WORDS:
            return (8,) * 4
        if self.scales == HALF:
            return (4, 4) * (1 + self.minima)
        return (4, *(WIDTH // self.group,) * (2 if self.scales == STEPS and self.minima else 1))

    @property
    def nbytes(self) -> int:
        """Bytes of a tile."""
        return WIDTH * (self.low + self.high) + BAND * sum(self.pieces)


def _table(values: tuple[int, ...], scales: int, group: int, factor: float = 1.0) -> TileLayout:
    codes = torch.tensor(values, dtype=torch.int16) + 128
    words = tuple(codes.to(torch.uint8).view(torch.int32).tolist())
    return TileLayout(4, 0, 0, scales, group, signed=True, codes=TABLE, words=words, factor=factor)


LAYOUTS: Mapping[str, TileLayout] = {
    "q8_0": TileLayout(4, 4, 128),
    "e4m3": TileLayout(4, 4, 0, ONE, group=WIDTH, codes=E4M3),
    "e4m3_16": TileLayout(4, 4, 0, WORDS, group=16, codes=E4M3),
    "q6_k": TileLayout(4, 2, 32, STEPS, group=16, signed=True),
    "q5_1": TileLayout(4, 1, minima=True),
    "q5_k": TileLayout(4, 1, 0, STEPS, minima=True),
    "q5_0": TileLayout(4, 1, 16),
    "q4_1": TileLayout(4, minima=True),
    "table_iq3_s": _table(IQ3_S, STEPS, 16),
    "table_iq3_xxs": _table(IQ3_XXS, STEPS, 16, 0.5),
    "table_iq2": _table(IQ2, STEPS, 16, 0.125),
    "q4_k": TileLayout(4, 0, 0, STEPS, minima=True),
    "q4_0": TileLayout(4, 0, 8),
    "iq4_nl": _table(IQ4, HALF, 32),
    "iq4_xs": _table(IQ4, STEPS, 32),
    "nvfp4": TileLayout(4, 0, 0, WORDS, group=16, codes=FLOATS),
    "mxfp4": TileLayout(4, 0, 0, POWERS, codes=FLOATS),
    "q3_k": TileLayout(2, 1, 4, STEPS, group=16, signed=True),
    "q2_k": TileLayout(2, 0, 0, PAIRS, group=16, minima=True),
}
"""The formats that GPUs multiply with, by name: those of blocks, and ``"e4m3"`` and ``"e4m3_16"`` of :func:`float8_in_tiles`."""


@dataclass(frozen=True, eq=False)
class TiledMatrix:
    """A matrix ``[rows, columns]`` in tiles. Rows and columns that a tile does not need are zeros.

    Attributes:
        format: its name.
        data: uint8 ``[bands, bytes of a band]``, rows contiguous.
        shape: ``(rows, columns)``.

    Raises:
        TypeError: ``data`` is not uint8.
        ValueError: a format without tiles, or a shape of ``data`` that does not fit.
    """

    format: str
    data: Tensor
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        if self.format not in LAYOUTS:
            raise ValueError(f"{self.format!r} has no tiles; the formats that have some are {', '.join(LAYOUTS)}")
        rows, columns = self.shape
        expected = (-(-rows // BAND), -(-columns // WIDTH) * self.layout.nbytes)
        if self.data.dtype is not torch.uint8:
            raise TypeError(f"data must be uint8, got {self.data.dtype}")
        if tuple(self.data.shape) != expected or self.data.stride(1) != 1:
            raise ValueError(
                f"data of a {self.format} matrix {list(self.shape)} must be {list(expected)} with contiguous rows, got {list(self.data.shape)}"
            )

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def layout(self) -> TileLayout:
        """Of its tiles."""
        return LAYOUTS[self.format]

    def decoded(self) -> Tensor:
        """The weights: float32 ``[rows, columns]``, with the bits of :func:`pipespec_kernels.formats.dequantize`, or of floats of 8 bits times their scales. On any device, with much memory; see
        :func:`pipespec_kernels.ops.decode_rows`."""
        return self.rows(torch.arange(self.shape[0], device=self.data.device))

    def rows(self, index: Tensor) -> Tensor:
        """Some rows, as floats: float32 ``[n, columns]`` for int64 ``[n]``."""
        layout, count = self.layout, -(-self.shape[1] // WIDTH)
        tiles = self.data.view(len(self.data), count, layout.nbytes)
        band, within = index // BAND, index % BAND
        at, planes = 0, []
        for bits in filter(None, (layout.low, layout.high)):
            # [bands, tiles, row, t, c, bytes]: of a row all
            plane = torch.unflatten(tiles[:, :, at : at + WIDTH * bits], 2, (BAND, 4, 4, bits))[band, :, within]
            planes.append(_unpacked(plane, bits))
            at += WIDTH * bits
        codes = planes[0] | planes[1] << layout.low if layout.high else planes[0]
        codes = codes.transpose(2, 3).reshape(len(index), -1)
        if layout.codes == E4M3:
            numbers = codes.contiguous().view(torch.float8_e4m3fn).float()
        else:
            numbers = (looked_up(layout.values, codes) if layout.values else codes.short() - layout.zero).float()
        pieces = []
        for size in layout.pieces:
            piece = torch.unflatten(tiles[:, :, at : at + BAND * size], 2, (BAND, size))[band, :, within]
            pieces.append(piece.contiguous())
            at += BAND * size
        scale, *minimum = _scales_of(layout, pieces)
        groups = numbers.view(len(index), -1, layout.group) * scale[:, :, None]
        groups = groups + minimum[0][:, :, None] if minimum else groups
        return groups.view(len(index), -1)[:, : self.shape[1]]


def _scales_of(layout: TileLayout, pieces: list[Tensor]) -> tuple[Tensor, ...]:
    """Scales and minima ``[n, columns / group]`` of bytes ``[n, tiles, b]``."""
    if layout.scales == POWERS:
        return (power(pieces[0]).flatten(1),)
    if layout.scales == ONE:
        return (pieces[0].view(torch.float32).flatten(1),)
    if layout.scales == HALF:
        halves = [torch.stack(pair, -1).view(torch.float16) for pair in zip(pieces[::2], pieces[1::2], strict=True)]
        return tuple(half.float().flatten(1) for half in halves)
    if layout.scales == WORDS:
        return (_by_column(torch.stack(pieces, -1).view(torch.float32)[..., 0]),)
    heads, *steps = pieces
    if layout.scales == PAIRS:
        steps = [steps[0] & 15, steps[0] >> 4]
    found = []
    for head, step in zip(heads.view(torch.float16).float().chunk(2, 2), steps, strict=False):
        whole = (step.view(torch.int8) if layout.signed else step).float() * (head * layout.factor)
        found.append(_by_column(whole))
    return tuple(found)


def _by_column(numbers: Tensor) -> Tensor:
    """Numbers ``[n, tiles, groups]`` in the order of the columns: tiles have the first halves of all groups of 32 before the second ones."""
    return torch.unflatten(numbers, 2, (-1, 4)).transpose(2, 3).flatten(1)


def in_tiles(matrix: QuantizedMatrix, device: torch.device | str | None = None) -> TiledMatrix:
    """A matrix in tiles, made on the device part by part: beside the result there is memory for one part.

    Args:
        matrix: in blocks, on any device.
        device: of the result; None: that of the blocks.

    Raises:
        ValueError: its format has no tiles.
    """
    name, (rows, columns) = matrix.format.name, matrix.shape
    if name not in LAYOUTS:
        raise ValueError(f"{name!r} has no tiles; the formats that have some are {', '.join(LAYOUTS)}")
    layout = LAYOUTS[name]
    device = matrix.data.device if device is None else torch.device(device)

    def part(of: slice) -> tuple[Tensor, list[Tensor]]:
        blocks = matrix.data[of].to(device)
        parts = matrix.format.read(blocks.reshape(-1, matrix.format.block_bytes))
        return _codes(layout, parts.codes).view(-1, columns), _pieces(layout, parts)

    return _made(name, (rows, columns), device, part)


def float8_in_tiles(weight: Tensor, scale: Tensor, device: torch.device | str | None = None) -> TiledMatrix:
    """Floats of 8 bits in tiles, as :func:`in_tiles`: format ``"e4m3"``, or ``"e4m3_16"`` with scales of parts of a tile.

    Args:
        weight: float8_e4m3fn ``[rows, columns]``.
        scale: float32 ``[rows, tiles]``, each for 128 columns of its row, or ``[rows, groups]``, each for 16. A weight is its product with its scale.
        device: of the result; None: that of ``weight``.

    Raises:
        ValueError: another dtype or shape, or a weight that is not finite.
    """
    (rows, columns), device = weight.shape, weight.device if device is None else torch.device(device)
    shapes = {(rows, -(-columns // LAYOUTS[name].group)): name for name in ("e4m3_16", "e4m3")}
    name = shapes.get((scale.shape[0], scale.shape[1])) if scale.dim() == 2 else None
    if name is None or (weight.dtype, scale.dtype) != (torch.float8_e4m3fn, torch.float32):
        fitting = " or ".join(str(list(shape)) for shape in reversed(shapes))
        raise ValueError(
            f"floats of 8 bits are float8_e4m3fn and have float32 scales {fitting}, got {weight.dtype} and {scale.dtype} {list(scale.shape)}"
        )
    if bool((weight.view(torch.uint8) & 127 == 127).any()):
        raise ValueError("it has weights that are not finite")

    def part(of: slice) -> tuple[Tensor, list[Tensor]]:
        codes = weight[of].to(device).contiguous().view(torch.uint8)
        bytes_of = scale[of].to(device).contiguous().view(torch.uint8)
        return codes, [bytes_of] if name == "e4m3" else [*torch.unflatten(bytes_of, 1, (-1, 4)).unbind(2)]

    return _made(name, (rows, columns), device, part)


def _made(
    name: str, shape: tuple[int, int], device: torch.device, part: Callable[[slice], tuple[Tensor, list[Tensor]]]
) -> TiledMatrix:
    """A matrix in tiles. ``part`` gives codes of some rows, uint8 ``[n, columns]``, and the bytes behind them, as :attr:`TileLayout.pieces` lists them."""
    layout, (rows, columns) = LAYOUTS[name], shape
    count = -(-columns // WIDTH)
    data = torch.empty((-(-rows // BAND), count * layout.nbytes), dtype=torch.uint8, device=device)
    step = max(1, _CHUNK // columns // BAND)
    for first in range(0, len(data), step):
        codes, pieces = part(slice(first * BAND, (first + step) * BAND))
        n, bands = len(codes), -(-len(codes) // BAND)
        codes = F.pad(codes, (0, count * WIDTH - columns, 0, bands * BAND - n))
        order = codes.view(bands, BAND, count, 4, 4, 8).permute(0, 2, 1, 4, 3, 5)
        planes = [_packed(order & (1 << layout.low) - 1, layout.low)]
        if layout.high:
            planes.append(_packed(order >> layout.low, layout.high))
        for size, piece in zip(layout.pieces, pieces, strict=True):
            planes.append(_of_tiles(layout, piece.reshape(n, -1), size, count, bands))
        data[first : first + step] = torch.cat([plane.reshape(bands, count, -1) for plane in planes], 2).flatten(1)
    return TiledMatrix(name, data, shape)


def _codes(layout: TileLayout, numbers: Tensor) -> Tensor:
    """Codes of numbers: uint8."""
    if not layout.values:
        return (numbers + layout.zero).to(torch.uint8)
    places = torch.zeros(256, dtype=torch.uint8)
    for place in range(15, -1, -1):
        places[layout.values[place] + 128] = place
    return places.to(numbers.device)[numbers.int() + 128]


def _pieces(layout: TileLayout, parts: Parts) -> list[Tensor]:
    """Bytes ``[n, b]`` of the numbers that :attr:`TileLayout.pieces` lists."""
    if layout.scales == POWERS:
        bits = parts.scale.view(torch.int32)
        return [torch.where(bits < 1 << 23, (bits >> 21) - 1, (bits >> 23) + 1).to(torch.uint8)]
    if layout.scales == WORDS:
        return [*torch.unflatten(parts.scale.contiguous().view(torch.uint8), 1, (-1, 4)).unbind(2)]
    minimum = None if parts.minimum is None else parts.minimum.half().view(torch.uint8)
    scale = (parts.scale / layout.factor).half().view(torch.uint8)
    if layout.scales == HALF:
        return [*scale.chunk(2, 1), *(() if minimum is None else minimum.chunk(2, 1))]
    assert parts.group_scales is not None
    # Minima of groups are subtracted.
    below = (
        torch.zeros_like(scale)
        if minimum is None
        else minimum ^ torch.tensor([0, 128], dtype=torch.uint8, device=minimum.device)
    )
    steps = [parts.group_scales, *(() if parts.group_minima is None else (parts.group_minima,))]
    if layout.scales == PAIRS:
        steps = [steps[0] | steps[1] << 4]
    return [
        torch.cat((scale, below), 1),
        *(step.to(torch.int8 if layout.signed else torch.uint8).view(torch.uint8) for step in steps),
    ]


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Codes ``[..., 8]`` of some bits in as many bytes, the first one lowest."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return (torch.unflatten(codes, -1, (bits, -1)) << shifts).sum(-1, dtype=torch.uint8)


def _unpacked(plane: Tensor, bits: int) -> Tensor:
    """The inverse of :func:`_packed`."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=plane.device)
    return (plane[..., None] >> shifts & (1 << bits) - 1).flatten(-2)


def _of_tiles(layout: TileLayout, piece: Tensor, size: int, count: int, bands: int) -> Tensor:
    """Bytes ``[rows, b]``, ``size`` for each tile of a row: ``[bands, tiles, 8, size]``."""
    has_steps = layout.scales in (STEPS, PAIRS, WORDS)
    if has_steps and size == 4 and 2 * piece.shape[1] == 4 * count:
        piece = piece.view(len(piece), -1, 1, 4).expand(-1, -1, 2, -1).flatten(1)  # the heads of 256 columns
    piece = F.pad(piece, (0, count * size - piece.shape[1], 0, bands * BAND - len(piece)))
    tiles = piece.view(bands, BAND, count, size)
    if has_steps and size == 8:  # of groups of 16: the first halves of all groups of 32 before the second ones
        tiles = torch.unflatten(tiles, 3, (4, 2)).transpose(3, 4).flatten(3)
    return tiles.transpose(1, 2)
