"""How weights become blocks, as llama.cpp does it without an importance matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from pipespec_kernels import block_layouts as layouts
from pipespec_kernels.block_layouts import half_bytes, pack_fields, pack_five, pack_nibbles

_TINY = 1e-15  # a group with smaller weights is stored as zeros


def as_stored(values: Tensor) -> Tensor:
    """What float16 makes of values: float32."""
    return values.to(torch.float16).float()


def _inverse(values: Tensor) -> Tensor:
    return torch.where(values == 0, torch.zeros_like(values), 1 / values)


def _largest(groups: Tensor) -> Tensor:
    """The entry of largest size of each last dimension, with its sign; the first of equals."""
    return groups.gather(-1, groups.abs().argmax(-1, keepdim=True))


# --- blocks of 32 ------------------------------------------------------------------------------------------------------


def encode_q8_0(x: Tensor) -> Tensor:
    scale = x.abs().amax(1, keepdim=True) / 127
    scaled = x * _inverse(scale)
    size = scaled.abs()
    whole = size.floor()
    numbers = scaled.sign() * (whole + (2 * (size - whole)).floor())  # halves away from zero
    return torch.cat((half_bytes(scale), numbers.to(torch.int8).view(torch.uint8)), 1)


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


def encode_q4_0(x: Tensor) -> Tensor:
    scale, numbers = _symmetric(x, 4)
    return torch.cat((half_bytes(scale), pack_nibbles(numbers, 16)), 1)


def encode_q4_1(x: Tensor) -> Tensor:
    scale, minimum, numbers = _affine(x, 4)
    return torch.cat((half_bytes(scale), half_bytes(minimum), pack_nibbles(numbers, 16)), 1)


def encode_q5_0(x: Tensor) -> Tensor:
    scale, numbers = _symmetric(x, 5)
    return torch.cat((half_bytes(scale), pack_five(numbers)), 1)


def encode_q5_1(x: Tensor) -> Tensor:
    scale, minimum, numbers = _affine(x, 5)
    return torch.cat((half_bytes(scale), half_bytes(minimum), pack_five(numbers)), 1)


def encode_iq4_nl(x: Tensor) -> Tensor:
    scale = _search_iq4(x)
    return torch.cat((half_bytes(scale), pack_nibbles(_nearest(x * _inverse(as_stored(scale)), layouts.IQ4), 16)), 1)


def encode_mxfp4(x: Tensor) -> Tensor:
    largest = x.abs().amax(1, keepdim=True)
    exponent = torch.where(largest > 0, largest.log2().floor() + 125, 0).to(torch.uint8)
    errors = (layouts.power(exponent)[:, :, None] * torch.tensor(layouts.E2M1) - x[:, :, None]).abs()
    return torch.cat((exponent, pack_nibbles(errors.argmin(2).to(torch.uint8), 16)), 1)


# --- blocks of 256 -----------------------------------------------------------------------------------------------------


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


def _affine_groups(x: Tensor, bits: int, size: int, first: float, steps: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The bytes of scale and minimum of blocks, those of their groups of ``size`` (of 4 bits for 16, of 6 for 32), and numbers ``[n, 256]``."""
    top, levels = (1 << bits) - 1, 15 if size == 16 else 63
    groups = x.reshape(-1, size)
    scale, offset = (part.view(len(x), -1) for part in _search_affine(groups, top, first, steps))
    head, stored = [], []
    for part in (scale, offset):
        largest = part.amax(1, keepdim=True)
        stored.append((levels * _inverse(largest) * part).round().clamp(0, levels).to(torch.uint8))
        head.append(largest / levels)
    scale, offset = ((as_stored(h) * s).view(-1, 1) for h, s in zip(head, stored, strict=True))
    numbers = ((groups + offset) * _inverse(scale)).round().clamp(0, top).to(torch.uint8)
    return torch.cat([half_bytes(part) for part in head], 1), stored[0], stored[1], numbers.view(len(x), 256)


