"""Stage: one model, its cache, and the step that every stage of a pipeline runs: plan, forward, select, commit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedModel

from pipespec.angles import LengthAngles
from pipespec.cache import RowCache
from pipespec.compat import embedding_size
from pipespec.forward import forward
from pipespec.sampling import Record, Selection, Selector
from pipespec_kernels import _native
from pipespec_kernels.state import Action, StateBlock

WIDTH = 64
"""Most tokens that one row feeds in one step. A stage further behind than that catches up in several."""

FIRST_ROOM = 1024
"""New tokens for which a cache has room at first; then its room doubles."""

PREFILL_CHUNK = 512
"""Tokens per row and forward in the prefill: bounds its activations and its mask."""


def stage_names(count: int) -> list[str]:
    """What the stages of a chain are called: drafts first, target last."""
    return [f"draft {i}" for i in range(count - 1)] + ["target"]


def first_capacity(longest: int, most: int) -> int:
    """Positions for which a stage's cache has room at first, with a prompt of ``longest`` tokens and at most ``most`` positions."""
    return min(most, longest + FIRST_ROOM + WIDTH)


def fixed_capacity(most: int) -> int:
    """Positions of a cache that cannot grow: rounded up, so that calls of about the same size share it."""
    return 1 << (most - 1).bit_length()


@dataclass(frozen=True)
class Start:
    """What every stage of a call begins with.

    ``prompts``: per row int32 token ids ``[P_r]`` without padding; ``limits``: per row the length it may grow to; ``selection``: how
    tokens are chosen; ``chunk``: tokens per row and forward in the prefill; ``reuse``: keep what the cache holds of the prompts
    from the call before; ``vocabulary``: the target's; ``forwards``: lengths of the longest row behind each forward of ``generate()``'s
    prefill (for angles that depend on it), if that has more than one.
    """

    prompts: Sequence[np.ndarray]
    limits: Sequence[int]
    selection: Selection
    vocabulary: int
    chunk: int = PREFILL_CHUNK
    reuse: bool = False
    forwards: Sequence[int] = ()

    @property
    def most(self) -> int:
        """Positions that a stage may come to use."""
        return max(self.limits) + WIDTH

    @property
    def capacity(self) -> int:
        """Positions for which a cache that grows has room at first: a limit is often the model's, and far away."""
        return first_capacity(max(len(p) for p in self.prompts), self.most)


