"""``cutoff``: top-k, top-p and min-p as the smallest logit of a row that passes, without a sort and in about one pass over the row.

Two launches. The first is split over the vocabulary: it takes, for each group of neighbouring logits, the largest and the sum of the weights. In the
second, one block of threads per row searches the threshold, and reads only groups that can hold it:

* top-k: as many groups as ``k`` have a largest logit that is at least the k-th largest one, so the k-th largest logit is at least that;
* top-p: all logits below some number sum to at most the groups whose largest is below it, and in each other group to its sum without the largest,
  or to what all of them at that number would be. If that is less than ``(1 - p) S``, where ``S`` is the whole sum, the others reach the share ``p``;
* after top-k, and for min-p: no group whose largest logit does not pass.

In rows of a language model few of the two thousand groups remain, in flat rows all may.

Logits are compared as integers in the order of floats. The search quarters an interval: it counts the logits at or above three pivots (top-k), or adds
up their weights (top-p), and keeps one quarter. 16 bits need at most 8 such passes over the groups that remain, 32 bits 16.

Invariants of the search: the logits at or above ``low`` reach the goal, those at or above ``high`` do not. Sums over
more of the same non-negative terms, in the same order, are never smaller in floating point either, so both hold with
rounding, and the search ends at a logit of the row: between two neighbouring logits nothing changes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pipespec_kernels.triton.launch import UNSPECIALIZED, begin_dependent, check_limits, dependent, on, strides

_LOG2E = tl.constexpr(1.4426950408889634)
# Logits that a block of threads reads at once, and warps of a block. Not tuned on a device.
TILE, SCAN_WARPS, SEARCH_WARPS = 4096, 4, 16
MIN_GROUP, MAX_GROUPS = 64, 2048
# Of what may lie below the bound of top-p. The rest exceeds the rounding of the sums.
_MARGIN = tl.constexpr(0.999)
# Low bits of an fp32 number, as an ordered integer, that carry no information of the original dtype.
_SHIFTS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}


@triton.jit
def _key(x, SHIFT: tl.constexpr):
    """An int32 in the order of the floats. +0 and -0 are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _float(key, SHIFT: tl.constexpr):
    """The float of a key; ``key`` is int64."""
    bits = ((key << SHIFT) | tl.where(key < 0, (1 << SHIFT) - 1, 0)).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weights(x, largest, scale):
    """``exp(x * scale)`` relative to the largest, which is 1 even if it is infinite."""
    y = x * scale
    most = largest * scale
    return tl.where(y == most, 1.0, tl.exp2((y - most) * _LOG2E))


@triton.jit
def _filters(
    row,
    column,
    vocab,
    query_lens,
    num_draft_tokens,
    top_k,
    top_p,
    min_p,
    HAS_COUNTS: tl.constexpr,
    HAS_K: tl.constexpr,
    HAS_P: tl.constexpr,
    HAS_MIN: tl.constexpr,
):
    """Whether the threshold of a column is wanted, and its filters: ``k`` (0: off), ``p``, and the least weight of min-p."""
    k = tl.full([], 0, tl.int32)
    if HAS_K:
        k = tl.load(top_k + row)
        k = tl.where((k > 0) & (k < vocab), k, 0).to(tl.int32)
    p = tl.full([], 1.0, tl.float64)
    if HAS_P:
        p = tl.load(top_p + row).to(tl.float64)
    least = tl.full([], 0.0, tl.float32)
    if HAS_MIN:
        least = tl.load(min_p + row).to(tl.float32)
    wanted = (k > 0) | (p < 1.0) | (least > 0.0)
    if HAS_COUNTS:
        fed = tl.load(query_lens + row)
        wanted = wanted & (column < fed) & (column >= fed - 1 - tl.load(num_draft_tokens + row))
    return wanted, k, p, least


