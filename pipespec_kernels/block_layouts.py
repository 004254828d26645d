"""What the bytes of a block say: per layout a function that reads blocks, and those that write some of them.

All of them give :class:`Parts`, from which the weights, the native products' reference and kernels of other devices come.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The values of IQ4_NL and IQ4_XS."""
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Floats of 4 bits, doubled."""
LARGEST_POWER = 252
"""The last byte of E8M0 with which all of them are finite in float32."""
IQ3_S = (1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15)
IQ3_XXS = (2, 6, 10, 14, 18, 22, 26, 31, -2, -6, -10, -14, -18, -22, -26, -31)
"""Those of the grid, halved."""
IQ2 = (1, 7, 8, 9, 25, 43, 0, 0, -1, -7, -8, -9, -25, -43, 0, 0)
"""Those of the grids of IQ2_XXS, IQ2_XS, IQ2_S, and of IQ1_S and IQ1_M times 8."""


class Parts(NamedTuple):
    """The numbers of blocks ``[n, block]``.

    A weight is ``scale * code``, plus ``minimum`` where there is one and no groups; with groups ``scale * group_scale * code``, less
    ``minimum * group_minimum`` where there are minima.

    Attributes:
        codes: int16 ``[n, block]``, with signs: offsets are subtracted, tables looked up.
        scale: float32 ``[n, scales]``, each of a run of codes.
        minimum: float32 ``[n, 1]``, or None.
        group_scales: int16 ``[n, groups]``, or None.
        group_minima: int16 ``[n, groups]``, or None.
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor | None = None
    group_scales: Tensor | None = None
    group_minima: Tensor | None = None

    def weights(self) -> Tensor:
        """float32 ``[n, block]``."""
        if self.group_scales is None:
            runs = self.scale[:, :, None] * self.codes.view(*self.scale.shape, -1)
            weights = runs.view(self.codes.shape)
            return weights if self.minimum is None else weights + self.minimum
        groups = self.codes.view(*self.group_scales.shape, -1)
        weights = (self.scale * self.group_scales)[:, :, None] * groups
        if self.minimum is not None and self.group_minima is not None:
            weights = weights - (self.minimum * self.group_minima)[:, :, None]
        return weights.view(self.codes.shape)


# --- parts of blocks ---------------------------------------------------------------------------------------------------


def half(block: Tensor, at: int) -> Tensor:
    """The float16 at byte ``at`` of each block, as float32 ``[n, 1]``."""
    return block[:, at : at + 2].contiguous().view(torch.float16).float()


def half_bytes(values: Tensor) -> Tensor:
    """Values ``[n, 1]`` as bytes of float16."""
    return values.to(torch.float16).view(torch.uint8)


def nibbles(packed: Tensor, group: int) -> Tensor:
    """The 4-bit numbers of bytes ``[n, b]``: of each ``group`` bytes first the low ones, then the high ones."""
    pairs = packed.reshape(len(packed), -1, 1, group)
    return torch.cat((pairs & 15, pairs >> 4), 2).view(len(packed), -1)


def pack_nibbles(numbers: Tensor, group: int) -> Tensor:
    """The inverse of :func:`nibbles`."""
    pairs = numbers.view(len(numbers), -1, 2, group)
    return (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).reshape(len(numbers), -1)


