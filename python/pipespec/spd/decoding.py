"""SPD's decoding loop for any placement of the stages, and the driver with all stages in one process.

Every token of the text is the target's own. :class:`pipespec.engine.sampler.Sampler` samples it from the logits of a forward of one token
after its exact prefix, as in plain decoding. Draft tokens change when this happens and never which token it is.
"""

from __future__ import annotations

import functools
import pickle
import threading
import time
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from pipespec.engine.cache import RowCache
from pipespec.engine.sampler import Sampler
from pipespec.engine.sampling import SamplingParams
from pipespec.engine.sections import open_sections
from pipespec.models.layout import CacheLayout
from pipespec.process.signals import draft_errors
from pipespec.process.warnings import user_stacklevel
from pipespec.schedules.base import Decoder, StageFailure
from pipespec.schedules.request import GenerationRequest
from pipespec.spd.drafting import Drafter
from pipespec.spd.machine import DraftRequest, Entry, Machine
from pipespec.spd.partition import LayerStage, Partition, Verifier, synchronise
from pipespec.spd.report import PHASES


class DraftSampler:
    """Samples draft tokens as the target's sampler would, with its noise and the logits processors that drafts may run.

    Args:
        sampling_params: Sampling of the drafts. Drafters with stages of their own read it, too.
        text: ``[B, positions]`` int32, the rows' tokens, which the driver keeps up to date.
        vocabulary: Size of the target's vocabulary.
    """

    def __init__(self, sampling_params: SamplingParams, text: np.ndarray, vocabulary: int) -> None:
        self.sampling_params, self.vocabulary = sampling_params, vocabulary
        self._rows = text.shape[0]
        self._sampler = Sampler(sampling_params, text, None, vocabulary, is_target=False)

    def __call__(self, logits: torch.Tensor, rows: list[int], positions: list[int]) -> list[int]:
        """Sample one token for each of ``rows``.

        Args:
            logits: ``[R, V]``.
            rows: R different rows.
            positions: Absolute position of each token.

        Raises:
            ValueError: A row occurs twice.
        """
        if len(set(rows)) != len(rows):
            raise ValueError(f"one token per row can be chosen at a time, not rows {rows}")
        block = logits.new_zeros((self._rows, 1, logits.shape[1]))
        block[rows, 0] = logits
        return _choose(self._sampler, block, rows, positions)


def _choose(sampler: Sampler, logits: torch.Tensor, rows: list[int], positions: list[int]) -> list[int]:
    """Sample one token for each of ``rows`` from ``logits [B, 1, V]``. ``positions``: of these tokens."""
    selected = sampler.argmax(logits)
    if selected is None:
        count = logits.shape[0]
        query_lens, at = np.zeros(count, dtype=np.int32), np.zeros(count, dtype=np.int64)
        query_lens[rows], at[rows] = 1, positions
        # There are no draft tokens, so the fed tokens have no effect.
        fed = torch.zeros((count, 1), dtype=torch.int32, device=logits.device)
        selected = sampler(logits, fed, query_lens, np.zeros_like(query_lens), at)
    tokens = selected.tolist()
    return [tokens[row][0] for row in rows]


class PhaseClock:
    """Seconds of a call by phase and by stage."""

    def __init__(self, stages: int) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.stage_seconds = [0.0] * stages
        self.saved = 0.0  # seconds that cycles would save if drafter and stages ran at the same time

    def add(self, phase: str, began: float) -> float:
        """Add the seconds since ``began``, a time of ``perf_counter``, to a phase, and return them."""
        seconds = time.perf_counter() - began
        self.seconds[phase] += seconds
        return seconds

    def cycle(self, draft: float, stages: Sequence[float]) -> None:
        """Add one cycle with the seconds of the drafter and of each stage."""
        for s, seconds in enumerate(stages):
            self.stage_seconds[s] += seconds
        self.saved += draft + sum(stages) - max(draft, *stages)


Streams = dict[int, torch.Tensor]
"""Residual streams ``[B, q, H]`` that the drafter reads, by HF index."""


class Fed(NamedTuple):
    """Residual streams of a part of the prompts: of the first ``real[r]`` columns of each row r, from position ``begin[r]`` on."""

    streams: Streams
    begin: Sequence[int]
    real: Sequence[int]


