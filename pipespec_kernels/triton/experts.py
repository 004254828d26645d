"""``experts_small``: products of few rows with the matrices of the experts that each row has chosen, in one launch.

A block of threads has some rows of the matrix of one expert, and multiplies them by all rows of ``x`` that have chosen it. Where none has, it returns at once, so the matrix of
an expert is read once or not at all. Products and the order of their sums are those of :mod:`pipespec_kernels.triton.linear`: a row's bits do not depend on the other rows. Which
experts are needed is known only when the launch ahead has ended, so no weights come before the wait.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pipespec_kernels.products import MAX_ROWS
from pipespec_kernels.tiles import TiledMatrix
from pipespec_kernels.triton import launch
from pipespec_kernels.triton.launch import begin_dependent, dependent, on
from pipespec_kernels.triton.linear import (
    PARTS,
    load_step,
    matrix_of,
    operand,
    operand_of,
    sum_of_parts,
    tiles_for,
)
from pipespec_kernels.triton.norm import rounded

BLOCK_MIXED = 1024
"""Numbers of a block of threads of :func:`mix_kernel`."""


@triton.jit(do_not_specialize=["rows"])
def experts_kernel(
    x,
    x_stride_m,
    x_stride_j,
    weight,
    weight_stride,
    bias,
    chosen,
    output,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    EACH: tl.constexpr,
    SLOTS: tl.constexpr,
    LAYOUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Row ``c`` of ``x``, or the one of its choice ``j``, is column ``c`` of the product of its expert, and row ``[c, j]`` of the result."""
    begin_dependent(PDL)
    dtype: tl.constexpr = output.dtype.element_ty
    expert = tl.program_id(1)
    c, j = tl.arange(0, COLUMNS), tl.arange(0, SLOTS)
    choice = tl.load(chosen + c[:, None] * EACH + j[None, :], mask=(c < rows)[:, None] & (j < EACH)[None, :], other=-1)
    slot = tl.max(tl.where(choice == expert, j[None, :], -1), 1)
    if tl.max(slot, 0) < 0:
        return
    takes = slot >= 0
    place = c.to(tl.int64) * x_stride_m + slot.to(tl.int64) * x_stride_j
    r, b = tl.arange(0, ROWS), tl.arange(0, ROWS // 8) * 8
    at = tl.program_id(0) * ROWS + r
    begin = tl.program_id(0) * ROWS + b
    row = expert.to(tl.int64) * N + at
    bands = (expert.to(tl.int64) * N + begin) // 8, begin < N
    sums = tl.zeros([PARTS, ROWS, COLUMNS], tl.float32)
    for start in range(0, K, PARTS * BLOCK):
        w = load_step(weight, weight_stride, row, at < N, bands, start, LAYOUT, K, EVEN, PARTS, BLOCK)
        a = operand_of(w, weight, weight_stride, bands, start, dtype, LAYOUT, K, EVEN, PARTS, ROWS, BLOCK)
        k = start + tl.arange(0, PARTS)[:, None, None] * BLOCK + tl.arange(0, BLOCK)[None, :, None]
        y = tl.load(x + place[None, None, :] + k, mask=takes[None, None, :] & (k < K), other=0.0)
        sums = tl.dot(a, operand(y), sums, input_precision="ieee")
    found = sum_of_parts(sums, PARTS, ROWS, COLUMNS)
    if HAS_BIAS:
        found += tl.load(bias + row, mask=at < N, other=0.0).to(tl.float32)[:, None]
    into = output + (c.to(tl.int64) * EACH + slot)[None, :] * N + at[:, None]
    tl.store(into, rounded(found, dtype).to(dtype), mask=(at < N)[:, None] & takes[None, :])


@triton.jit
def mix_kernel(
    found,
    shares,
    chosen,
    output,
    N: tl.constexpr,
    EACH: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The sum of a row's results, each times its share, in the order of its choices."""
    begin_dependent(PDL)
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in range(EACH):
        expert = tl.load(chosen + row * EACH + j)
        share = tl.load(shares + row * EACH + j).to(tl.float32)
        share = tl.where((expert >= 0) & (expert < EXPERTS), share, float("nan"))
        total += tl.load(found + (row * EACH + j) * N + n, mask=n < N, other=0.0).to(tl.float32) * share
    dtype: tl.constexpr = output.dtype.element_ty
    tl.store(output + row * N + n, rounded(total, dtype).to(dtype), mask=n < N)


def experts_small(
    x: Tensor, weight: Tensor | TiledMatrix, chosen: Tensor, bias: Tensor | None, experts: int, out: Tensor
) -> None:
    """See :func:`pipespec_kernels.ops.experts_small`, which checks the arguments and makes ``out``, contiguous."""
    launch.check_device(x.device, "x")
    matrix, layout = matrix_of(weight)
    rows, each, n, size = *out.shape, x.shape[-1]
    tile = tiles_for(n, x.element_size(), layout is not None)[0]
    with on(x.device):
        experts_kernel[(triton.cdiv(n, tile.rows), experts)](
            x,
            x.stride(0),
            x.stride(1) if x.dim() == 3 else 0,
            matrix,
            matrix.stride(0),
            x if bias is None else bias,
            chosen,
            out,
            rows,
            N=n,
            K=size,
            EACH=each,
            SLOTS=triton.next_power_of_2(each),
            LAYOUT=layout,
            HAS_BIAS=bias is not None,
            EVEN=n % tile.rows == 0 and size % (PARTS * tile.block) == 0,
            PARTS=PARTS,
            ROWS=tile.rows,
            BLOCK=tile.block,
            COLUMNS=8 if rows <= 8 else MAX_ROWS,
            **dependent(x.device),
            num_warps=PARTS,
            num_stages=tile.stages,
            enable_fp_fusion=False,
        )


def mix_experts(found: Tensor, shares: Tensor, chosen: Tensor, experts: int, out: Tensor) -> None:
    """The sums of the results of :func:`experts_small` ``[M, E, N]``, each times its share."""
    rows, each, n = found.shape
    with on(found.device):
        mix_kernel[(rows, triton.cdiv(n, BLOCK_MIXED))](
            found,
            shares,
            chosen,
            out,
            N=n,
            EACH=each,
            EXPERTS=experts,
            BLOCK=BLOCK_MIXED,
            **dependent(found.device),
            enable_fp_fusion=False,
        )
