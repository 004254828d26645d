"""SPD's decoding loop, whatever runs the stages; and all of them in one process, in turn.

Every token of the text is the target's own choice, made by the same :class:`pipespec.sampling.Selector` from the logits of a forward of
one token behind its exact prefix, as in plain decoding. Drafts decide when it is made, never what it is.
"""

from __future__ import annotations

import pickle
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from pipespec.cache import RowCache
from pipespec.drivers import Request
from pipespec.drivers.base import Holder, StageFailure
from pipespec.progress import level_of_caller
from pipespec.sampling import Selection, Selector
from pipespec.spd import drafting
from pipespec.spd.drafting import Drafter
from pipespec.spd.machine import Entry, Machine, Wanted
from pipespec.spd.partition import LayerStage, Partition, Verifier
from pipespec.spd.report import PHASES


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


class Streams(NamedTuple):
    """A residual stream that the drafter reads: HF index and values ``[B, q, H]``."""

    hf_index: int
    values: torch.Tensor


class SpeculativeDriver(ABC):
    """Runs one partitioned target and whoever drafts for it. See :class:`pipespec.drivers.base.Runner`.

    What differs by runtime is where the stages are: ``_open``, ``_feed``, ``_launch`` and ``_collect``. A drafter that raises costs speed,
    not text: ``StageFailure`` is warned of, and the call goes on without drafts.
    """

    def __init__(self, partition: Partition, verifier: Verifier, drafter: Drafter) -> None:
        self.partition, self.verifier, self.drafter = partition, verifier, drafter
        self.features = tuple(drafter.features)
        for index in self.features:
            partition.owner(index)  # ValueError where there is no such stream
        self.machine = Machine(partition.stages)
        self.clock = Clock(partition.stages)
        self.rounds = 0
        self._drafts = False  # whether the drafter is well

    @property
    def block(self) -> Machine:
        return self.machine

    @property
    @abstractmethod
    def target(self) -> Holder:
        """Whoever has the keys and values."""

    # ---- where the stages are

    @abstractmethod
    def _open(self, rows: int, longest: int, most: int) -> None:
        """Empty caches for ``rows`` rows with prompts of up to ``longest`` tokens, which may grow to ``most`` positions."""

    @abstractmethod
    def _feed(
        self, columns: np.ndarray, begin: Sequence[int], answer: bool
    ) -> tuple[torch.Tensor | None, list[Streams]]:
        """``columns [B, q]`` through all stages at positions ``begin`` (what lies behind them never was); with ``answer`` what the last one
        leaves, ``[B, q, H]``, and else None."""

    @abstractmethod
    def _launch(self, work: list[list[Entry]]) -> None:
        """The stages may begin a cycle: stage s on ``work[s]``."""

    @abstractmethod
    def _collect(self, work: list[list[Entry]]) -> tuple[torch.Tensor | None, list[Streams], list[float]]:
        """The cycle's end: what the last stage leaves ``[B, 1, H]`` (None: nothing), streams, and seconds of each stage."""

    # ---- a call

    def run(self, request: Request) -> None:
        """Generate. Returns when every row is complete."""
        start = request.start
        prompts = [p.tolist() for p in start.prompts]
        rows, longest = len(prompts), max(map(len, prompts))
        self._most = max(start.limits) + 1  # rows that idle in a batch are fed a column that does not count
        self.clock, self.rounds = Clock(self.partition.stages), 0
        self._text = np.zeros((rows, self._most), dtype=np.int32)
        for row, prompt in enumerate(prompts):
            self._text[row, : len(prompt)] = prompt
        self.machine.reset(prompts, start.limits, request.eos)
        self._select = Selector(start.selection, self._text, request.record, start.vocabulary)
        select = DraftSelect(pickle.loads(request.draft_selection), self._text, start.vocabulary)
        self._vocabulary = start.vocabulary
        self._drafts = True
        try:
            with self.clock.phase("prefill"), torch.inference_mode():
                self.verifier.open()
                self._guarded(self.drafter.start, prompts, max(start.limits), select)
                self._open(rows, longest, self._most)
                first = self._prefill(prompts, start.chunk)
            self.machine.begin(first)
            self._text[range(rows), [len(p) for p in prompts]] = first
            self._tell(request.on_commit)
            while self.machine.running:
                with torch.inference_mode():
                    verified = self._cycle()
                if verified:
                    self._tell(request.on_commit)
        finally:
            # Also of one that has failed: it may hold memory.
            self._guarded(self.drafter.finish, even_if_ill=True)

    @staticmethod
    def _tell(on_commit: Callable[[], None] | None) -> None:
        if on_commit is not None:
            on_commit()

    def forget(self) -> None:
        """Give back the caches in this process, until the next call. While none runs."""
        self.drafter.forget()

    def _begin(self, end: list[int]) -> list[int]:
        """Per row the positions that need no prefill."""
        return [0] * len(end)

    def _prefill(self, prompts: list[list[int]], chunk: int) -> list[int]:
        """All stages over the prompts; the target's tokens behind them.

        The last token of each prompt goes alone, as every later one will: the width of a forward may change its rounding.
        """
        end = [len(p) - 1 for p in prompts]
        begin = self._begin(end)
        level = not any(begin)
        while (missing := max(e - b for b, e in zip(begin, end, strict=True))) > 0:
            q = min(chunk, missing)
            columns = np.zeros((len(prompts), q), dtype=np.int32)
            real = [max(0, min(q, e - b)) for b, e in zip(begin, end, strict=True)]
            for row, (b, n) in enumerate(zip(begin, real, strict=True)):
                columns[row, :n] = self._text[row, b : b + n]
            self._show(self._feed(columns, begin, answer=False)[1], begin, real)
            # Rows that are complete go on with columns that do not count, as long as all begin together: no mask is needed then.
            begin = [b + q if level else min(b + q, e) for b, e in zip(begin, end, strict=True)]
        ones = np.ones(len(prompts), dtype=np.int32)
        hidden, streams = self._feed(np.array([[p[-1]] for p in prompts], dtype=np.int32), end, answer=True)
        self._show(streams, end, ones.tolist())
        assert hidden is not None
        at = np.array([len(p) for p in prompts], dtype=np.int64)
        return _choose(self._select, self.verifier.logits(hidden), ones, at, list(range(len(prompts))))

    def _show(self, streams: list[Streams], begin: Sequence[int], real: Sequence[int]) -> None:
        """The drafter observes the ``real[r]`` columns of row r that count, from position ``begin[r]``."""
        rows = [row for row, n in enumerate(real) for _ in range(n)]
        places = [i for n in real for i in range(n)]
        positions = [begin[row] + i for row, i in zip(rows, places, strict=True)]
        for index, values in streams:
            self._guarded(self.drafter.observe, index, rows, positions, values[rows, places])

    def _cycle(self) -> bool:
        """One cycle of all rows. Whether a token was verified."""
        machine, clock = self.machine, self.clock
        self.rounds += 1
        work = machine.entries()
        self._launch(work)
        began = time.perf_counter()
        with clock.phase("draft"):
            drafts = self._draft(machine.requests())
        drafted = time.perf_counter() - began
        with clock.phase("stages"):
            hidden, streams, took = self._collect(work)
        clock.cycle(drafted, took)
        with clock.phase("draft"):
            for index, values in streams:
                entries = work[self.partition.owner(index)]
                rows = [e.row for e in entries]
                self._guarded(self.drafter.observe, index, rows, [e.position for e in entries], values[rows, 0])
        with clock.phase("verify"):
            chosen = self._verify(work[-1], hidden)
        flushes = machine.commit(drafts, chosen)
        for row in drafts.keys() | chosen.keys():
            position, token = machine.newest(row)
            self._text[row, position] = token
        with clock.phase("draft"):
            for flush in flushes:
                self._guarded(self.drafter.truncate, *flush)
        return bool(chosen)

    def _verify(self, leaving: list[Entry], hidden: torch.Tensor | None) -> dict[int, int]:
        """The target's tokens behind what has left the last stage."""
        if not leaving:
            return {}
        assert hidden is not None
        rows = [e.row for e in leaving]
        n_fed = np.zeros(hidden.shape[0], dtype=np.int32)
        at = np.zeros(hidden.shape[0], dtype=np.int64)
        n_fed[rows], at[rows] = 1, [e.position + 1 for e in leaving]
        tokens = _choose(self._select, self.verifier.logits(hidden), n_fed, at, rows)
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