class SpeculativeDriver(Decoder):
    """Runs a partitioned target with a drafter.

    Subclasses place the stages: ``_open``, ``_feed``, ``_launch`` and ``_collect``. If the drafter raises, the call warns of a
    ``StageFailure`` and continues without drafts. The text does not change.

    Args:
        partition: Layers of each stage.
        verifier: Final norm and LM head.
        drafter: The drafter.
        native: Whether sections of the target may run in the native form.

    Raises:
        ValueError: The drafter reads a residual stream that the target does not have.
    """

    keeps_cache = True
    ran_as = "spd"
    starts_ahead = False
    """Whether a cycle starts before streamers and stopping criteria have the last one's tokens. What it runs for rows that they end is dropped."""

    def __init__(self, partition: Partition, verifier: Verifier, drafter: Drafter, native: bool) -> None:
        super().__init__()
        self.partition, self.verifier, self.drafter, self.native = partition, verifier, drafter, native
        self.features = tuple(drafter.features)
        self._is_recurrent = CacheLayout.of(verifier.section.parts.config).states is not None
        for index in self.features:
            partition.owner(index)  # raises ValueError
        self.block = self.machine = Machine(partition.stages)
        self.clock = PhaseClock(partition.stages)
        self.rounds = 0
        self._drafts = False  # whether the drafter works
        self._form = ""  # how the target runs

    @property
    def forms(self) -> Sequence[str]:
        return [self._form]

    # ---- where the stages are

    @abstractmethod
    def _open(self, rows: int, longest: int, most: int) -> None:
        """Empty the caches for ``rows`` rows with prompts of up to ``longest`` tokens, which may grow to ``most`` positions."""

    @abstractmethod
    def _feed(self, columns: np.ndarray, begin: Sequence[int], real: Sequence[int]) -> list[Fed]:
        """Run columns of the prompts through all stages. Cached positions from ``begin`` on are dropped first.

        Args:
            columns: ``[B, q]`` token ids.
            begin: Position of each row's first column.
            real: Columns of each row that belong to its prompt.

        Returns:
            What has passed all stages by now, of this call and earlier ones.
        """

    @abstractmethod
    def _answer(self, columns: np.ndarray, begin: Sequence[int]) -> tuple[torch.Tensor, list[Fed]]:
        """Run the last column of the prompts, ``[B, 1]``. Return the output of the last stage, and all that no :meth:`_feed` has returned."""

    @abstractmethod
    def _launch(self, work: list[list[Entry]]) -> None:
        """Start a cycle in which stage s runs ``work[s]``. Called outside of inference mode."""

    @abstractmethod
    def _collect(self, work: list[list[Entry]]) -> tuple[torch.Tensor | None, Streams, list[float]]:
        """End the cycle. Return the output of the last stage (``[B, 1, H]`` or None), residual streams, and seconds of each stage."""

    # ---- a call

    def run(self, request: GenerationRequest) -> None:
        """Generate until every row is complete."""
        with request.cache_lent_to(self.target):
            self._generate(request)

    def _generate(self, request: GenerationRequest) -> None:
        inputs = request.inputs
        prompts = [p.tolist() for p in inputs.prompts]
        rows, longest = len(prompts), max(map(len, prompts))
        self._most = max(inputs.limits) + 1  # idle rows of a batch are fed a padding column
        self.clock, self.rounds = PhaseClock(self.partition.stages), 0
        self._text = np.zeros((rows, self._most), dtype=np.int32)
        for row, prompt in enumerate(prompts):
            self._text[row, : len(prompt)] = prompt
        self.machine.reset(prompts, inputs.limits, request.eos)
        self._select = Sampler(
            inputs.sampling_params, self._text, request.record, inputs.vocabulary, grammar=inputs.grammar
        )
        select = DraftSampler(pickle.loads(request.draft_sampling_params), self._text, inputs.vocabulary)
        self._vocabulary = inputs.vocabulary
        self._drafts = True
        try:
            began = time.perf_counter()
            with torch.inference_mode():
                self._guarded(self.drafter.start, prompts, max(inputs.limits), select)
                self._open(rows, longest, self._most)
                first = self._prefill(prompts, inputs.chunk)
            self.clock.add("prefill", began)
            self.machine.begin(first)
            self._text[range(rows), [len(p) for p in prompts]] = first
            verified = True
            while True:
                if self.starts_ahead and self.machine.running:
                    self._start(self.machine.entries())
                if verified:
                    request.committed(self.block)  # it may end rows
                if not self.machine.running:
                    break
                work = self.machine.entries()
                if not self.starts_ahead:
                    self._start(work)
                verified = self._cycle(work)
        finally:
            # Also after a failure, since the drafter may hold memory.
            self._guarded(self.drafter.finish, always=True)

    def release_unused(self, request: GenerationRequest) -> None:
        """Release the caches in this process. Never runs during a call."""
        self.drafter.release()

    def close(self) -> None:
        self.drafter.close()

    def _begin(self, end: list[int]) -> list[int]:
        """For each row, the number of positions that need no prefill."""
        return [0] * len(end)

    def _prefill(self, prompts: list[list[int]], chunk: int) -> list[int]:
        """Run the prompts through all stages and return the target's token after each.

        The last token of each prompt has a forward of its own, as every later token has: the width of a forward may change its rounding.
        """
        end = [len(p) - 1 for p in prompts]
        begin = self._begin(end)
        # Recurrent states of complete rows do not survive further columns.
        level = not any(begin) and not self._is_recurrent
        while (missing := max(e - b for b, e in zip(begin, end, strict=True))) > 0:
            q = min(chunk, missing)
            columns = np.zeros((len(prompts), q), dtype=np.int32)
            real = [max(0, min(q, e - b)) for b, e in zip(begin, end, strict=True)]
            for row, (b, n) in enumerate(zip(begin, real, strict=True)):
                columns[row, :n] = self._text[row, b : b + n]
            self._show(self._feed(columns, begin, real))
            # As long as all rows begin together, complete rows continue with padding columns, which needs no mask.
            begin = [b + q if level else min(b + q, e) for b, e in zip(begin, end, strict=True)]
        hidden, arrived = self._answer(np.array([[p[-1]] for p in prompts], dtype=np.int32), end)
        self._show(arrived)
        return _choose(self._select, self.verifier.logits(hidden), list(range(len(prompts))), [len(p) for p in prompts])

    def _show(self, arrived: list[Fed]) -> None:
        """Pass residual streams of the prompts to the drafter."""
        for streams, begin, real in arrived:
            rows = [row for row, n in enumerate(real) for _ in range(n)]
            places = [i for n in real for i in range(n)]
            positions = [begin[row] + i for row, i in zip(rows, places, strict=True)]
            for index, values in streams.items():
                self._guarded(self.drafter.observe, index, rows, positions, values[rows, places])

    def _start(self, work: list[list[Entry]]) -> None:
        """Start a cycle."""
        began = time.perf_counter()
        self._launch(work)
        self.clock.add("stages", began)

    @torch.inference_mode()
    def _cycle(self, work: list[list[Entry]]) -> bool:
        """End the cycle that has started with ``work``. Return whether a token was verified."""
        machine, clock = self.machine, self.clock
        self.rounds += 1
        began = time.perf_counter()
        drafts = self._draft(machine.requests())
        drafted = clock.add("draft", began)
        began = time.perf_counter()
        hidden, streams, took = self._collect(work)
        clock.add("stages", began)
        clock.cycle(drafted, took)
        began = time.perf_counter()
        for index, values in streams.items():
            entries = work[self.partition.owner(index)]
            if not entries:  # a criterion has ended the rows behind their start
                continue
            rows = [e.row for e in entries]
            self._guarded(self.drafter.observe, index, rows, [e.position for e in entries], values[rows, 0])
        clock.add("draft", began)
        began = time.perf_counter()
        chosen = self._verify(work[-1], hidden)
        clock.add("verify", began)
        flushes = machine.commit(drafts, chosen)
        for row in drafts.keys() | chosen.keys():
            position, token = machine.newest(row)
            self._text[row, position] = token
        if flushes:
            began = time.perf_counter()
            for flush in flushes:
                self._guarded(self.drafter.truncate, *flush)
            clock.add("draft", began)
        return bool(chosen)

    def _verify(self, leaving: list[Entry], hidden: torch.Tensor | None) -> dict[int, int]:
        """The target's tokens after the entries that left the last stage, by row."""
        if not leaving:
            return {}
        assert hidden is not None
        rows = [e.row for e in leaving]
        tokens = _choose(self._select, self.verifier.logits(hidden), rows, [e.position + 1 for e in leaving])
        return dict(zip(rows, tokens, strict=True))

    # ---- the drafter, which may fail

    def _draft(self, wanted: list[DraftRequest]) -> dict[int, int]:
        # With one stage nothing is in flight behind the token that leaves, and a draft saves nothing.
        if not wanted or self.partition.stages == 1:
            return {}
        drafts: dict[int, int] | None = self._guarded(self._checked, wanted)
        return drafts or {}

    def _checked(self, requests: list[DraftRequest]) -> dict[int, int]:
        tokens = self.drafter.draft(requests)
        if len(tokens) != len(requests):
            raise ValueError(f"{len(tokens)} drafts for {len(requests)} requests")
        drafts = {r.row: int(token) for r, token in zip(requests, tokens, strict=True) if token is not None}
        outside = [token for token in drafts.values() if not 0 <= token < self._vocabulary]
        if outside:
            raise ValueError(f"drafted token id {outside[0]}, outside the target's vocabulary of {self._vocabulary}")
        return drafts

    def _guarded(self, call: Callable[..., Any], *arguments: Any, always: bool = False) -> Any:
        """Call the drafter. Return None if it fails or has failed in this call."""
        if not self._drafts and not always:
            return None
        with draft_errors(self._drafter_failed):
            return call(*arguments)
        return None

    def _drafter_failed(self, error: Exception) -> None:
        if self._drafts:
            self._drafts = False
            warnings.warn(
                f"the drafter failed ({type(error).__name__}: {error}); this call continues without it, the next one tries it "
                "again. The text is not affected, only its speed",
                StageFailure,
                stacklevel=user_stacklevel(),
            )


