"""One call of ``generate()``, as decoders get it, and the loan of the caller's cache during the call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
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
    """Holder of the target's keys and values, see :class:`Stage`. ``return_cache`` gives None where they are on other machines."""

    def adopt(self, cache: RowCache, text: Sequence[np.ndarray]) -> None: ...
    def return_cache(self, lengths: Sequence[int]) -> RowCache | None: ...


@dataclass(eq=False)
class GenerationRequest:
    """One call of ``generate()``.

    Args:
        inputs: What the target begins with. Drafts begin with the same, but for ``draft_sampling_params``.
        eos: Token ids that end a row.
        on_commit: Called after each step of the target with the text so far; what it raises ends the call.
        record: Where the target stores scores and logits.
        cache: Keys and values that the target continues.
        returns_cache: Whether the caller gets the target's keys and values after the call.
    """

    inputs: StageInputs
    eos: Sequence[int]
    on_commit: Callable[[TextSource], None] | None = None
    record: ScoreRecord | None = None
    cache: RowCache | None = None
    returns_cache: bool = False

    def __post_init__(self) -> None:
        # The loan of the cache: what it held before the call (None: there is no loan), and who has it, until it is returned.
        self._held: list[int] | None = None
        self._text: Sequence[np.ndarray] | None = None
        self._owner: CacheOwner | None = None

    @cached_property
    def draft_sampling_params(self) -> bytes:
        """The part of the sampling parameters that drafts apply, pickled."""
        return self.inputs.sampling_params.for_drafts()

    def committed(self, text: TextSource) -> None:
        """Report that the target took a step."""
        if self.on_commit is not None:
            self.on_commit(text)

    @contextmanager
    def cache_lent_to(self, owner: CacheOwner) -> Iterator[None]:
        """Let ``owner`` adopt the caller's cache, if there is one, until :meth:`return_cache`. After a failure the caller gets it back unchanged."""
        if self.cache is None:
            yield
            return
        self._held = held = list(self.cache.lengths)
        self._text, self._owner = self.cache.text, owner
        try:
            owner.adopt(self.cache, [prompt[:n] for prompt, n in zip(self.inputs.prompts, held, strict=True)])
            yield
        except BaseException:
            self.take_back()
            raise

    def return_cache(self, owner: CacheOwner, lengths: Sequence[int]) -> RowCache | None:
        """:meth:`CacheOwner.return_cache`, which ends the loan."""
        cache = owner.return_cache(lengths)
        self._owner = None
        return cache

    def take_back(self) -> None:
        """After a failure, also after the run: give the caller the cache as it was before the call. The stage must not write to it any more."""
        if self.cache is None or self._held is None:
            return
        try:
            with suppress(Exception):  # the call's own error is raised
                if self._owner is not None:
                    self._owner.return_cache(self._held)
        finally:
            # The owner may have been interrupted after it gave the cache up.
            self.cache.recover(self._held, self._text)
        self._held = self._owner = None
