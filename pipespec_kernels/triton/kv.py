"""Storage of keys and values ``[B, Hkv, S, D]`` with a length per row on the device: append, gather, compact, truncate.

Every launch reads its lengths and counts on the device, so a graph can capture it. A kernel does not change a row whose numbers point outside the
tensors. Where an operation moves rows or positions inside the storage, a block of threads owns all elements that it reads and writes. It reads a
tile, waits for all its threads, and writes the tile.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pipespec_kernels.triton import launch
from pipespec_kernels.triton.launch import on

MOST_GATHERED = 1024  # rows that a block of threads holds at a time
_TILE = 8192  # elements


@triton.jit(do_not_specialize=["width", "capacity"])
def append_kernel(
    new_keys,
    new_keys_stride_b,
    new_keys_stride_h,
    new_keys_stride_q,
    new_values,
    new_values_stride_b,
    new_values_stride_h,
    new_values_stride_q,
    keys,
    keys_stride_b,
    keys_stride_h,
    keys_stride_s,
    values,
    values_stride_b,
    values_stride_h,
    values_stride_s,
    lengths,
    n_new,
    width,
    capacity,
    HAS_NEW: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    length = tl.load(lengths + row).to(tl.int64)
    if HAS_NEW:
        count = tl.load(n_new + row).to(tl.int64)
    else:
        count = tl.full([], 0, tl.int64) + width
    good = (length >= 0) & (length <= capacity) & (count >= 0) & (count <= width) & (length + count <= capacity)
    mask = (good & (column < count))[:, None] & (d < DIM)[None, :]
    source = column.to(tl.int64)[:, None]
    place = length + source
    k = tl.load(
        new_keys + row * new_keys_stride_b + head * new_keys_stride_h + source * new_keys_stride_q + d[None, :],
        mask=mask,
    )
    tl.store(keys + row * keys_stride_b + head * keys_stride_h + place * keys_stride_s + d[None, :], k, mask=mask)
    v = tl.load(
        new_values + row * new_values_stride_b + head * new_values_stride_h + source * new_values_stride_q + d[None, :],
        mask=mask,
    )
    tl.store(
        values + row * values_stride_b + head * values_stride_h + place * values_stride_s + d[None, :], v, mask=mask
    )


@triton.jit(do_not_specialize=["count"])
def truncate_kernel(lengths, to, count, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < count
    length = tl.load(lengths + row, mask=there, other=0).to(tl.int64)
    wanted = tl.maximum(tl.load(to + row, mask=there, other=0).to(tl.int64), 0)
    tl.store(lengths + row, tl.minimum(length, wanted).to(lengths.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["batch", "count", "capacity"])
def gather_kernel(
    keys,
    keys_stride_b,
    keys_stride_h,
    keys_stride_s,
    values,
    values_stride_b,
    values_stride_h,
    values_stride_s,
    lengths,
    rows,
    batch,
    count,
    capacity,
    DIM: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A block of threads owns some elements of one head, in all rows."""
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1).to(tl.int64)
    row = tl.arange(0, BLOCK_B).to(tl.int64)
    source = tl.load(rows + row, mask=row < count, other=-1).to(tl.int64)
    good = (source >= 0) & (source < batch)
    length = tl.load(lengths + source, mask=good, other=0).to(tl.int64)
    # A row that stays where it is need not be copied.
    length = tl.where(source == row, 0, tl.minimum(length, capacity))
    place, d = element // BLOCK_D, element % BLOCK_D
    if tl.program_id(0).to(tl.int64) * BLOCK // BLOCK_D < tl.max(length, 0):
        mask = (place[None, :] < length[:, None]) & (d < DIM)[None, :]
        at = head * keys_stride_h + place * keys_stride_s + d
        k = tl.load(keys + source[:, None] * keys_stride_b + at[None, :], mask=mask)
        into = head * values_stride_h + place * values_stride_s + d
        v = tl.load(values + source[:, None] * values_stride_b + into[None, :], mask=mask)
        tl.debug_barrier()  # every thread has read its elements before any is overwritten
        tl.store(keys + row[:, None] * keys_stride_b + at[None, :], k, mask=mask)
        tl.store(values + row[:, None] * values_stride_b + into[None, :], v, mask=mask)


