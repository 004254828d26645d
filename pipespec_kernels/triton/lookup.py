"""``prompt_lookup``: the step of an n-gram index, in one launch.

The grid is (spans of the text, then of the corpus) x (rows). Each lane of a block counts how many tokens before its position are those before the end of the text.
A block enters its longest match, as one word, in an atomic maximum, and takes a ticket of its row. The block with the last ticket writes what the row proposes,
and resets the work space, so that the launch can be replayed. The cost depends on the room for the text, and not on what it holds.

The word orders matches: longer ones first, then those of the row's own text, then the latest.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pipespec_kernels.triton import launch
from pipespec_kernels.triton.launch import (
    Config,
    begin_dependent,
    cut,
    default_config,
    dependent,
    on,
)

OF_TEXT = tl.constexpr(1 << 32)
"""In a word: the match is in the row's own text, and not in the corpus. The bits below are its position, those above its length."""

_SPANS = Config(1024, 4, 64)
"""Blocks for the text of a row, and as many for the corpus. Not tuned on a device."""


@triton.jit
def token_at(stored, new, begin, position, inside):
    """Tokens of a text that is stored up to ``begin`` and goes on with ``new``; -1 where not ``inside``."""
    is_new = position >= begin
    old = tl.load(stored + position, mask=inside & ~is_new, other=-1)
    return tl.where(is_new, tl.load(new + (position - begin), mask=inside & is_new, other=-1), old)


@triton.jit
def longest_match(
    stored, until, text, new, begin, length, first, last, min_match, rank, MAX_MATCH: tl.constexpr, BLOCK: tl.constexpr
):
    """The word of the best match that ends in ``first`` .. ``last - 1`` of the tokens that are ``stored`` up to ``until``; 0: none."""
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], 0, tl.int64)
    while first < last:
        end = first + lanes
        agrees = end < last
        match = tl.full([BLOCK], 0, tl.int32)
        for i in range(MAX_MATCH):
            wanted = token_at(text, new, begin, length - 1 - i, i < length)
            agrees = agrees & (end >= i) & (i < length)
            agrees = agrees & (token_at(stored, new, until, end - i, agrees) == wanted)
            match += agrees.to(tl.int32)
        word = match.to(tl.int64) * (2 * OF_TEXT) + rank + end
        best = tl.maximum(best, tl.where(match >= min_match, word, 0))
        first += BLOCK
    return tl.max(best, axis=0)


_NUMBERS = ["history_stride", "corpus_size", "width", "count", "min_match", "splits", "span", "corpus_span"]


