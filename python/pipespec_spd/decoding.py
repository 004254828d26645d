"""SPD's decoding loop for any placement of the stages.

Every token of the text is the target's own. :class:`pipespec.engine.sampler.HostSampler` samples it from the logits of a forward of one token
after its exact prefix, as in plain decoding. Draft tokens change when this happens and never which token it is.
"""

from __future__ import annotations

import pickle
import time
import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from pipespec.engine.cached_text import prompt_chunks
from pipespec.engine.sampler import HostSampler
from pipespec.engine.sampling import SamplingParams, Step
from pipespec.errors import user_stacklevel
from pipespec.models.layout import CacheLayout
from pipespec.process.threads import draft_errors
from pipespec.schedules.base import Decoder, GenerationRequest, StageFailure
from pipespec_spd.drafting import Drafter, SampleTokens
from pipespec_spd.machine import DraftRequest, Entry, Machine
from pipespec_spd.partition import Partition, Verifier
from pipespec_spd.report import PHASES


def _draft_choice(sampling_params: SamplingParams, text: np.ndarray, vocabulary: int) -> SampleTokens:
    """A function that samples draft tokens as the target's sampler would, with its noise and the logits processors that drafts may run.

    ``text`` is ``[B, positions]`` int32, the rows' tokens, which the driver keeps up to date.
    """
    sampler = HostSampler(sampling_params, text, None, vocabulary, is_target=False)

    def select(logits: torch.Tensor, rows: list[int], positions: list[int]) -> list[int]:
        if len(set(rows)) != len(rows):
            raise ValueError(f"one token per row can be chosen at a time, not rows {rows}")
        block = logits.new_zeros((len(text), 1, logits.shape[1]))
        block[rows, 0] = logits
        return _choose(sampler, block, rows, positions)

    return select


def _choose(sampler: HostSampler, logits: torch.Tensor, rows: list[int], positions: list[int]) -> list[int]:
    """Sample one token for each of ``rows`` from ``logits [B, 1, V]``. ``positions``: of these tokens."""
    kv, query_lens = torch.zeros((2, logits.shape[0]), dtype=torch.int32, device="cpu")
    kv[rows], query_lens[rows] = torch.tensor(positions, dtype=torch.int32) - 1, 1
    # There are no draft tokens, so the fed tokens have no effect.
    fed = torch.zeros((logits.shape[0], 1), dtype=torch.int32, device=logits.device)
    tokens = sampler(logits, Step(fed, kv, query_lens, torch.zeros_like(query_lens))).tolist()
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


class PromptChunk(NamedTuple):
    """Residual streams of a part of the prompts: of the first ``real[r]`` columns of each row r, from position ``begin[r]`` on."""

    streams: Streams
    begin: Sequence[int]
    real: Sequence[int]


class SpeculativeDriver(Decoder):
    """Runs a partitioned target with a drafter.

    Subclasses place the stages: ``_open``, ``_feed``, ``_launch`` and ``_collect``. If the drafter raises, the call warns of a
    ``StageFailure`` and continues without drafts. The text does not change.

    ``native``: whether sections of the target may run in the native form. ``ValueError``: the drafter reads a residual stream that the target does not have.
    """

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
    def _open(self, rows: int, longest: int, max_positions: int) -> None:
        """Empty the caches for ``rows`` rows with prompts of up to ``longest`` tokens, which may grow to ``max_positions`` positions."""

    @abstractmethod
    def _feed(self, columns: np.ndarray, begin: Sequence[int], real: Sequence[int]) -> list[PromptChunk]:
        """Run columns of the prompts through all stages. Cached positions from ``begin`` on are dropped first.

        Args:
            columns: ``[B, q]`` token ids.
            begin: Position of each row's first column.
            real: Columns of each row that belong to its prompt.

        Returns:
            What has passed all stages by now, of this call and earlier ones.
        """

    @abstractmethod
    def _answer(self, columns: np.ndarray, begin: Sequence[int]) -> tuple[torch.Tensor, list[PromptChunk]]:
        """Run the last column of the prompts, ``[B, 1]``. Return the output of the last stage, and all that no :meth:`_feed` has returned."""

    def _launch(self, work: list[list[Entry]]) -> None:
        """Start a cycle in which stage s runs ``work[s]``, where stages run while the drafter does. Called outside of inference mode."""

    @abstractmethod
    def _collect(self, work: list[list[Entry]]) -> tuple[torch.Tensor | None, Streams, list[float]]:
        """End the cycle. Return the output of the last stage (``[B, 1, H]`` or None), residual streams, and seconds of each stage."""

    # ---- a call

    def run(self, request: GenerationRequest) -> None:
        """Generate until every row is complete."""
        request.hand_cache_to(self.target)
        self._generate(request)

    def _generate(self, request: GenerationRequest) -> None:
        inputs = request.inputs
        prompts = [p.tolist() for p in inputs.prompts]
        rows, longest = len(prompts), max(map(len, prompts))
        self._max_positions = max(inputs.limits) + 1  # idle rows of a batch are fed a padding column
        self.clock, self.rounds = PhaseClock(self.partition.stages), 0
        self._text = np.zeros((rows, self._max_positions), dtype=np.int32)
        for row, prompt in enumerate(prompts):
            self._text[row, : len(prompt)] = prompt
        self.machine.reset(prompts, inputs.limits, request.eos)
        self._select = HostSampler(
            inputs.sampling_params, self._text, request.record, inputs.vocabulary, grammar=inputs.grammar
        )
        select = _draft_choice(pickle.loads(request.draft_sampling_params), self._text, inputs.vocabulary)
        self._vocabulary = inputs.vocabulary
        self._drafts = True
        try:
            began = time.perf_counter()
            with torch.inference_mode():
                self._guarded(self.drafter.start, prompts, max(inputs.limits), select)
                self._open(rows, longest, self._max_positions)
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

    def release(self) -> None:
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
        for columns, at, real in prompt_chunks(self._text, begin, end, level, lambda: chunk):
            self._show(self._feed(columns, at, real))
        hidden, arrived = self._answer(np.array([[p[-1]] for p in prompts], dtype=np.int32), end)
        self._show(arrived)
        return _choose(self._select, self.verifier.logits(hidden), list(range(len(prompts))), [len(p) for p in prompts])

    def _show(self, arrived: list[PromptChunk]) -> None:
        """Pass residual streams of the prompts to the drafter."""
        for streams, begin, real in arrived:
            rows = [row for row, n in enumerate(real) for _ in range(n)]
            places = [i for n in real for i in range(n)]
            positions = [begin[row] + i for row, i in zip(rows, places, strict=True)]
            for index, values in streams.items():
                self._guarded(self.drafter.observe, index, rows, positions, values[rows, places])

    def _start(self, work: list[list[Entry]]) -> None:
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
            if not entries:  # a criterion has ended the rows after their start
                continue
            rows = [e.row for e in entries]
            self._guarded(self.drafter.observe, index, rows, [e.position for e in entries], values[rows, 0])
        clock.add("draft", began)
        began = time.perf_counter()
        chosen: dict[int, int] = {}
        if leaving := work[-1]:
            assert hidden is not None
            rows = [e.row for e in leaving]
            tokens = _choose(self._select, self.verifier.logits(hidden), rows, [e.position + 1 for e in leaving])
            chosen = dict(zip(rows, tokens, strict=True))
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

    # ---- the drafter, which may fail

    def _draft(self, wanted: list[DraftRequest]) -> dict[int, int]:
        # With one stage nothing is in flight after the token that leaves, and a draft saves nothing.
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
