"""Stage: one model of a chain, and the step that every stage runs: plan, forward, select, commit."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedModel

from pipespec.config import WIDTH
from pipespec.engine.acceptance import RejectionAcceptance, drop_rejected
from pipespec.engine.agreement import LONG_REST, agreement
from pipespec.engine.cache import RowCache
from pipespec.engine.cached_text import CachedText
from pipespec.engine.inputs import StageInputs
from pipespec.engine.ngram import NgramStage
from pipespec.engine.sampler import Sampler, ScoreRecord
from pipespec_kernels import _native
from pipespec_kernels.state import Action, StateBlock


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
        ngram: the stage upstream, if it is an n-gram index: it drafts before each step of this one.
        acceptance: shared by a draft and the target whose sampled calls use rejection sampling; None: coupled.
        confidence: whether the stage publishes how sure it is of its tokens, stops where that says so, and learns how often it keeps draft tokens.
            The target then chooses by it, see :meth:`step`.
        in_turn: whether the drafts stand still while the target works.
    """

    may_defer = True
    """Whether its prompt may be read by the first step of a call."""

    def __init__(
        self,
        model: PreTrainedModel,
        block: StateBlock,
        index: int,
        trace: _native.TraceBuffer | None = None,
        *,
        native: bool = True,
        ngram: NgramStage | None = None,
        acceptance: RejectionAcceptance | None = None,
        confidence: bool = False,
        in_turn: bool = True,
    ) -> None:
        super().__init__(model, native=native)
        self.block = block
        self.index = index
        self._trace = trace
        self._ngram = ngram
        self._acceptance = acceptance
        if acceptance is not None:
            self.reads_last = False
        self._confidence, self._in_turn = confidence, in_turn
        # It continues with what earlier calls taught it.
        self._policy = _native.GainPolicy() if confidence and index == block.target else None
        self.wait_ns = 0
        """The time that the last :meth:`step` wanted to wait for draft tokens, by their confidence; 0: it did not."""
        self.agreement = (0, 0)
        """Tokens of the target that agree with the draft's own choices, of those that it has compared: after a rest. Its reader resets it."""

    def release(self) -> None:
        super().release()
        if self._ngram is not None:
            self._ngram.release()

    @torch.inference_mode()
    def prefill(self, inputs: StageInputs, record: ScoreRecord | None = None) -> None:
        """Start a call: cache the keys and values of each prompt but its last token, and bind to the rows of the block.

        Args:
            inputs: of the call.
            record: where the target's scores and logits are stored, if the caller asks for them.
        """
        began = time.perf_counter_ns()
        prompts, rows = inputs.prompts, len(inputs.prompts)
        if self._ngram is not None:
            self._ngram.prefill(prompts)
        is_target, self.agreement = self.index == self.block.target, (0, 0)
        cache, held = self._open(inputs)
        filling = time.perf_counter_ns()
        widest, total = self._read(inputs, cache, held, selects=is_target)
        if self._trace is not None and total:
            self._trace.prefill(began, filling, time.perf_counter_ns(), min(inputs.chunk, widest), total)

        sampling_params = inputs.sampling_params
        if self._clamp is not None and sampling_params.stepwise:
            # Processors may name tokens that this model does not have.
            sampling_params = replace(sampling_params, processors=())
        acceptance = None if sampling_params.seeds is None else self._acceptance
        if acceptance is not None and is_target:
            acceptance.begin(rows, inputs.vocabulary, self._device)
        self._select = Sampler(
            sampling_params, self._text, record, inputs.vocabulary, is_target, acceptance, inputs.grammar
        )
        self.port = self.block.port(self.index, WIDTH)
        self.port.trace(self._trace)
        self.port.use_confidence(self._confidence)
        if self._policy is not None:
            self._policy.begin()
        self._tokens = torch.from_numpy(self.port.tokens)
        self._kv, self._query_lens, self._num_draft_tokens, self._n_select = (
            self.port.kv[:rows],
            self.port.query_lens[:rows],
            self.port.num_draft_tokens[:rows],
            self.port.n_select[:rows],
        )
        self._rows = rows
        self._step_ns = 0.0

    @property
    def lag(self) -> int:
        """Tokens of the longest row that the target has committed and this draft has not read, but for the newest one."""
        return max(self.block.length(self.block.target, row) - 1 - n for row, n in enumerate(self._read_until()))

    @property
    def num_draft_tokens(self) -> list[int]:
        """Per row, draft tokens that the last step verified."""
        return self._num_draft_tokens.tolist()

    @torch.inference_mode()
    def step(self, lookahead: int, max_draft_tokens: int, *, may_wait: bool = False) -> Action:
        """One step of all rows: plan, forward, select, commit.

        A target that goes by confidence verifies as many of the draft tokens as gain most, and decodes one token if that gains more.

        Args:
            lookahead: how many tokens this stage may be ahead of the next one; the target ignores it.
            max_draft_tokens: most draft tokens per row in this step.
            may_wait: return ``Action.WAIT``, and set :attr:`wait_ns`, if to wait for more draft tokens gains most by their confidence.

        Returns:
            ``Action.STEP`` if the step was made. Otherwise nothing was fed: ``IDLE`` until a neighbour publishes, ``WAIT`` for draft tokens,
            ``FINISHED`` when the target's text is complete.

        Raises:
            ValueError: a token was to be drawn from logits that are no distribution; only in the target.
        """
        began = time.perf_counter_ns()
        action = self._plan(lookahead, max_draft_tokens, may_wait)
        if action != Action.STEP:
            return action
        runs = not self.has_prompt_logits
        cache, fed = self._feed()
        if (self._n_select > 0).any():
            logits, first = self._score(fed, cache)
            selected, confidence = self._choose(logits, fed, first)
            known = 0 if confidence is None else confidence.data_ptr()
            self.port.commit(selected.data_ptr(), fed.shape[1] - first, known)
        else:
            self._forward(fed, cache, keep=0)
            # Rows that only feed missing tokens select nothing.
            self.port.commit(0, 0)
        if runs:
            self._note_time(time.perf_counter_ns() - began, fed.shape[1])
        return action

    def _plan(self, lookahead: int, max_draft_tokens: int, may_wait: bool) -> Action:
        """Decide what each row feeds. Arguments and result are those of :meth:`step`."""
        if self.has_prompt_logits:
            max_draft_tokens = 0
        if self._ngram is not None and max_draft_tokens > 0:
            self._ngram.fill(max_draft_tokens)
        if self._policy is not None and max_draft_tokens > 0:
            max_draft_tokens = self._choose_draft_tokens(self._policy, max_draft_tokens, may_wait)
            if self.wait_ns:
                return Action.WAIT
        if self._acceptance is not None:
            lookahead = min(lookahead, self._acceptance.lookahead)
        return self.port.plan(lookahead, max_draft_tokens, 0)

    def _feed(self) -> tuple[RowCache, torch.Tensor]:
        """Prepare the cache and the tokens ``[rows, columns]`` of the planned step."""
        port, cache = self.port, self._cache
        assert cache is not None
        if self._unread is not None:
            self._read_late(cache)
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
        agreed, compared = agreement(self._select, logits, fed, first, int(self._kv[0]) + 1)
        self.agreement = (self.agreement[0] + agreed, self.agreement[1] + compared)
        return logits[:, first:], first

    def _choose(self, logits: torch.Tensor, fed: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The tokens that the step commits, and how sure the stage is of them where it publishes that."""
        counts = np.maximum(self._n_select - first, 0), self._num_draft_tokens * (self._n_select > 0)
        # A split model may have its head on another device than its embedding.
        given = fed[:, first:].to(logits.device)
        selected = self._select(logits, given, *counts, self._kv.astype(np.int64) + (first + 1))
        if self._acceptance is not None:
            drop_rejected(selected, self.port.tokens, self._n_select, self._query_lens, self._num_draft_tokens)
            counts = np.maximum(self._n_select - first, 0), self._num_draft_tokens * (self._n_select > 0)
        # No stage reads that of the target's tokens.
        publishes = self._confidence and self._policy is None
        return selected, self._select.confidence(logits, *counts, selected) if publishes else None

    def _note_time(self, took: int, columns: int) -> None:
        self._step_ns = took if self._step_ns == 0 else 0.9 * self._step_ns + 0.1 * took
        self.port.set_step_ns(min(int(self._step_ns), 2**32 - 1))
        if self._policy is not None:
            self.block.note_step(self._policy, columns, took / 1e9, in_turn=self._in_turn)

    def _choose_draft_tokens(self, policy: _native.GainPolicy, most: int, may_wait: bool) -> int:
        """The draft tokens that the next step verifies at most; sets :attr:`wait_ns`."""
        each = 0.0 if self._in_turn else self.block.step_ns(self.index - 1) / 1e9
        chosen, awaited, wait_s = self.port.choose(policy, most, each, may_wait)
        # The draft writes its own time, which may be wrong; no wait is longer than the target needs for the tokens itself.
        self.wait_ns = int(1e9 * min(wait_s, awaited * policy.seconds(1))) if awaited else 0
        return chosen