@triton.jit(**UNSPECIALIZED)
def cutoff_scan_kernel(
    logits,
    logits_stride_b,
    logits_stride_q,
    vocab,
    query_lens,
    num_draft_tokens,
    inv_temperature,
    top_k,
    top_p,
    min_p,
    maxima,
    sums,
    HAS_COUNTS: tl.constexpr,
    HAS_K: tl.constexpr,
    HAS_P: tl.constexpr,
    HAS_MIN: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of each group the largest logit, NaN if it has one, and the sum of the weights relative to that."""
    begin_dependent(PDL)
    column = tl.program_id(1)
    row = tl.program_id(2)
    wanted, k, p, _ = _filters(
        row, column, vocab, query_lens, num_draft_tokens, top_k, top_p, min_p, HAS_COUNTS, HAS_K, HAS_P, HAS_MIN
    )
    if wanted:
        begin = tl.program_id(0) * BLOCK
        group = tl.arange(0, BLOCK // GROUP)
        offsets = begin + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        source = logits + row.to(tl.int64) * logits_stride_b + column.to(tl.int64) * logits_stride_q
        x = tl.load(source + offsets, mask=offsets < vocab, other=float("-inf")).to(tl.float32)
        largest = tl.max(x, axis=1)
        nan = tl.max((x != x).to(tl.int32), axis=1)
        place = (row * tl.num_programs(1) + column).to(tl.int64) * GROUPS_BLOCK + begin // GROUP + group
        inside = begin // GROUP + group < GROUPS_BLOCK
        tl.store(maxima + place, tl.where(nan == 0, largest, float("nan")), mask=inside)
        # After top-k the sum is that of the logits which it keeps.
        if (p < 1.0) & (k == 0):
            scale = tl.load(inv_temperature + row)
            tl.store(sums + place, tl.sum(_weights(x, largest[:, None], scale), axis=1), mask=inside)


@triton.jit
def _listed(remain, groups):
    """Write the indices of the groups that remain to ``groups``. Returns their number."""
    tl.debug_barrier()  # every thread has read the former list
    index = tl.arange(0, remain.shape[0])
    ones = remain.to(tl.int32)
    tl.store(groups + tl.cumsum(ones, axis=0) - 1, index, mask=remain)
    tl.debug_barrier()  # the list is read by other threads than those that wrote it
    return tl.sum(ones, axis=0)


@triton.jit
def _logits_of(source, groups, start, n, vocab, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """The logits of some of the ``n`` listed groups, from the one at ``start`` on; -inf after the last."""
    index = start + tl.arange(0, BLOCK // GROUP)
    offsets = tl.load(groups + index, mask=index < n, other=0)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = (index < n)[:, None] & (offsets < vocab)
    return tl.load(source + offsets, mask=mask, other=float("-inf")).to(tl.float32)


@triton.jit
def _measure(x, pivot, largest, scale, WEIGHTS: tl.constexpr):
    """Of each logit at or above the pivot its weight, or 1; of the others 0."""
    if WEIGHTS:
        return tl.where(x >= pivot, _weights(x, largest, scale), 0.0)
    else:
        return (x >= pivot).to(tl.int32)


@triton.jit
def _search(
    source,
    groups,
    n,
    vocab,
    low,
    high,
    goal,
    largest,
    scale,
    WEIGHTS: tl.constexpr,
    SHIFT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The greatest key in ``low .. high - 1`` for which the logits of the listed groups at or above it reach the goal."""
    while high - low > 1:
        pivot1 = low + (high - low) // 4
        pivot2 = low + (high - low) // 2
        pivot3 = low + (high - low) * 3 // 4
        zeros = tl.full([BLOCK // GROUP, GROUP], 0, tl.float32 if WEIGHTS else tl.int32)
        sum1 = zeros
        sum2 = zeros
        sum3 = zeros
        start = 0
        while start < n:
            x = _logits_of(source, groups, start, n, vocab, GROUP, BLOCK)
            sum1 += _measure(x, _float(pivot1, SHIFT), largest, scale, WEIGHTS)
            sum2 += _measure(x, _float(pivot2, SHIFT), largest, scale, WEIGHTS)
            sum3 += _measure(x, _float(pivot3, SHIFT), largest, scale, WEIGHTS)
            start += BLOCK // GROUP
        reached1 = tl.sum(sum1) >= goal
        reached2 = tl.sum(sum2) >= goal
        reached3 = tl.sum(sum3) >= goal
        high = tl.where(reached3, high, tl.where(reached2, pivot3, tl.where(reached1, pivot2, pivot1)))
        low = tl.where(reached3, pivot3, tl.where(reached2, pivot2, tl.where(reached1, pivot1, low)))
    return low


@triton.jit
def _smallest(source, groups, n, vocab, floor, least, largest, scale, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest logit of the listed groups that is at least ``floor`` and has at least the weight ``least``."""
    kept = tl.full([BLOCK // GROUP, GROUP], float("inf"), tl.float32)
    start = 0
    while start < n:
        x = _logits_of(source, groups, start, n, vocab, GROUP, BLOCK)
        passes = (x >= floor) & (_weights(x, largest, scale) >= least)
        kept = tl.minimum(kept, tl.where(passes, x, float("inf")))
        start += BLOCK // GROUP
    return tl.min(kept)


@triton.jit(**UNSPECIALIZED)
def cutoff_search_kernel(
    logits,
    logits_stride_b,
    logits_stride_q,
    vocab,
    query_lens,
    num_draft_tokens,
    inv_temperature,
    top_k,
    top_p,
    min_p,
    maxima,
    sums,
    remaining,
    out,
    HAS_COUNTS: tl.constexpr,
    HAS_K: tl.constexpr,
    HAS_P: tl.constexpr,
    HAS_MIN: tl.constexpr,
    SHIFT: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    column = tl.program_id(0)
    row = tl.program_id(1)
    cell = (row * tl.num_programs(0) + column).to(tl.int64)
    wanted, k, p, least = _filters(
        row, column, vocab, query_lens, num_draft_tokens, top_k, top_p, min_p, HAS_COUNTS, HAS_K, HAS_P, HAS_MIN
    )
    result = float("-inf")
    if wanted:
        source = logits + row.to(tl.int64) * logits_stride_b + column.to(tl.int64) * logits_stride_q
        groups = remaining + cell * GROUPS_BLOCK
        scale = tl.load(inv_temperature + row)
        index = tl.arange(0, GROUPS_BLOCK)
        exists = index < tl.cdiv(vocab, GROUP)
        most = tl.load(maxima + cell * GROUPS_BLOCK + index, mask=exists, other=float("-inf"))
        largest = tl.max(most, axis=0)
        if (tl.max((most != most).to(tl.int32), axis=0) == 0) & (largest > float("-inf")):
            keys = _key(most, SHIFT)
            weights = _weights(most, largest, scale)
            top = _key(largest, SHIFT).to(tl.int64) + 1
            low = _key(tl.full([], float("-inf"), tl.float32), SHIFT).to(tl.int64)
            if k > 0:
                # The k-th largest of the groups' largest logits, by bisection; without so many groups -inf.
                high = tl.where(tl.sum(exists.to(tl.int32), axis=0) >= k, top, low + 1)
                while high - low > 1:
                    middle = low + (high - low) // 2
                    reached = tl.sum((keys >= middle).to(tl.int32), axis=0) >= k
                    low = tl.where(reached, middle, low)
                    high = tl.where(reached, high, middle)
                n = _listed(exists & (keys >= low), groups)
                low = _search(source, groups, n, vocab, low, top, k, largest, scale, False, SHIFT, GROUP, BLOCK)
            if p < 1.0:
                # Of the logits that top-k kept: the whole weight, then the smallest set with the share p of it.
                if k > 0:
                    n = _listed(exists & (keys >= low), groups)
                    total = tl.full([BLOCK // GROUP, GROUP], 0.0, tl.float32)
                    start = 0
                    while start < n:
                        x = _logits_of(source, groups, start, n, vocab, GROUP, BLOCK)
                        total += _measure(x, _float(low, SHIFT), largest, scale, True)
                        start += BLOCK // GROUP
                    whole = tl.sum(total)
                else:
                    part = tl.load(sums + cell * GROUPS_BLOCK + index, mask=exists, other=0.0) * weights
                    whole = tl.sum(part, axis=0)
                    most_below = ((1.0 - p) * whole).to(tl.float32) * _MARGIN
                    high = top
                    while high - low > 1:
                        middle = low + (high - low) // 2
                        others = tl.minimum(
                            part - weights, (GROUP - 1) * _weights(_float(middle, SHIFT), largest, scale)
                        )
                        below = tl.sum(tl.where(keys < middle, part, tl.maximum(others, 0.0)), axis=0)
                        low = tl.where(below <= most_below, middle, low)
                        high = tl.where(below <= most_below, high, middle)
                    n = _listed(exists & (keys >= low), groups)
                    floor = _smallest(source, groups, n, vocab, _float(low, SHIFT), 0.0, largest, scale, GROUP, BLOCK)
                    low = _key(floor, SHIFT).to(tl.int64)
                goal = whole.to(tl.float64) * p
                low = _search(source, groups, n, vocab, low, top, goal, largest, scale, True, SHIFT, GROUP, BLOCK)
            result = _float(low, SHIFT)
            if least > 0.0:
                n = _listed(exists & (keys >= low) & (weights >= least), groups)
                result = _smallest(source, groups, n, vocab, result, least, largest, scale, GROUP, BLOCK)
    tl.store(out + cell, result)


def cutoff(
    logits: Tensor,
    *,
    inv_temperature: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    query_lens: Tensor | None = None,
    num_draft_tokens: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Temperature, top-k, top-p and min-p as the smallest logit that passes; see :func:`pipespec_kernels.ops.cutoff`, which checks the arguments.

    Weights are added up in float32: if a sum is within a few millionths of ``top_p``, the last logit may or may not pass. Repeated calls give the same
    result.

    Args:
        logits, out: as there.
        inv_temperature: 1 / temperature. This and the next three: one number, or a tensor ``[B]`` on the device: float32, ``top_k`` int32 or int64, ``top_p``
            and ``min_p`` also float64. (A number is written to the device by the host: inside a graph that is captured, give tensors.)
        top_k, top_p, min_p: as there.
        query_lens, num_draft_tokens: int32 ``[B]`` on the device, or None.

    Returns:
        float32 ``[B, Q]`` on the device of the logits, for ``Noise.cutoff``.

    Raises:
        ValueError: more rows or tokens than a launch takes, or a device without the kernels.
    """
    batch, width, vocab = check_limits(logits)
    device = logits.device
    scales = _per_row(inv_temperature, torch.float32, batch, device)
    assert scales is not None
    ks = _per_row(top_k, torch.int64, batch, device, off=0)
    ps = _per_row(top_p, torch.float64, batch, device, off=1)
    min_ps = _per_row(min_p, torch.float64, batch, device, off=0)
    if query_lens is not None and num_draft_tokens is not None:
        query_lens, num_draft_tokens = query_lens.contiguous(), num_draft_tokens.contiguous()
    if out is None:
        out = torch.empty((batch, width), dtype=torch.float32, device=device)
    if batch == 0 or width == 0:
        return out
    group = group_of(vocab)
    block = max(TILE, group)
    groups_block = max(16, triton.next_power_of_2(triton.cdiv(vocab, group)))
    # Per row and group: the largest logit, the sum of the weights, and the list of groups that remain.
    maxima, sums, remaining = torch.empty((3, batch, width, groups_block), dtype=torch.float32, device=device).unbind()
    rows = (
        logits,
        *strides(logits),
        vocab,
        out if query_lens is None else query_lens,
        out if num_draft_tokens is None else num_draft_tokens,
        scales,
        # A filter that is off is not read: any pointer works.
        scales if ks is None else ks,
        scales if ps is None else ps,
        scales if min_ps is None else min_ps,
    )
    options = {
        "HAS_COUNTS": query_lens is not None,
        "HAS_K": ks is not None,
        "HAS_P": ps is not None,
        "HAS_MIN": min_ps is not None,
        "GROUP": group,
        "GROUPS_BLOCK": groups_block,
        "BLOCK": block,
        **dependent(device),
    }
    with on(device):
        cutoff_scan_kernel[(triton.cdiv(vocab, block), width, batch)](
            *rows, maxima, sums, **options, num_warps=SCAN_WARPS
        )
        cutoff_search_kernel[(width, batch)](
            *rows,
            maxima,
            sums,
            remaining.view(torch.int32),
            out,
            **options,
            SHIFT=_SHIFTS[logits.dtype],
            num_warps=SEARCH_WARPS,
        )
    return out


def group_of(vocab: int) -> int:
    """Logits in a group: a power of two that makes at most ``MAX_GROUPS`` groups of a vocabulary below 8 million."""
    return min(TILE, max(MIN_GROUP, int(triton.next_power_of_2(vocab)) // MAX_GROUPS))


def _per_row(
    value: float | Tensor, dtype: torch.dtype, batch: int, device: torch.device, off: float | None = None
) -> Tensor | None:
    """The numbers of a filter; None if it is the number ``off``."""
    if isinstance(value, Tensor):
        return value.contiguous()
    return None if value == off else torch.full((batch,), value, dtype=dtype, device=device)
