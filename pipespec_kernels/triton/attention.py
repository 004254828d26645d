"""``verify_attention``: attention of a few new columns per row over a cache of keys and values, without a mask.

Row ``r`` has ``lengths[r]`` earlier keys and one more for each column that is fed. Column ``j`` sees the keys
``0 .. lengths[r] + j``. The lengths are on the device, so a captured graph replays at any length.

A block of threads takes one head of keys and values, a tile of the (column, query head) pairs that share it, and a part
of the keys: the heads of a group lie next to the columns in the rows of one matrix product, so that keys and values are
read once for all of them. Softmax runs along the keys with a running maximum (Milakov, Gimelshein, "Online normalizer
calculation for softmax", 2018; Dao, Fu, Ermon, Rudra, Re, "FlashAttention", 2022, algorithm 1), in float32. Where the
keys are shared among several blocks, which a long context and few rows need to fill a device (Dao, Haziza, Massa, Sizov,
"Flash-Decoding for long-context inference", 2023), each writes its sums of its span of the keys, and they are combined: those of each 16 spans in the order of
the keys, then those of the groups. In the invariant form with a work space, the block that takes the last ticket of a group combines the group, and the one
that takes the last ticket of the tile the groups, in the same launch; otherwise a second launch does, with a block for each pair. Both add the same numbers
in the same order.

``invariant``: the tile of the pairs, the block of keys and the span of keys that is summed before it meets the others are
constants, and keys that a column does not see add exact zeros. The result of a column then depends only on its own query and on the keys and values
that it sees, and not on the number of columns or on other rows. Products and sums are not fused, because a compiler might fuse them for some strides
and not for others.

With a window, a tile begins at the block of keys that holds the first one its first column sees. A block of threads whose part of the keys lies
before it writes sums of no keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pipespec_kernels.triton import launch
from pipespec_kernels.triton.kept import in_bytes, load_kept
from pipespec_kernels.triton.launch import MAX_ROWS, begin_dependent, dependent, on
from pipespec_kernels.triton.philox import IS_INTERPRETED

INVARIANT_SPAN = 256  # keys: partial sums cost an eighth of the bytes that the keys and values do (4 heads, 8 bit more)
INVARIANT_WIDTH = 32  # columns of one launch: bounds the memory for partial sums, of which each span has its own
GROUPED = 16  # spans that are combined first: one block would take as long for those of a long text as all others for the keys
COMBINED = 16  # spans that the second launch loads at a time

# Where it says IS_INTERPRETED: the interpreter multiplies bfloat16 as if its bits were integers, and ``range`` takes no numbers of its kind.
# Compiled, only a loop over a range overlaps its loads with its products.
_LOG2E = 1.4426950408889634


@triton.jit
def extent(lengths, query_lens, row, width, capacity, HAS_QUERY_LENS: tl.constexpr):
    """For a row: earlier keys, columns fed, and whether these numbers point outside the tensors (both are 0 then)."""
    n = tl.load(lengths + row).to(tl.int64)
    if HAS_QUERY_LENS:
        fed = tl.load(query_lens + row).to(tl.int64)
    else:
        fed = tl.full([], 0, tl.int64) + width
    good = (n >= 0) & (n <= capacity) & (fed >= 0) & (fed <= width) & (n + fed <= capacity)
    return tl.where(good, n, 0).to(tl.int32), tl.where(good, fed, 0).to(tl.int32), good


@triton.jit
def span_of(total, splits, SPAN: tl.constexpr, BLOCK_N: tl.constexpr):
    """Keys per block of threads: a constant, or an even share of the row's keys in whole blocks of keys."""
    if SPAN > 0:
        return SPAN
    else:
        return tl.maximum(tl.cdiv(tl.cdiv(total, BLOCK_N), splits), 1) * BLOCK_N


