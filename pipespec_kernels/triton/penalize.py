"""``penalize``: penalties, biases and a bitmask on logits in place, in one launch.

A block of threads has one column: it counts the tokens that the column has seen in a table of the vocabulary's size, then takes each entry back with an
atomic exchange. The thread that gets the count owns the token, so each token changes once, and the table is zero again. With a bitmask, further blocks
write -inf tile by tile. The first block writes -inf, too, where a bit is 0, so their order does not matter.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from pipespec_kernels.triton import launch
from pipespec_kernels.triton.launch import MIN_WIDTH_BLOCK, UNSPECIALIZED, begin_dependent, dependent, on, strides
from pipespec_kernels.triton.selection import invalid

BLOCK = 1024
SEEN = tl.constexpr(1 << 30)
"""In an entry of the table: the token is in the prompt. The bits below count generated occurrences."""


@triton.jit
def allowed(mask, ids, inside, HAS_BITMASK: tl.constexpr):
    """Whether the bit of each id is 1."""
    if HAS_BITMASK:
        words = tl.load(mask + (ids >> 5), mask=inside, other=0)
        return ((words >> (ids & 31)) & 1) != 0
    else:
        return inside


@triton.jit
def count(table, ids, inside, generated):
    tl.atomic_add(table + ids, 1, mask=inside & generated, sem="relaxed", scope="cta")
    tl.atomic_or(table + ids, SEEN, mask=inside & ~generated, sem="relaxed", scope="cta")


@triton.jit
def apply(source, table, ids, inside, mask, repetition, presence, frequency, HAS_BITMASK: tl.constexpr):
    entry = tl.atomic_xchg(table + ids, 0, mask=inside, sem="relaxed", scope="cta")
    owns = inside & (entry != 0)
    x = tl.load(source + ids, mask=owns, other=0.0)
    x = tl.where(x < 0.0, x * repetition, tl.div_rn(x, repetition + tl.zeros_like(x)))
    occurrences = entry & (SEEN - 1)
    # Two subtractions, each rounded by itself.
    x = tl.where(occurrences > 0, (x - frequency * occurrences.to(tl.float32)) - presence, x)
    x = tl.where(allowed(mask, ids, owns, HAS_BITMASK), x, float("-inf"))
    tl.store(source + ids, x, mask=owns)


@triton.jit(**UNSPECIALIZED)
def penalize_kernel(
    logits,
    logits_stride_b,
    logits_stride_q,
    vocab,
    tokens,
    tokens_stride_b,
    tokens_stride_q,
    history,
    history_stride,
    lengths,
    repetition,
    presence,
    frequency,
    prompt_lengths,
    bias_ids,
    bias,
    num_biases,
    query_lens,
    num_draft_tokens,
    width,
    bitmask,
    table,
    HAS_COUNTS: tl.constexpr,
    HAS_BITMASK: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    part = tl.program_id(0)
    column = tl.program_id(1)
    row = tl.program_id(2)
    fed = width
    draft_tokens = width - 1
    if HAS_COUNTS:
        fed = tl.load(query_lens + row)
        draft_tokens = tl.load(num_draft_tokens + row)
    bad = invalid(fed, draft_tokens, width)
    if HAS_COUNTS:
        needed = (fed > 0) & ~bad & (column < fed) & (column >= fed - 1 - draft_tokens)
    else:
        needed = column < fed

    place = row.to(tl.int64) * width + column
    source = logits + row.to(tl.int64) * logits_stride_b + column.to(tl.int64) * logits_stride_q
    mask = bitmask + place * ((vocab + 31) // 32)
    lanes = tl.arange(0, BLOCK)
    length = tl.load(lengths + row)
    said = history + row.to(tl.int64) * history_stride
    fed_tokens = tokens + row.to(tl.int64) * tokens_stride_b
    valid = (length >= 0) & (length <= history_stride)
    if part == 0:
        if valid & (length + column < history_stride):
            tl.store(said + length + column, tl.load(fed_tokens + column.to(tl.int64) * tokens_stride_q).to(tl.int32))
        if needed & valid:
            own = table + place * vocab
            prompt = tl.load(prompt_lengths + row)
            columns = tl.arange(0, WIDTH_BLOCK)
            new = tl.load(fed_tokens + columns.to(tl.int64) * tokens_stride_q, mask=columns <= column, other=-1)
            new = new.to(tl.int32)
            is_new = (columns <= column) & (new >= 0) & (new < vocab)

            at = 0
            while at < num_biases:
                there = at + lanes < num_biases
                ids = tl.load(bias_ids + row.to(tl.int64) * num_biases + at + lanes, mask=there, other=-1)
                inside = there & (ids >= 0) & (ids < vocab)
                amount = tl.load(bias + row.to(tl.int64) * num_biases + at + lanes, mask=inside, other=0.0)
                x = tl.load(source + ids, mask=inside, other=0.0) + amount
                x = tl.where(allowed(mask, ids, inside, HAS_BITMASK), x, float("-inf"))
                tl.store(source + ids, x, mask=inside)
                at += BLOCK

            at = 0
            while at < length:
                ids = tl.load(said + at + lanes, mask=at + lanes < length, other=-1)
                count(own, ids, (ids >= 0) & (ids < vocab), at + lanes >= prompt)
                at += BLOCK
            count(own, new, is_new, length + columns >= prompt)
            tl.debug_barrier()  # all counts and biases before the first exchange
            numbers = tl.load(repetition + row), tl.load(presence + row), tl.load(frequency + row)
            at = 0
            while at < length:
                ids = tl.load(said + at + lanes, mask=at + lanes < length, other=-1)
                inside = (ids >= 0) & (ids < vocab)
                apply(source, own, ids, inside, mask, numbers[0], numbers[1], numbers[2], HAS_BITMASK)
                at += BLOCK
            apply(source, own, new, is_new, mask, numbers[0], numbers[1], numbers[2], HAS_BITMASK)
    elif needed:
        ids = (part - 1) * BLOCK + lanes
        inside = ids < vocab
        tl.store(source + ids, float("-inf"), mask=inside & ~allowed(mask, ids, inside, HAS_BITMASK))


def penalize(
    logits: Tensor,
    tokens: Tensor,
    history: Tensor,
    lengths: Tensor,
    penalties: tuple[Any, ...],
    query_lens: Tensor | None,
    num_draft_tokens: Tensor | None,
    bitmask: Tensor | None,
    workspace: Tensor,
) -> None:
    """See :func:`pipespec_kernels.ops.penalize`, which checks the arguments; ``penalties``: its fields, in order."""
    launch.check_device(logits.device, "logits")
    batch, width, vocab = logits.shape
    repetition, presence, frequency, prompt_lengths, bias_ids, bias = penalties
    if batch == 0 or width == 0:
        return
    parts = 1 if bitmask is None else 1 + triton.cdiv(vocab, BLOCK)
    with on(logits.device):
        penalize_kernel[(parts, width, batch)](
            logits,
            *strides(logits),
            vocab,
            tokens,
            *strides(tokens),
            history,
            history.shape[1],
            lengths,
            repetition,
            presence,
            frequency,
            prompt_lengths,
            lengths if bias_ids is None else bias_ids,
            repetition if bias is None else bias,
            0 if bias_ids is None else bias_ids.shape[1],
            lengths if query_lens is None else query_lens,
            lengths if num_draft_tokens is None else num_draft_tokens,
            width,
            lengths if bitmask is None else bitmask,
            workspace,
            HAS_COUNTS=query_lens is not None,
            HAS_BITMASK=bitmask is not None,
            BLOCK=BLOCK,
            WIDTH_BLOCK=max(MIN_WIDTH_BLOCK, triton.next_power_of_2(width)),
            **dependent(logits.device),
            num_warps=4,
            enable_fp_fusion=False,
        )
