"""Messages between ranks: 32-bit integers in a fixed layout, without pickle. What a receiver reads from one is checked first.

A message has a head of :data:`HEAD` words and at most :data:`BODY` more:

    magic   kind   generation   words of the body   two words of the kind

``STATE``: 1 while the generation runs; the body has the records of ``csrc/runtime/replica.hpp``. ``CALL``: a part of an encoded call, with its offset
and the words of the whole. ``TEXT``: what it says, and its bytes in UTF-8. ``BYE``: the sender closes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers.generation import RepetitionPenaltyLogitsProcessor

from pipespec.engine.inputs import StageInputs
from pipespec.engine.sampling import SamplingParams
from pipespec_kernels.state import MAX_EOS

VERSION = 1
"""Of the layout. Ranks with another one are refused by name."""

MAGIC = 0x70730000 + VERSION
HEAD = 6
BODY = 4096 - HEAD
STATE, CALL, TEXT, BYE = 1, 2, 3, 4
FAILED, FORM = 1, 2
"""What a ``TEXT`` says: why a draft failed, or how its model's forward runs."""

MOST_CALL_WORDS = 2**28
"""Of a call: more than any prompts that fit a machine."""

_FIXED = 16
_MOST_TEXT_BYTES = 1024


class BadMessage(ValueError):
    """A message that no rank of this chain sends."""


def write_head(words: np.ndarray, kind: int, generation: int, body: int, first: int = 0, second: int = 0) -> int:
    """Write the head of a message, int32 ``[HEAD + BODY]``. Return the words of the message."""
    words[:HEAD] = (MAGIC, kind, generation, body, first, second)
    return HEAD + body


def read_head(words: np.ndarray) -> tuple[int, int, np.ndarray, int, int]:
    """Kind, generation, body and the two words of a message. Raises ``BadMessage``."""
    magic, kind, generation, body, first, second = words[:HEAD].tolist()
    if magic != MAGIC or not 0 <= body <= BODY or kind not in (STATE, CALL, TEXT, BYE):
        raise BadMessage("it sent a message of another program or version")
    return kind, generation, words[HEAD : HEAD + body], first, second


def text_words(text: str) -> tuple[np.ndarray, int]:
    """The words of a text, and its bytes; a long one is cut."""
    raw = text.encode()[:_MOST_TEXT_BYTES]
    return np.frombuffer(raw.ljust(-(-len(raw) // 4) * 4, b"\0"), dtype=np.int32), len(raw)


def text_of(body: np.ndarray, size: int) -> str:
    """The text of :func:`text_words`, printable characters only."""
    raw = body.tobytes()[: max(0, min(size, _MOST_TEXT_BYTES))]
    return "".join(c if c.isprintable() else " " for c in raw.decode(errors="replace"))


@dataclass(frozen=True)
class Call:
    """What a draft needs of a call."""

    inputs: StageInputs
    eos: Sequence[int]


def _repetition_penalty(params: SamplingParams) -> float:
    """That of a repetition penalty that is the only processor; else 1."""
    match params.processors:
        case (RepetitionPenaltyLogitsProcessor(penalty=penalty),):
            return float(penalty)
    return 1.0


def encode_call(inputs: StageInputs, eos: Sequence[int]) -> np.ndarray:
    """A call as int32 words.

    Drafts get temperature, top-k, top-p, min-p and a repetition penalty that is the only processor. Other processors run in the target alone.
    """
    params = inputs.sampling_params
    ends, seeds = sorted(params.ends), params.seeds
    numbers = np.array([params.temperature, params.top_p, params.min_p, _repetition_penalty(params)], dtype=np.float64)
    sizes = [len(inputs.prompts), inputs.vocabulary, inputs.chunk, inputs.reuse, len(eos), len(ends)]
    parts = [
        np.array([*sizes, seeds is not None, params.top_k], dtype=np.int32),
        numbers.view(np.int32),
        np.array([*eos, *ends], dtype=np.int32),
        np.array([len(prompt) for prompt in inputs.prompts], dtype=np.int32),
        np.array(inputs.limits, dtype=np.int32),
        np.array(seeds or (), dtype=np.uint64).view(np.int32),
        *(np.asarray(prompt, dtype=np.int32) for prompt in inputs.prompts),
    ]
    return np.concatenate(parts)


def decode_call(words: np.ndarray) -> Call:
    """The call of :func:`encode_call`. Raises ``BadMessage`` where its numbers do not fit together."""
    if len(words) < _FIXED:
        raise BadMessage("it sent a call that is too short")
    rows, vocabulary, chunk, reuse, n_eos, n_ends, sampled, top_k = words[:8].tolist()
    temperature, top_p, min_p, penalty = words[8:_FIXED].copy().view(np.float64).tolist()
    counts = (n_eos, n_ends, rows, rows, 2 * rows if sampled else 0)
    if (
        rows < 1
        or not 0 <= n_eos <= MAX_EOS
        or n_ends < 0
        or vocabulary < 1
        or chunk < 1
        or _FIXED + sum(counts) > len(words)
    ):
        raise BadMessage("it sent a call whose sizes do not fit together")
    eos, ends, lengths, limits, seeds, tokens = np.split(words[_FIXED:], np.cumsum(counts))
    if lengths.min() < 1 or int(lengths.sum(dtype=np.int64)) != len(tokens) or (limits < lengths).any():
        raise BadMessage("it sent a call whose prompts do not fit its rows")
    if not (0 < temperature < np.inf and 0 <= top_p <= 1 and 0 <= min_p <= 1 and 0 < penalty < np.inf and top_k >= 0):
        raise BadMessage("it sent a call whose sampling parameters are out of range")
    processors = () if penalty == 1.0 else (RepetitionPenaltyLogitsProcessor(penalty),)
    params = SamplingParams(
        seeds=tuple(seeds.copy().view(np.uint64).tolist()) if sampled else None,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        processors=processors,
        ends=frozenset(ends.tolist()),
    )
    prompts = [prompt.copy() for prompt in np.split(tokens, np.cumsum(lengths)[:-1])]
    inputs = StageInputs(prompts, limits.tolist(), params, vocabulary, chunk, reuse=bool(reuse))
    return Call(inputs, eos.tolist())
