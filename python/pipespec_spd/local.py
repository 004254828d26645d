"""SPD with all stages in one process, one after the other or each in a thread of its own."""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from pipespec.engine.cache import RowCache
from pipespec.schedules.base import Decoder
from pipespec.schedules.request import GenerationRequest
from pipespec_spd.decoding import Fed, SpeculativeDriver, Streams, column
from pipespec_spd.drafting import Drafter
from pipespec_spd.machine import Entry
from pipespec_spd.partition import LayerStage, Partition, Verifier, synchronise
from pipespec_spd.sections import open_sections

_END_S = 10.0
"""Longest wait for the step of a thread that is to end."""


class LocalDriver(SpeculativeDriver):
    """All stages run in this process.

    ``at_once``: the stages of a cycle run at the same time, each in a thread of its own, while the drafter runs in the caller's. Otherwise they run one
    after the other.
    """

    def __init__(
        self, model: PreTrainedModel, partition: Partition, drafter: Drafter, native: bool = True, at_once: bool = False
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
        if self._at_once and not self._threads:
            self._threads = [_StageThread() for _ in self.stages]
        self._steps: dict[int, Callable[[], tuple[torch.Tensor, Streams, float]]] = {}
        for s, entries in enumerate(work):
            if not entries:
                continue
            kind = self.stages[s].device.type
            # Autocast is a setting of this thread.
            autocast = torch.autocast(
                kind,
                torch.get_autocast_dtype(kind),
                torch.is_autocast_enabled(kind),
                torch.is_autocast_cache_enabled(),
            )
            step = functools.partial(self._step, s, entries, self.machine.held(s), autocast)
            self._steps[s] = self._threads[s].start(step) if self._at_once else step

    def _collect(self, work: list[list[Entry]]) -> tuple[torch.Tensor | None, Streams, list[float]]:
        streams: Streams = {}
        outbox: list[torch.Tensor | None] = [None] * (self.partition.stages + 1)
        took = [0.0] * self.partition.stages
        for s, step in self._steps.items():
            outbox[s + 1], more, took[s] = step()
            streams |= more
        self._inbox = outbox[:-1]
        return outbox[-1], streams, took

    @torch.inference_mode()  # of the present thread
    def _step(
        self, s: int, entries: list[Entry], held: Sequence[int], autocast: torch.autocast
    ) -> tuple[torch.Tensor, Streams, float]:
        """Run stage ``s`` for its entries of a cycle. ``held``: positions of each row that stay in its cache.

        Returns:
            The output of the stage, the residual streams that the drafter reads, and the seconds.
        """
        stage = self.stages[s]
        began = time.perf_counter()
        arrived = column(entries, stage.cache.rows) if s == 0 else self._inbox[s]
        assert arrived is not None, "an entry comes from the stage before"
        with autocast:
            hidden, streams = stage.step(arrived, held, self.features)
        if self._at_once:
            synchronise(stage.device)
        return hidden, streams, time.perf_counter() - began

    def _await_steps(self) -> None:
        """Wait for the steps under way and drop them: a call was interrupted."""
        for thread in self._threads:
            thread.clear()


class _StageThread:
    """A thread that runs the steps of a stage.

    The error of a signal handler may come between any two instructions of the caller. So what belongs to an interrupted call is found in the queues, and not
    by bookkeeping of the caller; and a ``SimpleQueue`` has no lock in Python that could stay locked. ``concurrent.futures`` has such locks, and refuses work
    once the main thread has ended, where a thread of the user may still be in a call.
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

    def start(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """Run ``call`` in the thread. Returns a function that waits for the oldest call without a result, and returns what it returned or raises its error."""
        self._calls.put(call)
        return self._result

    def _result(self) -> Any:
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
