"""Matrices of GGUF's smaller types, as blocks that hold the same weights and have kernels.

The package gguf knows the grids of the IQ types, so it gives the weights; scales are read here. A weight over its scale is then one of at most 16
integers, whose number takes 4 bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pipespec.models.gguf import CONVERTED, GgufFile, GgufTensor
from pipespec_kernels import block_layouts as layouts
from pipespec_kernels.formats import FORMATS, QuantizedMatrix, from_codes, from_e2m1


def as_blocks(file: GgufFile, tensor: GgufTensor, factors: Tensor | None = None) -> QuantizedMatrix:
    """A matrix of a type in :data:`pipespec.models.gguf.CONVERTED`.

    Args:
        file: holds it.
        tensor: ``[rows, columns]``.
        factors: of the weights of NVFP4, float32: each of as many rows as another; None: there are none.

    Raises:
        ValueError: the package gguf is too old, or scales are not finite: the message names the tensor.
    """
    name, _, block_bytes = CONVERTED[tensor.type]
    stored = file.stored(tensor).view(-1, block_bytes)
    if name == "NVFP4":
        # A byte that is no number stands for zero, and a sign for nothing.
        steps = (
            (stored[:, :4] & 127)
            .contiguous()
            .view(torch.float8_e4m3fn)
            .float()
            .nan_to_num(0.0)
            .view(tensor.shape[0], -1)
        )
        if factors is not None:
            steps = steps * factors.repeat_interleave(len(steps) // len(factors))[:, None]
        numbers = layouts.nibbles(stored[:, 4:].reshape(-1, 8), 8)
        return from_e2m1(numbers.view(tensor.shape), steps)
    head, scales = _SCALES[name](stored)
    scale = head.contiguous().view(torch.float16).float()
    if not bool(scale.isfinite().all()):
        raise ValueError(f"{file.path} is damaged: tensor {tensor.name} has scales that are not finite")
    weights = file.floats(tensor).view(-1, 16)
    if scales is None:
        codes = (weights.view(-1, 256) / torch.where(scale == 0, 1.0, scale)).round().to(torch.int8)
        return from_codes(codes.view(tensor.shape), scale.view(tensor.shape[0], -1))
    held, values, step = _TABLES[name[:3] if name != "IQ3_S" else name]
    scales = (2 * scales + 1).to(torch.int8)
    of_group = (scale * step * scales).view(-1, 1)
    codes = (weights / torch.where(of_group == 0, 1.0, of_group)).round().view(-1, 256)
    blocks = layouts.write_table(codes, values, scales, head)
    return QuantizedMatrix(FORMATS[held], blocks.view(tensor.shape[0], -1), (tensor.shape[0], tensor.shape[1]))


Scales = tuple[Tensor, Tensor | None]
"""The bytes of the float16 scales ``[n, 2]``, and the scales of groups, as stored: ``[n, 16]``."""


def _twice(scales: Tensor) -> Tensor:
    """Those of 32 weights as those of 16."""
    return scales.repeat_interleave(2, 1)


def _words(stored: Tensor, dtype: torch.dtype) -> Tensor:
    return stored.contiguous().view(dtype).int()


def _of_iq1_m(stored: Tensor) -> Scales:
    """Four words: each has four scales of three bits, and a quarter of the float16 above them."""
    words = _words(stored[:, 48:56], torch.int16) & 0xFFFF
    quarters = (words >> 12) << torch.tensor([0, 4, 8, 12])
    head = quarters.sum(1, keepdim=True).to(torch.int32).view(torch.uint8)[:, :2]
    return head, ((words[:, :, None] >> torch.tensor([0, 3, 6, 9])) & 7).view(-1, 16)


_SCALES: dict[str, Callable[[Tensor], Scales]] = {
    "IQ1_S": lambda s: (s[:, :2], _twice(_words(s[:, 34:50], torch.int16) >> 12 & 7)),
    "IQ1_M": _of_iq1_m,
    "IQ2_XXS": lambda s: (s[:, :2], _twice(_words(s[:, 2:66], torch.int32)[:, 1::2] >> 28 & 15)),
    "IQ2_XS": lambda s: (s[:, :2], layouts.fields(s[:, 66:74], 4)),
    "IQ2_S": lambda s: (s[:, :2], layouts.fields(s[:, 74:82], 4)),
    "IQ3_XXS": lambda s: (s[:, :2], _twice(_words(s[:, 66:98], torch.int32) >> 28 & 15)),
    "IQ3_S": lambda s: (s[:, :2], _twice(layouts.fields(s[:, 106:110], 4))),
    "TQ1_0": lambda s: (s[:, 52:54], None),
    "TQ2_0": lambda s: (s[:, 64:66], None),
}

_TABLES = {
    "IQ1": ("table_iq2", layouts.IQ2, 0.125),
    "IQ2": ("table_iq2", layouts.IQ2, 0.125),
    "IQ3": ("table_iq3_xxs", layouts.IQ3_XXS, 0.5),
    "IQ3_S": ("table_iq3_s", layouts.IQ3_S, 1.0),
}
"""By the beginning of a type's name: the blocks, their values, and the factor of both."""
