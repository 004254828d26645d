"""``add_rms_norm``: the residual stream of a layer and its RMS norm, in one launch.

A block of threads owns a row. It adds, rounds the sum to the dtype of the tensors, stores it and normalises the stored numbers, so that two launches
would give the same bits. The order of a row's sum depends on the hidden size and the alignment of the tensors: not on the number of rows or on the
place of a row among them. As in torch, products and sums are not fused.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pipespec_kernels.triton import launch
from pipespec_kernels.triton.launch import begin_dependent, dependent, on
from pipespec_kernels.triton.philox import IS_INTERPRETED

MAX_AT_ONCE = 16384  # elements of a row that registers hold; longer rows are read twice


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Round float32 numbers to ``dtype``. Returns float32."""
    if IS_INTERPRETED and dtype == tl.bfloat16:
        # The interpreter cuts the low bits off. A NaN must not carry into the exponent.
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return tl.where(x == x, nearest.to(tl.float32, bitcast=True), x)
    else:
        return x.to(dtype).to(tl.float32)


@triton.jit
def inverse_rms(sum_of_squares, eps, SIZE: tl.constexpr):
    """Correctly rounded at each step, as torch on a CPU; the hardware's reciprocal root is not."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(sum_of_squares, SIZE * 1.0) + eps))


@triton.jit
def weighted(y, weight, dtype: tl.constexpr, ONE_PLUS: tl.constexpr):
    """Normalised numbers times their weights: rounded before and after the product, or, with 1 + weight, only after it."""
    if ONE_PLUS:
        return rounded(y * (weight + 1.0), dtype)
    else:
        return rounded(rounded(y, dtype) * weight, dtype)


@triton.jit
def add_part(
    x_row, residual_row, residual_out_row, start, HAS_RESIDUAL: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr
):
    """The new residual of the elements from ``start`` on, as float32."""
    at = start + tl.arange(0, BLOCK)
    there = at < HIDDEN
    y = tl.load(x_row + at, mask=there, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        y = rounded(y + tl.load(residual_row + at, mask=there, other=0.0).to(tl.float32), x_row.dtype.element_ty)
        tl.store(residual_out_row + at, y.to(x_row.dtype.element_ty), mask=there)
    return y


@triton.jit
def normalise_part(
    y,
    factor,
    start,
    weight,
    bias,
    output_row,
    HAS_BIAS: tl.constexpr,
    ONE_PLUS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    dtype: tl.constexpr = output_row.dtype.element_ty
    at = start + tl.arange(0, BLOCK)
    there = at < HIDDEN
    w = tl.load(weight + at, mask=there, other=0.0).to(tl.float32)
    y = weighted(y * factor, w, dtype, ONE_PLUS)
    if HAS_BIAS:
        y = rounded(y + tl.load(bias + at, mask=there, other=0.0).to(tl.float32), dtype)
    tl.store(output_row + at, y.to(dtype), mask=there)


@triton.jit
def add_rms_norm_kernel(
    x,
    x_stride,
    residual,
    residual_stride,
    weight,
    bias,
    output,
    output_stride,
    residual_out,
    residual_out_stride,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ONE_PLUS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    row = tl.program_id(0).to(tl.int64)
    x_row = x + row * x_stride
    residual_row = residual + row * residual_stride
    output_row = output + row * output_stride
    residual_out_row = residual_out + row * residual_out_stride
    if HIDDEN <= BLOCK:
        y = add_part(x_row, residual_row, residual_out_row, 0, HAS_RESIDUAL, HIDDEN, BLOCK)
        factor = inverse_rms(tl.sum(y * y, 0), eps, HIDDEN)
        normalise_part(y, factor, 0, weight, bias, output_row, HAS_BIAS, ONE_PLUS, HIDDEN, BLOCK)
    else:
        squares = tl.zeros([BLOCK], tl.float32)
        start = 0
        while start < HIDDEN:
            y = add_part(x_row, residual_row, residual_out_row, start, HAS_RESIDUAL, HIDDEN, BLOCK)
            squares += y * y
            start += BLOCK
        factor = inverse_rms(tl.sum(squares, 0), eps, HIDDEN)
        tl.debug_barrier()  # another thread may have stored the elements that are read back
        start = 0
        while start < HIDDEN:
            y = add_part(residual_out_row, residual_row, residual_out_row, start, False, HIDDEN, BLOCK)
            normalise_part(y, factor, start, weight, bias, output_row, HAS_BIAS, ONE_PLUS, HIDDEN, BLOCK)
            start += BLOCK


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    one_plus_weight: bool,
    bias: Tensor | None,
    out: Tensor,
    residual_out: Tensor | None,
) -> None:
    """See :func:`pipespec_kernels.ops.add_rms_norm`, which checks the arguments. All but weight and bias are ``[rows, H]``; without a
    residual ``residual_out`` is None."""
    launch.check_device(x.device, "x")
    rows, hidden = x.shape
    if rows == 0:
        return
    before = x if residual is None else residual
    total = x if residual_out is None else residual_out
    block, warps = tile_of(hidden)
    with on(x.device):
        add_rms_norm_kernel[(rows,)](
            x,
            x.stride(0),
            before,
            before.stride(0),
            weight,
            weight if bias is None else bias,
            out,
            out.stride(0),
            total,
            total.stride(0),
            eps,
            HAS_RESIDUAL=residual is not None,
            HAS_BIAS=bias is not None,
            ONE_PLUS=one_plus_weight,
            HIDDEN=hidden,
            BLOCK=block,
            **dependent(x.device),
            num_warps=warps,
            enable_fp_fusion=False,
        )


def tile_of(hidden: int) -> tuple[int, int]:
    """Elements that a block of threads holds at once, and its warps: 16 elements a thread, in 16 bits two loads."""
    block = min(triton.next_power_of_2(hidden), MAX_AT_ONCE)
    return block, max(1, min(block // 512, 16))
