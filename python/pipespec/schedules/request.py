"""One call of ``generate()``, as decoders get it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from pipespec.engine.cache import RowCache
from pipespec.engine.inputs import StageInputs
from pipespec.engine.sampling import ScoreRecord


class TextSource(Protocol):
    """Where the committed tokens of a call are read: a :class:`StateBlock`, or an object with the same methods."""

    @property
    def target(self) -> int: ...
    def length(self, stage: int, row: int) -> int: ...
    def tokens(self, stage: int, row: int, begin: int, end: int) -> list[int]: ...
    def end_row(self, row: int) -> None: ...
    def counters(self, stage: int, row: int) -> dict: ...


class CacheOwner(Protocol):
    """Holder of the target's keys and values, see :class:`Stage`. ``complete`` gives None where they are on other machines."""

    def adopt(self, cache: RowCache, text: Sequence[np.ndarray]) -> None: ...
    def complete(self, texts: Sequence[np.ndarray], lengths: Sequence[int]) -> RowCache | None: ...
    def forget(self) -> None: ...


@dataclass(eq=False)
class GenerationRequest:
    """One call of ``generate()``.

    Args:
        inputs: What the target begins with. Drafts begin with the same, but for ``draft_sampling_params``.
        eos: Token ids that end a row.
        on_commit: Called after each step of the target with the text so far; what it raises ends the call.
        record: Where the target stores scores and logits.
        cache: A copy of the caller's keys and values, which the target continues.
        returns_cache: Whether the caller gets the target's keys and values after the call.
    """

    inputs: StageInputs
    eos: Sequence[int]
    on_commit: Callable[[TextSource], None] | None = None
    record: ScoreRecord | None = None
    cache: RowCache | None = None
    returns_cache: bool = False

    @cached_property
    def draft_sampling_params(self) -> bytes:
        """The part of the sampling parameters that drafts apply, pickled."""
        return self.inputs.sampling_params.for_drafts()

    def committed(self, text: TextSource) -> None:
        """Report that the target took a step."""
        if self.on_commit is not None:
            self.on_commit(text)

    def hand_cache_to(self, owner: CacheOwner) -> None:
        """Let ``owner`` adopt :attr:`cache`, if there is one."""
        if self.cache is not None:
            held = zip(self.inputs.prompts, self.cache.lengths, strict=True)
            owner.adopt(self.cache, [prompt[:n] for prompt, n in held])