class LocalDriver(SpeculativeDriver):
    """All stages in this process, in turn."""

    def __init__(self, model: PreTrainedModel, partition: Partition, drafter: Drafter) -> None:
        super().__init__(partition, Verifier.of(model), drafter)
        self.model = model
        self.stages = [LayerStage.of(model, partition, s) for s in range(partition.stages)]
        self._adopted: tuple[RowCache, list[np.ndarray]] | None = None
        self._complete = False

    @property
    def target(self) -> LocalDriver:
        return self

    def run(self, request: Request) -> None:
        self._complete = False
        super().run(request)
        self._complete = True

    def forget(self) -> None:
        super().forget()
        for stage in self.stages:
            stage.close()

    # ---- keys and values from outside, and for outside

    def adopt(self, cache: RowCache, text: Sequence[np.ndarray]) -> None:
        """Begin with what ``cache`` holds; ``text``: per row the tokens. It is not changed before :meth:`release`."""
        self._adopted = cache, list(text)
        self._complete = False

    def release(self, lengths: Sequence[int]) -> RowCache:
        """The stages' keys and values in one cache, up to ``lengths``: the adopted one, or a new one. A copy."""
        adopted, self._adopted = self._adopted, None
        if adopted is not None and not self._complete:
            given, text = adopted
            given.text = text
            return given
        held = zip(*(stage.cache.lengths for stage in self.stages), strict=True)
        ends = [min(n, *row) for n, row in zip(lengths, held, strict=True)]
        for stage in self.stages:
            stage.cache.truncate(ends)
        cache = adopted[0] if adopted is not None else RowCache.for_model(self.model, len(ends), max(ends))
        cache.reserve(max(ends))
        cache.load([pair for stage in self.stages for pair in stage.cache.states()])
        cache.truncate(ends)
        cache.text = [self._text[row, :n].copy() for row, n in enumerate(ends)]
        return cache

    def _begin(self, end: list[int]) -> list[int]:
        """What an adopted cache holds; nothing where the drafter must see every position."""
        if self._adopted is None or self.features:
            return super()._begin(end)
        cache, text = self._adopted
        begin = [min(len(tokens), e) for tokens, e in zip(text, end, strict=True)]
        if any(begin):
            states = cache.states()
            for stage in self.stages:
                stage.cache.reserve(cache.get_seq_length())
                stage.cache.load(states[stage.first : stage.first + len(stage.layers)])
        return begin

    # ---- the stages

    def _open(self, rows: int, longest: int, most: int) -> None:
        self._inbox: list[torch.Tensor | None] = [None] * self.partition.stages
        for stage in self.stages:
            stage.open(rows, longest, most)

    def _feed(
        self, columns: np.ndarray, begin: Sequence[int], answer: bool
    ) -> tuple[torch.Tensor | None, list[Streams]]:
        streams: list[Streams] = []
        hidden = torch.from_numpy(columns)
        for stage in self.stages:
            hidden = stage.step(hidden, begin, self._see(streams))
        return hidden, streams

    def _see(self, streams: list[Streams]) -> Callable[[int, torch.Tensor], None]:
        def see(index: int, stream: torch.Tensor) -> None:
            if index in self.features:
                streams.append(Streams(index, stream))

        return see

    def _launch(self, work: list[list[Entry]]) -> None:
        """They run in ``_collect``."""

    def _collect(self, work: list[list[Entry]]) -> tuple[torch.Tensor | None, list[Streams], list[float]]:
        streams: list[Streams] = []
        outbox: list[torch.Tensor | None] = [None] * (self.partition.stages + 1)
        took = [0.0] * self.partition.stages
        for s, (stage, entries) in enumerate(zip(self.stages, work, strict=True)):
            if not entries:
                continue
            began = time.perf_counter()
            arrived = column(entries, stage.cache.rows) if s == 0 else self._inbox[s]
            assert arrived is not None, "an entry comes from the stage before"
            outbox[s + 1] = stage.step(arrived, self.machine.held(s), self._see(streams))
            took[s] = time.perf_counter() - began
        self._inbox = outbox[:-1]
        return outbox[-1], streams, took


def column(entries: Sequence[Entry], rows: int) -> torch.Tensor:
    """The tokens of ``entries`` as ``[rows, 1]``, int64; 0 in rows without one."""
    tokens = torch.zeros((rows, 1), dtype=torch.int64, device="cpu")
    for entry in entries:
        tokens[entry.row, 0] = entry.token
    return tokens
