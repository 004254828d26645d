"""``verify``: every row's own choices up to the first draft token they contradict, in one launch and one pass over the logits.

The grid is (splits of the vocabulary) x (rows) x (columns that choose). A block of threads finds the best score of its span and enters it, as one
word, in an atomic maximum. Then it takes a ticket of its row. When a block takes the last ticket, the row's choices are complete. This block walks
along the draft tokens, writes the row's selected tokens and state, and resets the work space, so that the launch can be replayed.

Where there are more blocks than the device holds at once, the first columns of all rows come first. A block that finds a draft token beaten notes it,
and blocks that start later read nothing of the columns after it. No result depends on that: columns up to the first rejected draft token are always read.

Greedy, the score is the logit. Coupled, it is ``logit * inv_temperature + G`` with Gumbel noise ``G`` that depends on
(seed, position, token id) only, so that equal ids mean agreement at any temperature: Daliri, Musco, Suresh, "Coupling
without Communication and Drafter-Invariant Speculative Decoding" (2024), section 3.
"""

from __future__ import annotations

import operator

import torch
import triton
import triton.language as tl
from torch import Tensor

from pipespec_kernels.noise import Noise
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
    notes_pay,
    on,
    results,
    strides,
)
from pipespec_kernels.triton.philox import INTERPRETED, IS_INTERPRETED, draw, perturbed
from pipespec_kernels.triton.selection import (
    LOADS,
    LOADS_OF_FLOAT32,
    advance,
    any_of,
    as_words,
    beaten,
    better,
    invalid,
    no_scale,
    pack_best,
    unpack_id,
)


