"""SPD in one process: the stages of a partitioned target in turn. Correctness, and what a cycle is made of.

Every token of the text is the target's own choice, made by the same :class:`pipespec.sampling.Selector` from the logits of a forward of
one token behind its exact prefix, as in plain decoding. Drafts decide when it is made, never what it is.
"""

from __future__ import annotations

import pickle
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from pipespec.cache import RowCache
from pipespec.drivers import Request
from pipespec.drivers.base import StageFailure, level_of_caller
from pipespec.sampling import Selection, Selector
from pipespec.spd import drafting
from pipespec.spd.drafting import Drafter
from pipespec.spd.machine import Machine, Wanted
from pipespec.spd.partition import LayerStage, Partition, Verifier
from pipespec.spd.report import PHASES

_FIRST_ROOM = 1024
"""New tokens for which a cache has room at first; then its room doubles."""


class DraftSelect:
    """How a drafter's logits become tokens: as the target's would, with its noise and the processors that drafts may run.

    ``selection``: for drafters that run stages of their own.
    """

    def __init__(self, selection: Selection, text: np.ndarray, vocabulary: int) -> None:
        self.selection, self.vocabulary = selection, vocabulary
        self._rows = text.shape[0]
        self._selector = Selector(selection, text, None, vocabulary, judges=False)

    def __call__(self, logits: torch.Tensor, rows: list[int], positions: list[int]) -> list[int]:
        """``logits [R, V]``, of different rows."""
        if len(set(rows)) != len(rows):
            raise ValueError(f"one token per row can be chosen at a time, not rows {rows}")
        block = logits.new_zeros((self._rows, 1, logits.shape[1]))
        block[rows, 0] = logits
        n_fed = np.zeros(self._rows, dtype=np.int32)
        at = np.zeros(self._rows, dtype=np.int64)
        n_fed[rows], at[rows] = 1, positions
        return _choose(self._selector, block, n_fed, at, rows)


def _choose(
    selector: Selector, logits: torch.Tensor, n_fed: np.ndarray, positions: np.ndarray, rows: list[int]
) -> list[int]:
    """One token for each of ``rows`` from ``logits [B, 1, V]``; ``n_fed`` is 1 for these rows and else 0."""
    fed = torch.zeros((len(n_fed), 1), dtype=torch.int32, device="cpu")  # no hints: what was fed does not matter
    selected = selector(logits, fed, n_fed, np.zeros_like(n_fed), positions)
    return selected[rows, 0].tolist()


class Clock:
    """Where the seconds of a call went."""

    def __init__(self, stages: int) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.stage_seconds = [0.0] * stages
        self.saved = 0.0  # what cycles would take less with all at once

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - began

    def cycle(self, draft: float, stages: Sequence[float]) -> None:
        """``draft``, ``stages``: seconds of the drafter and of each stage in one cycle."""
        for s, seconds in enumerate(stages):
            self.stage_seconds[s] += seconds
        self.saved += draft + sum(stages) - max(draft, *stages)


