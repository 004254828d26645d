"""The interface of drafters for a partitioned target."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence

import torch

from pipespec.spd.machine import DraftRequest

SampleTokens = Callable[[torch.Tensor, list[int], list[int]], list[int]]
"""Logits ``[R, V]`` over the target's vocabulary, the row and the absolute position of each, to token ids (greedy or coupled)."""


class Drafter(abc.ABC):
    """Proposes the next token of each row, once per cycle, while the stages run.

    A drafter sees only what earlier cycles computed (SPD, arXiv 2605.30852: the draft of position t + 1 runs beside the stages).
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