_END_S = 10.0
"""Longest wait for the step of a thread that is to end."""

_NO_AUTOCAST = nullcontext()


def _autocast_of_this_thread(kind: str) -> AbstractContextManager[Any]:
    """The autocast of this thread for devices of a kind, as a context for another thread: it is a setting of the thread."""
    if not torch.is_autocast_enabled(kind):
        return _NO_AUTOCAST
    return torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=torch.is_autocast_cache_enabled())


class LocalDriver(SpeculativeDriver):
    """All stages run in this process.

    Args:
        model: The target.
        partition: Layers of each stage.
        drafter: The drafter.
        native: As for :class:`SpeculativeDriver`.
        at_once: Whether the stages of a cycle run at the same time, each in a thread of its own, while the drafter runs in the caller's. Otherwise they
            run one after the other.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        partition: Partition,
        drafter: Drafter,
        native: bool = True,
        at_once: bool = False,
    ) -> None:
        super().__init__(partition, Verifier.of(model), drafter, native)
        self.model, self._at_once = model, at_once
        self._threads: list[_StageThread] = []
        self.stages = [LayerStage.of(model, partition, s) for s in range(partition.stages)]
        self._adopted: tuple[RowCache, list[np.ndarray]] | None = None
        self._complete = False

    @property
    def target(self) -> LocalDriver:
        return self

    def for_fork(self) -> Decoder:
        # A call of another thread may have been under way in the caches.
        return LocalDriver(self.model, self.partition, self.drafter.for_fork(), self.native, self._at_once)

    def close(self) -> None:
        super().close()
        for thread in self._threads:
            thread.close()
        self._threads = []

    def _generate(self, request: GenerationRequest) -> None:
        self._complete = False
        super()._generate(request)
        self._complete = True

    def release_unused(self, request: GenerationRequest) -> None:
        super().release_unused(request)
        for stage in self.stages:
            stage.close()

    # ---- keys and values from outside, and for outside

    def adopt(self, cache: RowCache, text: Sequence[np.ndarray]) -> None:
        """Start the next call with the keys and values of ``cache``, whose rows hold ``text``. :meth:`return_cache` changes it."""
        self._adopted = cache, list(text)
        self._complete = False

    def return_cache(self, lengths: Sequence[int]) -> RowCache:
        """Copy the stages' keys and values up to ``lengths`` into the adopted cache, or into a new one, and return it."""
        self._await_steps()
        adopted = self._adopted
        if adopted is not None and not self._complete:
            self._adopted = None
            given, text = adopted
            given.text = text
            return given
        held = zip(*(stage.cache.lengths for stage in self.stages), strict=True)
        ends = [min(n, *row) for n, row in zip(lengths, held, strict=True)]
        # Recurrent layers may have fewer states than their rows have positions. Those of all stages must agree.
        while (there := self._restorable(ends)) != ends:
            ends = there
        for stage in self.stages:
            stage.cache.truncate(ends)
        cache = adopted[0] if adopted is not None else RowCache.for_model(self.model, len(ends), max(ends))
        cache.reserve(max(ends))
        cache.load([pair for stage in self.stages for pair in stage.cache.states()], ends)
        cache.text = [self._text[row, :n].copy() for row, n in enumerate(ends)]
        self._adopted = None  # not before: after an interrupt it is filled again
        return cache

    def _begin(self, end: list[int]) -> list[int]:
        """The lengths of an adopted cache, or 0 if the drafter must observe every position."""
        if self._adopted is None or self.features:
            return super()._begin(end)
        cache, text = self._adopted
        begin = cache.restorable([min(len(tokens), e) for tokens, e in zip(text, end, strict=True)])
        if any(begin):
            states = cache.states(begin)
            for stage in self.stages:
                stage.cache.reserve(cache.get_seq_length())
                stage.cache.load(states[stage.first : stage.first + len(stage.layers)], begin)
        return begin

    def _restorable(self, lengths: list[int]) -> list[int]:
        """Per row the largest length up to that of ``lengths`` that a stage can truncate its cache to, in the stage with the least."""
        found = [stage.cache.restorable(lengths) for stage in self.stages]
        return [min(row) for row in zip(*found, strict=True)]

    # ---- the stages

    def run(self, request: GenerationRequest) -> None:
        self._adopted = None  # of a call that was interrupted twice
        super().run(request)

    def _open(self, rows: int, longest: int, most: int) -> None:
        self._await_steps()
        self._inbox: list[torch.Tensor | None] = [None] * self.partition.stages
        self._renew()
        for stage in self.stages:
            stage.open(rows, longest, most)
        sections = [*(stage.section for stage in self.stages), self.verifier.section]
        beside = sum(stage.cache.nbytes for stage in self.stages)
        self._form = open_sections(sections, native=self.native, beside=beside)

    def _renew(self) -> None:
        """Replace stages whose modules are no longer the model's, as after ``resize_token_embeddings()``."""
        self.partition.check(self.model.config.num_hidden_layers)
        stages = [LayerStage.of(self.model, self.partition, s) for s in range(self.partition.stages)]
        verifier = Verifier.of(self.model)
        self.stages = [
            old if old.section.parts == new.section.parts else new for old, new in zip(self.stages, stages, strict=True)
        ]
        if verifier.section.parts != self.verifier.section.parts:
            self.verifier = verifier

    def _feed(self, columns: np.ndarray, begin: Sequence[int], real: Sequence[int]) -> list[Fed]:
        until = [b + n for b, n in zip(begin, real, strict=True)]
        return [Fed(self._run(columns, begin, until)[1], begin, real)]

    def _answer(self, columns: np.ndarray, begin: Sequence[int]) -> tuple[torch.Tensor, list[Fed]]:
        hidden, streams = self._run(columns, begin, [b + 1 for b in begin])
        return hidden, [Fed(streams, begin, [1] * len(columns))]

    def _run(self, columns: np.ndarray, begin: Sequence[int], until: Sequence[int]) -> tuple[torch.Tensor, Streams]:
        """Run columns through all stages, and return the output of the last one."""
        streams: Streams = {}
        hidden = torch.from_numpy(columns)
        for stage in self.stages:
            hidden, more = stage.step(hidden, begin, self.features, until)
            streams |= more
        return hidden, streams

    def _launch(self, work: list[list[Entry]]) -> None:
        """Start the stages if they run at the same time. Otherwise they run in ``_collect``."""
        if not self._at_once:
            return
        if not self._threads:
            self._threads = [_StageThread() for _ in self.stages]
        for s, entries in enumerate(work):
            if entries:
                autocast = _autocast_of_this_thread(self.stages[s].device.type)
                self._threads[s].submit(functools.partial(self._step, s, entries, self.machine.held(s), autocast))

    def _collect(self, work: list[list[Entry]]) -> tuple[torch.Tensor | None, Streams, list[float]]:
        streams: Streams = {}
        outbox: list[torch.Tensor | None] = [None] * (self.partition.stages + 1)
        took = [0.0] * self.partition.stages
        for s, entries in enumerate(work):
            if not entries:
                continue
            step = self._threads[s].result() if self._at_once else self._step(s, entries, self.machine.held(s))
            outbox[s + 1], more, took[s] = step
            streams |= more
        self._inbox = outbox[:-1]
        return outbox[-1], streams, took

    @torch.inference_mode()  # of the present thread
    def _step(
        self,
        s: int,
        entries: list[Entry],
        held: Sequence[int],
        autocast: AbstractContextManager[Any] = _NO_AUTOCAST,
    ) -> _Step:
        """Run stage ``s`` for its entries of a cycle, in another thread under ``autocast``. ``held``: positions of each row that stay in its cache."""
        stage = self.stages[s]
        began = time.perf_counter()
        arrived = column(entries, stage.cache.rows) if s == 0 else self._inbox[s]
        assert arrived is not None, "an entry comes from the stage before"
        with autocast:
            hidden, streams = stage.step(arrived, held, self.features)
        if self._at_once:
            synchronise(stage.device)
        return _Step(hidden, streams, time.perf_counter() - began)

    def _await_steps(self) -> None:
        """Wait for the steps under way and drop them: a call was interrupted."""
        for thread in self._threads:
            thread.clear()


