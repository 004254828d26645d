"""``logprobs``: log-probabilities of selected tokens and of the likeliest ones, in one launch.

A block of threads has one selected column. It reads the row once for the maximum and the sum (Milakov, Gimelshein, "Online normalizer calculation for softmax"
(2018), algorithm 3). Each of the likeliest tokens is one more pass, for the largest key below the last one found; the row then lies in the L2 cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pipespec_kernels.triton import launch
from pipespec_kernels.triton.launch import UNSPECIALIZED, begin_dependent, dependent, on, strides
from pipespec_kernels.triton.selection import invalid

BLOCK, WARPS = 2048, 8
_LOWEST = tl.constexpr(-(1 << 63))


@triton.jit
def key_of(x, ids):
    """Keys in the order of the logits, of equal ones the lowest id first."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # + 0.0 makes +0 of -0
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def grown(total, before, after):
    """A sum of exponentials relative to a maximum, after that has grown. Where there was none the sum is 0, or a NaN that stays."""
    return total * tl.where(before == float("-inf"), 0.0, tl.exp(before - after))


@triton.jit(**UNSPECIALIZED)
def logprobs_kernel(
    logits,
    logits_stride_b,
    logits_stride_q,
    vocab,
    selected,
    query_lens,
    num_draft_tokens,
    width,
    inv_temperature,
    cutoff,
    cutoff_stride_b,
    chosen,
    top_ids,
    top,
    top_n,
    HAS_SCALE: tl.constexpr,
    HAS_CUTOFF: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    step = tl.program_id(0)
    row = tl.program_id(1)
    fed = tl.load(query_lens + row)
    draft_tokens = tl.load(num_draft_tokens + row)
    place = row.to(tl.int64) * width + step
    token = tl.load(selected + place)
    reads = ~invalid(fed, draft_tokens, width) & (step <= draft_tokens) & (fed > 0)
    reads = reads & (token >= 0) & (token < vocab)
    if not reads:
        tl.store(chosen + place, float("-inf"))
        i = 0
        while i < top_n:
            tl.store(top_ids + place * top_n + i, -1)
            tl.store(top + place * top_n + i, float("-inf"))
            i += 1
    else:
        column = fed - 1 - draft_tokens + step
        source = logits + row.to(tl.int64) * logits_stride_b + column.to(tl.int64) * logits_stride_q
        lanes = tl.arange(0, BLOCK)
        scale = 1.0
        if HAS_SCALE:
            scale = tl.load(inv_temperature + row)
        lowest = float("-inf")
        if HAS_CUTOFF:
            lowest = tl.load(cutoff + row.to(tl.int64) * cutoff_stride_b + column)
        peak = tl.full([BLOCK], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        start = 0
        while start < vocab:
            x = tl.load(source + start + lanes, mask=start + lanes < vocab, other=float("-inf")).to(tl.float32)
            # -inf times a temperature that is no number would be a NaN after the vocabulary.
            y = tl.where((x < lowest) | (x == float("-inf")), float("-inf"), x * scale)
            after = tl.maximum(peak, y)
            total = grown(total, peak, after) + tl.where(y == float("-inf"), 0.0, tl.exp(y - after))
            peak = after
            start += BLOCK
        largest = tl.max(peak, axis=0)
        mass = tl.sum(grown(total, peak, largest), axis=0)
        normalizer = largest + tl.log(mass)
        usable = (mass > 0.0) & (normalizer - normalizer == 0.0)
        normalizer = tl.where(usable, normalizer, float("nan"))
        own = tl.load(source + token).to(tl.float32)
        # NaN where there is no distribution, below the cutoff too.
        dropped = (own < lowest) | (own == float("-inf"))
        tl.store(chosen + place, tl.where(dropped, normalizer * 0.0 + float("-inf"), own * scale - normalizer))

        i = 0
        last = tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64)
        while i < top_n:
            best = tl.full([BLOCK], _LOWEST, tl.int64)
            start = 0
            while start < vocab:
                ids = start + lanes
                x = tl.load(source + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
                keys = key_of(x, ids)
                counts = (ids < vocab) & (x > float("-inf")) & ~(x < lowest) & (keys < last)
                best = tl.maximum(best, tl.where(counts, keys, _LOWEST))
                start += BLOCK
            last = tl.max(best, axis=0)
            found = usable & (last != _LOWEST)
            best_id = 0x7FFFFFFF - (last & 0x7FFFFFFF).to(tl.int32)
            likely = tl.load(source + best_id, mask=found, other=0.0).to(tl.float32)
            value = tl.where(usable, float("-inf"), float("nan"))
            tl.store(top_ids + place * top_n + i, tl.where(found, best_id, -1))
            tl.store(top + place * top_n + i, tl.where(found, likely * scale - normalizer, value))
            i += 1


def logprobs(
    logits: Tensor,
    selected: Tensor,
    query_lens: Tensor,
    num_draft_tokens: Tensor,
    inv_temperature: Tensor | None,
    cutoff: Tensor | None,
    top_n: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`pipespec_kernels.ops.logprobs`, which checks the arguments. All are on the device of the logits."""
    launch.check_device(logits.device, "logits")
    batch, width, vocab = logits.shape
    device = logits.device
    chosen = torch.empty((batch, width), dtype=torch.float32, device=device)
    top_ids = torch.empty((batch, width, top_n), dtype=torch.int32, device=device)
    top = torch.empty((batch, width, top_n), dtype=torch.float32, device=device)
    if batch == 0 or width == 0:
        return chosen, top_ids, top
    with on(device):
        logprobs_kernel[(width, batch)](
            logits,
            *strides(logits),
            vocab,
            selected.contiguous(),
            query_lens,
            num_draft_tokens,
            width,
            chosen if inv_temperature is None else inv_temperature,
            chosen if cutoff is None else cutoff,
            0 if cutoff is None else cutoff.stride(0),
            chosen,
            top_ids,
            top,
            top_n,
            HAS_SCALE=inv_temperature is not None,
            HAS_CUTOFF=cutoff is not None,
            BLOCK=BLOCK,
            **dependent(device),
            num_warps=WARPS,
        )
    return chosen, top_ids, top
