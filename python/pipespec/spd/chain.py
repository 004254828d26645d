"""A PipeSpec chain as the drafter of a partitioned target: both systems at once.

The chain's text runs ahead of the verified text by one or more tokens per cycle, and supplies the drafts. The target verifies the draft tokens one per
cycle while they are in flight, instead of a block at a time.

:class:`ChainDrafter` is a lockstep chain in this process, whose last model drafts for the target: one model decodes plainly, several form drafts of
drafts. After a flush the chain continues from the flushed position, and its caches keep the positions that still agree.

:class:`AsynchronousChain` runs each model in a process of its own, as the schedule ``workers`` does. The processes run ahead while the stages verify. The
verified text is the target's in their state block, so that a rejection corrects them as in any chain.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from pipespec.config import PATIENCE, WIDTH, SpeculationConfig
from pipespec.engine.inputs import StageInputs
from pipespec.registry import WORKERS
from pipespec.schedules.base import GenerationRequest
from pipespec.schedules.lockstep import LockstepDriver
from pipespec.schedules.workers.driver import WorkersDriver
from pipespec.spd.decoding import DraftSampler
from pipespec.spd.drafting import Drafter, SampleTokens
from pipespec.spd.machine import DraftRequest
from pipespec_kernels.state import Action

_LOOKAHEAD = 4
"""Lookahead of the drafts inside the chain, the default of a lockstep chain."""

_LONGEST_WAIT_NS = 50_000_000
"""Longest wait for a draft token. The duration of a step, from which the wait follows, is written by another process."""


class ChainDrafter(Drafter):
    """Drafts the greedy or coupled continuation of a chain of models.

    Args:
        models: The chain, smallest first. The last one's text is drafted. All use the target's tokenizer, which
            :class:`pipespec.spd.SpeculativePipeline` checks.

    Raises:
        ValueError: ``models`` is empty.
    """

    def __init__(self, models: Sequence[PreTrainedModel]) -> None:
        if not models:
            raise ValueError("a chain needs at least one model")
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


class _VerifiedText:
    """The place of the target in the state block of a chain: it publishes what the stages have verified, and plans like any target."""

    form = ""

    def __init__(self, workers: WorkersDriver) -> None:
        self._block = workers.block

    def begin(self) -> None:
        """Start a call, whose rows lie in the block."""
        self.port = self._block.port(self._block.target, WIDTH)
        self._selected = torch.zeros((self._block.rows, 1), dtype=torch.int32)

    def publish(self, row: int, token: int) -> None:
        """Append the next token of a row."""
        self.port.plan(0, 0, 0)
        others = np.arange(len(self.port.query_lens)) != row
        for counts in (self.port.query_lens, self.port.n_select):
            counts[others] = 0
        self._selected[row] = token
        self.port.commit(self._selected.data_ptr(), 1)

    def drafted(self, most: int) -> list[list[int]]:
        """For each row, the draft tokens behind its verified text, at most ``most``."""
        self.port.plan(0, most, 0)
        begin = self.port.query_lens - self.port.num_draft_tokens
        return [
            row[at:end].tolist() for row, at, end in zip(self.port.tokens, begin, self.port.query_lens, strict=True)
        ]


class _Workers(WorkersDriver):
    """The processes of the drafts. The target's stages are elsewhere."""

    def __init__(self, models: Sequence[PreTrainedModel], config: SpeculationConfig) -> None:
        # No model is built for the target's place.
        super().__init__([*models, models[-1]], config)

    def _make_stage(self, i: int, ngram: Any = None, acceptance: Any = None) -> Any:
        return _VerifiedText(self)

    def begin(self, request: GenerationRequest) -> None:
        """Start a call. The processes run until :meth:`end`."""
        self._call = self._begin(request)

    def tend(self) -> None:
        """Notice processes that have ended or started."""
        self._tend(self._call)

    def end(self) -> None:
        self.block.start(0)


class AsynchronousChain(Drafter):
    """Drafts the text of a chain whose models run in processes of their own, ahead of the stages.

    It drafts at the end of a cycle, so that the chain has the cycle's time. If the chain is behind, the row gets no draft in this cycle.

    Args:
        models: The chain, smallest first, as for :class:`ChainDrafter`.
        stages: Number of stages of the target.

    Raises:
        ValueError: ``models`` is empty, or a model cannot live in shared memory.
        RuntimeError: A process cannot start.
    """

    late = True

    def __init__(self, models: Sequence[PreTrainedModel], stages: int) -> None:
        if not models:
            raise ValueError("a chain needs at least one model")
        self.models, self._stages = list(models), stages
        # The tokens in flight, the next one, and some that are ready when a cycle is shorter than a step of the chain.
        self._most = min(stages + _LOOKAHEAD, WIDTH // 2)
        lookahead = (*[_LOOKAHEAD] * (len(self.models) - 1), self._most)
        self._driver = _Workers(self.models, SpeculationConfig(schedule=WORKERS.name, lookahead=lookahead))
        self._is_late = False  # the last wait was in vain

    def start(self, prompts: list[list[int]], capacity: int, select: SampleTokens) -> None:
        self._driver.begin(_request(prompts, capacity, select))
        self._text: _VerifiedText = self._driver.target  # type: ignore[assignment]
        self._text.begin()
        self._is_late = False

    def begin_cycle(self, requests: list[DraftRequest]) -> None:
        self._driver.tend()
        block = self._driver.block
        for row, tokens, fill in requests:
            # The oldest token in flight is verified.
            for token in tokens[block.length(block.target, row) : len(tokens) - fill + 1]:
                self._text.publish(row, token)

    def draft(self, requests: list[DraftRequest]) -> list[int | None]:
        wanted = {r.row: r.tokens[len(r.tokens) - r.fill + 1 :] for r in requests}
        found = self._next(wanted)
        if None in found.values() and not self._is_late:
            block = self._driver.block
            patience = max(len(flying) + 1 for flying in wanted.values()) * PATIENCE * block.step_ns(block.target - 1)
            deadline = time.perf_counter_ns() + int(min(patience, _LONGEST_WAIT_NS))
            while None in found.values() and (left := deadline - time.perf_counter_ns()) > 0:
                self._text.port.park(left)
                found = self._next(wanted)
            self._is_late = None in found.values()
        return [found[r.row] for r in requests]

    def _next(self, wanted: dict[int, Sequence[int]]) -> dict[int, int | None]:
        """For each row, the chain's token behind the tokens in flight; None where it has none."""
        drafted = self._text.drafted(self._most)
        out: dict[int, int | None] = {}
        for row, flying in wanted.items():
            n = len(flying)
            agrees = len(drafted[row]) > n and drafted[row][:n] == list(flying)
            out[row] = drafted[row][n] if agrees else None
        if any(token is not None for token in out.values()):
            self._is_late = False
        return out

    def finish(self) -> None:
        self._driver.end()

    def close(self) -> None:
        self._driver.close()

    def for_fork(self) -> AsynchronousChain:
        return AsynchronousChain(self.models, self._stages)  # the processes and their block are the parent's
