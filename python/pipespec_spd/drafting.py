"""The interface of drafters for a partitioned target, and the drafter without weights."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence

import numpy as np
import torch

from pipespec_kernels import _native
from pipespec_spd.machine import DraftRequest

SampleTokens = Callable[[torch.Tensor, list[int], list[int]], list[int]]
"""Logits ``[R, V]`` over the target's vocabulary, the row and the absolute position of each, to token ids (greedy or coupled). A row occurs once."""

CHUNK = 64
"""Maximum number of columns of a drafter's forward over the prompt."""


class Drafter(abc.ABC):
    """Proposes the next token of each row, once per cycle, while the stages run.

    A drafter sees only what earlier cycles computed (SPD, arXiv 2605.30852: the draft of position t + 1 runs while the stages do).
    An error in a drafter costs speed and never changes the text.

    Attributes:
        features: HF indices of the residual streams that the drafter reads, ascending.
    """

    features: tuple[int, ...] = ()

    def start(self, prompts: list[list[int]], capacity: int, select: SampleTokens) -> None:
        """Begin a call.

        Args:
            prompts: Token ids of each row.
            capacity: Positions that any row can reach.
            select: Turns the drafter's logits into tokens as the target's sampler does.
        """

    def observe(self, index: int, rows: list[int], positions: list[int], values: torch.Tensor) -> None:
        """Receive a residual stream that a stage has computed. The prefill's positions come, too.

        Args:
            index: HF index of the stream, one of ``features``.
            rows: Row of each value.
            positions: Absolute position of each value.
            values: ``[len(rows), H]``.
        """

    @abc.abstractmethod
    def draft(self, requests: list[DraftRequest]) -> Sequence[int | None]:
        """Return one token id per request, or None for a row that gets no draft in this cycle."""

    def truncate(self, row: int, length: int) -> None:
        """Roll the row back to ``length`` positions after a flush. ``observe`` gets the later positions again."""

    def finish(self) -> None:
        """End the call and release what belongs to it."""

    def release(self) -> None:
        """Release the caches that are kept between calls. Never runs during a call."""

    def close(self) -> None:
        """Release what is kept until the pipeline is closed. A later call may follow."""

    def for_fork(self) -> Drafter:
        """Return the drafter that serves a child of a fork. The present one stays the parent's, which may be inside of a call."""
        return self


_MAX_SUFFIX = 3
"""Maximum number of tokens of the suffix."""


class NgramDrafter(Drafter):
    """Prompt lookup, without weights: drafts the token after the latest earlier occurrence of the longest suffix of the text.

    Without an earlier occurrence it drafts the newest token again, since an empty place in the pipeline saves nothing. This is prompt lookup
    decoding (Saxena 2023), one token at a time, with the tokens in flight as part of the text.
    """

    def __init__(self) -> None:
        self._rows: list[_native.NgramIndex] = []

    def start(self, prompts: list[list[int]], capacity: int, select: SampleTokens) -> None:
        self._rows = [_native.NgramIndex(1, _MAX_SUFFIX) for _ in prompts]
        for index, prompt in zip(self._rows, prompts, strict=True):
            index.write(0, np.array(prompt, dtype=np.int32))

    def draft(self, requests: list[DraftRequest]) -> list[int]:
        out = []
        for row, tokens, _ in requests:
            index = self._rows[row]
            # The tokens begin with those that the index has.
            index.write(len(index), np.array(tokens[len(index) :], dtype=np.int32))
            found = index.match()[0]
            out.append(tokens[-1] if found < 0 else found)
        return out

    def truncate(self, row: int, length: int) -> None:
        self._rows[row].truncate(length)

    def finish(self) -> None:
        self._rows = []