@triton.jit(do_not_specialize=_NUMBERS)
def lookup_kernel(
    tokens,
    query_lens,
    num_draft_tokens,
    n_select,
    history,
    history_stride,
    lengths,
    corpus,
    corpus_size,
    selected,
    best,
    ticket,
    width,
    count,
    min_match,
    splits,
    span,
    corpus_span,
    HAS_CORPUS: tl.constexpr,
    MAX_MATCH: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    split = tl.program_id(0)
    row = tl.program_id(1)
    fed = tl.load(query_lens + row)
    draft_tokens = tl.load(num_draft_tokens + row)
    selects = tl.load(n_select + row) > 0
    begin = tl.load(lengths + row)
    new = tokens + row.to(tl.int64) * width
    text = history + row.to(tl.int64) * history_stride
    out = selected + row.to(tl.int64) * width
    columns = tl.arange(0, WIDTH_BLOCK)
    known = fed - draft_tokens
    length = begin + known
    works = (fed > 0) & (fed <= width) & (draft_tokens >= 0) & (draft_tokens < fed)
    works = works & (begin >= 0) & (begin <= history_stride - fed)

    if ~(works & selects):
        if split == 0:
            given = tl.load(new + columns, mask=works & (columns < known), other=0)
            tl.store(text + begin + columns, given, mask=works & (columns < known))
            tl.store(out + columns, -1, mask=columns < width)
    else:
        word = tl.full([], 0, tl.int64)
        if split < splits:
            first = split * span
            last = tl.minimum(first + span, length - 1)
            word = longest_match(
                text, begin, text, new, begin, length, first, last, min_match, OF_TEXT, MAX_MATCH, BLOCK
            )
        elif HAS_CORPUS:
            first = (split - splits) * corpus_span
            last = tl.minimum(first + corpus_span, corpus_size - 1)
            word = longest_match(
                corpus, corpus_size, text, new, begin, length, first, last, min_match, 0, MAX_MATCH, BLOCK
            )
        if word > 0:
            tl.atomic_max(best + row, word, sem="relaxed")

        # Release: our word before our ticket. Acquire: all words of the row, if ours is the last. All blocks have read the step by then.
        if tl.atomic_add(ticket + row, 1, sem="acq_rel") == tl.num_programs(0) - 1:
            # .cg: from L2, where the atomics happen.
            found = tl.load(best + row, cache_modifier=".cg")
            source = (found & (OF_TEXT - 1)).to(tl.int32) + 1
            is_own = (found & OF_TEXT) != 0
            room = tl.minimum(tl.minimum(count, width + 1 - known), history_stride - length)
            # Past its end the text goes on with what is proposed.
            place = source + columns % tl.maximum(length - source, 1)
            proposed = token_at(text, new, begin, place, (columns < room) & is_own)
            number = room
            if HAS_CORPUS:
                if ~is_own:
                    number = tl.minimum(room, corpus_size - source)
                    proposed = tl.load(corpus + source + columns, mask=(columns < number) & (found > 0), other=-1)
            if found == 0:
                number = draft_tokens
                proposed = tl.load(new + known + columns, mask=columns < number, other=-1)
            given = tl.load(new + columns, mask=columns < known, other=0)
            tl.debug_barrier()  # every thread has read its tokens and the word before they are overwritten
            tl.store(text + begin + columns, given, mask=columns < known)
            tl.store(text + length + columns, proposed, mask=columns < number)
            tl.store(new + known + columns, proposed, mask=columns < number - 1)
            tl.store(out + columns, tl.where(columns < number, proposed, -1), mask=columns < width)
            tl.store(query_lens + row, tl.where(number > 0, known + number - 1, 0))
            tl.store(num_draft_tokens + row, tl.maximum(number - 1, 0))
            tl.store(best + row, 0)
            tl.store(ticket + row, 0)


def prompt_lookup(
    tokens: Tensor,
    query_lens: Tensor,
    num_draft_tokens: Tensor,
    n_select: Tensor,
    history: Tensor,
    lengths: Tensor,
    count: int,
    min_match: int,
    max_match: int,
    corpus: Tensor | None,
    selected: Tensor,
    workspace: Tensor,
    config: Config | None = None,
) -> None:
    """See :func:`pipespec_kernels.ops.prompt_lookup`, which checks the arguments. ``config``: how a text is cut into blocks. Changes no result."""
    launch.check_device(tokens.device, "tokens")
    batch, width = tokens.shape
    if batch == 0 or width == 0:
        return
    best, ticket = workspace[:batch], workspace[batch : 2 * batch]
    if config is None:
        config = _SPANS if tokens.is_cuda else default_config(1, history.shape[1], tokens.device, False)
    splits, span = cut(config, history.shape[1])
    corpus_splits, corpus_span = (0, 0) if corpus is None else cut(config, len(corpus))
    with on(tokens.device):
        lookup_kernel[(splits + corpus_splits, batch)](
            tokens,
            query_lens,
            num_draft_tokens,
            n_select,
            history,
            history.shape[1],
            lengths,
            history if corpus is None else corpus,
            0 if corpus is None else len(corpus),
            selected,
            best,
            ticket,
            width,
            count,
            min_match,
            splits,
            span,
            corpus_span,
            HAS_CORPUS=corpus is not None,
            MAX_MATCH=max_match,
            BLOCK=config.block,
            WIDTH_BLOCK=triton.next_power_of_2(width),
            **dependent(tokens.device),
            num_warps=config.warps,
        )
