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

from pipespec_kernels import formats as f
from pipespec_kernels.formats import QuantizedMatrix

__all__ = ["LAYOUTS", "TileLayout", "TiledMatrix", "in_tiles"]

BAND = 8
"""Rows of a tile."""

WIDTH = 128
"""Columns of a tile."""

HALF, STEPS = 0, 1
"""Kinds of scales. One float16 for 32 columns; or a float16 for the tile, times an integer of 8 bits for 32 or 16 columns."""

_CHUNK = 1 << 22  # weights that are brought into tiles at a time


class TileLayout(NamedTuple):
    """How the tiles of a format hold weights. The kernels are compiled for it.

    Attributes:
        low: bits of a code in the first plane of codes: 2 or 4.
        high: bits above them, in the second plane: 0, 1, 2 or 4. 0: there is none.
        zero: the code of the number 0.
        scales: :data:`HALF` or :data:`STEPS`.
        group: columns of one scale: 32, or 16 with :data:`STEPS`.
        minima: whether a minimum is added, of which there are as many as scales.
        signed: whether the integers of :data:`STEPS` have a sign.
    """

    low: int
    high: int
    zero: int
    scales: int
    group: int = 32
    minima: bool = False
    signed: bool = False

    @property
    def codes(self) -> int:
        """Bytes of a tile's codes."""
        return WIDTH * (self.low + self.high)

    @property
    def pieces(self) -> tuple[int, ...]:
        """Bytes per row of a tile of each kind of number behind the codes: low and high bytes of scales, likewise of minima; or the float16 heads of scale and
        minimum, scales, minima."""
        if self.scales == HALF:
            return (4, 4) * (1 + self.minima)
        return (4, *(WIDTH // self.group,) * (1 + self.minima))

    @property
    def nbytes(self) -> int:
        """Bytes of a tile."""
        return self.codes + BAND * sum(self.pieces)


Parts = tuple[Tensor, ...]
"""Of blocks ``[n, bytes]``: codes, uint8 ``[n, block]``; and bytes ``[n, b]`` of the numbers that :attr:`TileLayout.pieces` lists."""


def _of_simple(bits: int, has_minimum: bool) -> Callable[[Tensor], Parts]:
    """Blocks of 32 with codes of 4 or 5 bits."""

    def split(block: Tensor) -> Parts:
        at = 4 if has_minimum else 2
        codes = f._nibbles(block[:, at + 4 * (bits == 5) :], 16)
        if bits == 5:
            codes = codes | f._fifth_bits(block[:, at : at + 4])
        return codes, *block[:, : 4 if has_minimum else 2].split(1, 1)

    return split


def _of_q8_0(block: Tensor) -> Parts:
    return block[:, 2:] ^ 128, *block[:, :2].split(1, 1)


def _of_affine(bits: int) -> Callable[[Tensor], Parts]:
    """Blocks of 256 with scales and minima in 6 bits, of which the minimum is subtracted."""

    def split(block: Tensor) -> Parts:
        codes = f._nibbles(block[:, 16 if bits == 4 else 48 :], 32)
        if bits == 5:
            codes = codes | f._fields(block[:, 16:48], 1).transpose(1, 2).reshape(-1, 256) << 4
        sign = torch.tensor([0, 0, 0, 128], dtype=torch.uint8, device=block.device)
        return codes, block[:, :4] ^ sign, *f._scales(block[:, 4:16])

    return split


def _of_q6_k(block: Tensor) -> Parts:
    low = f._nibbles(block[:, :128], 64).view(-1, 2, 4, 32)
    high = f._fields(block[:, 128:192], 2).view(-1, 2, 32, 4).transpose(2, 3)
    return (low | high << 4).reshape(-1, 256), F.pad(block[:, 208:210], (0, 2)), block[:, 192:208]


_FORMATS: Mapping[str, tuple[TileLayout, Callable[[Tensor], Parts]]] = {
    "q8_0": (TileLayout(4, 4, 128, HALF), _of_q8_0),
    "q6_k": (TileLayout(4, 2, 32, STEPS, group=16, signed=True), _of_q6_k),
    "q5_1": (TileLayout(4, 1, 0, HALF, minima=True), _of_simple(5, True)),
    "q5_k": (TileLayout(4, 1, 0, STEPS, minima=True), _of_affine(5)),
    "q5_0": (TileLayout(4, 1, 16, HALF), _of_simple(5, False)),
    "q4_1": (TileLayout(4, 0, 0, HALF, minima=True), _of_simple(4, True)),
    "q4_k": (TileLayout(4, 0, 0, STEPS, minima=True), _of_affine(4)),
    "q4_0": (TileLayout(4, 0, 8, HALF), _of_simple(4, False)),
}

LAYOUTS: Mapping[str, TileLayout] = {name: layout for name, (layout, _) in _FORMATS.items()}
"""The formats that GPUs multiply with, by name."""


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
        """The weights: float32 ``[rows, columns]``, with the bits of :func:`pipespec_kernels.formats.dequantize`. On any device, with much memory; see
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
            plane = tiles[:, :, at : at + WIDTH * bits].unflatten(2, (BAND, 4, 4, bits))[band, :, within]
            planes.append(f._fields(plane.reshape(-1, bits), bits).reshape(len(index), count, 4, 4, 8))
            at += WIDTH * bits
        codes = planes[0] | planes[1] << layout.low if layout.high else planes[0]
        numbers = codes.transpose(2, 3).reshape(len(index), -1).float() - layout.zero
        pieces = []
        for size in layout.pieces:
            piece = tiles[:, :, at : at + BAND * size].unflatten(2, (BAND, size))[band, :, within]
            pieces.append(piece.contiguous())
            at += BAND * size
        scale, *minimum = _scales_of(layout, pieces)
        groups = numbers.view(len(index), -1, layout.group) * scale[:, :, None]
        groups = groups + minimum[0][:, :, None] if minimum else groups
        return groups.view(len(index), -1)[:, : self.shape[1]]


def _scales_of(layout: TileLayout, pieces: list[Tensor]) -> tuple[Tensor, ...]:
    """Scales and minima ``[n, columns / group]`` of bytes ``[n, tiles, b]``."""
    if layout.scales == HALF:
        halves = [torch.stack(pair, -1).view(torch.float16) for pair in zip(pieces[::2], pieces[1::2], strict=True)]
        return tuple(half.float().flatten(1) for half in halves)
    heads, *steps = pieces
    found = []
    for head, step in zip(heads.view(torch.float16).float().split(1, 2), steps, strict=False):
        whole = (step.view(torch.int8) if layout.signed else step).float() * head
        # Tiles have the first halves of all groups of 32 before the second ones.
        found.append(whole.unflatten(2, (-1, 4)).transpose(2, 3).flatten(1))
    return tuple(found)


def in_tiles(matrix: QuantizedMatrix, device: torch.device | str | None = None) -> TiledMatrix:
    """A matrix in tiles, made on the device part by part: beside the result there is memory for one part.

    Args:
        matrix: in blocks, on any device.
        device: of the result; None: that of the blocks.

    Raises:
        ValueError: its format has no tiles.
    """
    name, (rows, columns) = matrix.format.name, matrix.shape
    if name not in _FORMATS:
        raise ValueError(f"{name!r} has no tiles; the formats that have some are {', '.join(LAYOUTS)}")
    layout, split = _FORMATS[name]
    count = -(-columns // WIDTH)
    device = matrix.data.device if device is None else torch.device(device)
    data = torch.empty((-(-rows // BAND), count * layout.nbytes), dtype=torch.uint8, device=device)
    step = max(1, _CHUNK // columns // BAND)
    for first in range(0, len(data), step):
        blocks = matrix.data[first * BAND : (first + step) * BAND].to(device)
        n, block = len(blocks), matrix.format
        codes, *pieces = split(blocks.reshape(-1, block.block_bytes))
        bands = -(-n // BAND)
        pad = (0, count * WIDTH - columns, 0, bands * BAND - n)
        order = F.pad(codes.reshape(n, columns), pad).view(bands, BAND, count, 4, 4, 8).permute(0, 2, 1, 4, 3, 5)
        planes = [_packed(order & (1 << layout.low) - 1, layout.low)]
        if layout.high:
            planes.append(_packed(order >> layout.low, layout.high))
        for size, piece in zip(layout.pieces, pieces, strict=True):
            planes.append(_of_tiles(layout, piece.reshape(n, -1), size, count, bands))
        data[first : first + step] = torch.cat([plane.reshape(bands, count, -1) for plane in planes], 2).flatten(1)
    return TiledMatrix(name, data, (rows, columns))


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Codes ``[..., 8]`` of some bits in as many bytes."""
    return f._pack_fields(codes.reshape(*codes.shape[:-1], bits, 8 // bits), bits)


def _of_tiles(layout: TileLayout, piece: Tensor, size: int, count: int, bands: int) -> Tensor:
    """Bytes ``[rows, b]``, ``size`` for each tile of a row: ``[bands, tiles, 8, size]``."""
    if layout.scales == STEPS and size == 4 and 2 * piece.shape[1] == 4 * count:
        piece = piece.view(len(piece), -1, 1, 4).expand(-1, -1, 2, -1).flatten(1)  # the heads of 256 columns
    piece = F.pad(piece, (0, count * size - piece.shape[1], 0, bands * BAND - len(piece)))
    tiles = piece.view(bands, BAND, count, size)
    if (
        layout.scales == STEPS and size == 8
    ):  # of groups of 16: the first halves of all groups of 32 before the second ones
        tiles = tiles.unflatten(3, (4, 2)).transpose(3, 4).flatten(3)
    return tiles.transpose(1, 2)