def encode_q2_k(x: Tensor) -> Tensor:
    head, scales, minima, numbers = _affine_groups(x, 2, 16, -0.5, 15)
    return torch.cat((scales | (minima << 4), pack_fields(numbers, 2, 32), head), 1)


def encode_q4_k(x: Tensor) -> Tensor:
    head, scales, minima, numbers = _affine_groups(x, 4, 32, -1.0, 20)
    return torch.cat((head, layouts.write_six_bits(scales, minima), pack_nibbles(numbers, 32)), 1)


def encode_q5_k(x: Tensor) -> Tensor:
    head, scales, minima, numbers = _affine_groups(x, 5, 32, -0.5, 15)
    packed = pack_fields(numbers >> 4, 1, 32), pack_nibbles(numbers & 15, 32)
    return torch.cat((head, layouts.write_six_bits(scales, minima), *packed), 1)


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


def _nearest(x: Tensor, values: tuple[int, ...]) -> Tensor:
    """The places of the entries of an ascending table that are nearest: uint8."""
    table = torch.tensor(values, dtype=torch.float32)
    return torch.bucketize(x, (table[1:] + table[:-1]) / 2).to(torch.uint8)


def _search_iq4(x: Tensor) -> Tensor:
    """The scale of groups ``[n, g]`` with the values of IQ4_NL: of 15 grids around the one that gives the largest entry the lowest value, as :func:`_search_symmetric`."""
    largest = _largest(x)
    per_largest = torch.where(largest.abs() < _TINY, torch.zeros_like(largest), 1 / largest)
    table, weight = torch.tensor(layouts.IQ4, dtype=torch.float32), x * x
    scale, best = torch.zeros_like(largest), torch.zeros_like(largest)
    for step in range(-7, 8):
        values = table[_nearest(x * ((layouts.IQ4[0] + step) * per_largest), layouts.IQ4).int()]
        sum_xv = (weight * x * values).sum(1, keepdim=True)
        sum_vv = (weight * values * values).sum(1, keepdim=True)
        better = (sum_vv > 0) & (sum_xv * sum_xv > best * sum_vv)
        scale = torch.where(better, sum_xv / sum_vv, scale)
        best = torch.where(better, scale * sum_xv, best)
    return scale


def _signed_groups(scale: Tensor, lowest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Integers for the scales ``[n, groups]`` of groups, of which the largest becomes ``lowest``; the scale of blocks, and those of groups as stored ``[n * groups, 1]``."""
    largest = _largest(scale)
    largest = torch.where(largest.abs() < _TINY, torch.zeros_like(largest), largest)
    stored = (lowest * _inverse(largest) * scale).round().clamp(lowest, -lowest - 1).to(torch.int8)
    head = largest / lowest
    return stored, head, (as_stored(head) * stored).view(-1, 1)


def encode_q3_k(x: Tensor) -> Tensor:
    groups = x.reshape(-1, 16)
    stored, head, scale = _signed_groups(_search_symmetric(groups, 4).view(-1, 16), -32)
    numbers = (groups * _inverse(scale)).round().clamp(-4, 3) + 4
    return layouts.write_q3_k(numbers.to(torch.uint8).view(-1, 256), (stored + 32).view(torch.uint8), head)


def encode_q6_k(x: Tensor) -> Tensor:
    groups = x.reshape(-1, 16)
    stored, head, scale = _signed_groups(_search_symmetric(groups, 32).view(-1, 16), -128)
    return layouts.write_q6_k((groups * _inverse(scale)).round().clamp(-32, 31), stored, head)


def encode_iq4_xs(x: Tensor) -> Tensor:
    groups = x.reshape(-1, 32)
    stored, head, scale = _signed_groups(_search_iq4(groups).view(-1, 8), -32)
    numbers = _nearest(groups * _inverse(scale), layouts.IQ4).view(-1, 256)
    scales = (stored + 32).view(torch.uint8)
    packed = pack_fields(scales >> 4, 2), pack_fields(scales & 15, 4), pack_nibbles(numbers, 16)
    return torch.cat((half_bytes(head), *packed), 1)