@triton.jit(do_not_specialize=["width", "capacity"])
def compact_kernel(
    keys,
    keys_stride_b,
    keys_stride_h,
    keys_stride_s,
    values,
    values_stride_b,
    values_stride_h,
    values_stride_s,
    positions,
    positions_stride_b,
    positions_stride_p,
    begin,
    n_keep,
    width,
    capacity,
    DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A block of threads owns one head of one row, and processes its positions upwards."""
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    first = tl.load(begin + row).to(tl.int64)
    count = tl.load(n_keep + row).to(tl.int64)
    good = (first >= 0) & (first <= capacity) & (count >= 0) & (count <= width) & (first + count <= capacity)
    count = tl.where(good, count, 0)
    lanes = tl.arange(0, BLOCK_P)
    wrong = tl.zeros([BLOCK_P], tl.int32)
    start = 0
    while start < count:
        j = start + lanes
        source = tl.load(positions + row * positions_stride_b + j * positions_stride_p, mask=j < count, other=0).to(
            tl.int64
        )
        wrong += ((j < count) & ((source < first + j) | (source >= capacity))).to(tl.int32)
        start += BLOCK_P
    count = tl.where(tl.sum(wrong, 0) > 0, 0, count)
    key_base = keys + row * keys_stride_b + head * keys_stride_h
    value_base = values + row * values_stride_b + head * values_stride_h
    start = 0
    while start < count:
        j = start + lanes
        source = tl.load(positions + row * positions_stride_b + j * positions_stride_p, mask=j < count, other=0).to(
            tl.int64
        )[:, None]
        place = (first + j)[:, None]
        mask = (j < count)[:, None] & (d < DIM)[None, :]
        k = tl.load(key_base + source * keys_stride_s + d[None, :], mask=mask)
        v = tl.load(value_base + source * values_stride_s + d[None, :], mask=mask)
        # Later tiles read only behind the positions that this tile writes. So only this tile must read before it writes.
        tl.debug_barrier()
        tl.store(key_base + place * keys_stride_s + d[None, :], k, mask=mask)
        tl.store(value_base + place * values_stride_s + d[None, :], v, mask=mask)
        start += BLOCK_P


# The functions below take arguments that pipespec_kernels.ops has checked.


def _wide(dim: int) -> int:
    return max(16, 1 << (dim - 1).bit_length())


def kv_append(
    keys: Tensor, values: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, n_new: Tensor | None = None
) -> None:
    """See :func:`pipespec_kernels.ops.kv_append`."""
    launch.check_device(k_cache.device, "k_cache")
    batch, heads, width, dim = keys.shape
    if keys.numel() == 0:
        return
    block_d = _wide(dim)
    block_q = max(1, min(triton.next_power_of_2(width), _TILE // 2 // block_d))
    with on(k_cache.device):
        append_kernel[(triton.cdiv(width, block_q), heads, batch)](
            keys,
            *keys.stride()[:3],
            values,
            *values.stride()[:3],
            k_cache,
            *k_cache.stride()[:3],
            v_cache,
            *v_cache.stride()[:3],
            lengths,
            lengths if n_new is None else n_new,
            width,
            k_cache.shape[2],
            HAS_NEW=n_new is not None,
            DIM=dim,
            BLOCK_Q=block_q,
            BLOCK_D=block_d,
        )


def kv_truncate(lengths: Tensor, to: Tensor) -> None:
    """See :func:`pipespec_kernels.ops.kv_truncate`."""
    launch.check_device(lengths.device, "lengths")
    rows = lengths.numel()
    if rows:
        block = min(triton.next_power_of_2(rows), 1024)
        with on(lengths.device):
            truncate_kernel[(triton.cdiv(rows, block),)](lengths, to, rows, BLOCK=block)


def kv_gather(k_cache: Tensor, v_cache: Tensor, lengths: Tensor, rows: Tensor) -> None:
    """See :func:`pipespec_kernels.ops.kv_gather`."""
    launch.check_device(k_cache.device, "k_cache")
    batch, heads, capacity, dim = k_cache.shape
    count = rows.numel()
    if count == 0 or k_cache.numel() == 0:
        return
    block_b, block_d = triton.next_power_of_2(count), _wide(dim)
    block = max(16, _TILE // block_b)
    with on(k_cache.device):
        gather_kernel[(triton.cdiv(capacity * block_d, block), heads)](
            k_cache,
            *k_cache.stride()[:3],
            v_cache,
            *v_cache.stride()[:3],
            lengths,
            rows,
            batch,
            count,
            capacity,
            DIM=dim,
            BLOCK_B=block_b,
            BLOCK=block,
            BLOCK_D=block_d,
            num_warps=8,
        )


def kv_compact(k_cache: Tensor, v_cache: Tensor, positions: Tensor, begin: Tensor, n_keep: Tensor) -> None:
    """See :func:`pipespec_kernels.ops.kv_compact`."""
    launch.check_device(k_cache.device, "k_cache")
    batch, heads, capacity, dim = k_cache.shape
    width = positions.shape[1]
    if width == 0 or k_cache.numel() == 0:
        return
    block_d = _wide(dim)
    with on(k_cache.device):
        compact_kernel[(heads, batch)](
            k_cache,
            *k_cache.stride()[:3],
            v_cache,
            *v_cache.stride()[:3],
            positions,
            *positions.stride(),
            begin,
            n_keep,
            width,
            capacity,
            DIM=dim,
            BLOCK_P=max(1, min(triton.next_power_of_2(width), _TILE // 2 // block_d)),
            BLOCK_D=block_d,
        )
