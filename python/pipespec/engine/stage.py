"""Stage: one model of a chain, and the step that every stage runs: plan, forward, select, commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from pipespec.config import WIDTH
from pipespec.engine.acceptance import RejectionAcceptance, drop_rejected
from pipespec.engine.cache import RowCache
from pipespec.engine.cached_text import PROMPT_TAIL, CachedText
from pipespec.engine.chain import DraftSpec, InlineStage, StageInputs
from pipespec.engine.forward import native_form_of
from pipespec.engine.sampler import HostSampler
from pipespec.engine.sampling import ScoreRecord, Step
from pipespec.process.threads import draft_errors
from pipespec_kernels import _native
from pipespec_kernels.state import Action, StateBlock

LONG_REST = 8
"""Minimum number of missed tokens for which a draft that resumes also scores those of the target: that shows whether it pays, and costs their logits."""


def _raised(error: Exception) -> None:
    raise error


class Stage(CachedText):
    """One model of a chain, and its step.

    Drafts and target run the same step. It feeds the tokens whose keys and values are missing, then the draft tokens that upstream has
    published. It keeps the longest prefix of them that agrees with the model's own choices, and adds one token of its own.

    Args:
        model: in eval mode.
        block: the state block of the chain.
        index: place in the chain; the target has the last one.
        trace: buffer for the times of prefill and steps; None: no trace.
        native: whether the model may run in the native form.
        upstream: the stage upstream, if it is an inline one: it drafts before each step of this one.
        acceptance: shared by a draft and the target whose sampled calls use rejection sampling; None: coupled.
    """

    may_defer = True
    """Whether its prompt may be read by the first step of a call."""
    _upstream_works = False

    def __init__(
        self,
        model: PreTrainedModel,
        block: StateBlock,
        index: int,
        trace: _native.TraceBuffer | None = None,
        *,
        native: bool = True,
        upstream: InlineStage | None = None,
        acceptance: RejectionAcceptance | None = None,
    ) -> None:
        super().__init__(model, native=native)
        self.block = block
        self.index = index
        self._trace = trace
        self.upstream = upstream
        self.upstream_failed: Callable[[Exception], None] = _raised
        """Called with an error of :attr:`upstream`, which then drafts nothing until the next call."""
        self._acceptance = acceptance
        if acceptance is not None:
            self.reads_last = False
        self.defers = False
        """Whether the prompt is read in the first step of a call, which may never come. For drafts."""
        self._unread: list[int] | None = None
        self.agreement = (0, 0)
        """Tokens of the target that agree with the draft's own choices, of those that it has compared: after a rest. Its reader resets it."""

    def release(self) -> None:
        super().release()
        if self.upstream is not None:
            self.upstream.release()

    @property
    def translated(self) -> tuple[int, int] | None:
        """With another tokenizer than the target's: tokens that the model has generated in this call, and those that could not become tokens of the target."""
        return None

    def read_from(self, target: Stage) -> None:
        """Take what this draft reads of the target, in whose process it is. A model reads nothing."""

    def _run_upstream(self, run: Callable[[InlineStage], None]) -> None:
        if (upstream := self.upstream) is None:
            return
        self._upstream_works = False
        with draft_errors(self.upstream_failed):
            run(upstream)
            self._upstream_works = True

    @torch.inference_mode()
    def prefill(self, inputs: StageInputs, record: ScoreRecord | None = None) -> None:
        """Start a call: cache the keys and values of each prompt, and bind to the rows of the block. The first step reads the last token, unless the target's
        native form has read it with the prompt (``reads_last``).

        Args:
            inputs: of the call.
            record: where the target's scores and logits are stored, if the caller asks for them.
        """
        began = time.perf_counter_ns()
        prompts, rows = inputs.prompts, len(inputs.prompts)
        self._run_upstream(lambda upstream: upstream.start(prompts))
        is_target, self.agreement = self.index == self.block.target, (0, 0)
        cache, held = self._open(inputs)
        filling = time.perf_counter_ns()
        widest, total = self._read(inputs, cache, held, selects=is_target)
        if self._trace is not None and total:
            self._trace.prefill(began, filling, time.perf_counter_ns(), min(inputs.chunk, widest), total)

        sampling_params = inputs.sampling_params
        if self._clamp is not None and sampling_params.stepwise and not is_target:
            # Processors may name tokens that this model does not have.
            sampling_params = replace(sampling_params, processors=())
        acceptance = None if sampling_params.seeds is None else self._acceptance
        if acceptance is not None and is_target:
            acceptance.begin(rows, inputs.vocabulary, self._device)
        self._select = HostSampler(
            sampling_params, self._text, record, inputs.vocabulary, is_target, acceptance, inputs.grammar
        )
        self.port = self.block.port(self.index, WIDTH)
        self.port.trace(self._trace)
        self._tokens = torch.from_numpy(self.port.tokens)
        self._kv, self._query_lens, self._num_draft_tokens, self._n_select = (
            self.port.kv[:rows],
            self.port.query_lens[:rows],
            self.port.num_draft_tokens[:rows],
            self.port.n_select[:rows],
        )
        self._rows = rows

    def _read(self, inputs: StageInputs, cache: RowCache, held: list[int], *, selects: bool) -> tuple[int, int]:
        """Read the prompts from ``held`` on, or defer that, see :meth:`_fill`. Returns the largest and the total number of tokens that were read."""
        self._unread = list(self._held) if self.defers else None
        if self.defers:
            self._held = held
        else:
            self._fill(cache, held, self._held, selects=selects)
        new = [n - h for n, h in zip(self._held, held, strict=True)]
        return max(new), sum(new)

    @property
    def is_deferred(self) -> bool:
        """Whether the next forward reads the prompt first, see :attr:`defers`."""
        return self._unread is not None

    def pack(self) -> None:
        """Choose the form of the forwards, which packs the weights, before a call needs it."""
        native_form_of(self.model, RowCache.for_model(self.model, 1, 1), native=self._native)

    def _read_until(self) -> list[int]:
        """Per row, the position up to which the text is read, a part of a deferred prompt that will never be read included."""
        assert self._cache is not None
        read = self._read_by(self._cache)
        return self._late_begin(self._cache, read) or read

    def _late_begin(self, cache: RowCache, read: Sequence[int]) -> list[int] | None:
        """Where the reading of a deferred prompt begins, if the draft has read none of it, or too little; None: it goes on from ``read``."""
        if self._unread is None or cache.is_recurrent:
            return None
        missing = max(n - there for n, there in zip(self._unread, read, strict=True))
        return [max(0, n - PROMPT_TAIL) for n in self._unread] if missing > self._chunk or not any(read) else None

    @property
    def lag(self) -> int:
        """Tokens of the longest row that the target has committed and this draft has not read, but for the newest one."""
        return max(self.block.length(self.block.target, row) - 1 - n for row, n in enumerate(self._read_until()))

    @property
    def num_draft_tokens(self) -> list[int]:
        """Per row, draft tokens that the last step verified."""
        return self._num_draft_tokens.tolist()

    @torch.inference_mode()
    def step(self, lookahead: int, max_draft_tokens: int) -> Action:
        """One step of all rows: plan, forward, select, commit.

        Args:
            lookahead: how many tokens this stage may be ahead of the next one; the target ignores it.
            max_draft_tokens: maximum number of draft tokens per row in this step.

        Returns:
            ``Action.STEP`` if the step was made. Otherwise nothing was fed: ``IDLE`` until a neighbour publishes, ``FINISHED`` when the target's
            text is complete.

        Raises:
            ValueError: a token was to be drawn from logits that are no distribution; only in the target.
        """
        action = self._plan(lookahead, max_draft_tokens)
        if action == Action.STEP:
            cache, fed = self._feed()
            if (self._n_select > 0).any():
                logits, first = self._score(fed, cache)
                selected = self._choose(logits, fed, first)
                self.port.commit(selected.data_ptr(), selected.shape[1])
            else:
                # Rows that only feed missing tokens select nothing.
                self._forward(fed, cache, keep=0)
                self.port.commit(0, 0)
        return action

    def _plan(self, lookahead: int, max_draft_tokens: int) -> Action:
        """Decide what each row feeds. Arguments and result are those of :meth:`step`."""
        if self.has_prompt_logits:
            max_draft_tokens = 0
        if max_draft_tokens > 0 and self._upstream_works:
            self._run_upstream(lambda upstream: upstream.draft(max_draft_tokens))
        if self._acceptance is not None:
            lookahead = min(lookahead, self._acceptance.lookahead)
        return self.port.plan(lookahead, max_draft_tokens, 0)

    def _feed(self) -> tuple[RowCache, torch.Tensor]:
        """Prepare the cache and the tokens ``[rows, columns]`` of the planned step."""
        port, cache = self.port, self._cache
        assert cache is not None
        if self._unread is not None:
            # The prompts, whose reading was deferred.
            if (late := self._late_begin(cache, self._held)) is not None:
                cache.reset()
                self._held = self._skipped = late
            until, self._unread = self._unread, None
            self._fill(cache, list(self._held), until)
            self._held = until
        if not self.has_prompt_logits:
            self._roll_back(cache, self._in_cache(self._kv.tolist()))
        columns = port.columns
        self._grow(cache, cache.get_seq_length() + columns)
        fed = self._take_tokens(columns)
        self._held = (self._kv + self._query_lens).tolist()
        return cache, fed

    def _take_tokens(self, columns: int) -> torch.Tensor:
        """The tokens ``[rows, columns]`` of the planned step, which become part of the text."""
        port = self.port
        given = port.tokens[: self._rows, :columns]
        # Another process writes the draft tokens. As unsigned numbers, negative ids are large.
        if given.view(np.uint32).max() >= self._ids:
            np.clip(given, 0, self._ids - 1, out=given)
        fed = self._tokens[: self._rows, :columns].to(self._device)
        for row in range(self._rows):
            at, n = self._kv[row], self._query_lens[row]
            self._text[row, at : at + n] = port.tokens[row, :n]
        return fed

    def _first_selecting(self) -> int:
        """The first column whose logits a row needs."""
        return int((self._n_select - self._num_draft_tokens)[self._n_select > 0].min()) - 1

    def _score(self, fed: torch.Tensor, cache: RowCache) -> tuple[torch.Tensor, int]:
        """The logits of the columns from the first one that selects, and its index."""
        first = self._first_selecting()
        if self._prompt_logits is not None:
            logits, self._prompt_logits = self._prompt_logits, None
            return logits, first
        if first < LONG_REST or self._rows > 1 or self.index == self.block.target:
            return self._forward(fed, cache, keep=fed.shape[1] - first), first
        logits = self._forward(fed, cache, keep=fed.shape[1])
        # Compare the target's tokens in the columns up to the first one with the draft's own choices.
        one, none = torch.ones(1, dtype=torch.int32, device="cpu"), torch.zeros(1, dtype=torch.int32, device="cpu")
        text, kv = fed[0].tolist(), torch.from_numpy(self._kv)
        for c in range(first):
            own = self._select(logits[:, c : c + 1], Step(fed[:, c : c + 1].to(logits.device), kv + c, one, none))
            self.agreement = (self.agreement[0] + int(own[0, 0] == text[c + 1]), self.agreement[1] + 1)
        return logits[:, first:], first

    def _choose(self, logits: torch.Tensor, fed: torch.Tensor, first: int) -> torch.Tensor:
        """The tokens that the step commits."""
        counts = np.maximum(self._n_select - first, 0), self._num_draft_tokens * (self._n_select > 0)
        # A split model may have its head on another device than its embedding.
        given = fed[:, first:].to(logits.device)
        selected = self._select(logits, Step(given, *map(torch.from_numpy, (self._kv + first, *counts))))
        if self._acceptance is not None:
            drop_rejected(selected, self.port.tokens, self._n_select, self._query_lens, self._num_draft_tokens)
        return selected


@dataclass(frozen=True, eq=False)
class ModelDraft(DraftSpec):
    """A model of transformers with the target's tokenizer."""

    label = "a draft model"
    stage_class = Stage
    own_model = True
    draws = True
    runs_at_once = True
    source = "model"

    given: Any = None

    @classmethod
    def recognise(cls, given: Any) -> DraftSpec | None:
        return cls(given)

    def fit(self, model: Any, target: PreTrainedModel, weights: str | None) -> tuple[Any, str | None]:
        if weights is not None:
            from pipespec.models.quantizing import quantized

            model = quantized(model, weights)
        return model, weights

    def for_target(self, given: Any, target: PreTrainedModel) -> DraftSpec:
        return replace(self, given=None)  # it is loaded, and a worker process gets its weights in shared memory
