"""Profile: what the planner must know of a user's stages, measured through the engine itself, and kept on disk.

A stage's step time by width, context, rows and threads, step by step and captured; how much stages slow each other down when they run at the
same time; which tokens they choose over the same text (``agreement``), as the table that the simulator replays.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from pipespec.angles import angles_change_at
from pipespec.cache import RowCache
from pipespec.compat import embedding_size, head_size
from pipespec.drivers import Request, StreamsDriver, WorkersDriver
from pipespec.drivers.base import Policy
from pipespec.drivers.workers import restored_threads, target_threads
from pipespec.forward import forward
from pipespec.placement import NotCapturable
from pipespec.planning._checks import non_negative, positive, same_length
from pipespec.sampling import Selection
from pipespec.stage import PREFILL_CHUNK, Stage, Start
from pipespec_kernels import __version__, collect_env, ops
from pipespec_kernels.noise import Noise
from pipespec_kernels.state import Action, StateBlock

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 17, 33)
"""Of the steps that are measured: up to a full window's drafts and the token before them."""
CAPTURED_WIDTHS = (1, 2, 4, 8, 16, 32)
"""Of the captured steps that are measured: each is a graph."""
_CAPTURED_STEPS = 16
_SHORT, _LONG = 64, 1024
_QUARTER = 0.25
"""The quantile of a step's rounds that is taken for the step itself; what the mean has above it is the machine's."""
_WARM = 3
"""Steps until caches are warm and threads awake."""
_ROUNDS, _MOST_ROUNDS = 6, 16
_FORMAT = 2
MOST_POSITIONS = 2048


class ProfileWarning(UserWarning):
    """A stored profile could not be used, or none could be stored. Costs time, nothing else."""


@dataclass(frozen=True)
class StepTimes:
    """``seconds[i]`` of a step that feeds ``widths[i]`` columns to ``rows`` rows behind ``context`` tokens, with ``threads`` threads;
    ``prefill_s``: seconds per token of a prompt (all rows). ``captured``: of a step that needs no host, from its end to the next one's."""

    threads: int
    rows: int
    context: int
    widths: tuple[int, ...]
    seconds: tuple[float, ...]
    prefill_s: float = 0.0
    captured: bool = False

    def __post_init__(self) -> None:
        same_length("seconds", self.seconds, len(self.widths), "width")
        if not self.widths or list(self.widths) != sorted(set(self.widths)) or self.widths[0] < 1:
            raise ValueError(f"widths must grow from at least 1, not {self.widths}")
        for s in self.seconds:
            positive(s, "a step time")
        non_negative(self.prefill_s, "the time of a prompt's token")
        if min(self.threads, self.rows, self.context) < 1:
            raise ValueError(
                f"threads, rows and context must be at least 1: {self.threads}, {self.rows}, {self.context}"
            )

    def at(self, width: float) -> float:
        """Interpolated; beyond the widest as the last two widths say."""
        w, s = self.widths, self.seconds
        if width <= w[-1] or len(w) == 1:
            return float(np.interp(width, w, s))
        slope = max(0.0, (s[-1] - s[-2]) / (w[-1] - w[-2]))
        return s[-1] + slope * (width - w[-1])


