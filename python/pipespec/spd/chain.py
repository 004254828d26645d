"""A PipeSpec chain as the drafter of a partitioned target: both systems at once.

A chain's own text runs ahead of what is verified, one token per cycle or more, and the pipe's drafts are taken from it. It is the
house's lockstep chain (one draft: plain decoding; several: drafts of drafts), whose last model is the target's neighbour. So this is also what
a chain with a partitioned target looks like: its drafts are verified while they fly, one per cycle, instead of a block at a time. A
flush rewrites the chain's text from the flushed place on and leaves its caches where they agree with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from transformers import PreTrainedModel

from pipespec.drivers import LockstepDriver
from pipespec.drivers.base import Policy
from pipespec.drivers.base import Request as Call
from pipespec.spd.decoding import DraftSelect
from pipespec.spd.drafting import Drafter, Request, Select
from pipespec.stage import Start
from pipespec_kernels.state import Action

_WINDOW = 4
"""Tokens that a draft of a draft may be ahead; as a lockstep chain has it by default."""


class ChainDrafter(Drafter):
    """Drafts the greedy (or coupled) continuation of ``models``, smallest first; the last one's text is what is drafted.

    All must use the target's tokenizer, which :class:`pipespec.spd.SpeculativePipeline` checks. ``ValueError`` for no models.
    """

    def __init__(self, models: Sequence[PreTrainedModel]) -> None:
        if not models:
            raise ValueError("a chain needs at least one model")
        self.models = list(models)
        self._driver = LockstepDriver(self.models, Policy((_WINDOW,) * (len(self.models) - 1)))

    def start(self, prompts: list[list[int]], capacity: int, select: Select) -> None:
        if not isinstance(select, DraftSelect):
            raise TypeError("a chain chooses with stages of its own: it needs a DraftSelect, not any function")
        # It runs ahead of the pipe, past ends that may turn out to be none: there, too, it must choose.
        self._selection, self._vocabulary = replace(select.selection, ends=frozenset()), select.vocabulary
        self._capacity = capacity
        self._agreed = [0] * len(prompts)  # per row, how much of the chain's text is known to be the pipe's
        self._begin(prompts)

    def _begin(self, texts: list[list[int]]) -> None:
        """Go on from ``texts``, one per row."""
        self._texts = texts
        start = Start(
            [np.array(text, dtype=np.int32) for text in texts],
            [max(self._capacity, len(text) + 1) for text in texts],
            self._selection,
            self._vocabulary,
            reuse=True,
        )
        self._driver.begin(Call(start, ()))

    def draft(self, requests: list[Request]) -> list[int]:
        behind = {r.row: list(r.tokens) for r in requests if not self._follows(r.row, r.tokens)}
        if behind:
            # Rows that need no change keep what they have run ahead.
            self._begin([behind.get(row) or self._slice(row, 0, self._length(row)) for row in range(len(self._texts))])
        while any(self._length(r.row) <= len(r.tokens) for r in requests):
            if self._driver.advance() == Action.FINISHED:
                raise RuntimeError("a chain ended before the text that it drafts for")
        return [self._slice(r.row, len(r.tokens), len(r.tokens) + 1)[0] for r in requests]

    def _length(self, row: int) -> int:
        return self._driver.block.length(self._driver.block.target, row)

    def _slice(self, row: int, begin: int, end: int) -> list[int]:
        """The chain's text at positions ``begin .. end - 1``: what it has gone on from, and what it made of it."""
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

    def forget(self) -> None:
        self._driver.forget()