class _StageThread:
    """A thread that runs the steps of a stage.

    The error of a signal handler may come between any two instructions of the caller. So what belongs to an interrupted call is found in the queues, and not
    by bookkeeping of the caller; and a ``SimpleQueue`` has no lock in Python that could stay locked.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Any] = SimpleQueue()
        self._results: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        thread = threading.Thread(
            target=_run_calls, args=(self._calls, self._results), name="pipespec-stage", daemon=True
        )
        # Also at the end of the program, which must not find a daemon thread within a forward.
        self.close = weakref.finalize(self, _end_thread, thread, self._calls)
        thread.start()

    def submit(self, call: Callable[[], Any]) -> None:
        self._calls.put(call)

    def result(self) -> Any:
        """Wait for the oldest call without a result, and return what it returned or raise its error."""
        value, error = self._results.get()
        if error is not None:
            raise error
        return value

    def clear(self) -> None:
        """Wait for the calls under way and drop their results."""
        mark = object()
        self._calls.put(mark)
        while self._results.get()[0] is not mark:
            pass


def _run_calls(calls: SimpleQueue[Any], results: SimpleQueue[tuple[Any, BaseException | None]]) -> None:
    while (call := calls.get()) is not None:
        try:
            results.put((call() if callable(call) else call, None))
        except BaseException as error:
            results.put((None, error))
        del call  # it refers to the driver


def _end_thread(thread: threading.Thread, calls: SimpleQueue[Any]) -> None:
    calls.put(None)
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join(_END_S)


class _Step(NamedTuple):
    """What a step of a stage gave, and its seconds."""

    hidden: torch.Tensor
    streams: Streams
    seconds: float


def column(entries: Sequence[Entry], rows: int) -> torch.Tensor:
    """The tokens of ``entries`` as ``[rows, 1]`` int64, 0 in rows without an entry."""
    tokens = torch.zeros((rows, 1), dtype=torch.int64, device="cpu")
    for entry in entries:
        tokens[entry.row, 0] = entry.token
    return tokens