@dataclass(frozen=True)
class StageProfile:
    """One stage. Of a draft: ``contention``, how much longer its steps last beside the target's (0: no longer; 1: twice as long),
    ``burden``, how much longer the target's last beside its, and ``cold_s``, by how much its first step after one of the target's is longer
    in the same process. ``device``: stages with one number are on the same one."""

    name: str
    parameters: int
    times: tuple[StepTimes, ...]
    contention: float = 0.0
    burden: float = 0.0
    cold_s: float = 0.0
    device: int = 0

    def __post_init__(self) -> None:
        if not self.times:
            raise ValueError(f"{self.name}: a stage needs at least one step time")
        for what in ("contention", "burden", "cold_s"):
            non_negative(getattr(self, what), what)

    def has(self, rows: int, *, captured: bool = False) -> bool:
        return any((t.rows, t.captured) == (rows, captured) for t in self.times)

    def _nearest(self, threads: int, rows: int, captured: bool) -> list[StepTimes]:
        """Of one number of threads and rows, by context; of those that were not measured the nearest."""
        found = [t for t in self.times if t.captured == captured]
        if not found:
            raise ValueError(f"{self.name}: no {'captured' if captured else 'eager'} steps were measured")
        best = min(found, key=lambda t: (abs(math.log(t.rows / rows)), abs(t.threads - threads)))
        return sorted((t for t in found if (t.threads, t.rows) == (best.threads, best.rows)), key=lambda t: t.context)

    def seconds(
        self, width: float, *, threads: int, rows: int = 1, context: float = _SHORT, captured: bool = False
    ) -> float:
        """Of one step. Between contexts it is interpolated; for threads or rows that were not measured the nearest is taken."""
        same = self._nearest(threads, rows, captured)
        low, high = same[0], same[-1]
        a, b = low.at(width), high.at(width)
        if high.context == low.context:
            return a
        return max(min(a, b), a + (b - a) * (context - low.context) / (high.context - low.context))

    def prompt_s(self, tokens: int, *, threads: int, rows: int = 1, captured: bool = False) -> float:
        """Seconds that prompts of so many tokens take."""
        same = self._nearest(threads, rows, captured)
        nearest = min(same, key=lambda t: abs(math.log(t.context / max(tokens, 1))))
        return nearest.prefill_s * tokens * rows / nearest.rows


@dataclass(frozen=True)
class Profile:
    """All stages of a chain, draft 0 first.

    ``threads``: what the caller may use. ``slowness``: of the machine as it was while the profile was made: how much longer the target's steps lasted on
    average than ``stages`` say, which have the better quarter of the rounds. ``key``: digest of what it was measured on.
    """

    stages: tuple[StageProfile, ...]
    threads: int
    slowness: float = 1.0
    key: str = ""

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("a profile needs at least one stage")
        if self.threads < 1:
            raise ValueError(f"threads must be at least 1, not {self.threads}")
        positive(self.slowness, "slowness")

    @property
    def target(self) -> StageProfile:
        return self.stages[-1]

    def adding(self, times: Sequence[Sequence[StepTimes]]) -> Profile:
        """With more step times, per stage."""
        stages = (replace(s, times=(*s.times, *more)) for s, more in zip(self.stages, times, strict=True))
        return replace(self, stages=tuple(stages))

    def to_json(self) -> dict[str, Any]:
        stages = [
            {
                "name": s.name,
                "parameters": s.parameters,
                "contention": s.contention,
                "burden": s.burden,
                "cold_s": s.cold_s,
                "device": s.device,
                "times": [
                    {
                        "threads": t.threads,
                        "rows": t.rows,
                        "context": t.context,
                        "widths": list(t.widths),
                        "seconds": list(t.seconds),
                        "prefill_s": t.prefill_s,
                        "captured": t.captured,
                    }
                    for t in s.times
                ],
            }
            for s in self.stages
        ]
        return {"stages": stages, "threads": self.threads, "slowness": self.slowness, "key": self.key}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Profile:
        """Raises ``ValueError``, ``KeyError`` or ``TypeError`` for anything that :meth:`to_json` has not made. What older versions have not
        written is as if it had not been measured."""
        stages = tuple(
            StageProfile(
                str(s["name"]),
                int(s["parameters"]),
                tuple(
                    StepTimes(
                        t["threads"],
                        t["rows"],
                        t["context"],
                        tuple(t["widths"]),
                        tuple(t["seconds"]),
                        float(t["prefill_s"]),
                        bool(t.get("captured", False)),
                    )
                    for t in s["times"]
                ),
                contention=float(s["contention"]),
                burden=float(s["burden"]),
                cold_s=float(s["cold_s"]),
                device=int(s.get("device", 0)),
            )
            for s in data["stages"]
        )
        return Profile(stages, int(data["threads"]), float(data["slowness"]), str(data["key"]))


# --- measuring -------------------------------------------------------------------------------------------------------


