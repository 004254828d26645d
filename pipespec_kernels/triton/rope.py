"""``rope_append``: norms of queries and keys, their rotation, and keys and values into storage, in one launch.

A block of threads takes some heads of one column: queries, keys or values. Their number depends only on the sizes of a head, so that a column has the
    same bits whatever the other columns are. Norm and rotation are rounded where HuggingFace's modules round.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pipespec_kernels.triton import launch
from pipespec_kernels.triton.attention import extent
from pipespec_kernels.triton.kept import as_kept, in_bytes
from pipespec_kernels.triton.launch import MAX_ROWS, begin_dependent, dependent, on
from pipespec_kernels.triton.norm import inverse_rms, rounded, weighted

_TILE = 1024  # elements of half a tile


@triton.jit
def turn(x, partner, cos, sin, table: tl.constexpr, dtype: tl.constexpr):
    """``x * cos + partner * sin`` with the roundings of torch: products and sum in the dtype of the tables, then in that of ``x``."""
    return rounded(rounded(rounded(x * cos, table) + rounded(partner * sin, table), table), dtype)


# Not specialised: each value of 1 or multiple of 16 would compile a further kernel without a gain.
@triton.jit(do_not_specialize=["positions_stride_b", "positions_stride_q", "table_size", "width", "capacity"])
def rope_append_kernel(
    queries,
    queries_stride_b,
    queries_stride_h,
    queries_stride_q,
    new_keys,
    new_keys_stride_b,
    new_keys_stride_h,
    new_keys_stride_q,
    new_values,
    new_values_stride_b,
    new_values_stride_h,
    new_values_stride_q,
    output,
    output_stride_b,
    output_stride_h,
    output_stride_q,
    keys,
    keys_stride_b,
    keys_stride_h,
    keys_stride_s,
    values,
    values_stride_b,
    values_stride_h,
    values_stride_s,
    cos,
    cos_stride,
    sin,
    sin_stride,
    table_size,
    positions,
    positions_stride_b,
    positions_stride_q,
    q_norm,
    k_norm,
    eps,
    lengths,
    n_new,
    width,
    capacity,
    HAS_NEW: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ONE_PLUS: tl.constexpr,
    HEADS_Q: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    column = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    HALF: tl.constexpr = ROTARY // 2
    dtype: tl.constexpr = output.dtype.element_ty
    table: tl.constexpr = cos.dtype.element_ty

    before, count, good = extent(lengths, n_new, row, width, capacity, HAS_NEW)
    place = before.to(tl.int64) + column
    if HAS_POSITIONS:
        position = tl.load(positions + row * positions_stride_b + column * positions_stride_q).to(tl.int64)
    else:
        position = place
    fed = column < count
    known = (position >= 0) & (position < table_size)

    # Tiles of queries, then of keys, then of values.
    q_tiles: tl.constexpr = (HEADS_Q + BLOCK_H - 1) // BLOCK_H
    kv_tiles: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    is_q = tile < q_tiles
    is_v = tile >= q_tiles + kv_tiles
    zero = tl.full([], 0, tl.int64)  # strides and sizes become tensors of one type
    KEEPS_BYTES: tl.constexpr = keys.dtype.element_ty == tl.uint8
    if KEEPS_BYTES:
        # Storage and queries have different types.
        into = output + row * output_stride_b + column * output_stride_q
        into_stride = zero + output_stride_h
        at_keys = keys + row * keys_stride_b + place * keys_stride_s
        at_values = values + row * values_stride_b + place * values_stride_s
        stored = tl.where(is_v, at_values, at_keys)
        stored_stride = tl.where(is_v, zero + values_stride_h, zero + keys_stride_h)
    if is_q:
        first = tile * BLOCK_H
        heads = zero + HEADS_Q
        source = queries + row * queries_stride_b + column * queries_stride_q
        source_stride = zero + queries_stride_h
        if not KEEPS_BYTES:
            into = output + row * output_stride_b + column * output_stride_q
            into_stride = zero + output_stride_h
        norm = q_norm
    else:
        heads = zero + HEADS
        norm = k_norm
        if is_v:
            first = (tile - q_tiles - kv_tiles) * BLOCK_H
            source = new_values + row * new_values_stride_b + column * new_values_stride_q
            source_stride = zero + new_values_stride_h
            if not KEEPS_BYTES:
                into = values + row * values_stride_b + place * values_stride_s
                into_stride = zero + values_stride_h
        else:
            first = (tile - q_tiles) * BLOCK_H
            source = new_keys + row * new_keys_stride_b + column * new_keys_stride_q
            source_stride = zero + new_keys_stride_h
            if not KEEPS_BYTES:
                into = keys + row * keys_stride_b + place * keys_stride_s
                into_stride = zero + keys_stride_h

    head = first + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    e = ROTARY + tl.arange(0, BLOCK_REST)
    there = head < heads
    read = there & fed & known
    low = (d < HALF)[None, :]
    rest = (e < DIM)[None, :]
    from_head = source + head[:, None] * source_stride
    a = tl.load(from_head + d[None, :], mask=read[:, None] & low, other=0.0).to(tl.float32)
    b = tl.load(from_head + HALF + d[None, :], mask=read[:, None] & low, other=0.0).to(tl.float32)
    if ROTARY < DIM:
        c = tl.load(from_head + e[None, :], mask=read[:, None] & rest, other=0.0).to(tl.float32)

    if not is_v:
        if HAS_NORM:
            squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
            if ROTARY < DIM:
                squares += tl.sum(c * c, 1)
            factor = inverse_rms(squares, eps, DIM)[:, None]
            low_weight = tl.load(norm + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
            high_weight = tl.load(norm + HALF + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
            a = weighted(a * factor, low_weight, dtype, ONE_PLUS)
            b = weighted(b * factor, high_weight, dtype, ONE_PLUS)
            if ROTARY < DIM:
                rest_weight = tl.load(norm + e, mask=e < DIM, other=0.0).to(tl.float32)[None, :]
                c = weighted(c * factor, rest_weight, dtype, ONE_PLUS)
        angle = (d < HALF) & known
        cos_row = cos + position * cos_stride + d
        sin_row = sin + position * sin_stride + d
        low_cos = tl.load(cos_row, mask=angle, other=0.0).to(tl.float32)[None, :]
        high_cos = tl.load(cos_row + HALF, mask=angle, other=0.0).to(tl.float32)[None, :]
        low_sin = tl.load(sin_row, mask=angle, other=0.0).to(tl.float32)[None, :]
        high_sin = tl.load(sin_row + HALF, mask=angle, other=0.0).to(tl.float32)[None, :]
        turned = turn(a, -b, low_cos, low_sin, table, dtype)
        b = turn(b, a, high_cos, high_sin, table, dtype)
        a = turned

    # Padding of queries is zero, and queries that cannot be computed are NaN. Only a column's own place in storage is written.
    broken = is_q & ~(good & (known | ~fed))
    a = tl.where(broken, float("nan"), a)
    b = tl.where(broken, float("nan"), b)
    write = there & (is_q | (fed & known))
    if KEEPS_BYTES:
        to_storage = stored + head[:, None] * stored_stride
        keeps = write & (tile >= q_tiles)
        write &= is_q
        tl.store(to_storage + d[None, :], as_kept(a, tl.uint8), mask=keeps[:, None] & low)
        tl.store(to_storage + HALF + d[None, :], as_kept(b, tl.uint8), mask=keeps[:, None] & low)
        if ROTARY < DIM:
            tl.store(to_storage + e[None, :], as_kept(c, tl.uint8), mask=keeps[:, None] & rest)
    to_head = into + head[:, None] * into_stride
    tl.store(to_head + d[None, :], a.to(dtype), mask=write[:, None] & low)
    tl.store(to_head + HALF + d[None, :], b.to(dtype), mask=write[:, None] & low)
    if ROTARY < DIM:
        tl.store(to_head + e[None, :], tl.where(broken, float("nan"), c).to(dtype), mask=write[:, None] & rest)


def rope_append(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    n_new: Tensor | None,
    *,
    positions: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    one_plus_weight: bool,
    out: Tensor,
) -> None:
    """See :func:`pipespec_kernels.ops.rope_append`, which checks the arguments and makes ``out``."""
    launch.check_device(q.device, "q")
    batch, heads_q, width, dim = q.shape
    heads, rotary = keys.shape[1], cos.shape[1]
    if batch * width * (heads_q + heads) == 0:
        return
    tile = tile_of(dim, rotary)
    tiles = triton.cdiv(heads_q, tile["BLOCK_H"]) + 2 * triton.cdiv(heads, tile["BLOCK_H"])
    if batch > MAX_ROWS or tiles > MAX_ROWS:
        raise ValueError(f"at most {MAX_ROWS} rows and tiles of heads in a launch: q is {tuple(q.shape)}")
    with on(q.device):
        rope_append_kernel[(width, tiles, batch)](
            q,
            *q.stride()[:3],
            keys,
            *keys.stride()[:3],
            values,
            *values.stride()[:3],
            out,
            *out.stride()[:3],
            in_bytes(k_cache),
            *k_cache.stride()[:3],
            in_bytes(v_cache),
            *v_cache.stride()[:3],
            cos,
            cos.stride(0),
            sin,
            sin.stride(0),
            cos.shape[0],
            lengths if positions is None else positions,
            *((0, 0) if positions is None else positions.stride()),
            lengths if q_norm is None else q_norm,
            lengths if k_norm is None else k_norm,
            eps,
            lengths,
            lengths if n_new is None else n_new,
            width,
            k_cache.shape[2],
            HAS_NEW=n_new is not None,
            HAS_POSITIONS=positions is not None,
            HAS_NORM=q_norm is not None,
            ONE_PLUS=one_plus_weight,
            HEADS_Q=heads_q,
            HEADS=heads,
            DIM=dim,
            ROTARY=rotary,
            **tile,
            **dependent(q.device),
            num_warps=4,
            enable_fp_fusion=False,
        )


def tile_of(dim: int, rotary: int) -> dict[str, int]:
    """A tile of heads: lanes for half of the rotated dimensions, lanes for the others, heads."""
    half, rest = triton.next_power_of_2(rotary // 2), triton.next_power_of_2(max(dim - rotary, 1))
    return {"BLOCK_D": half, "BLOCK_REST": rest, "BLOCK_H": max(1, _TILE // max(half, rest // 2))}