@triton.jit
def _choose(
    source,
    start,
    vocab,
    scale,
    lowest,
    seed,
    position,
    stream,
    top,
    tile,
    COUPLED: tl.constexpr,
    HAS_CUTOFF: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each lane's best score, and the tile that it came from, after the tile at ``start``."""
    ids = start + tl.arange(0, BLOCK)
    x = tl.load(source + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    if HAS_CUTOFF:
        allowed = ~(x < lowest)
        # Most tiles of a filtered row hold nothing that can be chosen, and need no noise.
        if any_of(allowed):
            score = perturbed(x, scale, draw(seed, position, stream, start, BLOCK), FAST)
            improved = better(score, top) & allowed
            top = tl.where(improved, score, top)
            tile = tl.where(improved, start, tile)
    else:
        score = x
        if COUPLED:
            score = perturbed(x, scale, draw(seed, position, stream, start, BLOCK), FAST)
        improved = better(score, top)
        top = tl.where(improved, score, top)
        tile = tl.where(improved, start, tile)
    return top, tile


@triton.jit(**UNSPECIALIZED)
def verify_kernel(
    logits,
    logits_stride_b,
    logits_stride_q,
    vocab,
    tokens,
    tokens_stride_b,
    tokens_stride_q,
    query_lens,
    num_draft_tokens,
    width,
    selected,
    accepted,
    best,
    ticket,
    rejected,
    notes,
    next_token,
    length,
    epoch,
    seeds,
    positions,
    inv_temperature,
    cutoff,
    cutoff_stride_b,
    cutoff_stride_q,
    stream,
    offset,
    invalid_positions,
    splits,
    span,
    HAS_STATE: tl.constexpr,
    HAS_INVALID: tl.constexpr,
    COUPLED: tl.constexpr,
    HAS_CUTOFF: tl.constexpr,
    FAST: tl.constexpr,
    WALK: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    split = tl.program_id(0)
    row = tl.program_id(1)
    column = tl.program_id(2)  # index among the columns that choose
    fed = width
    draft_tokens = width - 1
    known = 0
    if WALK:
        # .cg: from L2, where the atomics happen, and not from this multiprocessor's cache.
        known = tl.load(rejected + row, cache_modifier=".cg")
        fed = tl.load(query_lens + row)
        draft_tokens = tl.load(num_draft_tokens + row)
    idle = fed == 0
    bad = invalid(fed, draft_tokens, width)
    scale = 1.0
    if COUPLED:
        scale = tl.load(inv_temperature + row)
        bad = bad | (no_scale(scale) & (fed != 0))
    first = fed - 1 - draft_tokens  # the column whose logits decide about the first draft token

    if idle | bad:
        if (column == 0) & (split == 0):
            columns = tl.arange(0, WIDTH_BLOCK)
            tl.store(selected + row.to(tl.int64) * width + columns, -1, mask=columns < width)
            if WALK:
                tl.store(accepted + row, tl.where(bad, -1, 0))
    elif column <= draft_tokens:
        source = logits + row.to(tl.int64) * logits_stride_b + (first + column).to(tl.int64) * logits_stride_q
        lanes = tl.arange(0, BLOCK)
        begin = split * span
        lowest = float("-inf")
        seed = tl.full([], 0, tl.int64)
        position = seed
        if COUPLED:
            seed = tl.load(seeds + row)
            position = tl.load(positions + row).to(tl.int64) + offset + first + column
            if HAS_CUTOFF:
                lowest = tl.load(
                    cutoff + row.to(tl.int64) * cutoff_stride_b + (first + column).to(tl.int64) * cutoff_stride_q
                )
        if known <= width - column:
            top = tl.full([BLOCK], float("-inf"), tl.float32)
            tile = tl.full([BLOCK], 0, tl.int32) + begin
            end = tl.minimum(begin + span, vocab)
            if IS_INTERPRETED:  # its loops cannot run over tensors
                start = begin
                while start < end:
                    top, tile = _choose(
                        source, start, vocab, scale, lowest, seed, position, stream, top, tile, COUPLED, HAS_CUTOFF, FAST, BLOCK
                    )  # fmt: skip
                    start += BLOCK
            else:
                loads: tl.constexpr = LOADS_OF_FLOAT32 if logits.dtype.element_ty == tl.float32 else LOADS
                # With noise for every logit the arithmetic takes longer than the loads: no stages.
                for start in tl.range(begin, end, BLOCK, num_stages=1 if COUPLED and not HAS_CUTOFF else loads):
                    top, tile = _choose(
                        source, start, vocab, scale, lowest, seed, position, stream, top, tile, COUPLED, HAS_CUTOFF, FAST, BLOCK
                    )  # fmt: skip
            word = pack_best(top, tile + lanes)
            place = as_words(best) + row.to(tl.int64) * width + column
            if WALK:
                if (notes != 0) & (column < draft_tokens):
                    before = tl.atomic_max(place, word, sem="relaxed")
                    draft_token = tl.load(
                        tokens
                        + row.to(tl.int64) * tokens_stride_b
                        + (first + 1 + column).to(tl.int64) * tokens_stride_q
                    )
                    if beaten(before, word, draft_token, begin, end, vocab):
                        tl.atomic_max(rejected + row, (width - column).to(tl.int64), sem="relaxed")
                else:
                    tl.atomic_max(place, word, sem="relaxed")
            else:
                tl.atomic_max(place, word, sem="relaxed")

        # Release: our word before our ticket. Acquire: all words of the row, if ours is the last.
        if tl.atomic_add(ticket + row, 1, sem="acq_rel") == (draft_tokens + 1) * splits - 1:
            columns = tl.arange(0, WIDTH_BLOCK)
            words = as_words(best) + row.to(tl.int64) * width + columns
            # A choice after the first rejected draft token may be incomplete, and is not used.
            choice = unpack_id(tl.load(words, mask=columns <= draft_tokens, other=0, cache_modifier=".cg"))
            agrees = columns < draft_tokens
            if WALK:
                draft_token = tl.load(
                    tokens + row.to(tl.int64) * tokens_stride_b + (first + 1 + columns).to(tl.int64) * tokens_stride_q,
                    mask=columns < draft_tokens,
                    other=-1,
                )
                agrees = agrees & (choice == draft_token)
            agreed = tl.min(tl.where(agrees, WIDTH_BLOCK, columns), axis=0)
            tl.store(
                selected + row.to(tl.int64) * width + columns,
                tl.where(columns <= agreed, choice, -1),
                mask=columns < width,
            )
            if WALK:
                tl.store(accepted + row, agreed)
            if HAS_STATE:
                last = tl.sum(tl.where(columns == agreed, choice, 0), axis=0)
                advance(next_token, length, epoch, row, last, agreed, draft_tokens)
            if HAS_INVALID:
                chosen = logits + row.to(tl.int64) * logits_stride_b + (first + columns).to(tl.int64) * logits_stride_q
                x = tl.load(chosen + choice, mask=columns <= agreed, other=0.0).to(tl.float32)
                # The difference is NaN where the logit is not finite.
                at = tl.min(tl.where(x - x == 0.0, WIDTH_BLOCK, columns), axis=0)
                if at < WIDTH_BLOCK:
                    before = tl.load(invalid_positions + row)
                    tl.store(invalid_positions + row, tl.minimum(before, position - column + at))
            tl.debug_barrier()  # every thread has read its words and its state before they are overwritten
            tl.store(words, 0, mask=columns <= draft_tokens)
            tl.store(ticket + row, 0)
            if WALK:
                tl.store(rejected + row, 0)


def verify(
    logits: Tensor,
    tokens: Tensor,
    query_lens: Tensor,
    num_draft_tokens: Tensor,
    *,
    noise: Noise | None = None,
    state: RowState | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    workspace: Workspace | None = None,
    invalid_positions: Tensor | None = None,
    exact: bool = False,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """Each row's own choices up to the first draft token that they contradict; see :func:`pipespec_kernels.ops.verify`, which checks the arguments.

    All tensors are on the device, and the host reads no values: a row with counts or an inverse temperature that do not fit gets ``accepted == -1`` and changes
    in nothing else.

    Args:
        logits, tokens, query_lens, num_draft_tokens, noise, out, invalid_positions: as there.
        state: written in place by the same launch.
        workspace: with it a call is exactly one launch, without it one more clears memory.
        exact: take logarithms as the host does: the choices are then those of the CPU, bit for bit, and the noise costs
            more than twice the instructions. The default differs in the noise's last bits.
        config: how rows are cut into blocks; default: chosen from the shape and the device. Changes no result.

    Returns:
        ``(selected[B, Q], accepted[B])``, int32 on the device of the logits. ``selected`` is -1 past ``accepted[r]``.

    Raises:
        ValueError: more rows or tokens than a launch takes, a device without the kernels, a small ``workspace``.
    """
    batch, width, vocab = check_limits(logits)
    config = config or default_config(batch * width, vocab, logits.device, noise is not None)
    selected, accepted = results(out, batch, width, logits.device)
    if batch == 0 or width == 0:
        accepted.zero_()
        return selected, accepted
    fed = tokens, query_lens.contiguous(), num_draft_tokens.contiguous()
    _launch(logits, fed, noise, state, invalid_positions, selected, accepted, workspace, exact, config)
    return selected, accepted


def select(
    logits: Tensor,
    *,
    noise: Noise | None = None,
    out: Tensor | None = None,
    workspace: Workspace | None = None,
    exact: bool = False,
    config: Config | None = None,
) -> Tensor:
    """The choice of every column: the result of :func:`verify` if every draft token is right. Arguments and errors as there; ``out``: int32 ``[B, Q]``.

    Returns:
        int32 ``[B, Q]`` on the device of the logits; -1 in rows whose inverse temperature is not finite and positive.
    """
    batch, width, vocab = check_limits(logits)
    config = config or default_config(batch * width, vocab, logits.device, noise is not None)
    selected = torch.empty((batch, width), dtype=torch.int32, device=logits.device) if out is None else out
    if batch > 0 and width > 0:
        _launch(logits, None, noise, None, None, selected, selected, workspace, exact, config)
    return selected


def _launch(
    logits: Tensor,
    fed: tuple[Tensor, Tensor, Tensor] | None,
    noise: Noise | None,
    state: RowState | None,
    invalid_positions: Tensor | None,
    selected: Tensor,
    accepted: Tensor,
    workspace: Workspace | None,
    exact: bool,
    config: Config,
) -> None:
    """The kernel on checked arguments; ``fed``: tokens, ``query_lens``, ``num_draft_tokens``, or None: no walk, all columns choose."""
    batch, width, vocab = logits.shape
    device = logits.device
    splits, span = cut(config, vocab)
    seeds, positions, inv_temperature, cutoff = fields(noise)
    stream, offset = (0, 0) if noise is None else (noise.stream, operator.index(noise.offset))
    best, ticket, rejected = (workspace or Workspace(batch, width, device)).pieces(batch, width, device)
    # Arguments that this mode does not read: any pointer works.
    unused = accepted
    next_token, length, epoch = state or (unused, unused, unused)
    tokens, query_lens, num_draft_tokens = fed or (selected, unused, unused)
    with on(device):
        verify_kernel[(splits, batch, width)](
            logits,
            *strides(logits),
            vocab,
            tokens,
            *strides(tokens),
            query_lens,
            num_draft_tokens,
            width,
            selected,
            accepted,
            best,
            ticket,
            rejected,
            notes_pay(splits * batch * width, device),
            next_token,
            length,
            epoch,
            unused if seeds is None else seeds,
            unused if positions is None else positions,
            unused if inv_temperature is None else inv_temperature,
            unused if cutoff is None else cutoff,
            *strides(cutoff),
            stream,
            offset,
            unused if invalid_positions is None else invalid_positions,
            splits,
            span,
            HAS_STATE=state is not None,
            HAS_INVALID=invalid_positions is not None,
            COUPLED=seeds is not None,
            HAS_CUTOFF=cutoff is not None,
            FAST=not (exact or INTERPRETED),
            WALK=fed is not None,
            BLOCK=config.block,
            WIDTH_BLOCK=max(MIN_WIDTH_BLOCK, triton.next_power_of_2(width)),
            **dependent(device),
            num_warps=config.warps,
        )
