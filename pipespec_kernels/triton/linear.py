"""``linear_small`` and ``qkv_append``: matrix products of up to 16 rows, each in one launch with what comes before and behind it in a layer.

A product of few rows takes as long as its weights take to arrive, so all else of a layer is done while they do. Each block of threads multiplies some
rows of the weights by all rows of ``x``. Its warps share the summands: of each step along a row of the weights, a warp takes one part. The weights are
the first operand of the tensor cores' products, so few rows of ``x``, the columns of those products, cost few of them. Then the sums of the warps are added.

* Before the product a block normalises the rows of ``x`` itself (RMS norm): they come from the L2 cache, and a launch would take longer.
* Behind it the same block adds the residual stream; or multiplies the activation of the gate by the other half, of which it has the same rows; or rotates
  queries and keys, of which it has both halves of a head, and writes keys and values to storage.

A number's order of summation depends on the shape and the dtype of the weights: not on the number of rows of ``x``, and not on the other rows. In a dependent launch
the block loads its first weights before it waits for the launch ahead. So no launch ahead may write weights, and every other access comes after the
wait; :mod:`bench.compile_gate` checks the code. In a step without work, where no row has a new token, every block returns at once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pipespec_kernels.products import MAX_ROWS
from pipespec_kernels.tiles import WIDTH, TiledMatrix, TileLayout
from pipespec_kernels.triton import launch, tuning
from pipespec_kernels.triton.activation import ACTIVATIONS, activated
from pipespec_kernels.triton.kept import as_kept, in_bytes
from pipespec_kernels.triton.launch import begin_dependent, dependent, on
from pipespec_kernels.triton.norm import inverse_rms, rounded, weighted
from pipespec_kernels.triton.philox import IS_INTERPRETED
from pipespec_kernels.triton.rope import turn
from pipespec_kernels.triton.tiles import decode, load_codes
from pipespec_kernels.triton.tuning import Tile

PARTS = 4  # of a step along K, one for each warp
MANY = 8192  # rows of weights from which on a block takes more of them: each block reads x once more


@triton.jit
def operand(x):
    """The interpreter multiplies bfloat16 as if its bits were integers."""
    if IS_INTERPRETED:
        return x.to(tl.float32)
    else:
        return x


@triton.jit
def is_idle(query_lens, batch, ROWS_OF_X: tl.constexpr):
    """Whether no row has a new token."""
    row = tl.arange(0, ROWS_OF_X)
    return tl.max(tl.load(query_lens + row, mask=row < batch, other=0), 0) <= 0


@triton.jit
def load_weights(
    weight,
    weight_stride,
    row,
    there,
    start,
    K: tl.constexpr,
    EVEN: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A step's weights ``[PARTS, rows, BLOCK]``."""
    k = start + tl.arange(0, PARTS)[:, None, None] * BLOCK + tl.arange(0, BLOCK)[None, None, :]
    at = weight + row.to(tl.int64)[None, :, None] * weight_stride + k
    if EVEN:
        return tl.load(at, eviction_policy="evict_first")
    else:
        return tl.load(at, mask=there[None, :, None] & (k < K), other=0.0, eviction_policy="evict_first")


