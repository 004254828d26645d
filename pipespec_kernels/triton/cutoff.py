"""``cutoff``: top-k, top-p and min-p as the smallest logit of a row that passes, without a sort.

Each row has one block of threads. Logits are compared as integers in the order of floats. The threshold is found by quartering: a pass over the row,
which is in L2 by then, counts the logits at or above three pivots (top-k), or adds up their weights (top-p), and keeps one quarter of the interval.
16 bits need at most 8 passes, 32 bits 16.

Invariants of the search: the logits at or above ``low`` reach the goal, those at or above ``high`` do not. Sums over
more of the same non-negative terms, in the same order, are never smaller in floating point either, so both hold with
rounding, and the search ends at a logit of the row: between two neighbouring logits nothing changes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pipespec_kernels import reference
from pipespec_kernels.triton.launch import check, check_logits, check_written, on

_LOG2E = tl.constexpr(1.4426950408889634)
BLOCK, WARPS = 2048, 16  # per row; not tuned on a device
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
    bits = (key << SHIFT) | tl.where(key < 0, (1 << SHIFT) - 1, 0)
    bits = bits.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weights(x, largest, scale):
    """``exp(x * scale)`` relative to the largest, which is 1 even if it is infinite."""
    y = x * scale
    most = largest * scale
    return tl.where(y == most, 1.0, tl.exp2((y - most) * _LOG2E))


@triton.jit
def cutoff_kernel(
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
    out,
    width,
    HAS_COUNTS: tl.constexpr,
    HAS_K: tl.constexpr,
    HAS_P: tl.constexpr,
    HAS_MIN: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.program_id(0)
    row = tl.program_id(1)
    source = logits + row.to(tl.int64) * logits_stride_b + column.to(tl.int64) * logits_stride_q
    result = float("-inf")
    read = column >= 0
    if HAS_COUNTS:
        fed = tl.load(query_lens + row)
        read = (column < fed) & (column >= fed - 1 - tl.load(num_draft_tokens + row))
    scale = tl.load(inv_temperature + row)
    k = 0
    if HAS_K:
        k = tl.load(top_k + row)
        k = tl.where((k > 0) & (k < vocab), k, 0).to(tl.int32)
    p = 1.0
    if HAS_P:
        p = tl.load(top_p + row)
    least = 0.0
    if HAS_MIN:
        least = tl.load(min_p + row)
    lanes = tl.arange(0, BLOCK)

    if read & ((k > 0) | (p < 1.0) | (least > 0.0)):
        highest = tl.full([BLOCK], float("-inf"), tl.float32)
        smallest = tl.full([BLOCK], float("inf"), tl.float32)
        nans = tl.full([BLOCK], 0, tl.int32)
        start = 0
        while start < vocab:
            inside = start + lanes < vocab
            x = tl.load(source + start + lanes, mask=inside, other=float("-inf")).to(tl.float32)
            highest = tl.maximum(highest, x)
            smallest = tl.minimum(smallest, tl.where(inside, x, float("inf")))
            nans = nans | (x != x).to(tl.int32)
            start += BLOCK
        largest = tl.max(highest, axis=0)
        if (tl.max(nans, axis=0) == 0) & (largest > float("-inf")):
            bottom = _key(tl.min(smallest, axis=0), SHIFT).to(tl.int64)
            top = _key(largest, SHIFT).to(tl.int64) + 1

            low = bottom
            high = tl.where(k > 0, top, bottom + 1)  # without a filter the search has ended already
            while high - low > 1:
                pivot1 = low + (high - low) // 4
                pivot2 = low + (high - low) // 2
                pivot3 = low + (high - low) * 3 // 4
                float1 = _float(pivot1, SHIFT)
                float2 = _float(pivot2, SHIFT)
                float3 = _float(pivot3, SHIFT)
                count1 = tl.full([BLOCK], 0, tl.int32)
                count2 = count1
                count3 = count1
                start = 0
                while start < vocab:
                    # Padded lanes are -inf: they count only if every logit of the row counts.
                    x = tl.load(source + start + lanes, mask=start + lanes < vocab, other=float("-inf")).to(tl.float32)
                    count1 += (x >= float1).to(tl.int32)
                    count2 += (x >= float2).to(tl.int32)
                    count3 += (x >= float3).to(tl.int32)
                    start += BLOCK
                reached1 = tl.sum(count1, axis=0) >= k
                reached2 = tl.sum(count2, axis=0) >= k
                reached3 = tl.sum(count3, axis=0) >= k
                high = tl.where(reached3, high, tl.where(reached2, pivot3, tl.where(reached1, pivot2, pivot1)))
                low = tl.where(reached3, pivot3, tl.where(reached2, pivot2, tl.where(reached1, pivot1, low)))

            if HAS_P:
                # Of the logits that top-k kept: the whole weight, then the smallest set with the share p of it.
                floor = _float(low, SHIFT)
                total = tl.full([BLOCK], 0.0, tl.float32)
                start = 0
                while start < vocab:
                    x = tl.load(source + start + lanes, mask=start + lanes < vocab, other=float("-inf")).to(tl.float32)
                    total += tl.where(x >= floor, _weights(x, largest, scale), 0.0)
                    start += BLOCK
                goal = tl.sum(total, axis=0) * p
                high = tl.where(p < 1.0, top, low + 1)
                while high - low > 1:
                    pivot1 = low + (high - low) // 4
                    pivot2 = low + (high - low) // 2
                    pivot3 = low + (high - low) * 3 // 4
                    float1 = _float(pivot1, SHIFT)
                    float2 = _float(pivot2, SHIFT)
                    float3 = _float(pivot3, SHIFT)
                    mass1 = tl.full([BLOCK], 0.0, tl.float32)
                    mass2 = mass1
                    mass3 = mass1
                    start = 0
                    while start < vocab:
                        x = tl.load(source + start + lanes, mask=start + lanes < vocab, other=float("-inf")).to(
                            tl.float32
                        )
                        weight = _weights(x, largest, scale)
                        mass1 += tl.where(x >= float1, weight, 0.0)
                        mass2 += tl.where(x >= float2, weight, 0.0)
                        mass3 += tl.where(x >= float3, weight, 0.0)
                        start += BLOCK
                    reached1 = tl.sum(mass1, axis=0) >= goal
                    reached2 = tl.sum(mass2, axis=0) >= goal
                    reached3 = tl.sum(mass3, axis=0) >= goal
                    high = tl.where(reached3, high, tl.where(reached2, pivot3, tl.where(reached1, pivot2, pivot1)))
                    low = tl.where(reached3, pivot3, tl.where(reached2, pivot2, tl.where(reached1, pivot1, low)))

            result = _float(low, SHIFT)
            if HAS_MIN:
                floor = result
                kept = tl.full([BLOCK], float("inf"), tl.float32)
                start = 0
                while start < vocab:
                    x = tl.load(source + start + lanes, mask=start + lanes < vocab, other=float("-inf")).to(tl.float32)
                    stays = (start + lanes < vocab) & (x >= floor) & (_weights(x, largest, scale) >= least)
                    kept = tl.minimum(kept, tl.where(stays, x, float("inf")))
                    start += BLOCK
                result = tl.where(least > 0.0, tl.min(kept, axis=0), result)
    tl.store(out + row.to(tl.int64) * width + column, result)


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
    """Temperature, top-k, top-p and min-p as the smallest logit that passes; see :func:`pipespec_kernels.ops.cutoff`.

    The filters are those of HuggingFace's warpers, in their order, each applied to the logits that the one before kept. Logits equal to a kept one
    are all kept. Weights are added up in float32: if a sum is within a few millionths of ``top_p``, the last logit may or may not pass. Repeated
    calls give the same result. A row with a NaN, or with -inf alone, or for which all filters are off, gets -inf.

    Args:
        logits: ``[B, Q, V]``, float32, bfloat16 or float16. Any strides in the first two dimensions.
        inv_temperature: 1 / temperature, finite and positive. This and the next three: one number, or a tensor ``[B]`` on
            the device: float32, but ``top_k`` int32. (A number is written to the device by the host: inside a graph
            that is captured, give tensors.)
        top_k: 0 or at least V: off.
        top_p: ``0 .. 1``; 1: off.
        min_p: ``0 .. 1``; 0: off.
        query_lens, num_draft_tokens: int32 ``[B]`` on the device, as for :func:`verify`: only the columns that it may read are
            computed, the others get -inf. None: all columns.
        out: contiguous float32 ``[B, Q]`` to write to; must overlap no other argument.

    Returns:
        float32 ``[B, Q]`` on the device of the logits, for ``Noise.cutoff``.

    Raises:
        TypeError: not a tensor or number, or a dtype that is not supported.
        ValueError: shapes, strides, devices or numbers that do not fit. Nothing has been written then. Numbers in tensors
            are not checked.
    """
    batch, width, vocab = check_logits(logits)
    device = logits.device
    scales = _per_row(inv_temperature, "inv_temperature", torch.float32, batch, device)
    assert scales is not None
    ks = _per_row(top_k, "top_k", torch.int32, batch, device, off=0)
    ps = _per_row(top_p, "top_p", torch.float32, batch, device, off=1)
    min_ps = _per_row(min_p, "min_p", torch.float32, batch, device, off=0)
    if (query_lens is None) != (num_draft_tokens is None):
        raise ValueError("query_lens and num_draft_tokens go together")
    if query_lens is not None:
        query_lens = check(query_lens, "query_lens", (torch.int32,), (batch,), device).contiguous()
        num_draft_tokens = check(num_draft_tokens, "num_draft_tokens", (torch.int32,), (batch,), device).contiguous()
        if device.type == "cpu":
            reference.check_counts(query_lens, num_draft_tokens, width)
    if out is None:
        out = torch.empty((batch, width), dtype=torch.float32, device=device)
    else:
        check_written(out, "out", (torch.float32,), (batch, width), device)
    if batch == 0 or width == 0:
        return out
    block = BLOCK if device.type == "cuda" else min(1 << 15, max(16, triton.next_power_of_2(vocab)))
    with on(device):
        cutoff_kernel[(width, batch)](
            logits,
            logits.stride(0),
            logits.stride(1),
            vocab,
            out if query_lens is None else query_lens,
            out if num_draft_tokens is None else num_draft_tokens,
            scales,
            # A filter that is off is not read: any pointer works.
            scales if ks is None else ks,
            scales if ps is None else ps,
            scales if min_ps is None else min_ps,
            out,
            width,
            HAS_COUNTS=query_lens is not None,
            HAS_K=ks is not None,
            HAS_P=ps is not None,
            HAS_MIN=min_ps is not None,
            SHIFT=_SHIFTS[logits.dtype],
            BLOCK=block,
            num_warps=WARPS,
        )
    return out


def _per_row(
    value: Any, name: str, dtype: torch.dtype, batch: int, device: torch.device, off: float | None = None
) -> Tensor | None:
    """The checked numbers of a filter; None if it is the number ``off``."""
    if isinstance(value, Tensor):
        return check(value, name, (dtype,), (batch,), device).contiguous()
    if isinstance(value, bool) or not isinstance(value, int if dtype is torch.int32 else (int, float)):
        raise TypeError(f"{name} must be a number or a tensor, got {type(value).__name__}")
    if name == "inv_temperature":
        fits = 0 < value < float("inf")
    else:
        fits = 0 <= value <= (2**31 - 1 if name == "top_k" else 1)
    if not fits:
        raise ValueError(f"{name} is not valid: {value}")
    if value == off:
        return None
    return torch.full((batch,), value, dtype=dtype, device=device)
