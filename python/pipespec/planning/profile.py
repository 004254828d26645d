"""Profile: what the planner must know of a user's stages, measured through the engine itself, and kept on disk.

A stage's step time by width, context, rows and threads; how much stages slow each other down when they run at the same time;
which tokens they choose over the same text (``agreement``), as the table that the simulator replays.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from pipespec.cache import RowCache
from pipespec.drivers import Driver, Request
from pipespec.drivers.base import Policy
from pipespec.drivers.workers import target_threads
from pipespec.forward import forward
from pipespec.planning._checks import non_negative, positive, same_length
from pipespec.sampling import Selection
from pipespec.stage import PREFILL_CHUNK, Stage, Start
from pipespec_kernels import __version__, collect_env, ops
from pipespec_kernels.noise import Noise
from pipespec_kernels.state import Action, StateBlock

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16)
_SHORT, _LONG = 64, 1024
_FORMAT = 1
MOST_POSITIONS = 2048

Clock = Callable[[], float]


class ProfileWarning(UserWarning):
    """A stored profile could not be used, or none could be stored. Costs time, nothing else."""


@dataclass(frozen=True)
class StepTimes:
    """``seconds[i]`` of a step that feeds ``widths[i]`` columns to ``rows`` rows behind ``context`` tokens, with ``threads`` threads."""

    threads: int
    rows: int
    context: int
    widths: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        same_length("seconds", self.seconds, len(self.widths), "width")
        if not self.widths or list(self.widths) != sorted(set(self.widths)) or self.widths[0] < 1:
            raise ValueError(f"widths must grow from at least 1, not {self.widths}")
        for s in self.seconds:
            positive(s, "a step time")
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
    """One stage. ``prefill_s``: seconds per token of a prompt."""

    name: str
    parameters: int
    times: tuple[StepTimes, ...]
    prefill_s: float

    def __post_init__(self) -> None:
        if not self.times:
            raise ValueError(f"{self.name}: a stage needs at least one step time")
        non_negative(self.prefill_s, "the time of a prompt's token")

    def has(self, threads: int, rows: int) -> bool:
        return any(t.threads == threads and t.rows == rows for t in self.times)

    def seconds(self, width: float, *, threads: int, rows: int = 1, context: float = _SHORT) -> float:
        """Of one step. Between contexts it is interpolated; for threads or rows that were not measured the nearest is taken."""
        best = min(self.times, key=lambda t: (abs(math.log(t.rows / rows)), abs(t.threads - threads)))
        same = sorted(
            (t for t in self.times if (t.threads, t.rows) == (best.threads, best.rows)), key=lambda t: t.context
        )
        low, high = same[0], same[-1]
        a, b = low.at(width), high.at(width)
        if high.context == low.context:
            return a
        return max(min(a, b), a + (b - a) * (context - low.context) / (high.context - low.context))


@dataclass(frozen=True)
class Profile:
    """All stages of a chain, draft 0 first. ``threads``: what the caller may use; ``contention[n]``: how much of each other's time n
    stages take that run at once (0: none; 1: they share what one alone has); ``key``: digest of what it was measured on."""

    stages: tuple[StageProfile, ...]
    threads: int
    contention: dict[int, float] = field(default_factory=dict)
    key: str = ""

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("a profile needs at least one stage")
        if self.threads < 1:
            raise ValueError(f"threads must be at least 1, not {self.threads}")
        for value in self.contention.values():
            non_negative(value, "contention")

    @property
    def target(self) -> StageProfile:
        return self.stages[-1]

    def overlap(self, stages: int) -> float:
        """Contention of ``stages`` at once: as measured, or as measured with the nearest number of them."""
        if not self.contention:
            return 0.0
        return self.contention[min(self.contention, key=lambda n: abs(n - stages))]

    def to_json(self) -> dict[str, Any]:
        stages = [
            {
                "name": s.name,
                "parameters": s.parameters,
                "prefill_s": s.prefill_s,
                "times": [
                    {
                        "threads": t.threads,
                        "rows": t.rows,
                        "context": t.context,
                        "widths": list(t.widths),
                        "seconds": list(t.seconds),
                    }
                    for t in s.times
                ],
            }
            for s in self.stages
        ]
        contention = {str(n): c for n, c in self.contention.items()}
        return {"stages": stages, "threads": self.threads, "contention": contention, "key": self.key}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Profile:
        """Raises ``ValueError``, ``KeyError`` or ``TypeError`` for anything that :meth:`to_json` has not made."""
        stages = tuple(
            StageProfile(
                str(s["name"]),
                int(s["parameters"]),
                tuple(
                    StepTimes(t["threads"], t["rows"], t["context"], tuple(t["widths"]), tuple(t["seconds"]))
                    for t in s["times"]
                ),
                float(s["prefill_s"]),
            )
            for s in data["stages"]
        )
        contention = {int(n): float(c) for n, c in data["contention"].items()}
        return Profile(stages, int(data["threads"]), contention, str(data["key"]))


# --- measuring -------------------------------------------------------------------------------------------------------


class _Bench:
    """One model as the last stage of a chain of two, its draft a script that proposes what it is told to."""

    def __init__(self, model: PreTrainedModel, rows: int, context: int, steps: int) -> None:
        self.vocabulary = model.get_input_embeddings().weight.shape[0]
        self._random = np.random.default_rng(1)
        self._rows = rows
        prompts = [self._random.integers(0, self.vocabulary, context).astype(np.int32) for _ in range(rows)]
        limits = [context + steps + 2 * WIDTHS[-1]] * rows
        self._block = StateBlock.create(2, rows, steps + 2 * WIDTHS[-1] + 2)
        self._block.reset([context] * rows, limits, [int(p[-1]) for p in prompts], [])
        self._block.set_alive(0, True)
        self._block.set_alive(1, True)
        self._draft = self._block.port(0, 64)
        self._stage = Stage(model, self._block, 1)
        began = time.perf_counter()
        self._stage.prefill(Start(prompts, limits, Selection(), self.vocabulary))
        self.prefill_s = time.perf_counter() - began

    def step(self, width: int) -> float:
        """Seconds of one step that feeds ``width`` columns."""
        while self._draft.plan(width - 1, 0, 0) == Action.STEP:
            columns = self._draft.columns
            says = self._random.integers(0, self.vocabulary, (self._rows, columns)).astype(np.int32)
            self._draft.commit(says.ctypes.data, columns)
        began = time.perf_counter()
        self._stage.step(0, width - 1)
        return time.perf_counter() - began


@contextmanager
def threads_set(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure_steps(
    model: PreTrainedModel,
    threads: int,
    *,
    rows: int = 1,
    context: int = _SHORT,
    widths: Sequence[int] = WIDTHS,
    repeats: int = 7,
    budget_s: float = 2.0,
) -> tuple[StepTimes, float]:
    """Medians over ``repeats`` rounds through all widths (fewer when the budget is used up; one at least), and the seconds of a
    prompt's token."""
    with threads_set(threads):
        began = time.perf_counter()
        bench = _Bench(model, rows, context, (repeats + 1) * len(widths) + 4)
        bench.step(1)  # the first picks kernels
        if (bench.step(1) + bench.step(2)) * len(widths) > budget_s:
            widths = sorted({widths[0], widths[len(widths) // 2], widths[-1]})
        found: dict[int, list[float]] = {width: [] for width in widths}
        for round_ in range(repeats):
            for width in widths:
                found[width].append(bench.step(width))
            spent = time.perf_counter() - began
            if spent * (round_ + 2) / (round_ + 1) > budget_s:
                break
    seconds = tuple(statistics.median(found[w]) for w in widths)
    return StepTimes(threads, rows, context, tuple(widths), seconds), bench.prefill_s / context


def thread_counts(stages: int) -> list[int]:
    """Numbers of threads that a plan may choose: all, what is left beside 1 .. ``stages`` - 1 workers, and one."""
    every = torch.get_num_threads()
    return sorted({1, every, *(target_threads(drafts) for drafts in range(1, stages))}, reverse=True)


def measure_stages(
    models: Sequence[PreTrainedModel],
    names: Sequence[str],
    *,
    rows: int = 1,
    budget_s: float = 20.0,
    told: Callable[[str], None] = lambda what: None,
) -> Profile:
    """Step times of every model, alone on the machine, with every number of threads that a plan may choose."""
    threads = torch.get_num_threads()
    counts = thread_counts(len(models))
    limit = min(getattr(m.config, "max_position_embeddings", None) or _LONG + 256 for m in models)
    long = min(_LONG, max(2 * _SHORT, limit - 192))
    share = budget_s / (len(models) * (len(counts) + 1))
    stages = []
    for name, model in zip(names, models, strict=True):
        told(f"measuring {name}")
        times, prefill = [], []
        for count in counts:
            short, per_token = measure_steps(model, count, rows=rows, budget_s=share)
            few = (1, 2, 4, 8)
            far, _ = measure_steps(model, count, rows=rows, context=long, widths=few, repeats=3, budget_s=share / 2)
            # What the longer text adds, at the widths of the finer table.
            added = [max(0.0, far.at(min(w, few[-1])) - short.at(min(w, few[-1]))) for w in short.widths]
            seconds = tuple(s + a for s, a in zip(short.seconds, added, strict=True))
            times += [short, replace(short, context=long, seconds=seconds)]
            prefill.append(per_token)
        stages.append(StageProfile(name, model.num_parameters(), tuple(times), min(prefill)))
    return Profile(tuple(stages), threads)


def measure_overlap(driver: Driver, profile: Profile, text: np.ndarray, vocabulary: int, tokens: int = 96) -> float:
    """Contention of a ``workers`` chain: all its stages run on ``text`` at once, none ever idle, and are compared with ``profile``
    (the chain's stages, in order)."""
    stages = len(driver.models)
    before = driver.policy
    driver.steer(Policy((64,) * (stages - 1)))
    marks: list[tuple[float, list[int], list[int]]] = []
    block = driver.block

    def look() -> None:
        counts = [block.counters(s, 0) for s in range(stages)]
        marks.append((time.perf_counter(), [c["steps"] for c in counts], [c["fed"] for c in counts]))

    calls = 0

    def on_commit() -> None:
        nonlocal calls
        calls += 1
        if calls == 8:  # all have their prompts
            look()

    start = Start([text.astype(np.int32)], [len(text) + tokens], Selection(), vocabulary)
    try:
        driver.run(Request(start, [], on_commit))
        look()
    finally:
        driver.steer(before)
    if len(marks) < 2:  # over after less than eight steps: nothing was seen
        return 0.0
    (began, steps0, fed0), (ended, steps1, fed1) = marks[0], marks[-1]
    slower = []
    for s, stage in enumerate(profile.stages):
        steps = steps1[s] - steps0[s]
        if steps < 4:
            continue
        own = target_threads(stages - 1) if s == stages - 1 else 1
        alone = stage.seconds((fed1[s] - fed0[s]) / steps, threads=own, context=len(text) + tokens / 2)
        mean = (ended - began) / steps
        if s < stages - 1 and block.step_ns(s):
            mean = min(mean, block.step_ns(s) / 1e9)  # it may have rested at its bound
        slower.append(mean / alone - 1)
    return max(0.0, statistics.mean(slower)) / (stages - 1) if slower else 0.0


# --- agreement -------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def choices(
    model: PreTrainedModel, text: np.ndarray, first: int, selection: Selection, vocabulary: int, row: int = 0
) -> np.ndarray:
    """What ``model`` would choose at positions ``first .. len(text) - 1`` behind the ``text`` before them; int64. Processors other
    than the fused ones are left out."""
    cache = RowCache.for_model(model, 1, len(text) + 1)
    own = model.get_input_embeddings().weight.shape[0]
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
    vocabulary = models[-1].get_output_embeddings().weight.shape[0]
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
    for model in models:
        config = {k: v for k, v in model.config.to_dict().items() if not k.startswith("_")}
        device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else "cpu"
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
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        _tell(f"{file} is not a profile that can be used ({type(error).__name__}: {error}); it is made anew")
        return None


_told: set[str] = set()


def _tell(what: str) -> None:
    if what not in _told:
        _told.add(what)
        warnings.warn(what, ProfileWarning, stacklevel=4)
