"""Measurement of a profile through the engine: step times, and the slowdown of concurrent stages."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedModel

from pipespec.config import SpeculationConfig
from pipespec.drivers import GenerationRequest, StreamsDriver, WorkersDriver
from pipespec.engine.ngram import NGRAM, NgramDraft, NgramStage
from pipespec.engine.sampling import SamplingParams
from pipespec.engine.stage import Stage, StageInputs
from pipespec.errors import NotCapturable
from pipespec.models.properties import embedding_size, head_size
from pipespec.models.rope import rope_changes_at
from pipespec.planning.profile import SHORT_CONTEXT, Profile, StageProfile, StepTimes, without_outliers
from pipespec.process.threads import target_threads, threads_set
from pipespec_kernels.state import Action, StateBlock

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 17, 33)
"""Widths of the measured steps: up to the draft tokens of a full lookahead and the token before them."""
CAPTURED_WIDTHS = (1, 2, 4, 8, 16, 32)
"""Widths of the measured captured steps. Each width is a graph."""
_CAPTURED_STEPS = 16
_LONG = 1024
_LOOKAHEAD = 64
"""Of the draft that publishes random tokens: more than the widest step feeds."""
_WARM = 8
"""Steps until caches are warm and threads are awake."""
_ROUNDS, _MOST_ROUNDS = 6, 16
_NGRAM_ROUNDS = 15


class _StepTimer:
    """Times steps of one model as the target of a chain of two. The draft publishes random tokens."""

    def __init__(self, model: PreTrainedModel, rows: int, context: int, steps: int, native: bool) -> None:
        """``steps``: most steps after each :meth:`begin`."""
        self.vocabulary = embedding_size(model)
        self.context = context
        self._random = np.random.default_rng(1)
        prompts = [self._random.integers(0, self.vocabulary, context).astype(np.int32) for _ in range(rows)]
        limits = [context + steps + 2 * WIDTHS[-1]] * rows
        self._inputs = StageInputs(prompts, limits, SamplingParams(), self.vocabulary)
        # Drawn now, so that the pauses between steps are as short as in decoding: the pool's threads sleep in a longer one.
        drafted = self._random.integers(0, self.vocabulary, (64, rows, _LOOKAHEAD)).astype(np.int32)
        self._drafted = itertools.cycle(drafted)
        self._block = StateBlock.create(2, rows, steps + 2 * WIDTHS[-1] + 2)
        self._stage = Stage(model, self._block, 1, native=native)

    def begin(self, *, reuse: bool = False) -> float:
        """Start again at the prompts and return the seconds of their prefill. ``reuse``: take them from the cache."""
        prompts, limits = self._inputs.prompts, self._inputs.limits
        self._block.reset([self.context] * len(prompts), limits, [int(p[-1]) for p in prompts], [])
        self._block.set_alive(0, True)
        self._block.set_alive(1, True)
        self._draft = self._block.port(0, _LOOKAHEAD)
        began = time.perf_counter()
        self._stage.prefill(replace(self._inputs, reuse=reuse))
        if self._stage.model.device.type == "cuda":  # the forward is only queued
            torch.cuda.synchronize(self._stage.model.device)
        return time.perf_counter() - began

    def step(self, width: int) -> float:
        """Seconds of one step that feeds ``width`` columns."""
        while self._draft.plan(width - 1, 0, 0) == Action.STEP:
            self._draft.commit(next(self._drafted).ctypes.data, _LOOKAHEAD)
        began = time.perf_counter()
        self._stage.step(0, width - 1)
        return time.perf_counter() - began


def _contexts(models: Sequence[PreTrainedModel]) -> tuple[int, int]:
    """Contexts of the measured steps: a short one, and one that all models support."""
    # With dynamic RoPE beyond its limit, a target accepts no draft tokens.
    ends = (rope_changes_at(m) or getattr(m.config, "max_position_embeddings", None) for m in models)
    limit = min(end or _LONG + 256 for end in ends)
    return SHORT_CONTEXT, min(_LONG, max(2 * SHORT_CONTEXT, limit - 192))


def thread_counts(stages: int) -> list[int]:
    """Numbers of threads that a plan may choose: all, those left beside 1 .. ``stages`` - 1 workers, and one."""
    every = torch.get_num_threads()
    return sorted({1, every, *(target_threads(drafts) for drafts in range(1, stages))}, reverse=True)


class Profiler:
    """Measures the stages of a chain in rounds.

    A round has one step of every width, stage, context and number of threads, so that a slow moment of the machine affects all of them
    alike. :meth:`profile` summarises all rounds.
    """

    def __init__(
        self,
        models: Sequence[PreTrainedModel],
        names: Sequence[str],
        *,
        rows: int = 1,
        widths: Sequence[int] = WIDTHS,
        round_s: float = 2.0,
        native: bool = True,
    ) -> None:
        """Prepare the caches of every stage.

        Args:
            models: Drafts, then the target.
            names: Of the stages.
            rows: Rows of the batch.
            widths: Tokens per row of the measured steps.
            round_s: A round that would take more seconds than this has fewer widths.
            native: See :class:`pipespec.config.SpeculationConfig`.
        """
        self.models, self.names, self.rows = list(models), list(names), rows
        self.threads = torch.get_num_threads()
        self._counts = thread_counts(len(models))
        contexts = _contexts(models)
        self._benches = [
            [_StepTimer(model, rows, c, 2 * len(widths) + _WARM + 2, native) for c in contexts] for model in models
        ]
        # Seconds of a step, by stage, context, threads and width. Width 0: seconds per prompt token.
        self._steps: dict[tuple[int, int, int, int], list[float]] = {}
        # By draft: relative slowdown of its steps, and of the target's.
        self._beside: dict[int, list[tuple[float, float]]] = {}
        self._cold: dict[int, list[float]] = {}
        self._rounds = 0
        took = 0.0
        with threads_set(1):
            for short, _ in self._benches:
                short.begin()
                short.step(1)  # the first step selects kernels
                took += min(short.step(1) for _ in range(3))
        if 2 * took * len(widths) * len(self._counts) > round_s:
            widths = sorted({widths[0], widths[len(widths) // 2], widths[-1]})
        few = [w for w in (1, 2, 4, 9) if w in widths] or list(widths)
        self._widths = (tuple(widths), tuple(few))  # of the short context and the long one

    def round(self) -> None:
        """Measure one step of every kind."""
        self._rounds += 1
        for threads in self._counts:
            with threads_set(threads):
                for stage, benches in enumerate(self._benches):
                    for place, (bench, widths) in enumerate(zip(benches, self._widths, strict=True)):
                        is_short = place == 0
                        prompt = bench.begin(reuse=not is_short)
                        if is_short:
                            self._note(stage, place, threads, 0, prompt / bench.context)
                        for _ in range(_WARM):
                            bench.step(1)
                        first = self._rounds % len(widths)
                        for width in (*widths[first:], *widths[:first]):
                            bench.step(width)  # a step behind one of another width takes longer
                            self._note(stage, place, threads, width, bench.step(width))
        target = self._benches[-1][0]
        for stage, (bench, _) in enumerate(self._benches[:-1]):
            for either in (bench, target):
                either.begin(reuse=True)
            warm = min(bench.step(1) for _ in range(_WARM + 2))
            for _ in range(2):
                target.step(1)
                self._cold.setdefault(stage, []).append(bench.step(1) - warm)

    def _note(self, stage: int, place: int, threads: int, width: int, seconds: float) -> None:
        self._steps.setdefault((stage, place, threads, width), []).append(seconds)

    def beside(self, driver: WorkersDriver) -> None:
        """Measure how much each draft in its worker process and the target slow each other down: steps at the same time alternate with steps alone.

        Args:
            driver: Of the whole chain.
        """
        bench, widths = self._benches[-1][0], self._widths[1]
        random = np.random.default_rng(2)
        limit = min(getattr(m.config, "max_position_embeddings", None) or _LONG for m in driver.models)
        vocabulary = head_size(driver.models[-1])
        prompt = random.integers(0, vocabulary, 16).astype(np.int32)
        start = StageInputs([prompt], [max(64, min(limit - 64, 1024))], SamplingParams(), vocabulary)

        def steps() -> list[float]:
            bench.begin(reuse=True)
            for _ in range(_WARM):
                bench.step(1)
            return [bench.step(w) for w in (*widths, *widths)]

        with threads_set(target_threads(1)):
            for draft in range(len(driver.models) - 1):
                before = steps()
                with driver.drafting(GenerationRequest(start, []), draft) as drafted:
                    if not drafted(4):
                        continue
                    rates = []
                    began, count = time.perf_counter(), drafted(0)
                    together = steps()
                    for pause in (0.0, max(sum(together), 0.02)):
                        time.sleep(pause)
                        now, more = time.perf_counter(), drafted(0)
                        rates.append((more - count) / (now - began))
                        began, count = now, more
                if count >= start.limits[0] - len(prompt) or min(rates) <= 0.0:  # the draft finished, or made no step
                    continue
                alone = [(a + b) / 2 for a, b in zip(before, steps(), strict=True)]
                slower = statistics.mean(b / a for a, b in zip(alone, together, strict=True))
                self._beside.setdefault(draft, []).append((rates[1] / rates[0] - 1, slower - 1))

    def profile(self) -> Profile:
        """Summarise all rounds so far by medians; at least one round is needed."""
        stages = []
        places = device_numbers(self.models)
        for stage, (name, model, benches) in enumerate(zip(self.names, self.models, self._benches, strict=True)):
            times = []
            for threads in self._counts:
                best: list[StepTimes] = []
                for place, (bench, widths) in enumerate(zip(benches, self._widths, strict=True)):
                    medians = [statistics.median(self._steps[stage, place, threads, w]) for w in widths]
                    seconds = without_outliers(widths, medians)
                    prompt = self._steps.get((stage, place, threads, 0))
                    per_token = best[0].prefill_s if prompt is None else statistics.median(prompt)
                    best.append(StepTimes(threads, self.rows, bench.context, widths, seconds, per_token))
                short, far = best
                # The extra time of the longer context, at the widths of the finer table.
                measured = [min(w, far.widths[-1]) for w in short.widths]
                added = np.maximum(0.0, far.at(measured) - short.at(measured))
                seconds = tuple(float(s + a) for s, a in zip(short.seconds, added, strict=True))
                times += [short, replace(far, widths=short.widths, seconds=seconds)]
            beside = self._beside.get(stage, [(0.0, 0.0)])
            contention, burden = (max(0.0, statistics.mean(either)) for either in zip(*beside, strict=True))
            cold = max(0.0, statistics.median(self._cold.get(stage, [0.0])))
            stages.append(
                StageProfile(name, model.num_parameters(), tuple(times), contention, burden, cold, places[stage])
            )
        return Profile(tuple(stages), self.threads)


def measure_stages(
    models: Sequence[PreTrainedModel],
    names: Sequence[str],
    *,
    rows: int = 1,
    widths: Sequence[int] = WIDTHS,
    budget_s: float = 10.0,
    beside: WorkersDriver | None = None,
    native: bool = True,
) -> Profile:
    """Measure the step times of every model, alone, with every number of threads that a plan may choose.

    Args:
        models: Drafts, then the target.
        names: Of the stages.
        rows: Rows of the batch.
        widths: Tokens per row of the measured steps.
        budget_s: Rounds stop before they would take more seconds than this. At least one round is made.
        beside: The chain's worker driver, for the slowdown of concurrent stages. None: not measured.
        native: See :class:`pipespec.config.SpeculationConfig`.
    """
    began = time.perf_counter()
    profiler = Profiler(models, names, rows=rows, widths=widths, round_s=budget_s / _ROUNDS, native=native)
    for done in range(1, _MOST_ROUNDS + 1):
        profiler.round()
        if beside is not None:
            profiler.beside(beside)
        spent = time.perf_counter() - began
        if spent * (done + 1) / done > budget_s:
            break
    return profiler.profile()


def measure_ngram(draft: NgramDraft) -> StageProfile:
    """Measure the time of an n-gram index per draft token, and per token of a prompt.

    Args:
        draft: With the ids of its corpus, see :meth:`pipespec.engine.ngram.NgramDraft.for_target`.
    """
    block = StateBlock.create(2, 1, 2 * WIDTHS[-1] + 2)
    stage = NgramStage(draft, block)
    # A text that begins again: there is a match at each position.
    prompt = np.tile(np.random.default_rng(1).permutation(SHORT_CONTEXT // 2).astype(np.int32), 3)
    drafts, prefills = [], []
    for _ in range(_NGRAM_ROUNDS):
        block.reset([len(prompt)], [len(prompt) + 2 * WIDTHS[-1]], [int(prompt[-1])], [])
        began = time.perf_counter()
        stage.prefill([prompt])
        read = time.perf_counter()
        stage.fill(WIDTHS[-1])
        ended = time.perf_counter()
        drafted = block.length(0, 0) - len(prompt)
        prefills.append((read - began) / len(prompt))
        drafts.append((ended - read) / max(1, drafted))
    times = StepTimes(1, 1, SHORT_CONTEXT, (1,), (statistics.median(drafts),), statistics.median(prefills))
    return StageProfile(NGRAM, 0, (times,), ngram=True)


class _OneWidth(StreamsDriver):
    """Captured steps of one width: every step feeds and scores all of its columns."""

    columns = 1

    def step_widths(self) -> list[int]:
        return [self.columns]


def measure_captured(
    models: Sequence[PreTrainedModel],
    names: Sequence[str],
    *,
    rows: int = 1,
    widths: Sequence[int] = CAPTURED_WIDTHS,
) -> list[tuple[StepTimes, ...]]:
    """Measure the captured steps of every model, for :meth:`Profile.adding`. On a CPU the same steps run uncaptured.

    Each model decodes alone, as a chain of one in the driver of ``"streams"``. The result is the median time from the end of one step to the
    end of the next. The slowdown of concurrent stages is not measured, see :func:`pipespec.planning.planner.predict`.

    Args:
        models: Drafts, then the target.
        names: Of the stages.
        rows: Rows of the batch.
        widths: Tokens per row of the measured steps.

    Raises:
        NotCapturable: A step cannot become a CUDA graph.
        ValueError: The models cannot run in this schedule.
    """
    contexts, threads = _contexts(models), torch.get_num_threads()
    found = []
    for model, name in zip(models, names, strict=True):
        try:
            driver = _OneWidth([model], SpeculationConfig(trace=2 * _CAPTURED_STEPS))
        except NotCapturable as error:
            raise NotCapturable(name, error.part, error.cause) from error
        try:
            # The long context first: the short one reuses its caches and graphs.
            times = [_captured_times(driver, name, rows, context, widths, threads) for context in reversed(contexts)]
        finally:
            driver.close()
        found.append(tuple(reversed(times)))
    return found


def _captured_times(
    driver: _OneWidth, name: str, rows: int, context: int, widths: Sequence[int], threads: int
) -> StepTimes:
    vocabulary = embedding_size(driver.models[-1])
    random = np.random.default_rng(1)
    prompts = [random.integers(0, vocabulary, context).astype(np.int32) for _ in range(rows)]
    start = StageInputs(prompts, [context + _WARM + _CAPTURED_STEPS] * rows, SamplingParams(), vocabulary)
    seconds, prefills = [], []
    for width in widths:
        driver.columns = width
        driver.run(GenerationRequest(start, []))
        if driver.remarks:
            raise NotCapturable(name, "its step", driver.remarks[0])
        (trace,) = driver.traces().values()
        prompt, steps = trace[trace["prefill"] > 0], trace[trace["prefill"] == 0]
        seconds.append(1e-9 * float(np.median(np.diff(steps["end_ns"])[_WARM - 1 :])))
        # Until the launch of the first step, which waits for the device.
        prefills.append(1e-9 * float(steps["launched_ns"][0] - prompt["start_ns"][0]) / context)
    per_token = max(0.0, statistics.median(prefills))
    return StepTimes(threads, rows, context, tuple(widths), tuple(seconds), per_token, captured=True)


def device_numbers(models: Sequence[PreTrainedModel]) -> list[int]:
    """One number per model: models with the same number are on the same device."""
    devices = list(dict.fromkeys(model.device for model in models))
    return [devices.index(model.device) for model in models]
