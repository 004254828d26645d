"""``rejection_sample``: rejection sampling of draft tokens that were drawn from a draft's distribution.

Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding" (ICML 2023), algorithm 1, and Chen
et al., "Accelerating Large Language Model Decoding with Speculative Sampling" (2023), algorithm 2: a draft token ``h`` drawn
from ``q`` is accepted where ``u q(h) < p(h)``; the first rejected one is replaced by a draw from the residual, proportional to ``max(p - q, 0)``.
After the last accepted one comes a draw from ``p``. The result is distributed as a draw from ``p`` alone, provided that the draft's draw, ``u`` and
the residual's draw are independent.

Two launches. The first takes the logarithms of the sums of exponentials, a piece of a column per block of threads; the last
block of a column tests its draft token. The second reads, for each row, the one column in which a token is to be drawn, and draws
it by Gumbel-max: the largest ``ln(p - q) + G = x / T + ln(1 - q / p) + G + constant``. No probability is ever stored.

As in ``verify``, a rejection is noted, and blocks that start later read nothing of the columns after it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pipespec_kernels.noise import INDEPENDENT, Noise, Streams
from pipespec_kernels.triton.launch import (
    MIN_WIDTH_BLOCK,
    UNSPECIALIZED,
    Config,
    RowState,
    Workspace,
    begin_dependent,
    check_limits,
    cut,
    default_config,
    dependent,
    fields,
    on,
    results,
    strides,
)
from pipespec_kernels.triton.philox import INTERPRETED, IS_INTERPRETED, draw, draw4, lg2, perturbed, uniform
from pipespec_kernels.triton.selection import (
    LOADS,
    LOADS_OF_FLOAT32,
    NOTHING,
    advance,
    as_words,
    better,
    invalid,
    no_scale,
    pack_best,
    unpack_id,
)

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
# The start of a running maximum: lower than any logit that matters, and finite, so that differences are numbers.
_FLOOR = tl.constexpr(-1e30)
# Logits that a lane adds up between two comparisons with the running maximum, each of which costs one more exponential.
_GROUP = tl.constexpr(8)
# Splits of a column whose sums the last block adds up, so that the usual divisions share a kernel.
_MIN_SPLITS_BLOCK = 128


@triton.jit
def _add_exponentials(source, start, vocab, scale, lowest, m, s, BLOCK: tl.constexpr):
    """Add a tile to the lanes' ``s``, the sums of ``2^(y - m)``; ``y`` is the logit in powers of two."""
    offsets = start + _GROUP * tl.arange(0, BLOCK // _GROUP)[:, None] + tl.arange(0, _GROUP)[None, :]
    x = tl.load(source + offsets, mask=offsets < vocab, other=float("-inf")).to(tl.float32)
    y = tl.where(x < lowest, float("-inf"), x * scale)
    higher = tl.maximum(m, tl.max(y, axis=1))
    s = s * tl.exp2(m - higher) + tl.sum(tl.exp2(y - higher[:, None]), axis=1)
    return higher, s


@triton.jit
def _logarithm_of_sum(slots, splits, SPLITS_BLOCK: tl.constexpr):
    """The binary logarithm of a column's sum. The slots are added in order, so that it does not depend on the order of arrival."""
    pieces = tl.arange(0, SPLITS_BLOCK)
    m = tl.load(slots + 4 * pieces, mask=pieces < splits, other=_FLOOR, cache_modifier=".cg")
    s = tl.load(slots + 4 * pieces + 1, mask=pieces < splits, other=0.0, cache_modifier=".cg")
    most = tl.max(m, axis=0)
    return most + tl.log2(tl.sum(s * tl.exp2(m - most), axis=0))


@triton.jit(**UNSPECIALIZED)
def rejection_test_kernel(
    logits,
    logits_stride_b,
    logits_stride_q,
    draft_logits,
    draft_stride_b,
    draft_stride_q,
    vocab,
    tokens,
    tokens_stride_b,
    tokens_stride_q,
    query_lens,
    num_draft_tokens,
    width,
    selected,
    accepted,
    sums,
    lse,
    arrivals,
    ticket,
    rejected,
    seeds,
    positions,
    inv_temperature,
    draft_inv_temperature,
    cutoff,
    cutoff_stride_b,
    cutoff_stride_q,
    draft_cutoff,
    draft_cutoff_stride_b,
    draft_cutoff_stride_q,
    stream,
    splits,
    span,
    HAS_DRAFT: tl.constexpr,
    HAS_CUTOFF: tl.constexpr,
    HAS_DRAFT_CUTOFF: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    split = tl.program_id(0)
    row = tl.program_id(1)
    column = tl.program_id(2)
    row64 = row.to(tl.int64)
    fed = tl.load(query_lens + row)
    draft_tokens = tl.load(num_draft_tokens + row)
    bad = invalid(fed, draft_tokens, width)
    scale = tl.load(inv_temperature + row)
    bad = bad | (no_scale(scale) & (fed != 0))
    if HAS_DRAFT:
        draft_scale = tl.load(draft_inv_temperature + row)
        bad = bad | (no_scale(draft_scale) & (fed != 0))
    first = fed - 1 - draft_tokens
    columns = tl.arange(0, WIDTH_BLOCK)

    if bad | (fed == 0) | (draft_tokens == 0):
        if (column == 0) & (split == 0):
            tl.store(selected + row64 * width + columns, -1, mask=columns < width)
            tl.store(accepted + row, tl.where(bad, -1, 0))
    elif column < draft_tokens:
        at = (first + column).to(tl.int64)
        scale = scale * _LOG2E
        source = logits + row64 * logits_stride_b + at * logits_stride_q
        lowest = float("-inf")
        if HAS_CUTOFF:
            lowest = tl.load(cutoff + row64 * cutoff_stride_b + at * cutoff_stride_q)
        if HAS_DRAFT:
            draft_scale = draft_scale * _LOG2E
            draft_source = draft_logits + row64 * draft_stride_b + at * draft_stride_q
            draft_lowest = float("-inf")
            if HAS_DRAFT_CUTOFF:
                draft_lowest = tl.load(draft_cutoff + row64 * draft_cutoff_stride_b + at * draft_cutoff_stride_q)
        slots = sums + (row64 * width + column) * splits * 4
        if tl.load(rejected + row, cache_modifier=".cg") <= width - column:
            m = tl.full([BLOCK // _GROUP], _FLOOR, tl.float32)
            s = tl.full([BLOCK // _GROUP], 0.0, tl.float32)
            if HAS_DRAFT:
                draft_m = m
                draft_s = s
            begin = split * span
            end = tl.minimum(begin + span, vocab)
            if IS_INTERPRETED:  # its loops cannot run over tensors
                start = begin
                while start < end:
                    m, s = _add_exponentials(source, start, vocab, scale, lowest, m, s, BLOCK)
                    if HAS_DRAFT:
                        draft_m, draft_s = _add_exponentials(
                            draft_source, start, vocab, draft_scale, draft_lowest, draft_m, draft_s, BLOCK
                        )
                    start += BLOCK
            else:
                loads: tl.constexpr = LOADS_OF_FLOAT32 if logits.dtype.element_ty == tl.float32 else LOADS
                for start in tl.range(begin, end, BLOCK, num_stages=loads):
                    m, s = _add_exponentials(source, start, vocab, scale, lowest, m, s, BLOCK)
                    if HAS_DRAFT:
                        draft_m, draft_s = _add_exponentials(
                            draft_source, start, vocab, draft_scale, draft_lowest, draft_m, draft_s, BLOCK
                        )
            slot = slots + split * 4
            highest = tl.max(m, axis=0)
            tl.store(slot, highest)
            tl.store(slot + 1, tl.sum(s * tl.exp2(m - highest), axis=0))
            if HAS_DRAFT:
                highest = tl.max(draft_m, axis=0)
                tl.store(slot + 2, highest)
                tl.store(slot + 3, tl.sum(draft_s * tl.exp2(draft_m - highest), axis=0))

        # Release: our sums before our ticket. Acquire: all sums of the column, if ours is the last.
        if tl.atomic_add(arrivals + row64 * width + column, 1, sem="acq_rel") == splits - 1:
            # Of a column after a rejection the sums may be incomplete. They are not used.
            if tl.load(rejected + row, cache_modifier=".cg") <= width - column:
                draft_token = tl.load(tokens + row64 * tokens_stride_b + (at + 1) * tokens_stride_q).to(tl.int64)
                real = (draft_token >= 0) & (draft_token < vocab)
                target_lse = _logarithm_of_sum(slots, splits, SPLITS_BLOCK)
                x = tl.load(source + draft_token, mask=real, other=float("-inf")).to(tl.float32)
                p = tl.exp2(tl.where(x < lowest, float("-inf"), x) * scale - target_lse)
                q = 1.0  # without draft logits the draft token has probability 1
                draft_lse = 0.0
                if HAS_DRAFT:
                    draft_lse = _logarithm_of_sum(slots + 2, splits, SPLITS_BLOCK)
                    x = tl.load(draft_source + draft_token, mask=real, other=float("-inf")).to(tl.float32)
                    q = tl.exp2(tl.where(x < draft_lowest, float("-inf"), x) * draft_scale - draft_lse)
                r, _1, _2, _3 = draw4(tl.load(seeds + row), tl.load(positions + row) + at, stream, at * 0)
                # Below 1: with p = q the test must pass for every u.
                u = tl.minimum(uniform(r, True), 1.0 - 2.0**-24)
                # False where either is NaN: a draft token is then rejected and the row's own choice stands.
                if ~(real & (u * q < p)):
                    tl.store(lse + 2 * (row64 * width + column), target_lse)
                    tl.store(lse + 2 * (row64 * width + column) + 1, draft_lse)
                    tl.atomic_max(rejected + row, (width - column).to(tl.int64), sem="relaxed")

            # The same for notes and the columns of the row.
            if tl.atomic_add(ticket + row, 1, sem="acq_rel") == draft_tokens - 1:
                known = tl.load(rejected + row, cache_modifier=".cg")
                agreed = tl.where(known == 0, draft_tokens, width - known.to(tl.int32))
                draft_ids = tl.load(
                    tokens + row64 * tokens_stride_b + (first + 1 + columns).to(tl.int64) * tokens_stride_q,
                    mask=columns < agreed,
                    other=-1,
                ).to(tl.int32)
                tl.store(selected + row64 * width + columns, draft_ids, mask=columns < width)
                tl.store(accepted + row, agreed)
                tl.debug_barrier()  # every thread has read the note that is overwritten now
                tl.store(arrivals + row64 * width + columns, 0, mask=columns < draft_tokens)
                tl.store(rejected + row, 0)
                tl.store(ticket + row, 0)


@triton.jit(**UNSPECIALIZED)
def rejection_choose_kernel(
    logits,
    logits_stride_b,
    logits_stride_q,
    draft_logits,
    draft_stride_b,
    draft_stride_q,
    vocab,
    tokens,
    tokens_stride_b,
    tokens_stride_q,
    query_lens,
    num_draft_tokens,
    width,
    selected,
    accepted,
    lse,
    best,
    ticket,
    next_token,
    length,
    epoch,
    seeds,
    positions,
    inv_temperature,
    draft_inv_temperature,
    cutoff,
    cutoff_stride_b,
    cutoff_stride_q,
    draft_cutoff,
    draft_cutoff_stride_b,
    draft_cutoff_stride_q,
    stream,
    splits,
    span,
    HAS_STATE: tl.constexpr,
    HAS_DRAFT: tl.constexpr,
    HAS_CUTOFF: tl.constexpr,
    HAS_DRAFT_CUTOFF: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    split = tl.program_id(0)
    row = tl.program_id(1)
    row64 = row.to(tl.int64)
    fed = tl.load(query_lens + row)
    draft_tokens = tl.load(num_draft_tokens + row)
    agreed = tl.load(accepted + row)

    if (fed != 0) & (agreed >= 0):
        column = (fed - 1 - draft_tokens + agreed).to(tl.int64)
        of_rejected = lse + 2 * (row64 * width + agreed)
        target_lse = tl.load(of_rejected, mask=agreed < draft_tokens, other=0.0)
        draft_lse = tl.load(of_rejected + 1, mask=agreed < draft_tokens, other=0.0)
        # After the last draft token, and where one of the two has no distribution (NaN), the target's row alone decides.
        residual = (agreed < draft_tokens) & (target_lse == target_lse) & (draft_lse == draft_lse)
        scale = tl.load(inv_temperature + row)
        seed = tl.load(seeds + row)
        position = tl.load(positions + row) + column
        source = logits + row64 * logits_stride_b + column * logits_stride_q
        lowest = float("-inf")
        if HAS_CUTOFF:
            lowest = tl.load(cutoff + row64 * cutoff_stride_b + column * cutoff_stride_q)
        if HAS_DRAFT:
            draft_scale = tl.load(draft_inv_temperature + row) * _LOG2E
            draft_source = draft_logits + row64 * draft_stride_b + column * draft_stride_q
            draft_lowest = float("-inf")
            if HAS_DRAFT_CUTOFF:
                draft_lowest = tl.load(draft_cutoff + row64 * draft_cutoff_stride_b + column * draft_cutoff_stride_q)
        else:
            rejected = tl.load(
                tokens + row64 * tokens_stride_b + (column + 1) * tokens_stride_q, mask=residual, other=-1
            )
        lanes = tl.arange(0, BLOCK)
        start = split * span
        end = tl.minimum(start + span, vocab)
        # The best of the residual, and the best of the target's row, because rounding can empty the residual.
        top = tl.full([BLOCK], float("-inf"), tl.float32)
        tile = tl.full([BLOCK], 0, tl.int32) + start
        whole_top = top
        whole_tile = tile
        while start < end:
            ids = start + lanes
            x = tl.load(source + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
            score = perturbed(x, scale, draw(seed, position, stream, start, BLOCK), FAST)
            improved = better(score, whole_top) & ~(x < lowest)
            whole_top = tl.where(improved, score, whole_top)
            whole_tile = tl.where(improved, start, whole_tile)
            if HAS_DRAFT:
                # A padded lane of the target counts as -inf and is never chosen, so the draft's logit there has no effect.
                z = tl.load(draft_source + ids, mask=(ids < vocab) & residual, other=0.0).to(tl.float32)
                z = tl.where(z < draft_lowest, float("-inf"), z * draft_scale)
                ratio = tl.exp2((z - draft_lse) - (x * (scale * _LOG2E) - target_lse))
                inside = ratio < 1.0
                score += lg2(tl.where(inside, 1.0 - ratio, 1.0), FAST) * _LN2
            else:
                inside = ids != rejected
            improved = better(score, top) & ~(x < lowest) & inside & residual
            top = tl.where(improved, score, top)
            tile = tl.where(improved, start, tile)
            start += BLOCK
        words = as_words(best) + 2 * row64
        tl.atomic_max(words, pack_best(top, tile + lanes), sem="relaxed")
        tl.atomic_max(words + 1, pack_best(whole_top, whole_tile + lanes), sem="relaxed")

        if tl.atomic_add(ticket + row, 1, sem="acq_rel") == splits - 1:
            word = tl.load(words, cache_modifier=".cg")
            whole_word = tl.load(words + 1, cache_modifier=".cg")
            choice = unpack_id(tl.where((word >> 32).to(tl.uint32) > NOTHING, word, whole_word))
            tl.store(selected + row64 * width + agreed, choice)
            if HAS_STATE:
                advance(next_token, length, epoch, row, choice, agreed, draft_tokens)
            tl.debug_barrier()  # every thread has read the values that are overwritten now
            tl.store(words, 0)
            tl.store(words + 1, 0)
            tl.store(ticket + row, 0)


def rejection_sample(
    logits: Tensor,
    tokens: Tensor,
    query_lens: Tensor,
    num_draft_tokens: Tensor,
    draft_logits: Tensor | None,
    noise: Noise,
    *,
    streams: Streams = INDEPENDENT,
    draft_inv_temperature: Tensor | None = None,
    draft_cutoff: Tensor | None = None,
    state: RowState | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    workspace: Workspace | None = None,
    exact: bool = False,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """Rejection sampling: the accepted draft tokens of each row, and one token drawn after them.

    See :func:`pipespec_kernels.ops.rejection_sample`, which checks the arguments, also for rows without a distribution. In powers of two (times
    ``inv_temperature`` and lg2 e), a logit far below -1e30 counts as -inf. A row without a larger logit has no distribution.

    Args:
        logits, tokens, query_lens, num_draft_tokens, draft_logits, noise, streams, draft_inv_temperature, draft_cutoff, out: as there.
        state, workspace: as for :func:`verify`.
        config: as for :func:`verify`. Sums of exponentials are added up in pieces, so their last bits depend on it and on the shape from which it is
            chosen. A test that these bits decide depends on it, too.
        exact: take the logarithms in the noise as the host does.

    Returns:
        ``(selected[B, Q], accepted[B])``, int32 on the device of the logits. ``selected`` is -1 past ``accepted[r]``.

    Raises:
        ValueError: as for :func:`verify`.
    """
    batch, width, vocab = check_limits(logits)
    device = logits.device
    query_lens, num_draft_tokens = query_lens.contiguous(), num_draft_tokens.contiguous()
    seeds, positions, inv_temperature, cutoff = fields(noise)
    assert positions is not None
    if noise.offset or positions.dtype is not torch.int64:
        positions = positions.long() + noise.offset
    draft_scale = inv_temperature if draft_inv_temperature is None else draft_inv_temperature.contiguous()
    test_config = config or default_config(batch * max(width - 1, 1), vocab, device, False)
    choose_config = config or default_config(batch, vocab, device, True)
    test_cut, choose_cut = cut(test_config, vocab), cut(choose_config, vocab)
    selected, accepted = results(out, batch, width, device)
    if batch == 0 or width == 0:
        accepted.zero_()
        return selected, accepted
    best, ticket, rejected = (workspace or Workspace(batch, width, device)).pieces(batch, width, device)
    sums = torch.empty((batch, width, test_cut.splits, 4), dtype=torch.float32, device=device)
    lse = torch.empty((batch, width, 2), dtype=torch.float32, device=device)
    unused = accepted  # stands for arguments that are not read
    modes = {"HAS_DRAFT": draft_logits is not None, "HAS_CUTOFF": cutoff is not None} | dependent(device)
    modes["HAS_DRAFT_CUTOFF"] = draft_logits is not None and draft_cutoff is not None
    rows = (
        logits,
        *strides(logits),
        unused if draft_logits is None else draft_logits,
        *strides(draft_logits),
        vocab,
        tokens,
        *strides(tokens),
        query_lens,
        num_draft_tokens,
        width,
        selected,
        accepted,
    )
    distributions = (
        seeds,
        positions,
        inv_temperature,
        draft_scale,
        unused if cutoff is None else cutoff,
        *strides(cutoff),
        unused if draft_cutoff is None else draft_cutoff,
        *strides(draft_cutoff),
    )
    with on(device):
        rejection_test_kernel[(test_cut.splits, batch, max(width - 1, 1))](
            *rows,
            sums,
            lse,
            best,  # zero at this point, and again after
            ticket,
            rejected,
            *distributions,
            streams.accept,
            test_cut.splits,
            test_cut.span,
            **modes,
            BLOCK=test_config.block,
            WIDTH_BLOCK=max(MIN_WIDTH_BLOCK, triton.next_power_of_2(width)),
            SPLITS_BLOCK=max(_MIN_SPLITS_BLOCK, triton.next_power_of_2(test_cut.splits)),
            num_warps=test_config.warps,
        )
        rejection_choose_kernel[(choose_cut.splits, batch)](
            *rows,
            lse,
            best,
            ticket,
            *(state or (unused, unused, unused)),
            *distributions,
            streams.residual,
            choose_cut.splits,
            choose_cut.span,
            HAS_STATE=state is not None,
            **modes,
            FAST=not (exact or INTERPRETED),
            BLOCK=choose_config.block,
            num_warps=choose_config.warps,
        )
    return selected, accepted