@triton.jit
def take_block(
    q, top, weight, acc, start, end, sees, key_base, keys_stride_s, value_base, values_stride_s, whole, window,
    scale_log2, cap_log2, dtype: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The keys ``start .. start + BLOCK_N - 1``: the running maximum, the sum of weights, and that of weighted values."""
    d = tl.arange(0, BLOCK_D)
    at = start + tl.arange(0, BLOCK_N)
    there = (at < end)[:, None] & whole
    offset = at.to(tl.int64)[:, None]
    k = load_kept(key_base + offset * keys_stride_s + d[None, :], there, dtype)
    if IS_INTERPRETED:
        k = k.to(tl.float32)
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
    if CAPPED:
        # cap * tanh(x), where the score is 2 x in units of log 2: tanh(x) = (1 - e^(-2 x)) / (1 + e^(-2 x)) for x >= 0. That form cancels
        # where x is small; there it is x + x^3 P(x^2), with the polynomial of Cephes' tanhf.
        falls = tl.exp2(-tl.abs(score))
        large = (1.0 - falls) / (1.0 + falls)
        x = score * 0.34657359  # log(2) / 2
        square = x * x
        p = (-5.70498872745e-3 * square + 2.06390887954e-2) * square - 5.37397155531e-2
        p = (p * square + 1.33314422036e-1) * square - 3.33332819422e-1
        small = x + x * square * p
        score = tl.where(square < 0.390625, small, tl.where(score < 0, -large, large)) * cap_log2
    visible = at[None, :] <= sees[:, None]
    if WINDOWED:
        visible &= at[None, :] > sees[:, None] - window
    score = tl.where(visible, score, float("-inf"))
    highest = tl.maximum(top, tl.max(score, 1))
    # A row that has seen no key yet: any finite number works.
    anchor = tl.where(highest == float("-inf"), 0.0, highest)
    p = tl.exp2(score - anchor[:, None])
    shrink = tl.exp2(top - anchor)
    weight = weight * shrink + tl.sum(p, 1)
    v = load_kept(value_base + offset * values_stride_s + d[None, :], there, dtype)
    p = p.to(v.dtype)
    if IS_INTERPRETED:
        p = p.to(tl.float32)
        v = v.to(tl.float32)
    acc = tl.dot(p, v, acc * shrink[:, None], input_precision="ieee")
    return highest, weight, acc


@triton.jit
def write(
    output, output_stride_b, output_stride_h, output_stride_q, row, head, m, real, weight, acc, good,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write the results of pairs ``m`` of a head of keys: zeros where no key is seen, NaN in a row that leads out of the tensors."""
    d = tl.arange(0, BLOCK_D)
    result = acc / tl.where(weight == 0, 1.0, weight)[:, None]
    result = tl.where(good, result, float("nan"))
    tl.store(
        output
        + row * output_stride_b
        + (head * GROUP + m % GROUP).to(tl.int64)[:, None] * output_stride_h
        + (m // GROUP).to(tl.int64)[:, None] * output_stride_q
        + d[None, :],
        result.to(output.dtype.element_ty),
        mask=real[:, None] & (d < DIM)[None, :],
    )


@triton.jit
def add_spans(
    top, weight, acc, start, written, place, sums, maxima, weights, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    SPANS: tl.constexpr,
):  # fmt: skip
    """The spans ``start .. start + SPANS - 1`` of those before ``written``, one after the other: the running maximum and sums of pairs."""
    d = tl.arange(0, BLOCK_D)
    # Unrolled, so that the loads do not wait for one another. In a loop that is not over a range, Triton would put a barrier between them.
    for i in tl.static_range(SPANS):
        there = start + i < written
        at = place + start + i
        # .cg: reads from L2, where the other blocks wrote, and not from this multiprocessor's cache.
        highest = tl.load(maxima + at, mask=there, other=float("-inf"), cache_modifier=".cg")
        partial = tl.load(weights + at, mask=there, other=0.0, cache_modifier=".cg")
        part = tl.load(
            sums + at[:, None] * DIM + d[None, :],
            mask=there[:, None] & (d < DIM)[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        anchor = tl.maximum(top, highest)
        anchor = tl.where(anchor == float("-inf"), 0.0, anchor)  # a pair that sees no key
        shrink = tl.exp2(top - anchor)
        factor = tl.exp2(highest - anchor)
        weight = weight * shrink + factor * partial
        acc = acc * shrink[:, None] + factor[:, None] * part
        top = tl.maximum(top, highest)
    return top, weight, acc


@triton.jit
def add_all(
    start, end, written, place, sums, maxima, weights, DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """The sums of pairs over the spans ``start .. end - 1``, of each pair those before ``written``."""
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    written = tl.minimum(written, end)
    if IS_INTERPRETED:
        while start < end:
            top, weight, acc = add_spans(
                top, weight, acc, start, written, place, sums, maxima, weights, DIM, BLOCK_D, SPANS
            )
            start += SPANS
    else:
        for at in range(start, end, SPANS):
            top, weight, acc = add_spans(
                top, weight, acc, at, written, place, sums, maxima, weights, DIM, BLOCK_D, SPANS
            )
    return top, weight, acc


@triton.jit
def add_group(
    total_top, total_weight, total, start, most, written, place, sums, maxima, weights, DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, GROUPED: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """One more group of spans of one pair, as if its sums had been written: :func:`add_spans` adds them so."""
    end = tl.minimum(start + GROUPED, most)
    top, weight, acc = add_all(start, end, written, place, sums, maxima, weights, DIM, 1, BLOCK_D, SPANS)
    anchor = tl.maximum(total_top, top)
    anchor = tl.where(anchor == float("-inf"), 0.0, anchor)
    shrink = tl.exp2(total_top - anchor)
    factor = tl.exp2(top - anchor)
    total_weight = total_weight * shrink + factor * weight
    total = total * shrink[:, None] + factor[:, None] * acc
    return tl.maximum(total_top, top), total_weight, total


# Not specialised: each value of 1 or multiple of 16 would compile a further kernel without a gain.
@triton.jit(do_not_specialize=["first", "columns", "width", "capacity", "splits", "window"])
def attention_kernel(
    queries,
    queries_stride_b,
    queries_stride_h,
    queries_stride_q,
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
    sums,
    maxima,
    weights,
    tickets,
    first,
    columns,
    width,
    capacity,
    splits,
    window,
    scale_log2,
    cap_log2,
    HAS_QUERY_LENS: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SPAN: tl.constexpr,
    DIRECT: tl.constexpr,
    COMBINES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUPED: tl.constexpr,
    SPANS: tl.constexpr,
    PDL: tl.constexpr,
):
    """``DIRECT``: no other block has a part of the keys. ``COMBINES``: the last blocks of a tile combine the sums of all. Of each pair there is room for the sums
    of all spans, then for those of all groups."""
    begin_dependent(PDL)
    split = tl.program_id(0)
    # Tiles of one head follow one another, while its keys and values are in the L2 cache.
    tiles = tl.num_programs(1) // HEADS
    head = tl.program_id(1) // tiles  # of the keys
    tile = tl.program_id(1) % tiles
    row = tl.program_id(2).to(tl.int64)
    before, fed, good = extent(lengths, query_lens, row, width, capacity, HAS_QUERY_LENS)
    total = before + fed
    span = span_of(total, splits, SPAN, BLOCK_N)

    # A tile's row m is column m // GROUP of this launch, in query head head * GROUP + m % GROUP.
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    column = first + m // GROUP
    live = (m < columns * GROUP) & (column < fed)
    d = tl.arange(0, BLOCK_D)
    # The tile's last fed column sees the most keys. Keys after those are not loaded.
    last = tl.minimum(first + (tile * BLOCK_M + BLOCK_M - 1) // GROUP, first + columns - 1)
    end = tl.where(first + tile * BLOCK_M // GROUP < fed, before + tl.minimum(last + 1, fed), 0)
    begin = split * span
    stop = tl.minimum(begin + span, end)
    sharing = tl.maximum(tl.cdiv(end, span), 1)  # blocks that take a part of the tile's keys
    if WINDOWED:
        # The tile's first column sees the earliest keys.
        seen = tl.maximum(before + first + tile * BLOCK_M // GROUP + 1 - window, 0)
        begin = tl.maximum(begin, seen // BLOCK_N * BLOCK_N)

    if split < sharing:
        heads = head * GROUP + m % GROUP
        # Column indices in the whole block, and in this launch's part of the tensors.
        local = (m // GROUP).to(tl.int64)
        whole = (d < DIM)[None, :]
        q = tl.load(
            queries
            + row * queries_stride_b
            + heads.to(tl.int64)[:, None] * queries_stride_h
            + local[:, None] * queries_stride_q
            + d[None, :],
            mask=live[:, None] & whole,
            other=0.0,
        )
        if IS_INTERPRETED:
            q = q.to(tl.float32)
        key_base = keys + row * keys_stride_b + head.to(tl.int64) * keys_stride_h
        value_base = values + row * values_stride_b + head.to(tl.int64) * values_stride_h
        sees = tl.where(live, before + column, -1)  # the last key that it sees
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        weight = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        if IS_INTERPRETED:
            start = begin
            while start < stop:
                top, weight, acc = take_block(
                    q, top, weight, acc, start, end, sees, key_base, keys_stride_s, value_base, values_stride_s, whole,
                    window, scale_log2, cap_log2, queries.dtype.element_ty, WINDOWED, CAPPED, BLOCK_N, BLOCK_D,
                )  # fmt: skip
                start += BLOCK_N
        else:
            for start in range(begin, stop, BLOCK_N):
                top, weight, acc = take_block(
                    q, top, weight, acc, start, end, sees, key_base, keys_stride_s, value_base, values_stride_s, whole,
                    window, scale_log2, cap_log2, queries.dtype.element_ty, WINDOWED, CAPPED, BLOCK_N, BLOCK_D,
                )  # fmt: skip

        real = m < columns * GROUP
        all_groups = tl.cdiv(splits, GROUPED)
        place = ((row * HEADS + head) * (columns * GROUP) + m) * (splits + all_groups)
        complete = sharing <= (1 if COMBINES else 0)
        if DIRECT:
            complete = sharing > 0
        if not complete:
            tl.store(sums + (place + split)[:, None] * DIM + d[None, :], acc, mask=real[:, None] & whole)
            tl.store(maxima + place + split, top, mask=real)
            tl.store(weights + place + split, weight, mask=real)
            if COMBINES:
                tl.debug_barrier()  # the sums of all threads come before the ticket of one
                ticket = tickets + (row * tl.num_programs(1) + tl.program_id(1)) * (1 + all_groups)
                group = split // GROUPED
                begin = group * GROUPED
                stop = tl.minimum(begin + GROUPED, sharing)
                # Release: our sums before our ticket. Acquire: the sums of all blocks, if ours is the last.
                if tl.atomic_add(ticket + 1 + group, 1, sem="acq_rel") == stop - begin - 1:
                    tl.store(ticket + 1 + group, 0)
                    # Of each pair, the spans of which it sees some keys.
                    written = tl.cdiv(tl.where(real & (column < fed), before + column + 1, 0), span)
                    top, weight, acc = add_all(
                        begin, stop, written, place, sums, maxima, weights, DIM, BLOCK_M, BLOCK_D, SPANS
                    )
                    groups = tl.cdiv(sharing, GROUPED)
                    complete = groups == 1
                    if groups > 1:
                        place += splits
                        tl.store(sums + (place + group)[:, None] * DIM + d[None, :], acc, mask=real[:, None] & whole)
                        tl.store(maxima + place + group, top, mask=real)
                        tl.store(weights + place + group, weight, mask=real)
                        tl.debug_barrier()
                        if tl.atomic_add(ticket, 1, sem="acq_rel") == groups - 1:
                            tl.store(ticket, 0)
                            top, weight, acc = add_all(
                                0, groups, groups, place, sums, maxima, weights, DIM, BLOCK_M, BLOCK_D, SPANS
                            )
                            complete = groups > 0
        if complete:
            write(
                output, output_stride_b, output_stride_h, output_stride_q, row, head, m, real, weight, acc, good,
                GROUP, DIM, BLOCK_D,
            )  # fmt: skip


@triton.jit(do_not_specialize=["first", "columns", "width", "capacity", "splits"])
def combine_kernel(
    lengths,
    query_lens,
    output,
    output_stride_b,
    output_stride_h,
    output_stride_q,
    sums,
    maxima,
    weights,
    first,
    columns,
    width,
    capacity,
    splits,
    HAS_QUERY_LENS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUPED: tl.constexpr,
    SPANS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Combine the sums of one pair, if several blocks have taken its tile, and write its result."""
    begin_dependent(PDL)
    row, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    m = tl.program_id(0) + tl.zeros([1], tl.int32)
    before, fed, good = extent(lengths, query_lens, row, width, capacity, HAS_QUERY_LENS)
    span = span_of(before + fed, splits, SPAN, BLOCK_N)
    column = first + m // GROUP
    written = tl.cdiv(tl.where(column < fed, before + column + 1, 0), span)
    most = tl.max(written, 0)
    place = ((row * HEADS + head) * (columns * GROUP) + m) * (splits + tl.cdiv(splits, GROUPED))
    top = tl.full([1], float("-inf"), tl.float32)
    weight = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_D], tl.float32)
    start = 0
    while start < most:
        top, weight, acc = add_group(
            top, weight, acc, start, most, written, place, sums, maxima, weights, DIM, BLOCK_D, GROUPED, SPANS
        )
        start += GROUPED
    real = m < columns * GROUP
    write(
        output, output_stride_b, output_stride_h, output_stride_q, row, head, m, real, weight, acc, good,
        GROUP, DIM, BLOCK_D,
    )  # fmt: skip


class Tiling(NamedTuple):
    """The tiling. Without ``invariant``, results differ between tilings in their last bits.

    Attributes:
        block_m: (column, query head) pairs of a tile, a power of two, at least 16.
        block_n: keys of a block, likewise.
        warps: per block of threads.
        stages: blocks of keys and values that are loaded at a time.
        span: keys that one block of threads sums; 0: an even share of the row's keys.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    span: int

    def combined(self, dim: int) -> int:
        """Spans of a tile that its last block loads at a time. With more, registers spill; with fewer of narrow heads, too, since the compiler then reckons with
        more blocks of threads on a multiprocessor."""
        return 32 // self.warps * (2 if dim <= 64 else 1)


def tiling(pairs: int, dim: int, itemsize: int, invariant: bool, capped: bool = False) -> Tiling:
    """The tiling for a number of (column, query head) pairs per head of keys. ``capped``: scores have a window and a soft cap, whose registers would spill with three stages on sm_80.

    A tile has as many pairs as registers hold, because each tile reads all the keys. A block of keys is as large as shared memory allows for its
    stages. The compile gate checks both; neither is tuned on a device.
    """
    wide = max(16, triton.next_power_of_2(dim))
    if itemsize == 4:  # float32 has no tensor cores at full precision, and twice the bytes
        return Tiling(16, 16, 8, 2, INVARIANT_SPAN if invariant else 0)
    stages = 3 if wide <= 128 and not capped else 2
    if invariant:
        return Tiling(16, 64, 4, stages, INVARIANT_SPAN)
    block_m = max(16, min(triton.next_power_of_2(pairs), 128 if wide <= 128 else 32))
    return Tiling(block_m, 64, 8 if block_m * wide > 2048 else 4, stages, 0)


def verify_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    query_lens: Tensor | None = None,
    *,
    scale: float | None = None,
    invariant: bool = False,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    splits: int | None = None,
) -> Tensor:
    """See :func:`pipespec_kernels.ops.verify_attention`, which checks the arguments.

    ``splits``: blocks of threads that share a row's keys; default: as many as fill the device.
    """
    batch, heads_q, width, dim = q.shape
    heads, capacity = k_cache.shape[1], k_cache.shape[2]
    if out is None:
        out = torch.empty((batch, width, heads_q, dim), dtype=q.dtype, device=q.device).transpose(1, 2)
    if out.numel() == 0:
        return out
    if capacity == 0:
        raise ValueError("the cache has no room: its capacity is 0")
    launch.check_device(q.device, "q")
    group = heads_q // heads
    step = min(width, INVARIANT_WIDTH) if invariant else width
    cut = tiling(step * group, dim, q.element_size(), invariant, window is not None and softcap is not None)
    tiles = triton.cdiv(step * group, cut.block_m)
    if batch > MAX_ROWS or heads * tiles > MAX_ROWS:
        raise ValueError(
            f"at most {MAX_ROWS} rows, and {MAX_ROWS} tiles of columns and heads, in a launch: q is {tuple(q.shape)}"
        )
    if cut.span:
        splits = triton.cdiv(capacity, cut.span)
    elif splits is None:
        wanted = 1 if q.is_cpu else 2 * launch.multiprocessors(q.device)
        splits = max(1, wanted // (batch * heads * tiles))
    splits = max(1, min(splits, triton.cdiv(capacity, cut.block_n)))
    block_d = max(16, triton.next_power_of_2(dim))
    direct = splits == 1
    groups = triton.cdiv(splits, GROUPED)
    room = 0 if workspace is None else workspace.numel()
    combines = invariant and not direct and batch * heads * tiles * (1 + groups) <= room
    shape = (batch, heads, step * group, splits + groups)
    # Only written parts are read, so these are not cleared.
    sums = out if direct else torch.empty((*shape, dim), dtype=torch.float32, device=q.device)
    maxima = out if direct else torch.empty(shape, dtype=torch.float32, device=q.device)
    weights = out if direct else torch.empty(shape, dtype=torch.float32, device=q.device)
    constants = {"HAS_QUERY_LENS": query_lens is not None, "GROUP": group, "HEADS": heads, "DIM": dim, "SPAN": cut.span}
    constants |= {"BLOCK_N": cut.block_n, "BLOCK_D": block_d, "GROUPED": GROUPED} | dependent(q.device)
    counts = lengths if query_lens is None else query_lens  # not read without query_lens
    scale_log2 = (dim**-0.5 if scale is None else scale) * _LOG2E * (1.0 if softcap is None else 2.0 / softcap)
    modes = {"WINDOWED": window is not None, "CAPPED": softcap is not None}
    with on(q.device):
        for first in range(0, width, step):
            columns = min(step, width - first)
            queries, output = q[:, :, first:], out[:, :, first:]
            attention_kernel[(splits, heads * triton.cdiv(columns * group, cut.block_m), batch)](
                queries,
                *queries.stride()[:3],
                in_bytes(k_cache),
                *k_cache.stride()[:3],
                in_bytes(v_cache),
                *v_cache.stride()[:3],
                lengths,
                counts,
                output,
                *output.stride()[:3],
                sums,
                maxima,
                weights,
                workspace if combines else lengths,
                first,
                columns,
                width,
                capacity,
                splits,
                0 if window is None else min(window, capacity),
                scale_log2,
                0.0 if softcap is None else softcap * _LOG2E,
                **constants,
                **modes,
                DIRECT=direct,
                COMBINES=combines,
                SPANS=cut.combined(dim),
                BLOCK_M=cut.block_m,
                num_warps=cut.warps,
                num_stages=cut.stages,
                enable_fp_fusion=not invariant,
            )
            if not (direct or combines):
                combine_kernel[(columns * group, heads, batch)](
                    lengths,
                    counts,
                    output,
                    *output.stride()[:3],
                    sums,
                    maxima,
                    weights,
                    first,
                    columns,
                    width,
                    capacity,
                    splits,
                    **constants,
                    SPANS=COMBINED,
                    num_warps=4,
                    enable_fp_fusion=not invariant,
                )
    return out
