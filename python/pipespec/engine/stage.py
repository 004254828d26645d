"""Stage: one model, its cache, and the step that every stage of a pipeline runs: plan, forward, select, commit."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedModel

from pipespec.config import WIDTH
from pipespec.engine.acceptance import Acceptance
from pipespec.engine.cache import RowCache
from pipespec.engine.forward import described, forward, forward_row, recheck, release, wide_columns
from pipespec.engine.grammar import Grammar
from pipespec.engine.group import ForwardGroup
from pipespec.engine.ngram import NgramStage
from pipespec.engine.sampling import Sampler, SamplingParams, ScoreRecord
from pipespec.models.devices import input_device
from pipespec.models.properties import embedding_size
from pipespec_kernels import _native
from pipespec_kernels.state import Action, StateBlock

INITIAL_CAPACITY = 1024
"""Generated tokens that a new cache has room for. A cache that becomes full doubles."""

PREFILL_CHUNK = 512
"""Tokens per row and forward in the prefill. It bounds activations and masks."""

PROMPT_TAIL = 64
"""Tokens of a prompt that a draft reads if it begins late. The rest hardly helps it, and would delay the text."""

_LONG_REST = 8
"""Tokens from which on a draft that has not read them compares them with its own choices. This costs their logits, and tells whether the draft pays."""


def stage_names(count: int) -> list[str]:
    """Names of the stages of a chain of ``count`` models: drafts first, target last."""
    return [f"draft {i}" for i in range(count - 1)] + ["target"]


def first_capacity(longest: int, most: int) -> int:
    """Positions of a new cache that grows, for prompts of up to ``longest`` tokens and texts of up to ``most`` positions."""
    return min(most, longest + INITIAL_CAPACITY + WIDTH)


def static_capacity(most: int) -> int:
    """Positions of a static cache for texts of up to ``most`` positions: the next power of two, so that similar calls share a cache."""
    return 1 << (most - 1).bit_length()


@dataclass(frozen=True)
class StageInputs:
    """What each stage of a call starts from.

    Attributes:
        prompts: per row, int32 token ids ``[P_r]`` without padding.
        limits: per row, the length that its text may reach.
        sampling_params: how tokens are chosen.
        vocabulary: tokens of the target's vocabulary.
        chunk: tokens per row and forward in the prefill.
        reuse: whether the cache of the call before is kept as far as it agrees with the prompts.
        grammar: what constrains the tokens of each row, for the target and for drafts that run in turn with it; None: nothing.
    """

    prompts: Sequence[np.ndarray]
    limits: Sequence[int]
    sampling_params: SamplingParams
    vocabulary: int
    chunk: int = PREFILL_CHUNK
    reuse: bool = False
    grammar: Grammar | None = None

    @property
    def most(self) -> int:
        """Positions that a row may come to use, padding columns of its last step included."""
        return max(self.limits) + WIDTH

    @property
    def capacity(self) -> int:
        """Positions of a new cache that grows. A limit is often the model's own, far beyond the text."""
        return first_capacity(max(len(p) for p in self.prompts), self.most)