class _Bench:
    """One model as the last stage of a chain of two, its draft a script that proposes what it is told to."""

    def __init__(self, model: PreTrainedModel, rows: int, context: int, steps: int) -> None:
        """Room for ``steps`` steps after each :meth:`begin`."""
        self.vocabulary = embedding_size(model)
        self.context = context
        self._random = np.random.default_rng(1)
        prompts = [self._random.integers(0, self.vocabulary, context).astype(np.int32) for _ in range(rows)]
        limits = [context + steps + 2 * WIDTHS[-1]] * rows
        self._start = Start(prompts, limits, Selection(), self.vocabulary)
        self._block = StateBlock.create(2, rows, steps + 2 * WIDTHS[-1] + 2)
        self._stage = Stage(model, self._block, 1)

    def begin(self, *, reuse: bool = False) -> float:
        """Back to the prompts, which ``reuse`` takes from the cache; seconds that they took."""
        prompts, limits = self._start.prompts, self._start.limits
        self._block.reset([self.context] * len(prompts), limits, [int(p[-1]) for p in prompts], [])
        self._block.set_alive(0, True)
        self._block.set_alive(1, True)
        self._draft = self._block.port(0, 64)
        began = time.perf_counter()
        self._stage.prefill(replace(self._start, reuse=reuse))
        if self._stage.model.device.type == "cuda":  # it is only queued
            torch.cuda.synchronize(self._stage.model.device)
        return time.perf_counter() - began

    def step(self, width: int) -> float:
        """Seconds of one step that feeds ``width`` columns."""
        while self._draft.plan(width - 1, 0, 0) == Action.STEP:
            columns = self._draft.columns
            says = self._random.integers(0, self.vocabulary, (len(self._start.prompts), columns)).astype(np.int32)
            self._draft.commit(says.ctypes.data, columns)
        began = time.perf_counter()
        self._stage.step(0, width - 1)
        return time.perf_counter() - began


def _contexts(models: Sequence[PreTrainedModel]) -> tuple[int, int]:
    """Tokens behind which steps are measured: few, and as many as all of the models may have."""
    # Beyond where its angles change a target takes no hints.
    ends = (angles_change_at(m) or getattr(m.config, "max_position_embeddings", None) for m in models)
    limit = min(end or _LONG + 256 for end in ends)
    return _SHORT, min(_LONG, max(2 * _SHORT, limit - 192))


@contextmanager
def threads_set(count: int) -> Iterator[None]:
    with restored_threads():
        torch.set_num_threads(count)
        yield


def thread_counts(stages: int) -> list[int]:
    """Numbers of threads that a plan may choose: all, what is left beside 1 .. ``stages`` - 1 workers, and one."""
    every = torch.get_num_threads()
    return sorted({1, every, *(target_threads(drafts) for drafts in range(1, stages))}, reverse=True)


