"""Keys and values in floats of 8 bits (E4M3), which kernels have as bytes: rounded as they are stored, decoded in registers as they are loaded."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pipespec_kernels.kept import KEPT
from pipespec_kernels.triton.philox import IS_INTERPRETED


@triton.jit
def as_kept(x, dtype: tl.constexpr):
    """Numbers as storage keeps them: rounded to ``dtype``; for bytes to floats of 8 bits (E4M3), those beyond 448 to 448. Every GPU has the operations."""
    if dtype == tl.uint8:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        held = tl.minimum(size, 0x43E00000)  # 448
        normal = ((held + 0x7FFFF + ((held >> 20) & 1)) >> 20) - (120 << 3)  # to the nearest, ties to even
        # Where a code is a multiple of 2 ** -9, the sum with 2 ** 14 rounds to those.
        small = (held.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(held < 0x3C800000, small, normal)
        code = tl.where(size > 0x7F800000, 127, code)  # NaN
        return (code | ((bits >> 24) & 128)).to(tl.uint8)
    else:
        return x.to(dtype)


@triton.jit
def load_kept(at, there, dtype: tl.constexpr):
    """Numbers of storage in the dtype of the arithmetic. A NaN in 8 bits is 480."""
    if at.dtype.element_ty == tl.uint8:
        x = tl.load(at, mask=there, other=0)
        # The exponent of bfloat16 and float32 is 120 larger, that of float16 by 8; so the smallest numbers need no code of their own.
        if IS_INTERPRETED or dtype == tl.float32:
            bits = x.to(tl.int32)
            number = ((bits & 127) << 20 | (bits & 128) << 24).to(tl.float32, bitcast=True) * 1.329227995784916e36
            return number.to(dtype)
        else:
            bits = x.to(tl.int16)
            if dtype == tl.bfloat16:
                number = ((bits & 127) << 4 | (bits & 128) << 8).to(tl.bfloat16, bitcast=True)
                return number * tl.full([], 1.329227995784916e36, tl.bfloat16)
            else:
                number = ((bits & 127) << 7 | (bits & 128) << 8).to(tl.float16, bitcast=True)
                return number * tl.full([], 256.0, tl.float16)
    else:
        return tl.load(at, mask=there, other=0.0)


def in_bytes(storage: Tensor) -> Tensor:
    """Storage as the kernels take it."""
    return storage.view(torch.uint8) if storage.dtype is KEPT else storage