class Stage:
    """A model at place ``index`` of the chain.

    There is one kind of step, for drafts and target alike: it feeds the tokens whose keys and values are missing, then
    whatever drafts upstream has, keeps the longest agreeing prefix and one token of its own. ``trace``: where its prefill and its steps
    are noted; None: nowhere.
    """

    def __init__(
        self, model: PreTrainedModel, block: StateBlock, index: int, trace: _native.TraceBuffer | None = None
    ) -> None:
        self.model = model
        self.block = block
        self.index = index
        self._trace = trace
        self._cache: RowCache | None = None
        # Per row and position the token whose keys and values the cache holds there.
        self._text = np.zeros((0, 0), dtype=np.int32)
        self._held: list[int] = []  # per row, how much of it that is
        self._vocabulary: int = embedding_size(model)
        self._clamp: int | None = None
        self._angles: LengthAngles | None = None
        self.takes_hints = True
        """False from where on drafts are of no more use in this call."""

    def adopt(self, cache: RowCache, text: Sequence[np.ndarray]) -> None:
        """Go on with a cache from elsewhere; ``text``: per row the tokens it holds."""
        self._cache = cache
        cache.text = None  # until release()
        self._text = np.zeros((len(text), max(map(len, text), default=0)), dtype=np.int32)
        for row, tokens in enumerate(text):
            self._text[row, : len(tokens)] = tokens
        self._held = [len(tokens) for tokens in text]

    def forget(self) -> None:
        """Give the cache back to the system; the next prefill makes a new one."""
        self._cache = None

    def keeps(self, start: Start, given: RowCache | None) -> int:
        """Bytes that a call need not allocate, since a cache is there that it takes over; ``given``: which it will have adopted."""
        cache, capacity = self._cache if given is None else given, start.capacity
        if cache is None or not cache.fits(len(start.prompts), capacity) or not cache.suits(self.model):
            return 0
        # A larger one spares it no more than the one that it would have made.
        return cache.nbytes * capacity // cache.capacity

    def spare(self, start: Start, given: RowCache | None) -> None:
        """As :meth:`forget`, unless the cache holds what a call goes on with."""
        cache = self._cache
        if cache is None or given is not None or not (start.reuse and cache.rows == len(start.prompts)):
            self.forget()

    def release(self, lengths: Sequence[int]) -> RowCache:
        """Hand the cache over, truncated to ``lengths``; the next prefill makes a new one."""
        cache, self._cache = self._cache, None
        assert cache is not None
        cache.truncate([min(n, held) for n, held in zip(lengths, cache.lengths, strict=True)])
        cache.text = [self._text[row, :n].copy() for row, n in enumerate(cache.lengths)]
        return cache

    @torch.inference_mode()
    def prefill(self, start: Start, record: Record | None = None) -> None:
        """Start the rows of a generation: cache the keys and values of each prompt but its last token."""
        began = time.perf_counter_ns()
        prompts = start.prompts
        rows, most = len(prompts), start.most
        self._fit_vocabulary(start.vocabulary)
        held = [0] * rows
        if self._cache is not None and not self._cache.suits(self.model):  # it was moved, or cast
            self._cache = None
        if self._cache is not None and start.reuse and self._cache.rows == rows:
            held = [_common(self._text[row, : self._held[row]], prompt[:-1]) for row, prompt in enumerate(prompts)]
        judges = self.index == self.block.target
        longest = self._fit_angles(prompts, judges)
        if self._angles is not None and self._angles.recomputes and max(held) <= self._angles.limit < longest:
            held = [0] * rows
        cache = self._room(start, held)
        cache.truncate(held)
        self._text = np.zeros((rows, most), dtype=np.int32)
        for row, prompt in enumerate(prompts):
            self._text[row, : len(prompt)] = prompt
        self._held = [len(p) - 1 for p in prompts]
        filling = time.perf_counter_ns()
        self._chunk, filled = start.chunk, held
        for seen in (self._angles is not None and start.forwards) or (longest,):
            until = [min(max(b, seen - r), e) for b, r, e in zip(filled, self._behind, self._held, strict=True)]
            self._fill(cache, filled, until, seen)
            filled = until
        new = [n - h for n, h in zip(self._held, held, strict=True)]
        if self._trace is not None and any(new):
            self._trace.prefill(began, filling, time.perf_counter_ns(), min(start.chunk, max(new)), sum(new))

        selection = start.selection
        if self._clamp is not None and selection.stepwise:
            selection = replace(selection, processors=())  # they may name tokens that it does not have
        self._select = Selector(selection, self._text, record, start.vocabulary, judges)
        self.port = self.block.port(self.index, WIDTH)
        self.port.trace(self._trace)
        self._tokens = torch.from_numpy(self.port.tokens)
        self._kv, self._n_fed, self._n_hint, self._n_select = (
            self.port.kv[:rows],
            self.port.n_fed[:rows],
            self.port.n_hint[:rows],
            self.port.n_select[:rows],
        )
        self._rows = rows
        self._step_ns = 0.0

    def _fit_vocabulary(self, targets: int) -> None:
        # A draft whose vocabulary is padded less than the target's cannot be fed every token of it.
        self._clamp = self._vocabulary - 1 if self._vocabulary < targets else None

    def _fit_angles(self, prompts: Sequence[np.ndarray], judges: bool) -> int:
        """See how the model's angles depend on the length. Returns the longest row's."""
        longest = max(len(prompt) for prompt in prompts)
        angles = LengthAngles.of(self.model)
        if angles is not None:
            angles.reset()
        self._angles = angles if judges else None  # a draft may say what it likes
        self._behind = np.array([longest - len(prompt) for prompt in prompts])
        self._is_short = angles is not None and longest <= angles.limit
        self.takes_hints = self._angles is None or longest < self._angles.limit
        return longest

    def _room(self, start: Start, held: list[int]) -> RowCache:
        """A cache for the rows of a call, from here on the stage's. What the one before has of them, ``held[r]`` tokens, it has, too."""
        rows, capacity = len(start.prompts), start.capacity
        cache = self._cache
        if cache is not None and start.reuse and cache.rows == rows:
            cache.reserve(capacity)
        if cache is None or not cache.fits(rows, capacity):
            self._cache = cache = None  # before the new one is allocated
            self._cache = cache = RowCache.for_model(self.model, rows, capacity)
        return cache

    def _fill(self, cache: RowCache, begin: list[int], end: list[int], seen: int) -> None:
        """Cache the tokens ``begin[r] .. end[r] - 1`` of each row, with the angles of a forward of ``seen`` tokens."""
        device, level = self.model.device, not any(begin)
        while (missing := max(e - b for b, e in zip(begin, end, strict=True))) > 0:
            q = min(self._chunk, missing, cache.capacity - max(cache.lengths))
            columns = np.zeros((len(end), q), dtype=np.int32)
            for row, (b, e) in enumerate(zip(begin, end, strict=True)):
                columns[row, : max(0, min(q, e - b))] = self._text[row, b : min(b + q, e)]
            self._forward(torch.from_numpy(columns).to(device), cache, keep=0, seen=seen)
            begin = [b + q if level else min(b + q, e) for b, e in zip(begin, end, strict=True)]
            if not level:  # what is complete must not eat up the room of the others
                cache.truncate(begin)
        cache.truncate(end)

    def _forward(self, fed: torch.Tensor, cache: RowCache, keep: int, seen: int) -> torch.Tensor:
        if self._clamp is not None:
            fed = fed.clamp(max=self._clamp)
        try:
            most = max(seen, max(cache.lengths) + fed.shape[1])
            with nullcontext() if self._angles is None else self._angles.seeing(seen, most):
                return forward(self.model, fed, cache, keep=keep)
        except BaseException:
            # Half of a feed lies beyond the lengths, which grow when it is complete.
            self._held = [min(n, have) for n, have in zip(self._held, cache.lengths, strict=True)]
            raise

    @torch.inference_mode()
    def step(self, window: int, max_hints: int, min_hints: int = 0) -> Action:
        """One step of all rows. See ``Policy`` in ``csrc/protocol/plan.hpp`` for the arguments, ``Action`` for the result.

        Anything but ``Action.STEP`` means that nothing was fed.
        """
        began = time.perf_counter_ns()
        port = self.port
        action = port.plan(window, max_hints, min_hints)
        if action != Action.STEP:
            return action
        cache = self._cache
        assert cache is not None
        cache.truncate(self._kv)
        seen = 0 if self._angles is None else self._hold_back(cache, self._angles)
        columns = port.columns if self._angles is None else int(self._n_fed.max())
        need = cache.get_seq_length() + columns
        if need > cache.capacity:
            cache.reserve(max(need, min(2 * cache.capacity, self._text.shape[1])))
        fed = self._tokens[: self._rows, :columns].to(self.model.device)
        for row in range(self._rows):
            at, n = self._kv[row], self._n_fed[row]
            self._text[row, at : at + n] = self.port.tokens[row, :n]
        self._held = (self._kv + self._n_fed).tolist()
        selecting = self._n_select > 0
        if selecting.any():
            # Logits of the columns before the first that is needed are not computed.
            first = int((self._n_select - self._n_hint)[selecting].min()) - 1
            logits = self._forward(fed, cache, keep=columns - first, seen=seen)
            selected = self._select(
                logits,
                fed[:, first:],
                np.maximum(self._n_select - first, 0),
                self._n_hint * selecting,
                self._kv.astype(np.int64) + (first + 1),
            )
            port.commit(selected.data_ptr(), columns - first)
        else:
            self._forward(fed, cache, keep=0, seen=seen)
            port.commit(0, 0)  # rows that only catch up select nothing
        took = time.perf_counter_ns() - began
        self._step_ns = took if self._step_ns == 0 else 0.9 * self._step_ns + 0.1 * took
        port.set_step_ns(min(int(self._step_ns), 2**32 - 1))
        return action

    def _hold_back(self, cache: RowCache, angles: LengthAngles) -> int:
        """Of what was planned, leave what ``generate()`` would feed with the same angles; returns the length that they belong to.

        ``generate()`` feeds one token of each row at a time, and the longest row's length counts, ended or not. Up to the limit it makes
        no difference. Beyond, all rows go together, without hints: another number of columns would be another length.
        """
        feeds = self._n_fed > 0
        # The longest row's length when it is the turn of the token that each row has last.
        at = self._kv + self._n_fed - self._n_hint + self._behind
        first = int(at[feeds].min())
        seen = max(angles.limit, first)
        hints = np.minimum(self._n_hint, np.maximum(seen - at, 0))
        for counts in (self._n_select, self._n_fed):
            np.maximum(counts - (self._n_hint - hints), 0, out=counts)
            counts[at > seen] = 0
        self._n_hint[:] = hints
        self.takes_hints = bool((at[feeds] + 1 < angles.limit).any())
        if self._is_short and first > angles.limit:
            self._is_short = False
            if angles.recomputes:
                cache.truncate([0] * self._rows)
                self._fill(cache, [0] * self._rows, self._kv.tolist(), seen)
        return seen


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens the two have in common from their beginning."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