@triton.jit
def load_step(
    weight, weight_stride, row, there, bands, start,
    LAYOUT: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A step's weights, or their codes. ``bands``: the bands of the rows, and which are there."""
    if LAYOUT is None:
        return load_weights(weight, weight_stride, row, there, start, K, EVEN, PARTS, BLOCK)
    else:
        return load_codes(weight, weight_stride, bands[0], bands[1], start // BLOCK, LAYOUT, K, EVEN, PARTS)


@triton.jit
def operand_of(
    w, weight, weight_stride, bands, start, dtype: tl.constexpr,
    LAYOUT: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What a step multiplies, of what :func:`load_step` has loaded."""
    if LAYOUT is None:
        return operand(w)
    else:
        at = start // BLOCK
        w = decode(w, weight, weight_stride, bands[0], bands[1], at, dtype, LAYOUT, K, EVEN, PARTS, ROWS // 8)
        return operand(w)


@triton.jit
def load_x(
    x, x_stride, rows, factor, norm, start,
    NORM: tl.constexpr, ONE_PLUS: tl.constexpr, K: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The numbers ``[PARTS, BLOCK, COLUMNS]`` that a step multiplies its weights by: row ``c`` of ``x`` is column ``c``."""
    k = start + tl.arange(0, PARTS)[:, None, None] * BLOCK + tl.arange(0, BLOCK)[None, :, None]
    c = tl.arange(0, COLUMNS)[None, None, :]
    y = tl.load(x + c.to(tl.int64) * x_stride + k, mask=(c < rows) & (k < K), other=0.0)
    if NORM:
        w = tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)
        y = weighted(y.to(tl.float32) * factor[None, None, :], w, x.dtype.element_ty, ONE_PLUS).to(x.dtype.element_ty)
    return y


@triton.jit
def norm_factors(x, x_stride, rows, eps, K: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """What the RMS norm multiplies each row by. All threads lie along a row, so its order of summation does not depend on the number of rows."""
    c = tl.arange(0, COLUMNS)[:, None]
    squares = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)[None, :]
        y = tl.load(x + c.to(tl.int64) * x_stride + k, mask=(c < rows) & (k < K), other=0.0).to(tl.float32)
        squares += tl.sum(y * y, 1)
    return inverse_rms(squares, eps, K)


@triton.jit
def sum_of_parts(sums, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sum over the first dimension, of four, in an order of its own: that of ``tl.sum`` depends on where the threads lie."""
    tl.static_assert(PARTS == 4)
    even, odd = tl.split(tl.reshape(tl.permute(sums, (1, 2, 0)), (ROWS, COLUMNS, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return (first + second) + (third + fourth)


@triton.jit
def multiply(
    w, x, x_stride, rows, weight, weight_stride, bias, norm, eps, row, there, bands, LAYOUT: tl.constexpr,
    HAS_BIAS: tl.constexpr, NORM: tl.constexpr, ONE_PLUS: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_NORM: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rows ``row [ROWS]`` of the weights (those that are ``there``) times the rows of ``x``: float32 ``[ROWS, COLUMNS]``, rounded to the dtype. ``w``: what
    :func:`load_step` has loaded for the first step."""
    dtype: tl.constexpr = x.dtype.element_ty
    factor = tl.full([COLUMNS], 1.0, tl.float32)
    if NORM:
        factor = norm_factors(x, x_stride, rows, eps, K, BLOCK_NORM, COLUMNS)
    y = load_x(x, x_stride, rows, factor, norm, 0, NORM, ONE_PLUS, K, PARTS, BLOCK, COLUMNS)
    sums = tl.zeros([PARTS, ROWS, COLUMNS], tl.float32)
    a = operand_of(w, weight, weight_stride, bands, 0, dtype, LAYOUT, K, EVEN, PARTS, ROWS, BLOCK)
    sums = tl.dot(a, operand(y), sums, input_precision="ieee")
    for start in range(PARTS * BLOCK, K, PARTS * BLOCK):
        w = load_step(weight, weight_stride, row, there, bands, start, LAYOUT, K, EVEN, PARTS, BLOCK)
        a = operand_of(w, weight, weight_stride, bands, start, dtype, LAYOUT, K, EVEN, PARTS, ROWS, BLOCK)
        y = load_x(x, x_stride, rows, factor, norm, start, NORM, ONE_PLUS, K, PARTS, BLOCK, COLUMNS)
        sums = tl.dot(a, operand(y), sums, input_precision="ieee")
    found = sum_of_parts(sums, PARTS, ROWS, COLUMNS)
    if HAS_BIAS:
        found += tl.load(bias + row, mask=there, other=0.0).to(tl.float32)[:, None]
    return rounded(found, dtype)


@triton.jit
def halves(y, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The first and the second half of the rows, each ``[ROWS / 2, COLUMNS]``."""
    return tl.split(tl.permute(tl.reshape(y, (2, ROWS // 2, COLUMNS)), (1, 2, 0)))


@triton.jit(do_not_specialize=["rows", "batch"], do_not_specialize_on_alignment=["query_lens"])
def linear_kernel(
    x,
    x_stride,
    weight,
    weight_stride,
    bias,
    norm,
    residual,
    residual_stride,
    output,
    output_stride,
    query_lens,
    eps,
    rows,
    batch,
    N: tl.constexpr,
    K: tl.constexpr,
    KIND: tl.constexpr,
    LAYOUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    NORM: tl.constexpr,
    ONE_PLUS: tl.constexpr,
    EVEN: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_NORM: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS_OF_X: tl.constexpr,
    PDL: tl.constexpr,
):
    """``KIND``: of the activation, whose gates are the first half of the rows of the weights; -1: there is none. ``LAYOUT``: of the tiles of the weights;
    None: they are numbers of the dtype of ``x``."""
    dtype: tl.constexpr = output.dtype.element_ty
    OUT: tl.constexpr = N // 2 if KIND >= 0 else N
    r, b = tl.arange(0, ROWS), tl.arange(0, ROWS // 8) * 8
    if KIND >= 0:
        HALF: tl.constexpr = ROWS // 2
        at = tl.program_id(0) * HALF + r % HALF
        row = at + r // HALF * OUT
        begin = tl.program_id(0) * HALF + b % HALF
        bands = (begin + b // HALF * OUT) // 8, begin < OUT
    else:
        at = tl.program_id(0) * ROWS + r
        row = at
        begin = tl.program_id(0) * ROWS + b
        bands = begin // 8, begin < OUT
    if HAS_COUNTS and not PDL:
        if is_idle(query_lens, batch, ROWS_OF_X):
            return
    w = load_step(weight, weight_stride, row, at < OUT, bands, 0, LAYOUT, K, EVEN, PARTS, BLOCK)
    begin_dependent(PDL)
    if HAS_COUNTS and PDL:
        if is_idle(query_lens, batch, ROWS_OF_X):
            return
    y = multiply(
        w, x, x_stride, rows, weight, weight_stride, bias, norm, eps, row, at < OUT, bands, LAYOUT,
        HAS_BIAS, NORM, ONE_PLUS, K, EVEN, PARTS, ROWS, BLOCK, BLOCK_NORM, COLUMNS,
    )  # fmt: skip
    if KIND >= 0:
        gate, up = halves(y, ROWS, COLUMNS)
        y = rounded(rounded(activated(gate, KIND), dtype) * up, dtype)
        at = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    c = tl.arange(0, COLUMNS)
    write = (at < OUT)[:, None] & (c < rows)[None, :]
    column = c.to(tl.int64)[None, :]
    if HAS_RESIDUAL:
        before = tl.load(residual + column * residual_stride + at[:, None], mask=write, other=0.0)
        y = rounded(y + before.to(tl.float32), dtype)
    tl.store(output + column * output_stride + at[:, None], y.to(dtype), mask=write)


@triton.jit(
    do_not_specialize=["rows", "batch", "width", "capacity", "table_size"],
    do_not_specialize_on_alignment=["lengths", "query_lens"],
)
def qkv_append_kernel(
    x,
    x_stride,
    weight,
    weight_stride,
    bias,
    norm,
    cos,
    cos_stride,
    sin,
    sin_stride,
    table_size,
    keys,
    keys_stride_b,
    keys_stride_h,
    keys_stride_s,
    values,
    values_stride_b,
    values_stride_h,
    values_stride_s,
    lengths,
    query_lens,
    output,
    output_stride_b,
    output_stride_h,
    output_stride_q,
    eps,
    rows,
    batch,
    width,
    capacity,
    K: tl.constexpr,
    HEADS_Q: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    LAYOUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    NORM: tl.constexpr,
    ONE_PLUS: tl.constexpr,
    EVEN: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_NORM: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS_OF_X: tl.constexpr,
    PDL: tl.constexpr,
):
    """Row ``c`` of ``x`` is column ``c % width`` of row ``c // width`` of the storage. A block has some dimensions of a head's first half, and those of the
    other half that they are rotated with; or it has dimensions that are not rotated."""
    HALF: tl.constexpr = ROTARY // 2
    PAIRS: tl.constexpr = ROWS // 2
    TURNED: tl.constexpr = (HALF + PAIRS - 1) // PAIRS  # blocks of a head that rotate
    BLOCKS: tl.constexpr = TURNED + (DIM - ROTARY + ROWS - 1) // ROWS
    dtype: tl.constexpr = output.dtype.element_ty
    table: tl.constexpr = cos.dtype.element_ty
    head, tile = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    turns = tile < TURNED
    first = tl.where(turns, tile * PAIRS, ROTARY + (tile - TURNED) * ROWS)
    gap = tl.where(turns, HALF, PAIRS)
    r = tl.arange(0, ROWS)
    d = first + r % PAIRS + r // PAIRS * gap
    there = tl.where(turns, first + r % PAIRS < HALF, d < DIM)
    b = tl.arange(0, ROWS // 8) * 8
    begin = first + b % PAIRS + b // PAIRS * gap
    bands = (head * DIM + begin) // 8, tl.where(turns, first + b % PAIRS < HALF, begin < DIM)
    if HAS_COUNTS and not PDL:
        if is_idle(query_lens, batch, ROWS_OF_X):
            return
    w = load_step(weight, weight_stride, head * DIM + d, there, bands, 0, LAYOUT, K, EVEN, PARTS, BLOCK)
    begin_dependent(PDL)
    if HAS_COUNTS and PDL:
        if is_idle(query_lens, batch, ROWS_OF_X):
            return
    y = multiply(
        w, x, x_stride, rows, weight, weight_stride, bias, norm, eps, head * DIM + d, there, bands, LAYOUT,
        HAS_BIAS, NORM, ONE_PLUS, K, EVEN, PARTS, ROWS, BLOCK, BLOCK_NORM, COLUMNS,
    )  # fmt: skip
    low, high = halves(y, ROWS, COLUMNS)

    c = tl.arange(0, COLUMNS)
    row, column = (c // width).to(tl.int64), (c % width).to(tl.int64)
    before = tl.load(lengths + row, mask=c < rows, other=-1).to(tl.int64)
    place = before + column
    if HAS_COUNTS:
        fed = tl.load(query_lens + row, mask=c < rows, other=0).to(tl.int64)
    else:
        fed = tl.zeros([COLUMNS], tl.int64) + width
    good = (before >= 0) & (before <= capacity - fed) & (fed <= width) & (place < table_size)
    new = good & (column < fed)
    d = first + tl.arange(0, PAIRS)
    in_low = tl.where(turns, d < HALF, d < DIM)
    in_high = tl.where(turns, d < HALF, d + gap < DIM)
    is_q = head < HEADS_Q
    is_v = head >= HEADS_Q + HEADS
    if turns & (head < HEADS_Q + HEADS):
        angle = in_low[:, None] & good[None, :]
        at = place[None, :] * cos_stride + d[:, None]
        low_cos = tl.load(cos + at, mask=angle, other=0.0).to(tl.float32)
        high_cos = tl.load(cos + at + HALF, mask=angle, other=0.0).to(tl.float32)
        at = place[None, :] * sin_stride + d[:, None]
        low_sin = tl.load(sin + at, mask=angle, other=0.0).to(tl.float32)
        high_sin = tl.load(sin + at + HALF, mask=angle, other=0.0).to(tl.float32)
        turned = turn(low, -high, low_cos, low_sin, table, dtype)
        high = turn(high, low, high_cos, high_sin, table, dtype)
        low = turned

    # Queries that cannot be computed are NaN. Keys and values of theirs, and of padding, are not written.
    zero = tl.full([], 0, tl.int64)  # strides become tensors of one type
    if keys.dtype.element_ty == tl.uint8:
        # Storage and queries have different types.
        at_keys = keys + (head - HEADS_Q) * (zero + keys_stride_h)
        at_values = values + (head - HEADS_Q - HEADS) * (zero + values_stride_h)
        stored = tl.where(is_v, at_values, at_keys)[None, :] + d[:, None]
        keys_at = row * keys_stride_b + place * keys_stride_s
        stored += tl.where(is_v, row * values_stride_b + place * values_stride_s, keys_at)[None, :]
        keeps = new & (head >= HEADS_Q)
        tl.store(stored, as_kept(low, tl.uint8), mask=in_low[:, None] & keeps[None, :])
        tl.store(stored + gap, as_kept(high, tl.uint8), mask=in_high[:, None] & keeps[None, :])
        low = tl.where(good[None, :], low, float("nan"))
        high = tl.where(good[None, :], high, float("nan"))
        into = output + head * (zero + output_stride_h)
        at = row * output_stride_b + column * output_stride_q
        write = (c < rows) & is_q
    elif is_q:
        low = tl.where(good[None, :], low, float("nan"))
        high = tl.where(good[None, :], high, float("nan"))
        into = output + head * (zero + output_stride_h)
        at = row * output_stride_b + column * output_stride_q
        write = c < rows
    elif is_v:
        into = values + (head - HEADS_Q - HEADS) * (zero + values_stride_h)
        at = row * values_stride_b + place * values_stride_s
        write = new
    else:
        into = keys + (head - HEADS_Q) * (zero + keys_stride_h)
        at = row * keys_stride_b + place * keys_stride_s
        write = new
    into += at[None, :] + d[:, None]
    tl.store(into, low.to(dtype), mask=in_low[:, None] & write[None, :])
    tl.store(into + gap, high.to(dtype), mask=in_high[:, None] & write[None, :])


def tiles_for(weights: int, itemsize: int, in_tiles: bool = False) -> tuple[Tile, ...]:
    """The tiles that products of a number of rows of weights may have, that of an unmeasured one first. They divide the summands of a row alike, so results have the same bits.

    The first one has 16 KiB of weights in a step: two or three blocks on a multiprocessor then keep more bytes on their way than the latency of memory needs. Those of quantised
    weights are as wide as the tiles in which they lie.
    """
    rows = 32 if weights >= MANY else 16
    if in_tiles:
        block, norm = WIDTH, 512 if itemsize == 4 else 1024
    elif itemsize == 4:
        rows, block, norm = 16, 32, 1024
    else:
        block, norm = 2048 // rows, 1024
    if itemsize == 4:  # no tensor cores, whose sums do not depend on the number of rows
        return tuple(Tile(rows, block, norm, stages) for stages in ((3, 2) if in_tiles else (2, 3)))
    return tuple(Tile(n, block, norm, stages) for n in (rows, 48 - rows) for stages in (3, 2, 4))


def matrix_of(weight: Tensor | TiledMatrix) -> tuple[Tensor, TileLayout | None]:
    """The memory of a matrix, and the layout of its tiles if it lies in some."""
    return (weight.data, weight.layout) if isinstance(weight, TiledMatrix) else (weight, None)


def constants_of(
    x: Tensor, even_rows: bool, norm: bool, one_plus: bool, bias: bool, counts: bool, tile: Tile
) -> dict[str, Any]:
    """What both kernels have as constants. ``even_rows``: every block has all its rows of the weights."""
    rows, size = x.shape
    return {
        "K": size,
        "HAS_BIAS": bias,
        "HAS_COUNTS": counts,
        "NORM": norm,
        "ONE_PLUS": one_plus,
        "EVEN": even_rows and size % (PARTS * tile.block) == 0,
        "PARTS": PARTS,
        "ROWS": tile.rows,
        "BLOCK": tile.block,
        "BLOCK_NORM": tile.norm,
        "COLUMNS": 8 if rows <= 8 else MAX_ROWS,
        "ROWS_OF_X": MAX_ROWS,
    }


def key_of(what: str, x: Tensor, weight: Tensor | TiledMatrix, *flags: object) -> str:
    """Names a product among those of a device. ``flags``: what else changes its code."""
    of = weight.format if isinstance(weight, TiledMatrix) else str(x.dtype).removeprefix("torch.")
    columns = 8 if len(x) <= 8 else MAX_ROWS
    return f"{what} {len(weight)}x{x.shape[1]} {of} {x.element_size()} M={columns} {' '.join(map(str, flags))}"


def linear_small(
    x: Tensor,
    weight: Tensor | TiledMatrix,
    bias: Tensor | None,
    norm: Tensor | None,
    eps: float,
    one_plus_weight: bool,
    activation: str | None,
    residual: Tensor | None,
    query_lens: Tensor | None,
    out: Tensor,
) -> None:
    """See :func:`pipespec_kernels.ops.linear_small`, which checks the arguments."""
    launch.check_device(x.device, "x")
    matrix, layout = matrix_of(weight)
    kind = -1 if activation is None else ACTIVATIONS.index(activation)

    def run(tile: Tile, residual: Tensor | None, query_lens: Tensor | None, out: Tensor) -> None:
        step = tile.rows if activation is None else tile.rows // 2
        even = out.shape[1] % step == 0
        flags = norm is not None, one_plus_weight, bias is not None, query_lens is not None
        constants = constants_of(x, even, *flags, tile)
        before = out if residual is None else residual
        linear_kernel[(triton.cdiv(out.shape[1], step),)](
            x,
            x.stride(0),
            matrix,
            matrix.stride(0),
            x if bias is None else bias,
            x if norm is None else norm,
            before,
            before.stride(0),
            out,
            out.stride(0),
            out if query_lens is None else query_lens,
            eps,
            len(x),
            0 if query_lens is None else len(query_lens),
            N=len(weight),
            LAYOUT=layout,
            KIND=kind,
            HAS_RESIDUAL=residual is not None,
            **constants,
            **dependent(x.device),
            num_warps=PARTS,
            num_stages=tile.stages,
            enable_fp_fusion=False,
        )

    tiles = tiles_for(len(weight), x.element_size(), layout is not None)
    key = key_of("linear", x, weight, kind, norm is not None)
    with on(x.device):
        # A trial has memory of its own, and no step without work.
        tile = tuning.chosen(x.device, key, tiles, lambda tile: run(tile, None, None, torch.empty_like(out)))
        run(tile, residual, query_lens, out)


def qkv_append(
    x: Tensor,
    weight: Tensor | TiledMatrix,
    bias: Tensor | None,
    norm: Tensor | None,
    eps: float,
    one_plus_weight: bool,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    query_lens: Tensor | None,
    out: Tensor,
) -> None:
    """See :func:`pipespec_kernels.ops.qkv_append`, which checks the arguments and makes ``out``."""
    launch.check_device(x.device, "x")
    heads_q, heads, dim, rotary = out.shape[1], k_cache.shape[1], k_cache.shape[3], cos.shape[1]
    matrix, layout = matrix_of(weight)
    pairs, rest = rotary // 2, dim - rotary

    def run(tile: Tile, keys: Tensor, values: Tensor, lengths: Tensor, query_lens: Tensor | None, out: Tensor) -> None:
        even = pairs % (tile.rows // 2) == 0 and rest % tile.rows == 0
        flags = norm is not None, one_plus_weight, bias is not None, query_lens is not None
        constants = constants_of(x, even, *flags, tile)
        blocks = triton.cdiv(pairs, tile.rows // 2) + triton.cdiv(rest, tile.rows)
        qkv_append_kernel[(blocks * (heads_q + 2 * heads),)](
            x,
            x.stride(0),
            matrix,
            matrix.stride(0),
            x if bias is None else bias,
            x if norm is None else norm,
            cos,
            cos.stride(0),
            sin,
            sin.stride(0),
            cos.shape[0],
            in_bytes(keys),
            *keys.stride()[:3],
            in_bytes(values),
            *values.stride()[:3],
            lengths,
            lengths if query_lens is None else query_lens,
            out,
            *out.stride()[:3],
            eps,
            len(x),
            len(out),
            out.shape[2],
            keys.shape[2],
            LAYOUT=layout,
            HEADS_Q=heads_q,
            HEADS=heads,
            DIM=dim,
            ROTARY=rotary,
            **constants,
            **dependent(x.device),
            num_warps=PARTS,
            num_stages=tile.stages,
            enable_fp_fusion=False,
        )

    def trial(tile: Tile) -> None:
        storage = k_cache.new_empty((len(out), heads, out.shape[2], dim))
        run(tile, storage, storage, torch.zeros_like(lengths), None, torch.empty_like(out))

    tiles = tiles_for(len(weight), x.element_size(), layout is not None)
    with on(x.device):
        tile = tuning.chosen(x.device, key_of("qkv", x, weight, dim, rotary, norm is not None), tiles, trial)
        run(tile, k_cache, v_cache, lengths, query_lens, out)