def fields(packed: Tensor, bits: int, group: int = 1) -> Tensor:
    """The ``bits``-bit numbers of bytes ``[n, b]``: of each ``group`` bytes first the lowest ones."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    found = (packed.reshape(len(packed), -1, 1, group) >> shifts[:, None]) & ((1 << bits) - 1)
    return found.view(len(packed), -1)


def pack_fields(numbers: Tensor, bits: int, group: int = 1) -> Tensor:
    """The inverse of :func:`fields`."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=numbers.device)
    found = numbers.view(len(numbers), -1, 8 // bits, group) << shifts[:, None]
    return found.sum(2, dtype=torch.uint8).view(len(numbers), -1)


def pack_five(numbers: Tensor) -> Tensor:
    """32 5-bit numbers: 4 bytes of their highest bits, 16 bytes of the others."""
    return torch.cat((pack_fields(numbers >> 4, 1), pack_nibbles(numbers & 15, 16)), 1)


def power(exponents: Tensor) -> Tensor:
    """Half of the powers of two in bytes (E8M0): float32."""
    exponents = exponents.int()
    bits = torch.where(exponents < 2, (exponents + 1) << 21, (exponents - 1).clamp(min=0) << 23)
    return bits.view(torch.float32)


def looked_up(values: tuple[int, ...], numbers: Tensor) -> Tensor:
    """Entries of a table: int16."""
    return torch.tensor(values, dtype=torch.int16, device=numbers.device)[numbers.int()]


# --- blocks of 32 ------------------------------------------------------------------------------------------------------


def read_q8_0(block: Tensor) -> Parts:
    return Parts(block[:, 2:].contiguous().view(torch.int8).short(), half(block, 0))


def read_q4_0(block: Tensor) -> Parts:
    return Parts(nibbles(block[:, 2:], 16).short() - 8, half(block, 0))


def read_q4_1(block: Tensor) -> Parts:
    return Parts(nibbles(block[:, 4:], 16).short(), half(block, 0), half(block, 2))


def _five(packed: Tensor) -> Tensor:
    return (nibbles(packed[:, 4:], 16) | (fields(packed[:, :4], 1) << 4)).short()


def read_q5_0(block: Tensor) -> Parts:
    return Parts(_five(block[:, 2:]) - 16, half(block, 0))


def read_q5_1(block: Tensor) -> Parts:
    return Parts(_five(block[:, 4:]), half(block, 0), half(block, 2))


def read_iq4_nl(block: Tensor) -> Parts:
    return Parts(looked_up(IQ4, nibbles(block[:, 2:], 16)), half(block, 0))


def read_mxfp4(block: Tensor) -> Parts:
    return Parts(looked_up(E2M1, nibbles(block[:, 1:], 16)), power(block[:, :1]))


def read_nvfp4(block: Tensor) -> Parts:
    """Two scales in float32, each of 16 codes: of the files' E4M3, and the scale of the matrix."""
    return Parts(looked_up(E2M1, nibbles(block[:, 8:], 16)), block[:, :8].contiguous().view(torch.float32))


# --- blocks of 256: 8 groups of 32, or 16 groups of 16 -----------------------------------------------------------------


def read_q2_k(block: Tensor) -> Parts:
    scales = block[:, :16].short()
    return Parts(fields(block[:, 16:80], 2, 32).short(), half(block, 80), half(block, 82), scales & 15, scales >> 4)


def read_q3_k(block: Tensor) -> Parts:
    numbers = fields(block[:, 32:96], 2, 32) | (fields(block[:, :32], 1, 32) << 2)
    scales = nibbles(block[:, 96:104], 8) | (fields(block[:, 104:108], 2, 4) << 4)
    return Parts(numbers.short() - 4, half(block, 108), group_scales=scales.short() - 32)


def write_q3_k(numbers: Tensor, scales: Tensor, head: Tensor) -> Tensor:
    """Blocks of the weights ``head * (scale - 32) * (number - 4)``: uint8 ``[n, 256]`` and ``[n, 16]``, and float16 values ``[n, 1]``."""
    low, high = pack_fields(numbers & 3, 2, 32), pack_fields(numbers >> 2, 1, 32)
    packed = pack_nibbles(scales & 15, 8), pack_fields(scales >> 4, 2, 4)
    return torch.cat((high, low, *packed, half_bytes(head)), 1)


def write_six_bits(scales: Tensor, minima: Tensor) -> Tensor:
    """8 6-bit scales and 8 minima in 12 bytes: the first four of each, then low halves of the others, their high bits above the first."""
    low = scales[:, :4] | ((scales[:, 4:] >> 4) << 6)
    middle = minima[:, :4] | ((minima[:, 4:] >> 4) << 6)
    return torch.cat((low, middle, (scales[:, 4:] & 15) | ((minima[:, 4:] & 15) << 4)), 1)


def _read_six_bits(block: Tensor, numbers: Tensor) -> Parts:
    """Q4_K and Q5_K, whose scales lie as :func:`write_six_bits` has them."""
    low, middle, rest = block[:, 4:8], block[:, 8:12], block[:, 12:16]
    scales = torch.cat((low & 63, (rest & 15) | ((low >> 2) & 48)), 1)
    minima = torch.cat((middle & 63, (rest >> 4) | ((middle >> 2) & 48)), 1)
    return Parts(numbers.short(), half(block, 0), half(block, 2), scales.short(), minima.short())


def read_q4_k(block: Tensor) -> Parts:
    return _read_six_bits(block, nibbles(block[:, 16:], 32))


def read_q5_k(block: Tensor) -> Parts:
    return _read_six_bits(block, nibbles(block[:, 48:], 32) | (fields(block[:, 16:48], 1, 32) << 4))


def read_q6_k(block: Tensor) -> Parts:
    numbers = nibbles(block[:, :128], 64) | (fields(block[:, 128:192], 2, 32) << 4)
    scales = block[:, 192:208].contiguous().view(torch.int8).short()
    return Parts(numbers.short() - 32, half(block, 208), group_scales=scales)


def write_q6_k(codes: Tensor, scales: Tensor, head: Tensor) -> Tensor:
    """Blocks of the weights ``head * scale * code``: -32 to 31 for each of 256, int8 ``[n, 16]``, and float16 values ``[n, 1]``."""
    numbers = (codes + 32).to(torch.uint8).view(-1, 256)
    low, high = pack_nibbles(numbers & 15, 64), pack_fields(numbers >> 4, 2, 32)
    return torch.cat((low, high, scales.view(torch.uint8), half_bytes(head)), 1)


def read_iq4_xs(block: Tensor) -> Parts:
    scales = fields(block[:, 4:8], 4) | (fields(block[:, 2:4], 2) << 4)
    codes = looked_up(IQ4, nibbles(block[:, 8:], 16))
    return Parts(codes, half(block, 0), group_scales=scales.short() - 32)


def _read_table(block: Tensor, values: tuple[int, ...], factor: float) -> Parts:
    """Blocks of our own: a float16 scale, 16 int8 scales of groups, and 4 bits per weight, which name a value of a table."""
    scales = block[:, 2:18].contiguous().view(torch.int8).short()
    return Parts(looked_up(values, nibbles(block[:, 18:], 16)), half(block, 0) * factor, group_scales=scales)


def read_table_iq3_s(block: Tensor) -> Parts:
    return _read_table(block, IQ3_S, 1.0)


def read_table_iq3_xxs(block: Tensor) -> Parts:
    return _read_table(block, IQ3_XXS, 0.5)


def read_table_iq2(block: Tensor) -> Parts:
    return _read_table(block, IQ2, 0.125)


def write_table(codes: Tensor, values: tuple[int, ...], scales: Tensor, head: Tensor) -> Tensor:
    """Blocks of a table: codes ``[n, 256]`` out of its values, int8 ``[n, 16]``, and bytes of float16 ``[n, 2]``."""
    places = torch.zeros(256, dtype=torch.uint8)
    for place in range(15, -1, -1):
        places[values[place] + 128] = place
    numbers = places[codes.int() + 128]
    return torch.cat((head, scales.view(torch.uint8), pack_nibbles(numbers, 16)), 1)
