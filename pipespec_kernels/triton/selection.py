"""Functions of the kernels that find the largest score of a row, in pieces and in any order.

A thread keeps, per lane, the best score and the tile it came from; a block reduces its lanes once, at the end, to one
64-bit word whose order is (score, lowest id first), and an atomic maximum combines the words of several blocks. So the result does not depend on
tiles, blocks or their timing. A NaN is larger than everything, and the first of them wins; -0 equals +0. No word is 0, which stands for "nothing
yet".
"""

from __future__ import annotations

import triton
import triton.language as tl

# The high half of the word of -inf: no score above -inf was found.
NOTHING = tl.constexpr(0x007FFFFF)

# Tiles of a row in flight: the loads of later tiles overlap with the arithmetic of this one. Of float32 fewer, in more bytes: shared memory holds all
# but one of them, of two rows in rejection sampling, and a block of threads has 99 KiB of it on some devices.
LOADS = tl.constexpr(4)
LOADS_OF_FLOAT32 = tl.constexpr(3)


@triton.jit
def better(score, best):
    """Whether a later score replaces a lane's best: a larger one or a NaN does, unless the best is a NaN."""
    return (best == best) & ~(score <= best)


@triton.jit
def any_of(lanes):
    """Whether one of the lanes of a block holds."""
    return tl.max(lanes.to(tl.int32), axis=0) != 0


@triton.jit
def pack_best(best, ids):
    """The word of a block: its largest score, and the lowest id (>= 0) with that score."""
    bits = (best + 0.0).to(tl.int32, bitcast=True)  # + 0.0 makes +0 of -0
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers, in the order of the floats
    key = tl.where(best == best, key, 0x7FFFFFFF)
    largest = tl.max(key, axis=0)
    lowest = tl.min(tl.where(key == largest, ids, 0x7FFFFFFF), axis=0)
    high = (largest ^ -0x80000000).to(tl.uint32, bitcast=True)
    return (high.to(tl.uint64) << 32) | (~lowest).to(tl.uint32, bitcast=True).to(tl.uint64)


@triton.jit
def unpack_id(word):
    """The id in a word."""
    return ~(word.to(tl.uint32).to(tl.int32, bitcast=True))


@triton.jit
def beaten(before, word, token, begin, end, vocab):
    """Whether a column is now known to choose another id than its draft ``token``. ``word``: of its span ``begin .. end - 1``, which has just been
    entered; ``before``: the largest word of its other spans until then.

    A draft token that is the best of its own span has the word of that span, and a larger word is of a better id. Of the spans of a column in which
    another id is chosen, at least one finds that out: the draft token's own, or the first larger one after it.
    """
    is_own = (token >= begin) & (token < end)
    beaten_here = (unpack_id(word) != token) | (before > word)
    beaten_there = (unpack_id(before) == token) & (word > before)
    return (token < 0) | (token >= vocab) | tl.where(is_own, beaten_here, beaten_there)


@triton.jit
def invalid(fed, draft_tokens, width):
    """Whether a row's counts are invalid. The host does not read them, so the kernel checks them before it uses them as
    indices."""
    return (fed < 0) | (fed > width) | ((draft_tokens < 0) | (draft_tokens >= fed)) & (fed != 0)


@triton.jit
def no_scale(scale):
    """Whether an inverse temperature is invalid: with 0 or a NaN, the padding after the vocabulary would become a NaN and win."""
    return ~((scale > 0.0) & (scale < float("inf")))


@triton.jit
def advance(next_token, length, epoch, row, choice, agreed, draft_tokens):
    """Update a row's state (``launch.RowState``) after a verification that selected ``choice`` after ``agreed`` draft tokens."""
    tl.store(next_token + row, choice)
    tl.store(length + row, tl.load(length + row) + agreed + 1)
    tl.store(epoch + row, tl.load(epoch + row) + (agreed < draft_tokens).to(tl.int32))


@triton.jit
def as_words(pointer):
    """A pointer to int64 as one to the unsigned words that atomic maxima order."""
    return pointer.to(tl.pointer_type(tl.uint64))