class SpeculativeDriver:
    """Runs one partitioned target and whoever drafts for it. See :class:`pipespec.drivers.base.Runner`.

    A drafter that raises costs speed, not text: ``StageFailure`` is warned of, and the call goes on without drafts.
    """

    def __init__(self, model: PreTrainedModel, partition: Partition, drafter: Drafter) -> None:
        self.model, self.partition, self.drafter = model, partition, drafter
        self.stages = [LayerStage.of(model, partition, s) for s in range(partition.stages)]
        self._verifier = Verifier.of(model)
        self.machine = Machine(partition.stages)
        self._drafts = False  # whether the drafter is well
        self._adopted: tuple[RowCache, list[np.ndarray]] | None = None
        self._complete = False
        self.rounds = 0

    @property
    def block(self) -> Machine:
        return self.machine

    @property
    def target(self) -> SpeculativeDriver:
        return self

    # ---- keys and values from outside, and for outside

    def adopt(self, cache: RowCache, text: Sequence[np.ndarray]) -> None:
        """Begin with what ``cache`` holds; ``text``: per row the tokens. It is not changed before :meth:`release`."""
        self._adopted = cache, list(text)
        self._complete = False

    def release(self, lengths: Sequence[int]) -> RowCache:
        """The stages' keys and values in one cache, up to ``lengths``: the adopted one, or a new one. A copy."""
        adopted, self._adopted = self._adopted, None
        if adopted is not None and not self._complete:
            cache, text = adopted
            cache.text = text
            return cache
        rows = len(lengths)
        ends = [min(n, held) for n, held in zip(lengths, self._held(), strict=True)]
        for stage in self.stages:
            stage.cache.truncate(ends)
        cache = adopted[0] if adopted is not None else RowCache.for_model(self.model, rows, max(ends))
        cache.reserve(max(ends))
        cache.load([pair for stage in self.stages for pair in stage.cache.states()])
        cache.truncate(ends)
        cache.text = [self._text[row, :n].copy() for row, n in enumerate(ends)]
        return cache

    def _held(self) -> list[int]:
        """Per row the positions that every stage holds."""
        return [min(row) for row in zip(*(stage.cache.lengths for stage in self.stages), strict=True)]

    def forget(self) -> None:
        """Give the caches back to the system."""
        for stage in self.stages:
            stage.close()

    # ---- a call

    def run(self, request: Request) -> None:
        """Generate. Returns when every row is complete."""
        start = request.start
        rows, longest = len(start.prompts), max(len(p) for p in start.prompts)
        self._most = max(start.limits) + 1  # rows that idle in a batch are fed a column that does not count
        self.clock, self.rounds, self._complete = Clock(self.partition.stages), 0, False
        self._text = np.zeros((rows, self._most), dtype=np.int32)
        prompts = [p.tolist() for p in start.prompts]
        for row, prompt in enumerate(prompts):
            self._text[row, : len(prompt)] = prompt
        self.machine.reset(prompts, start.limits, request.eos)
        self._select = Selector(start.selection, self._text, request.record, start.vocabulary)
        select = DraftSelect(pickle.loads(request.draft_selection), self._text, start.vocabulary)
        self._vocabulary = start.vocabulary
        self._features = frozenset(self.drafter.features)
        self._drafts = True
        self._inbox: list[torch.Tensor | None] = [None] * self.partition.stages
        try:
            with self.clock.phase("prefill"), torch.inference_mode():
                self._guarded(self.drafter.start, prompts, max(start.limits), select)
                for stage in self.stages:
                    stage.open(rows, min(self._most, longest + _FIRST_ROOM))
                first = self._prefill(prompts, start.chunk)
            self.machine.begin(first)
            self._text[range(rows), [len(p) for p in prompts]] = first
            self._tell(request.on_commit)
            while self.machine.running:
                with torch.inference_mode():
                    verified = self._cycle()
                if verified:
                    self._tell(request.on_commit)
            self._complete = True
        finally:
            # Also of one that has failed: it may hold memory.
            self._guarded(self.drafter.finish, even_if_ill=True)

    @staticmethod
    def _tell(on_commit: Callable[[], None] | None) -> None:
        if on_commit is not None:
            on_commit()

    def _prefill(self, prompts: list[list[int]], chunk: int) -> list[int]:
        """All stages over the prompts; the target's tokens behind them.

        The last token of each prompt goes alone, as every later one will: the width of a forward may change its rounding.
        """
        rows = range(len(prompts))
        end = [len(p) - 1 for p in prompts]
        begin = self._taken_over(end)
        level = not any(begin)
        while (missing := max(e - b for b, e in zip(begin, end, strict=True))) > 0:
            q = min(chunk, missing, self.stages[0].cache.capacity - max(self.stages[0].cache.lengths))
            columns = np.zeros((len(prompts), q), dtype=np.int32)
            real = [(row, b, max(0, min(q, end[row] - b))) for row, b in enumerate(begin)]
            for row, b, n in real:
                columns[row, :n] = self._text[row, b : b + n]
            self._through(columns, real)
            begin = [b + q if level else min(b + q, e) for b, e in zip(begin, end, strict=True)]
            if not level:  # what is complete must not eat up the room of the others
                self._truncate(begin)
        self._truncate(end)
        last = np.array([[p[-1]] for p in prompts], dtype=np.int32)
        hidden = self._through(last, [(row, end[row], 1) for row in rows])
        ones = np.ones(len(prompts), dtype=np.int32)
        at = np.array([len(p) for p in prompts], dtype=np.int64)
        return _choose(self._select, self._verifier.logits(hidden), ones, at, list(rows))

    def _taken_over(self, end: list[int]) -> list[int]:
        """Per row the positions that need no prefill, of an adopted cache. None where the drafter must see every position."""
        if self._adopted is None or self._features:
            return [0] * len(end)
        cache, text = self._adopted
        states = cache.states()
        begin = [min(len(tokens), e) for tokens, e in zip(text, end, strict=True)]
        for stage in self.stages:
            if any(begin):
                stage.cache.reserve(cache.get_seq_length() + 1)
                stage.cache.load(states[stage.first : stage.first + len(stage.layers)])
            stage.cache.truncate(begin)
        return begin

    def _truncate(self, lengths: Sequence[int]) -> None:
        for stage in self.stages:
            stage.cache.truncate(lengths)

    def _through(self, columns: np.ndarray, real: list[tuple[int, int, int]]) -> torch.Tensor:
        """Feed ``columns [rows, q]`` to all stages one after the other; ``real``: row, first position and number of those that count."""
        rows = [row for row, _, n in real for _ in range(n)]
        places = [i for _, _, n in real for i in range(n)]
        positions = [b + i for _, b, n in real for i in range(n)]

        def see(index: int, stream: torch.Tensor) -> None:
            if index in self._features:
                self._guarded(self.drafter.observe, index, rows, positions, stream[rows, places])

        hidden = self.stages[0].embedded(torch.from_numpy(columns))
        see(0, hidden)
        for stage in self.stages:
            stage.cache.reserve(min(self._most, stage.cache.get_seq_length() + columns.shape[1]))
            hidden = stage.forward(hidden, see)
        return hidden

    def _cycle(self) -> bool:
        """One cycle of all rows. Whether a token was verified."""
        machine, clock = self.machine, self.clock
        self.rounds += 1
        began = time.perf_counter()
        drafts = self._draft(machine.requests())
        drafted = time.perf_counter()
        clock.seconds["draft"] += drafted - began
        seen: list[tuple[int, list[int], list[int], torch.Tensor]] = []
        outbox: list[torch.Tensor | None] = [None] * (self.partition.stages + 1)
        took = [0.0] * self.partition.stages
        for s, work in enumerate(machine.entries()):
            if work:
                before = time.perf_counter()
                outbox[s + 1] = self._run_stage(s, work, seen)
                took[s] = time.perf_counter() - before
        clock.cycle(drafted - began, took)
        clock.seconds["stages"] += sum(took)
        with clock.phase("draft"):
            for what in seen:
                self._guarded(self.drafter.observe, *what)
        with clock.phase("verify"):
            chosen = self._verify(outbox[-1])
        self._inbox = outbox[:-1]
        flushes = machine.commit(drafts, chosen)
        for row in drafts.keys() | chosen.keys():
            position, token = machine.newest(row)
            self._text[row, position] = token
        with clock.phase("draft"):
            for flush in flushes:
                self._guarded(self.drafter.truncate, *flush)
        return bool(chosen)

    def _run_stage(self, s: int, work: Sequence[Any], seen: list) -> torch.Tensor:
        """Stage ``s`` on its entries: one column for all rows, of which those without an entry do not count."""
        stage, machine = self.stages[s], self.machine
        cache = stage.cache
        cache.truncate(machine.held(s))
        need = cache.get_seq_length() + 1
        if need > cache.capacity:
            cache.reserve(max(need, min(2 * cache.capacity, self._most)))
        rows, positions = [e.row for e in work], [e.position for e in work]
        if s == 0:
            tokens = np.zeros((cache.rows, 1), dtype=np.int32)
            tokens[rows, 0] = [e.token for e in work]
            hidden = stage.embedded(torch.from_numpy(tokens))
            if 0 in self._features:
                seen.append((0, rows, positions, hidden[rows, 0]))
        else:
            arrived = self._inbox[s]
            assert arrived is not None, "an entry comes from the stage before"
            hidden = arrived

        def see(index: int, stream: torch.Tensor) -> None:
            if index in self._features:
                seen.append((index, rows, positions, stream[rows, 0]))

        return stage.forward(hidden, see)

    def _verify(self, hidden: torch.Tensor | None) -> dict[int, int]:
        """The target's tokens behind what has left the last stage."""
        leaving = self.machine.exits()
        if not leaving:
            return {}
        assert hidden is not None
        rows = [e.row for e in leaving]
        n_fed = np.zeros(hidden.shape[0], dtype=np.int32)
        at = np.zeros(hidden.shape[0], dtype=np.int64)
        n_fed[rows], at[rows] = 1, [e.position + 1 for e in leaving]
        tokens = _choose(self._select, self._verifier.logits(hidden), n_fed, at, rows)
        return dict(zip(rows, tokens, strict=True))

    # ---- the drafter, which may fail

    def _draft(self, wanted: list[Wanted]) -> dict[int, int]:
        # With one stage nothing is in flight behind a token that leaves: a draft could save nothing.
        if not wanted or self.partition.stages == 1:
            return {}
        tokens = self._guarded(self._checked, [drafting.Request(*w) for w in wanted])
        return {} if tokens is None else dict(zip((w.row for w in wanted), tokens, strict=True))

    def _checked(self, requests: list[drafting.Request]) -> list[int]:
        tokens = [int(token) for token in self.drafter.draft(requests)]
        if len(tokens) != len(requests):
            raise ValueError(f"{len(tokens)} drafts for {len(requests)} requests")
        outside = [token for token in tokens if not 0 <= token < self._vocabulary]
        if outside:
            raise ValueError(f"drafted token id {outside[0]}, outside the target's vocabulary of {self._vocabulary}")
        return tokens

    def _guarded(self, call: Callable[..., Any], *arguments: Any, even_if_ill: bool = False) -> Any:
        """Call the drafter, if it is well; None where it is not."""
        if not self._drafts and not even_if_ill:
            return None
        try:
            return call(*arguments)
        except Exception as error:
            if self._drafts:
                self._drafts = False
                warnings.warn(
                    f"the drafter failed ({type(error).__name__}: {error}); this call goes on without it, the next one tries it "
                    "again. The text is not affected, only its speed",
                    StageFailure,
                    stacklevel=level_of_caller(),
                )
            return None
