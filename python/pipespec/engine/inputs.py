"""StageInputs: what each stage of a call starts from, and the sizes that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipespec.config import WIDTH
from pipespec.engine.sampling import SamplingParams

if TYPE_CHECKING:
    from pipespec.engine.grammar import Grammar

INITIAL_CAPACITY = 1024
"""Generated tokens that a new cache has room for. A cache that becomes full doubles."""

PREFILL_CHUNK = 512
"""Tokens per row and forward in the prefill, at least. It bounds activations and masks."""

GPU_CHUNK = 2048
"""Tokens of all rows in such a forward on a GPU. There the host's launches take longer than the products of few tokens."""


def stage_names(count: int) -> list[str]:
    """Names of the stages of a chain of ``count`` models: drafts first, target last."""
    return [f"draft {i}" for i in range(count - 1)] + ["target"]


def prefill_chunk(rows: int, device: str) -> int:
    """Tokens per row and forward in the prefill of so many rows. ``device``: its name."""
    return PREFILL_CHUNK if device.startswith("cpu") else max(PREFILL_CHUNK, GPU_CHUNK // rows)


def first_capacity(longest: int, most: int) -> int:
    """Positions of a new cache that grows, for prompts of up to ``longest`` tokens and texts of up to ``most`` positions."""
    return min(most, longest + INITIAL_CAPACITY + WIDTH)


def static_capacity(most: int) -> int:
    """Positions of a static cache for texts of up to ``most`` positions, so that similar calls share a cache.

    The widest step beyond a power of two: a limit that is one, as is usual, does not double the cache.
    """
    return (1 << max(most - WIDTH - 1, 0).bit_length()) + WIDTH


@dataclass(frozen=True)
class StageInputs:
    """What each stage of a call starts from.

    Attributes:
        prompts: per row, int32 token ids ``[P_r]`` without padding.
        limits: per row, the length that its text may reach.
        sampling_params: how tokens are chosen.
        vocabulary: tokens of the target's vocabulary.
        chunk: tokens per row and forward in the prefill.
        grammar: what constrains the tokens of each row, for the target and for drafts that run in turn with it; None: nothing.
    """

    prompts: Sequence[np.ndarray]
    limits: Sequence[int]
    sampling_params: SamplingParams
    vocabulary: int
    chunk: int = PREFILL_CHUNK
    grammar: Grammar | None = None

    @property
    def most(self) -> int:
        """Positions that a row may come to use, padding columns of its last step included."""
        return max(self.limits) + WIDTH

    @property
    def capacity(self) -> int:
        """Positions of a new cache that grows. A limit is often the model's own, far beyond the text."""
        return first_capacity(max(len(p) for p in self.prompts), self.most)