class Profiler:
    """Measures the stages of a chain in rounds.

    A round is a step of every width, stage, context and number of threads, so that a bad moment of the machine's touches all alike;
    rounds may lie far apart. :meth:`profile` is what all of them say together.
    """

    def __init__(
        self,
        models: Sequence[PreTrainedModel],
        names: Sequence[str],
        *,
        rows: int = 1,
        widths: Sequence[int] = WIDTHS,
        round_s: float = 2.0,
    ) -> None:
        """``round_s``: a round that would take longer has fewer widths."""
        self.models, self.names, self.rows = list(models), list(names), rows
        self.threads = torch.get_num_threads()
        self._counts = thread_counts(len(models))
        contexts = _contexts(models)
        self._benches = [[_Bench(model, rows, c, 2 * len(widths) + _WARM + 2) for c in contexts] for model in models]
        # Seconds of a step, by stage, context, threads and width; of a prompt's token, with width 0.
        self._steps: dict[tuple[int, int, int, int], list[float]] = {}
        self._beside: dict[
            int, list[tuple[float, float]]
        ] = {}  # by draft: how much longer its steps last, and the target's
        self._cold: dict[int, list[float]] = {}
        self._rounds = 0
        took = 0.0
        with threads_set(1):
            for short, _ in self._benches:
                short.begin()
                short.step(1)  # the first picks kernels
                took += min(short.step(1) for _ in range(3))
        if 2 * took * len(widths) * len(self._counts) > round_s:
            widths = sorted({widths[0], widths[len(widths) // 2], widths[-1]})
        few = [w for w in (1, 2, 4, 9) if w in widths] or list(widths)
        self._widths = (tuple(widths), tuple(few))  # behind a short text and a long one

    def round(self) -> None:
        """One step of every kind."""
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
        """How much each draft in its process and the target slow each other down: both measured at once and alone, in turn.

        ``driver``: of the whole chain.
        """
        bench, widths = self._benches[-1][0], self._widths[1]
        random = np.random.default_rng(2)
        limit = min(getattr(m.config, "max_position_embeddings", None) or _LONG for m in driver.models)
        vocabulary = head_size(driver.models[-1])
        prompt = random.integers(0, vocabulary, 16).astype(np.int32)
        start = Start([prompt], [max(64, min(limit - 64, 1024))], Selection(), vocabulary)

        def steps() -> list[float]:
            bench.begin(reuse=True)
            for _ in range(_WARM):
                bench.step(1)
            return [bench.step(w) for w in (*widths, *widths)]

        with threads_set(target_threads(1)):
            for draft in range(len(driver.models) - 1):
                before = steps()
                with driver.drafting(Request(start, []), draft) as drafted:
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
                if count >= start.limits[0] - len(prompt) or min(rates) <= 0.0:  # it came to its end, or not to a step
                    continue
                alone = [(a + b) / 2 for a, b in zip(before, steps(), strict=True)]
                slower = statistics.mean(b / a for a, b in zip(alone, together, strict=True))
                self._beside.setdefault(draft, []).append((rates[1] / rates[0] - 1, slower - 1))

    def profile(self) -> Profile:
        """Of all rounds so far; at least one."""
        ratios = []
        stages = []
        places = _places(self.models)
        for stage, (name, model, benches) in enumerate(zip(self.names, self.models, self._benches, strict=True)):
            times = []
            for threads in self._counts:
                best: list[StepTimes] = []
                for place, (bench, widths) in enumerate(zip(benches, self._widths, strict=True)):
                    samples = [self._steps[stage, place, threads, w] for w in widths]
                    low = [float(np.quantile(s, _QUARTER)) for s in samples]
                    if stage == len(self.models) - 1:  # most of the time is the target's
                        ratios += [statistics.mean(s) / q for s, q in zip(samples, low, strict=True)]
                    prompt = self._steps.get((stage, place, threads, 0))
                    per_token = best[0].prefill_s if prompt is None else float(np.quantile(prompt, _QUARTER))
                    best.append(StepTimes(threads, self.rows, bench.context, widths, tuple(low), per_token))
                short, far = best
                # What the longer text adds, at the widths of the finer table.
                added = [max(0.0, far.at(w) - short.at(w)) for w in (min(w, far.widths[-1]) for w in short.widths)]
                seconds = tuple(s + a for s, a in zip(short.seconds, added, strict=True))
                times += [short, replace(far, widths=short.widths, seconds=seconds)]
            beside = self._beside.get(stage, [(0.0, 0.0)])
            contention, burden = (max(0.0, statistics.mean(either)) for either in zip(*beside, strict=True))
            cold = max(0.0, statistics.median(self._cold.get(stage, [0.0])))
            stages.append(
                StageProfile(name, model.num_parameters(), tuple(times), contention, burden, cold, places[stage])
            )
        return Profile(tuple(stages), self.threads, statistics.median(ratios))


def measure_stages(
    models: Sequence[PreTrainedModel],
    names: Sequence[str],
    *,
    rows: int = 1,
    widths: Sequence[int] = WIDTHS,
    budget_s: float = 10.0,
    beside: WorkersDriver | None = None,
) -> Profile:
    """Step times of every model, alone on the machine, with every number of threads that a plan may choose; and with ``beside``, the
    chain's own driver, how much drafts at work slow the target down, and it them."""
    began = time.perf_counter()
    profiler = Profiler(models, names, rows=rows, widths=widths, round_s=budget_s / _ROUNDS)
    for done in range(1, _MOST_ROUNDS + 1):
        profiler.round()
        if beside is not None:
            profiler.beside(beside)
        spent = time.perf_counter() - began
        if spent * (done + 1) / done > budget_s:
            break
    return profiler.profile()


class _OneWidth(StreamsDriver):
    """Captured steps of one width, whatever they have to do: all their columns are fed and scored."""

    columns = 1

    def _widths(self) -> list[int]:
        return [self.columns]


def measure_captured(
    models: Sequence[PreTrainedModel],
    names: Sequence[str],
    *,
    rows: int = 1,
    widths: Sequence[int] = CAPTURED_WIDTHS,
) -> list[tuple[StepTimes, ...]]:
    """Per model the times of its captured steps, for :meth:`Profile.adding`. On a CPU the same steps run uncaptured.

    Each model decodes alone, as a chain of one under the very driver and scheduler that ``"streams"`` has; what is taken is the median time from
    one step's end to the next one's, what lies between them included. What stages at once cost each other is not measured; see
    :func:`pipespec.planning.planner.predict`.

    Raises :class:`pipespec.placement.NotCapturable`, ``ValueError``.
    """
    contexts, threads = _contexts(models), torch.get_num_threads()
    found = []
    for model, name in zip(models, names, strict=True):
        try:
            driver = _OneWidth([model], Policy(), trace=2 * _CAPTURED_STEPS)
        except NotCapturable as error:
            raise NotCapturable(name, error.part, error.cause) from error
        try:
            # The long text first: its caches and graphs are there for the short one.
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
    start = Start(prompts, [context + _WARM + _CAPTURED_STEPS] * rows, Selection(), vocabulary)
    seconds, prefills = [], []
    for width in widths:
        driver.columns = width
        driver.run(Request(start, []))
        if driver.remarks:
            raise NotCapturable(name, "its step", driver.remarks[0])
        (trace,) = driver.traces().values()
        prompt, steps = trace[trace["prefill"] > 0], trace[trace["prefill"] == 0]
        seconds.append(1e-9 * float(np.median(np.diff(steps["end_ns"])[_WARM - 1 :])))
        # Until the first step is launched: the device has been waited for.
        prefills.append(1e-9 * float(steps["launched_ns"][0] - prompt["start_ns"][0]) / context)
    per_token = max(0.0, statistics.median(prefills))
    return StepTimes(threads, rows, context, tuple(widths), tuple(seconds), per_token, captured=True)


def _places(models: Sequence[PreTrainedModel]) -> list[int]:
    """Of each model's device, a number: models with the same one are on the same."""
    devices = list(dict.fromkeys(model.device for model in models))
    return [devices.index(model.device) for model in models]


# --- agreement -------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def choices(
    model: PreTrainedModel, text: np.ndarray, first: int, selection: Selection, vocabulary: int, row: int = 0
) -> np.ndarray:
    """What ``model`` would choose at positions ``first .. len(text) - 1`` behind the ``text`` before them; int64. Processors other
    than the fused ones are left out."""
    cache = RowCache.for_model(model, 1, len(text) + 1)
    own = embedding_size(model)
    ids = torch.from_numpy(np.minimum(text, own - 1).astype(np.int32))[None].to(model.device)
    out = []
    at = 0
    while at < len(text) - 1:
        end = min(at + (PREFILL_CHUNK if at < first - 1 else 64), len(text) - 1)
        if at < first - 1:
            end = min(end, first - 1)
        keep = end - at if at >= first - 1 else 0
        logits = forward(model, ids[:, at:end], cache, keep=keep)
        if keep:
            logits = logits[:, :, :vocabulary]
            if selection.seeds is None:
                out.append(ops.argmax(logits)[0])
            else:
                key = torch.from_numpy(np.array(selection.seeds[row : row + 1], dtype=np.uint64).view(np.int64))
                inverse = torch.full((1,), 1 / selection.temperature, dtype=torch.float32)
                cutoff = None
                if selection.cuts:
                    s = selection
                    cutoff = ops.cutoff(logits, inv_temperature=inverse, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p)
                out.append(ops.sample(logits, Noise(key, np.array([at + 1]), inverse, cutoff))[0])
        at = end
    return torch.cat(out).cpu().numpy().astype(np.int64) if out else np.zeros(0, dtype=np.int64)


def agreement(truth: np.ndarray, said: Sequence[np.ndarray]) -> np.ndarray:
    """The simulator's table, uint8 ``[positions, drafts]``: 0 where a draft says what the target says; equal numbers in a row are equal
    tokens."""
    table = np.zeros((len(truth), len(said)), dtype=np.uint8)
    for i, own in enumerate(said):
        if own.shape != truth.shape:
            raise ValueError(f"draft {i} answered {own.shape} positions, the target {truth.shape}")
        table[:, i] = np.where(own == truth, 0, i + 1)
        for j in range(i):  # drafts that are wrong alike
            alike = (own == said[j]) & (own != truth)
            table[alike, i] = table[alike, j]
    return table


def agreement_on(
    models: Sequence[PreTrainedModel],
    text: np.ndarray,
    first: int,
    *,
    own_text: bool,
    selection: Selection | None = None,
    row: int = 0,
) -> np.ndarray:
    """The table of ``models`` over ``text`` from position ``first`` on. ``own_text``: it is what the target itself said there."""
    selection = selection or Selection()
    vocabulary = head_size(models[-1])
    text = text[: first + MOST_POSITIONS]
    truth = text[first:].astype(np.int64) if own_text else choices(models[-1], text, first, selection, vocabulary, row)
    return agreement(truth, [choices(m, text, first, selection, vocabulary, row) for m in models[:-1]])


# --- on disk ---------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """``$PIPESPEC_CACHE``, or ``pipespec`` under ``$XDG_CACHE_HOME`` (default: ``~/.cache``)."""
    own = os.environ.get("PIPESPEC_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pipespec"


def digest(models: Sequence[PreTrainedModel], *, threads: int) -> str:
    """Changes with everything that a profile depends on: models (weights by samples), hardware, threads, versions."""
    env = collect_env()
    facts: list[Any] = [_FORMAT, threads, env["cpu"]["model"], env["cpu"]["usable_cores"], platform.machine()]
    facts += [torch.__version__, transformers.__version__, __version__]
    for model, place in zip(models, _places(models), strict=True):
        config = {k: v for k, v in model.config.to_dict().items() if not k.startswith("_")}
        # Which of several GPUs of one kind is no matter, but who shares one is.
        device = (torch.cuda.get_device_name(model.device), place) if model.device.type == "cuda" else "cpu"
        facts += [config, str(model.dtype), device, model.num_parameters(), _sample(model)]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _sample(model: PreTrainedModel) -> str:
    """A few numbers of every tensor: models of one shape differ in what they say."""
    seen = hashlib.sha256()
    for parameter in model.parameters():
        flat = parameter.detach().flatten()
        middle = flat.numel() // 2
        seen.update(flat[middle : middle + 16].float().cpu().numpy().tobytes())
    return seen.hexdigest()


@dataclass(frozen=True)
class Stored:
    """What lies on disk for one chain: its profile and what was last known of its drafts' agreement, by mode."""

    profile: Profile
    tables: dict[str, np.ndarray]


def store(stored: Stored, folder: Path | None = None) -> bool:
    """Write it; False, and one warning, where that cannot be."""
    folder = folder or cache_folder()
    tables = {mode: table.tolist() for mode, table in stored.tables.items()}
    data = {"format": _FORMAT, "profile": stored.profile.to_json(), "tables": tables}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Complete or not at all: another process may read at the same time.
        descriptor, name = tempfile.mkstemp(dir=folder, suffix=".new")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(data, file)
            os.replace(name, folder / f"{stored.profile.key}.json")
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        _tell(f"the profile cannot be kept in {folder} ({error}); it is measured again next time")
        return False
    return True


def load(key: str, stages: int, folder: Path | None = None) -> Stored | None:
    """What was stored under ``key``; None where there is nothing, and, with a warning, where it cannot be used."""
    file = (folder or cache_folder()) / f"{key}.json"
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if data["format"] != _FORMAT:
            raise ValueError(f"it has format {data['format']}")
        profile = Profile.from_json(data["profile"])
        if profile.key != key or len(profile.stages) != stages:
            raise ValueError("it is of other models")
        tables = {}
        for mode, rows in data["tables"].items():
            table = np.array(rows, dtype=np.uint8)
            if table.ndim != 2 or table.shape[1] != stages - 1 or len(table) == 0:
                raise ValueError(f"its table has shape {table.shape}")
            tables[str(mode)] = table
        return Stored(profile, tables)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        _tell(f"{file} is not a profile that can be used ({type(error).__name__}: {error}); it is made anew")
        return None


_told: set[str] = set()


def _tell(what: str) -> None:
    if what not in _told:
        _told.add(what)
        warnings.warn(what, ProfileWarning, stacklevel=4)
