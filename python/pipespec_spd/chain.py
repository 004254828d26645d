"""A PipeSpec chain as the drafter of a partitioned target: both systems at once.

The chain's text runs ahead of the verified text by one or more tokens per cycle, and supplies the drafts. The target verifies the draft tokens one per
cycle while they are in flight, instead of a block at a time.

:class:`ChainDrafter` is a lockstep chain in this process, whose last model drafts for the target: one model decodes plainly, several form drafts of
drafts. After a flush the chain continues from the flushed position, and its caches keep the positions that still agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from transformers import PreTrainedModel

from pipespec.config import SpeculationConfig
from pipespec.engine.inputs import StageInputs
from pipespec.schedules.lockstep import LockstepDriver
from pipespec.schedules.request import GenerationRequest
from pipespec_kernels.state import Action
from pipespec_spd.decoding import DraftSampler
from pipespec_spd.drafting import Drafter, SampleTokens
from pipespec_spd.machine import DraftRequest

_LOOKAHEAD = 4
"""Lookahead of the drafts inside the chain, the default of a lockstep chain."""


class ChainDrafter(Drafter):
    """Drafts the greedy or coupled continuation of a chain of models, smallest first. The last one's text is drafted.

    All use the target's tokenizer, which :class:`pipespec_spd.SpeculativePipeline` checks.
    """

    def __init__(self, models: Sequence[PreTrainedModel]) -> None:
        self.models = list(models)
        self._driver = LockstepDriver(self.models, SpeculationConfig(lookahead=(_LOOKAHEAD,) * (len(self.models) - 1)))

    def start(self, prompts: list[list[int]], capacity: int, select: SampleTokens) -> None:
        self._select, self._capacity = select, capacity
        # For each row, the length up to which the chain's text is known to equal that of the pipeline.
        self._agreed = [0] * len(prompts)
        self._begin(prompts)

    def _begin(self, texts: list[list[int]]) -> None:
        """Continue from ``texts``, one per row."""
        self._texts = texts
        self._driver.begin(_request(texts, self._capacity, self._select))

    def draft(self, requests: list[DraftRequest]) -> list[int]:
        behind = {r.row: list(r.tokens) for r in requests if not self._follows(r.row, r.tokens)}
        if behind:
            # The other rows keep the tokens that they are ahead.
            self._begin([behind.get(row) or self._slice(row, 0, self._length(row)) for row in range(len(self._texts))])
        while any(self._length(r.row) <= len(r.tokens) for r in requests):
            if self._driver.advance() == Action.FINISHED:
                raise RuntimeError("a chain ended before the text that it drafts for")
        return [self._slice(r.row, len(r.tokens), len(r.tokens) + 1)[0] for r in requests]

    def _length(self, row: int) -> int:
        return self._driver.block.length(self._driver.block.target, row)

    def _slice(self, row: int, begin: int, end: int) -> list[int]:
        """The chain's text at positions ``begin`` to ``end - 1``: given tokens, then generated ones."""
        begun = self._texts[row]
        own = max(begin, len(begun))
        out = begun[begin:end]
        return out + self._driver.block.tokens(self._driver.block.target, row, own, end) if own < end else out

    def _follows(self, row: int, tokens: Sequence[int]) -> bool:
        """Whether the chain's text begins with ``tokens``."""
        if self._length(row) < len(tokens):
            return False
        known, self._agreed[row] = self._agreed[row], len(tokens)
        return self._slice(row, known, len(tokens)) == list(tokens[known:])

    def truncate(self, row: int, length: int) -> None:
        self._agreed[row] = min(self._agreed[row], length)

    def finish(self) -> None:
        self._texts = []

    def release(self) -> None:
        self._driver.release()

    def for_fork(self) -> ChainDrafter:
        return ChainDrafter(self.models)  # a call of another thread may have been under way in the caches


def _request(texts: list[list[int]], capacity: int, select: SampleTokens) -> GenerationRequest:
    """The request to continue ``texts``, one per row. The chain continues past end tokens that the target may still reject."""
    if not isinstance(select, DraftSampler):
        raise TypeError("a chain samples in its own stages: it needs a DraftSampler, not any other function")
    inputs = StageInputs(
        [np.array(text, dtype=np.int32) for text in texts],
        [max(capacity, len(text) + 1) for text in texts],
        replace(select.sampling_params, ends=frozenset()),
        select.vocabulary,
        reuse=True,
    )
    return GenerationRequest(inputs, ())