class Stage:
    """One model of a chain, its cache, and its step.

    Drafts and target run the same step. It feeds the tokens whose keys and values are missing, then the draft tokens that upstream has
    published. It keeps the longest prefix of them that agrees with the model's own choices, and adds one token of its own.

    Caches between calls: after a call the stage keeps its cache. The next call reuses it if it has the same number of rows and enough capacity. With
    ``StageInputs.reuse`` it also keeps the tokens that agree with its prompts.

    * :meth:`adopt` replaces the stage's cache by the caller's (``past_key_values``). From there on the stage owns it.
    * :meth:`return_cache` gives the cache to the caller. The stage has none afterwards.
    * :meth:`reusable_bytes` is the memory that the next call takes over instead of allocating it.
    * :meth:`release_unused` frees the cache before a call that does not need its content; :meth:`release` frees it in any case.

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

    def __init__(
        self,
        model: PreTrainedModel,
        block: StateBlock,
        index: int,
        trace: _native.TraceBuffer | None = None,
        *,
        native: bool = True,
        ngram: NgramStage | None = None,
        acceptance: Acceptance | None = None,
        confidence: bool = False,
        in_turn: bool = True,
    ) -> None:
        self.model = model
        self._confidence, self._in_turn = confidence, in_turn
        # It continues with what earlier calls taught it.
        self._policy = _native.GainPolicy() if confidence and index == block.target else None
        self.wait_ns = 0
        """The time that the last :meth:`step` wanted to wait for draft tokens, by their confidence; 0: it did not."""
        self._acceptance = acceptance
        self.block = block
        self.index = index
        self._trace = trace
        self._native = native
        self._ngram = ngram
        self._cache: RowCache | None = None
        # int32 [rows, positions]: the tokens whose keys and values the cache holds, _held[row] of them.
        self._text = np.zeros((0, 0), dtype=np.int32)
        self._held: list[int] = []
        # Per row, the position of the first of these tokens: a draft that begins late does not read the beginning of a long prompt.
        self._skipped: list[int] = []
        self._vocabulary: int = embedding_size(model)
        self._clamp: int | None = None
        self._group = ForwardGroup.of(model)
        self._prompt_logits: torch.Tensor | None = None
        self.reads_wide = True
        """Whether the model's own modules read long parts of a prompt, see :func:`pipespec.engine.forward.wide_columns`."""
        self.defers = False
        """Whether the prompt is read in the first step of a call, which may never come. For drafts."""
        self.agreement = (0, 0)
        """Tokens of the target that agree with the draft's own choices, of those that it has compared: after a rest. Its reader resets it."""
        self._unread: list[int] | None = None

    def adopt(self, cache: RowCache, text: Sequence[np.ndarray]) -> None:
        """Own the caller's cache from here on. The next prefill continues from what it holds.

        Args:
            cache: of this model's shape.
            text: per row, int32 ids of the tokens that it holds.
        """
        self._cache = cache
        # return_cache() sets it again.
        cache.text = None
        self._skipped = [0] * len(text)
        self._text = np.zeros((len(text), max(map(len, text), default=0)), dtype=np.int32)
        for row, tokens in enumerate(text):
            self._text[row, : len(tokens)] = tokens
        self._held = [len(tokens) for tokens in text]

    def release(self) -> None:
        """Free the cache. The next prefill allocates a new one."""
        self._cache = None
        if self._ngram is not None:
            self._ngram.release()

    def reusable_bytes(self, inputs: StageInputs, given: RowCache | None) -> Counter[str]:
        """Bytes per device that a call takes over instead of allocating them.

        Args:
            inputs: of the call.
            given: the cache that the stage will adopt for it; None: its own.
        """
        cache, capacity = self._cache if given is None else given, inputs.capacity
        if cache is None or not cache.fits(len(inputs.prompts), capacity) or not cache.matches(self.model):
            return Counter()
        # The rest of a larger cache saves no allocation.
        return Counter({device: n * capacity // cache.capacity for device, n in cache.nbytes_on().items()})

    def release_unused(self, inputs: StageInputs, given: RowCache | None) -> None:
        """Free the cache unless the call continues from its content, and the packed weights.

        Args:
            inputs: of the call.
            given: the cache that the stage will adopt for it; None: its own.
        """
        cache = self._cache
        if cache is None or given is not None or not (inputs.reuse and cache.rows == len(inputs.prompts)):
            self.release()
        release(self.model)

    def return_cache(self, lengths: Sequence[int]) -> RowCache:
        """Give the cache to the caller, with the tokens it holds in its ``text``.

        Args:
            lengths: per row, tokens to keep; a row that holds fewer keeps those.
        """
        cache, self._cache = self._cache, None
        assert cache is not None
        self._roll_back(cache, [min(n, held) for n, held in zip(lengths, cache.lengths, strict=True)])
        cache.text = [self._text[row, :n].copy() for row, n in enumerate(cache.lengths)]
        return cache

    @property
    def form(self) -> str:
        """How the model's forward runs, see :func:`pipespec.engine.forward.described`."""
        return "" if self._cache is None else described(self.model, self._cache, native=self._native)

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
        cache, held = self._open(inputs)
        is_target = self.index == self.block.target
        filling = time.perf_counter_ns()
        self._chunk = inputs.chunk
        self._unread = list(self._held) if self.defers else None
        self.agreement = (0, 0)
        self._prompt_logits = None
        if self.defers:
            self._held = held
        else:
            self._fill(cache, held, self._held, selects=is_target)
        new = [n - h for n, h in zip(self._held, held, strict=True)]
        if self._trace is not None and any(new):
            self._trace.prefill(began, filling, time.perf_counter_ns(), min(inputs.chunk, max(new)), sum(new))

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
    def has_prompt_logits(self) -> bool:
        """Whether the forward that has read the prompt also gives the logits of the next step, which then feeds nothing and verifies no draft tokens."""
        return self._prompt_logits is not None

    @property
    def lag(self) -> int:
        """Tokens of the longest row that the target has committed and this draft has not read, but for the newest one."""
        assert self._cache is not None
        read = [n + skipped for n, skipped in zip(self._cache.lengths, self._skipped, strict=True)]
        if self._unread is not None and not any(read):
            read = [n - PROMPT_TAIL for n in self._unread]
        return max(self.block.length(self.block.target, row) - 1 - n for row, n in enumerate(read))

    @property
    def num_draft_tokens(self) -> list[int]:
        """Per row, draft tokens that the last step verified."""
        return self._num_draft_tokens.tolist()

    def _read_prompt(self, cache: RowCache) -> None:
        """Read the prompts, whose reading was deferred."""
        assert self._unread is not None
        until, self._unread = self._unread, None
        if not any(self._held) and not cache.is_recurrent:
            self._held = self._skipped = [max(0, n - PROMPT_TAIL) for n in until]
        self._fill(cache, list(self._held), until)
        self._held = until

    def _measure_agreement(self, logits: torch.Tensor, fed: torch.Tensor, known: int) -> None:
        """Compare this draft's own choices with tokens that the target has generated while the draft rested."""
        first = int(self._kv[0]) + 1
        one, none = np.ones(1, dtype=np.int32), np.zeros(1, dtype=np.int32)
        own = [
            int(
                self._select(
                    logits[:, c : c + 1], fed[:, c : c + 1].to(logits.device), one, none, np.array([first + c])
                )[0, 0]
            )
            for c in range(known - 1)
        ]
        agreed = sum(a == b for a, b in zip(own, fed[0, 1:known].tolist(), strict=True))
        self.agreement = (self.agreement[0] + agreed, self.agreement[1] + known - 1)

    def _open(self, inputs: StageInputs) -> tuple[RowCache, list[int]]:
        """Prepare cache and text of a call. Returns the cache, and how many tokens of each row it holds."""
        prompts, rows, most = inputs.prompts, len(inputs.prompts), inputs.most
        self._device = input_device(self.model)
        self._fit_vocabulary(inputs.vocabulary)
        held = [0] * rows
        if self._cache is not None and not self._cache.matches(self.model):
            # The model was moved or cast since.
            self._cache = None
        if self._cache is not None and inputs.reuse and self._cache.rows == rows:
            held = [_common(self._text[row, : self._held[row]], prompt[:-1]) for row, prompt in enumerate(prompts)]
            if any(n <= skipped for n, skipped in zip(held, self._skipped, strict=True) if skipped):
                held = [0] * rows
            held = self._cache.restorable(held)
        cache = self._cache_for(inputs, held)
        if not any(held):
            self._skipped = [0] * rows
        cache.truncate(self._in_cache(held))
        if any(held):
            # For a cache that is empty, the first forward does so.
            recheck(self.model, native=self._native)
        self._text = np.zeros((rows, most), dtype=np.int32)
        for row, prompt in enumerate(prompts):
            self._text[row, : len(prompt)] = prompt
        self._held = [len(p) - 1 for p in prompts]
        return cache, held

    @torch.inference_mode()
    def follow(self, inputs: StageInputs) -> list[np.ndarray]:
        """Run the forwards that the leader of the target's group announces, until it ends the call.

        Args:
            inputs: of the call, those of the leader.

        Returns:
            Per row, int32 ids of the text that the leader has generated, without the prompt.

        Raises:
            RuntimeError: the leader's call has failed.
        """
        cache, _ = self._open(inputs)
        assert self._group is not None
        while (announced := self._group.receive()).tokens is not None:
            tokens, lengths = announced.tokens, announced.lengths
            cache.truncate(lengths)
            self._grow(cache, max(lengths) + tokens.shape[1])
            self._forward(tokens.to(self._device), cache, announced.keep)
        for row, (prompt, new) in enumerate(zip(inputs.prompts, announced.text, strict=True)):
            self._text[row, len(prompt) : len(prompt) + len(new)] = new
        return list(announced.text)

    def _roll_back(self, cache: RowCache, lengths: Sequence[int]) -> None:
        """Truncate to ``lengths``. Tokens after the last recurrent states that are left are fed again."""
        there = cache.restorable(lengths)
        cache.truncate(there)
        if there != list(lengths):
            cache.reserve_states()
            self._fill(cache, there, list(lengths))

    def _in_cache(self, positions: Sequence[int]) -> list[int]:
        """The indices of positions of the text in the cache."""
        return [n - skipped for n, skipped in zip(positions, self._skipped, strict=True)]

    def _grow(self, cache: RowCache, need: int) -> None:
        """Room for ``need`` positions per row. A cache that becomes full doubles."""
        if need > cache.capacity:
            cache.reserve(max(need, min(2 * cache.capacity, self._text.shape[1])))

    def _fit_vocabulary(self, target_vocabulary: int) -> None:
        # A draft whose vocabulary is padded less than the target's cannot embed each of its tokens.
        self._clamp = self._vocabulary - 1 if self._vocabulary < target_vocabulary else None
        self._ids = max(self._vocabulary, target_vocabulary)

    def _cache_for(self, inputs: StageInputs, held: list[int]) -> RowCache:
        """The cache for a call, which the stage owns from here on. It holds the first ``held[r]`` tokens of the cache before."""
        rows, capacity = len(inputs.prompts), inputs.capacity
        cache = self._cache
        if cache is not None and inputs.reuse and cache.rows == rows:
            cache.reserve(capacity)
        if cache is None or not cache.fits(rows, capacity):
            # The old one is freed before the new one is allocated.
            self._cache = cache = None
            self._cache = cache = RowCache.for_model(self.model, rows, capacity)
        return cache

    def _fill(self, cache: RowCache, begin: list[int], end: list[int], *, selects: bool = False) -> None:
        """Cache the tokens ``begin[r] .. end[r] - 1`` of each row.

        With ``selects``, forwards by the library also read the last token of a prompt. The first step takes their logits, and reads no weights.
        """
        logits: dict[int, torch.Tensor] = {}
        if self.reads_wide and self._group is None:
            begin = self._fill_by_library(cache, begin, end, logits if selects else None)
            end = [max(pair) for pair in zip(begin, end, strict=True)]
        # The states of a complete row do not survive further columns.
        level = not any(self._in_cache(begin)) and not cache.is_recurrent
        while (missing := max(e - b for b, e in zip(begin, end, strict=True))) > 0:
            q = min(self._chunk, missing, cache.capacity - max(cache.lengths))
            columns = np.zeros((len(end), q), dtype=np.int32)
            for row, (b, e) in enumerate(zip(begin, end, strict=True)):
                columns[row, : max(0, min(q, e - b))] = self._text[row, b : min(b + q, e)]
            cache.aim(self._in_cache([max(b, min(b + q, e)) for b, e in zip(begin, end, strict=True)]))
            self._forward(torch.from_numpy(columns).to(self._device), cache, keep=0)
            begin = [b + q if level else min(b + q, e) for b, e in zip(begin, end, strict=True)]
            if not level:
                # Padding columns of complete rows must not use up the capacity.
                cache.truncate(self._in_cache(begin))
        cache.truncate(self._in_cache(end))
        if logits:
            self._complete(cache, logits, end)

    def _fill_by_library(
        self, cache: RowCache, begin: list[int], end: list[int], logits: dict[int, torch.Tensor] | None
    ) -> list[int]:
        """Cache the tokens that belong to wide forwards, row by row. Returns where the rest begins.

        With ``logits``, they go up to the last token of a prompt, and its logits are added by row.
        """
        last, begin = [e + (logits is not None) for e in end], list(begin)
        wide = wide_columns(
            self.model, cache, max(e - b for b, e in zip(begin, last, strict=True)), native=self._native
        )
        for row, to in enumerate(last):
            while wide is not None and (q := min(self._chunk, to - begin[row])) >= wide:
                tokens = torch.from_numpy(self._text[row, begin[row] : begin[row] + q])[None].to(self._device)
                tokens = tokens if self._clamp is None else tokens.clamp(max=self._clamp)
                begin[row] += q
                keep = int(logits is not None and begin[row] == to)
                kept = forward_row(self.model, tokens, cache, row, keep)
                if logits is not None and keep:
                    logits[row] = kept
        return begin

    def _complete(self, cache: RowCache, logits: dict[int, torch.Tensor], end: list[int]) -> None:
        """Read the last token of the other prompts, each for itself: a forward of all rows would compute the keys and values of the complete ones again."""
        for row, last in enumerate(end):
            if row not in logits:
                token = torch.from_numpy(self._text[row, last : last + 1])[None].to(self._device)
                with cache.row_alone(row, 1) as alone:
                    logits[row] = forward(self.model, token, alone, keep=1, native=self._native)
        self._prompt_logits = torch.cat([logits[row] for row in range(len(end))])

    def _forward(self, fed: torch.Tensor, cache: RowCache, keep: int) -> torch.Tensor:
        if self._clamp is not None:
            fed = fed.clamp(max=self._clamp)
        if self._group is not None and self._group.is_leader:
            self._group.announce(fed, cache.lengths, keep)
        try:
            return self._call(fed, cache, keep)
        except BaseException:
            # Lengths grow when a forward is complete, so what an interrupted one has written does not count.
            has = [n + skipped for n, skipped in zip(cache.lengths, self._skipped, strict=True)]
            self._held = [min(pair) for pair in zip(self._held, has, strict=True)]
            raise

    def _call(self, fed: torch.Tensor, cache: RowCache, keep: int) -> torch.Tensor:
        return forward(self.model, fed, cache, keep=keep, native=self._native)

    @torch.inference_mode()
    def step(
        self, lookahead: int, max_draft_tokens: int, min_draft_tokens: int = 0, *, may_wait: bool = False
    ) -> Action:
        """One step of all rows: plan, forward, select, commit.

        A target that goes by confidence verifies as many of the draft tokens as gain most, and decodes one token if that gains more.

        Args:
            lookahead: how many tokens this stage may be ahead of the next one; the target ignores it.
            max_draft_tokens: most draft tokens per row in this step.
            min_draft_tokens: return ``Action.WAIT`` while a row has fewer draft tokens and more may come; 0: never.
            may_wait: return ``Action.WAIT``, and set :attr:`wait_ns`, if to wait for more draft tokens gains most by their confidence.

        Returns:
            ``Action.STEP`` if the step was made. Otherwise nothing was fed: ``IDLE`` until a neighbour publishes, ``WAIT`` for draft tokens,
            ``FINISHED`` when the target's text is complete.

        Raises:
            ValueError: a token was to be drawn from logits that are no distribution; only in the target.
        """
        began = time.perf_counter_ns()
        port, prompt_logits = self.port, self._prompt_logits
        if prompt_logits is not None:
            max_draft_tokens = min_draft_tokens = 0
        if self._ngram is not None and max_draft_tokens > 0:
            self._ngram.fill(max_draft_tokens)
        if self._policy is not None and max_draft_tokens > 0:
            max_draft_tokens = self._choose_draft_tokens(self._policy, max_draft_tokens, min_draft_tokens, may_wait)
            if self.wait_ns:
                return Action.WAIT
            min_draft_tokens = min(min_draft_tokens, max_draft_tokens)
        if self._acceptance is not None:
            lookahead = min(lookahead, self._acceptance.lookahead)
        action = port.plan(lookahead, max_draft_tokens, min_draft_tokens)
        if action != Action.STEP:
            return action
        cache = self._cache
        assert cache is not None
        if self._unread is not None:
            self._read_prompt(cache)
        if prompt_logits is None:
            self._roll_back(cache, self._in_cache(self._kv.tolist()))
        columns = port.columns
        self._grow(cache, cache.get_seq_length() + columns)
        given = port.tokens[: self._rows, :columns]
        # Another process writes the draft tokens. As unsigned numbers, negative ids are large.
        if given.view(np.uint32).max() >= self._ids:
            np.clip(given, 0, self._ids - 1, out=given)
        fed = self._tokens[: self._rows, :columns].to(self._device)
        for row in range(self._rows):
            at, n = self._kv[row], self._query_lens[row]
            self._text[row, at : at + n] = self.port.tokens[row, :n]
        self._held = (self._kv + self._query_lens).tolist()
        selecting = self._n_select > 0
        if selecting.any():
            # Columns before the first one that selects need no logits.
            first = int((self._n_select - self._num_draft_tokens)[selecting].min()) - 1
            measures = first >= _LONG_REST and self._rows == 1 and self.index != self.block.target
            if prompt_logits is not None:
                logits, self._prompt_logits = prompt_logits, None
            else:
                logits = self._forward(fed, cache, keep=columns if measures else columns - first)
            if measures:
                self._measure_agreement(logits, fed, first + 1)
                logits = logits[:, first:]
            selected = self._select(
                logits,
                # A split model may have its head on another device than its embedding.
                fed[:, first:].to(logits.device),
                np.maximum(self._n_select - first, 0),
                self._num_draft_tokens * selecting,
                self._kv.astype(np.int64) + (first + 1),
            )
            if self._acceptance is not None:
                self._drop_rejected(selected)
            known = None
            if self._confidence and self._policy is None:
                # No stage reads that of the target's tokens.
                counts = np.maximum(self._n_select - first, 0), self._num_draft_tokens * selecting
                known = self._select.confidence(logits, *counts, selected)
            port.commit(selected.data_ptr(), columns - first, 0 if known is None else known.data_ptr())
        else:
            self._forward(fed, cache, keep=0)
            # Rows that only feed missing tokens select nothing.
            port.commit(0, 0)
        if prompt_logits is not None:
            return action
        took = time.perf_counter_ns() - began
        self._step_ns = took if self._step_ns == 0 else 0.9 * self._step_ns + 0.1 * took
        port.set_step_ns(min(int(self._step_ns), 2**32 - 1))
        if self._policy is not None:
            self.block.note_step(self._policy, columns, took / 1e9, in_turn=self._in_turn)
        return action

    def _choose_draft_tokens(self, policy: _native.GainPolicy, most: int, least: int, may_wait: bool) -> int:
        """The draft tokens that the next step verifies at most; sets :attr:`wait_ns`."""
        each = 0.0 if self._in_turn else self.block.step_ns(self.index - 1) / 1e9
        chosen, awaited, wait_s = self.port.choose(policy, most, each, may_wait)
        # The draft writes its own time, which may be wrong; no wait is longer than the target needs for the tokens itself.
        self.wait_ns = int(1e9 * min(wait_s, awaited * policy.seconds(1))) if awaited else 0
        return max(chosen, min(least, most)) if chosen else 0

    def _drop_rejected(self, selected: torch.Tensor) -> None:
        """Take a rejected draft token out of the step if the stage's own token in its place is the same: commit would accept it, and go on.

        Rejection sampling rejects the token of a draft without a distribution (NaN), and may then draw it from the target's.
        """
        for row in np.flatnonzero(self._num_draft_tokens * (self._n_select > 0)):
            draft_tokens = int(self._num_draft_tokens[row])
            kept = int((selected[row] >= 0).sum()) - 1
            if kept >= draft_tokens:
                continue
            fed = int(self._query_lens[row])
            if int(selected[row, kept]) == int(self.port.tokens[row, fed - draft_tokens + kept]):
                for counts in (self._n_select, self._query_lens, self._num_draft_tokens):
                    counts[row] -= draft_tokens - kept


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common prefix."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
