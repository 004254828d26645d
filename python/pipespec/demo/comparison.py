"""The comparison that ``pipespec demo`` and ``bench/bench_cpu.py`` show: who generates the target's text, and how fast.

Fair by construction: every row generates the same prompts, in fp32, greedily, with all cores; the rows take turns prompt by
prompt, so that a noisy machine disturbs all alike; HuggingFace's rows are tuned first, on prompts that are not measured, and
ours run with their defaults.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer, PreTrainedModel

from pipespec.demo import FAMILY, family_path
from pipespec.loading import load_model
from pipespec.observe import Report
from pipespec.pipeline import Pipeline
from pipespec_kernels import __version__, collect_env

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many of its parts are done, and how many there are."""


@dataclass(frozen=True)
class Row:
    """One line of the table. ``schedule`` None: HuggingFace's own ``generate()``."""

    key: str
    label: str
    schedule: str | None
    drafts: tuple[str, ...] = ()


ROWS = (
    Row("plain", "HF generate()", None),
    Row("assisted-small", "HF assisted, small", None, ("small",)),
    Row("assisted-medium", "HF assisted, medium", None, ("medium",)),
    Row("lookup", "HF prompt lookup", None),
    Row("ours-plain", "ours, target alone", "plain"),
    Row("lockstep-small", "lockstep, small", "lockstep", ("small",)),
    Row("lockstep-medium", "lockstep, medium", "lockstep", ("medium",)),
    Row("lockstep-3", "lockstep, small + medium", "lockstep", ("small", "medium")),
    Row("workers-small", "workers, small", "workers", ("small",)),
    Row("workers-medium", "workers, medium", "workers", ("medium",)),
    Row("workers-3", "workers, small + medium", "workers", ("small", "medium")),
)


@dataclass(frozen=True)
class Setting:
    """How HuggingFace's assisted generation or prompt lookup is set: drafts per round, the confidence to go on drafting, and how
    transformers changes the former from round to round."""

    tokens: int
    threshold: float | None = None
    schedule: str = "constant"

    def __str__(self) -> str:
        threshold = "" if self.threshold is None else f", threshold {self.threshold:g}"
        return f"{self.tokens} tokens{threshold}" + (f", {self.schedule}" if self.schedule != "constant" else "")


ASSISTED = (*(Setting(tokens, threshold) for tokens in (5, 3, 8) for threshold in (0.0, 0.4)), Setting(20, 0.4))
"""Tried for each draft; the last is transformers' default."""

LOOKUP = (Setting(3), Setting(10))


@dataclass
class Counts:
    """What one verifying stage did, summed."""

    name: str
    steps: int = 0
    produced: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, other: Counts) -> None:
        self.steps += other.steps
        self.produced += other.produced
        self.drafted += other.drafted
        self.accepted += other.accepted


@dataclass(frozen=True)
class Run:
    """One prompt generated once. ``output``: prompt and text, LongTensor ``[1, S + new]``."""

    output: torch.Tensor
    tokens: int
    seconds: float
    stages: tuple[Counts, ...]


@dataclass(frozen=True)
class Result:
    """One row, measured. Ratios are medians over the repeats, each within one repeat; None: nothing to compare with."""

    key: str
    label: str
    setting: str | None
    tokens_per_second: float
    repeats: list[float]
    ratio_to_plain: float | None
    ratio_to_best_hf: float | None
    accepted_length: dict[str, float]
    acceptance_rate: dict[str, float]
    identical: int
    runs: int

    @property
    def is_identical(self) -> bool:
        return self.identical == self.runs


@dataclass(frozen=True)
class Family:
    """A target, its drafts by name (smallest first), and their tokenizer; all in fp32 on the CPU."""

    name: str
    target: PreTrainedModel
    drafts: dict[str, PreTrainedModel]
    tokenizer: Any

    @staticmethod
    def load(folder: Path | None = None) -> Family:
        """The bundled family, or the one in ``folder`` (``target/``, ``medium/``, ``small/``)."""
        paths = {name: folder / name if folder else family_path(name) for name in FAMILY}
        models = {name: load_model(path, dtype=torch.float32) for name, path in paths.items()}
        tokenizer = AutoTokenizer.from_pretrained(paths["target"])
        drafts = {name: models[name] for name in reversed(FAMILY) if name != "target"}
        return Family(folder.name if folder else "bundled", models["target"], drafts, tokenizer)

    def encode(self, text: str) -> torch.Tensor:
        """LongTensor ``[1, S]``."""
        return self.tokenizer(text, return_tensors="pt").input_ids

    def room(self, texts: Sequence[str]) -> int:
        """Tokens that fit behind each of ``texts``. Raises ``ValueError`` if one of them fills the target already."""
        limit: int = self.target.config.max_position_embeddings
        longest = max(self.encode(text).shape[1] for text in texts)
        if longest >= limit:
            raise ValueError(f"the prompt has {longest} tokens; the family's limit, the answer included, is {limit}")
        return limit - longest

    def parameters(self) -> dict[str, int]:
        return {name: model.num_parameters() for name, model in (*self.drafts.items(), ("target", self.target))}


class _Rounds:
    """A streamer that only counts: assisted generation hands over one block per verification, the prompt first."""

    def __init__(self) -> None:
        self.count = -1

    def put(self, value: torch.Tensor) -> None:
        self.count += 1

    def end(self) -> None:
        pass


class HuggingFace:
    """A row of transformers' own ``generate()``; ``options`` go into every call."""

    def __init__(self, row: Row, family: Family, **options: Any) -> None:
        self.options = options
        self.target = family.target
        self.draft = family.drafts[row.drafts[0]] if row.drafts else None
        self.candidates: tuple[Setting, ...] = ASSISTED if row.drafts else LOOKUP if row.key == "lookup" else ()
        self.setting = self.candidates[0] if self.candidates else None

    def generate(self, ids: torch.Tensor, new_tokens: int) -> tuple[torch.Tensor, tuple[Counts, ...]]:
        common: dict[str, Any] = {
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": new_tokens,
            "do_sample": False,
            **self.options,
        }
        if self.setting is None:
            return self.target.generate(ids, **common), ()
        rounds = _Rounds()
        if self.draft is not None:
            assistant = self.draft.generation_config  # where transformers reads these from, in every call
            assistant.num_assistant_tokens = self.setting.tokens
            assistant.num_assistant_tokens_schedule = self.setting.schedule
            assistant.assistant_confidence_threshold = self.setting.threshold
            output = self.target.generate(ids, assistant_model=self.draft, streamer=rounds, **common)
        else:
            output = self.target.generate(ids, prompt_lookup_num_tokens=self.setting.tokens, streamer=rounds, **common)
        return output, (Counts("target", steps=rounds.count, produced=output.shape[1] - ids.shape[1]),)

    def close(self) -> None:
        pass


class _Ours:
    """A row of ours."""

    candidates: tuple[Setting, ...] = ()
    setting: Setting | None = None

    def __init__(self, row: Row, family: Family) -> None:
        self.names = (*row.drafts, "target")
        self.pipe = Pipeline(family.target, [family.drafts[d] for d in row.drafts], schedule=row.schedule or "plain")

    def generate(self, ids: torch.Tensor, new_tokens: int) -> tuple[torch.Tensor, tuple[Counts, ...]]:
        output = self.pipe.generate(ids, max_new_tokens=new_tokens, do_sample=False)
        report = self.pipe.report
        assert report is not None
        return output, self._counts(report)

    def _counts(self, report: Report) -> tuple[Counts, ...]:
        verifying = list(zip(self.names, report.stages, strict=True))[1:]
        return tuple(Counts(name, s.steps, s.produced, s.drafted, s.accepted) for name, s in verifying)

    def close(self) -> None:
        self.pipe.close()


@dataclass
class Comparison:
    """Rows that take turns. ``with`` it: the rows of workers hold processes.

    Parameters
    ----------
    family: the models.
    prompts: texts to measure with.
    new_tokens: most tokens per prompt.
    rows: keys of :data:`ROWS`; ``"plain"`` is the reference and always there.
    progress: told about everything that takes its time.
    """

    family: Family
    prompts: Sequence[str]
    new_tokens: int
    rows: Sequence[str] = tuple(row.key for row in ROWS)
    progress: Progress = field(default=lambda what, done, total: None)

    def __post_init__(self) -> None:
        keys = [row.key for row in ROWS]
        unknown = [key for key in self.rows if key not in keys]
        if unknown:
            raise ValueError(f"no row {', '.join(map(repr, unknown))}; there are {', '.join(keys)}")
        if not self.prompts:
            raise ValueError("nothing to measure with: at least one prompt is needed")
        self._rows = [row for row in ROWS if row.key == "plain" or row.key in self.rows]
        self._ids = [self.family.encode(prompt) for prompt in self.prompts]
        self._contenders: dict[str, HuggingFace | _Ours] = {}
        self._runs: dict[str, dict[tuple[int, int], Run]] = {row.key: {} for row in self._rows}
        self.threads = len(os.sched_getaffinity(0))
        self.tuning: dict[str, list[dict[str, Any]]] = {}

    def start(self) -> None:
        """Make the rows ready: worker processes are started. Raises as :class:`Pipeline`."""
        torch.set_num_threads(self.threads)
        for done, row in enumerate(self._rows):
            self.progress(f"starting: {row.label}", done, len(self._rows))
            self._contender(row)

    def pipeline(self, key: str) -> Pipeline:
        """The pipeline of one of our rows, to show it before or between the measurements."""
        contender = self._contender(next(row for row in self._rows if row.key == key))
        assert isinstance(contender, _Ours)
        return contender.pipe

    def _contender(self, row: Row) -> HuggingFace | _Ours:
        if row.key not in self._contenders:
            kind = HuggingFace if row.schedule is None else _Ours
            self._contenders[row.key] = kind(row, self.family)
        return self._contenders[row.key]

    def tune(self, calibration: Sequence[str], settings: int | None = None) -> None:
        """Find the best setting of each row that has one to choose, among its first ``settings`` (None: all of them).

        ``calibration``: prompts other than the measured ones.
        """
        ids = [self.family.encode(prompt) for prompt in calibration]
        work = [(row, setting) for row in self._rows for setting in self._contenders[row.key].candidates[:settings]]
        speeds: dict[str, dict[Setting, float]] = {}
        for done, (row, setting) in enumerate(work):
            self.progress(f"tuning: {row.label}, {setting}", done, len(work))
            contender = self._contenders[row.key]
            contender.setting = setting
            runs = [_timed(contender, prompt, self.new_tokens) for prompt in ids]
            speeds.setdefault(row.key, {})[setting] = _speed(runs)
        for key, found in speeds.items():
            self._contenders[key].setting = max(found, key=lambda s: found[s])
            self.tuning[key] = [asdict(s) | {"tokens_per_second": speed} for s, speed in found.items()]

    def warm_up(self) -> None:
        """Run each row once, unmeasured: the first call allocates caches and picks kernels."""
        for done, row in enumerate(self._rows):
            self.progress(f"warming up: {row.label}", done, len(self._rows))
            _timed(self._contenders[row.key], self._ids[0], self.new_tokens)

    def measure(self, repeats: int) -> Iterator[list[Result]]:
        """Measure; yields the table so far after each prompt that all rows have generated."""
        total = repeats * len(self._ids) * len(self._rows)
        done = 0
        for repeat in range(repeats):
            for prompt, ids in enumerate(self._ids):
                turn = (repeat * len(self._ids) + prompt) % len(self._rows)  # nobody always follows the same neighbour
                for row in (*self._rows[turn:], *self._rows[:turn]):
                    self.progress(f"measuring, repeat {repeat + 1} of {repeats}: {row.label}", done, total)
                    self._runs[row.key][repeat, prompt] = _timed(self._contenders[row.key], ids, self.new_tokens)
                    done += 1
                yield self.results()

    def results(self) -> list[Result]:
        """One per row, from what has been measured so far."""
        repeats = sorted({repeat for repeat, _ in self._runs["plain"]})
        speeds = {
            row.key: [_speed([r for (i, _), r in self._runs[row.key].items() if i == repeat]) for repeat in repeats]
            for row in self._rows
        }
        rivals = [row.key for row in self._rows if self._contenders[row.key].candidates]
        best = max(rivals, key=lambda key: median(speeds[key])) if rivals else None
        return [self._result(row, speeds, best) for row in self._rows]

    def _result(self, row: Row, speeds: dict[str, list[float]], best: str | None) -> Result:
        runs = self._runs[row.key]
        total: dict[str, Counts] = {}
        for run in runs.values():
            for counts in run.stages:
                total.setdefault(counts.name, Counts(counts.name)).add(counts)
        references = {prompt: run.output for (repeat, prompt), run in self._runs["plain"].items() if repeat == 0}
        setting = self._contenders[row.key].setting
        return Result(
            key=row.key,
            label=row.label,
            setting=str(setting) if setting else None,
            tokens_per_second=median(speeds[row.key]),
            repeats=speeds[row.key],
            ratio_to_plain=_ratio(speeds[row.key], speeds["plain"]),
            ratio_to_best_hf=_ratio(speeds[row.key], speeds[best]) if best else None,
            accepted_length={c.name: c.produced / c.steps for c in total.values() if c.steps},
            acceptance_rate={c.name: c.accepted / c.drafted for c in total.values() if c.drafted},
            identical=sum(torch.equal(run.output, references[prompt]) for (_, prompt), run in runs.items()),
            runs=len(runs),
        )

    def record(self) -> dict[str, Any]:
        """Everything about this measurement, ready for JSON. No paths, no names of people or machines."""
        return {
            "machine": machine() | {"threads": self.threads},
            "family": self.family.name,
            "parameters": self.family.parameters(),
            "dtype": "float32",
            "prompts": len(self.prompts),
            "new_tokens": self.new_tokens,
            "tokens": sum(run.tokens for (repeat, _), run in self._runs["plain"].items() if repeat == 0),
            "tuning": self.tuning,
            "rows": [asdict(result) for result in self.results()],
        }

    def close(self) -> None:
        for contender in self._contenders.values():
            contender.close()

    def __enter__(self) -> Comparison:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def machine() -> dict[str, Any]:
    """The hardware and the versions that a measurement depends on."""
    env = collect_env()
    return {
        "cpu": env["cpu"]["model"],
        "cores": env["cpu"]["usable_cores"],
        "simd": env["cpu"]["simd"],
        "memory_gb": round((env["memory_bytes"] or 0) / 2**30, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "pipespec": __version__,
    }


HEADER = ("", "tokens/s", "vs generate()", "vs best HF", "accepted length", "acceptance", "identical text")


def cells(result: Result) -> tuple[str, ...]:
    """A result as the table shows it, under :data:`HEADER`. Several verifying stages: the one next to the smallest first."""

    def times(ratio: float | None) -> str:
        return "-" if ratio is None else f"{ratio:.2f}x"

    # Where nothing drafts, every step yields one token: nothing to tell.
    lengths = result.accepted_length.values() if result.acceptance_rate or result.setting else ()
    return (
        result.label,
        f"{result.tokens_per_second:.1f}",
        times(result.ratio_to_plain),
        times(result.ratio_to_best_hf),
        " / ".join(f"{length:.2f}" for length in lengths) or "-",
        " / ".join(f"{rate:.2f}" for rate in result.acceptance_rate.values()) or "-",
        f"{'yes' if result.is_identical else 'NO'} ({result.identical}/{result.runs})",
    )


def format_table(results: Sequence[Result]) -> str:
    """The table as plain text."""
    return aligned([HEADER, *map(cells, results)])


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Lines of cells in columns, the first one to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(w) if column else cell.ljust(w)
            for column, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def footnotes(results: Sequence[Result]) -> list[str]:
    """What the table does not say by itself: which settings won."""
    tuned = [f"{r.label}: {r.setting}" for r in results if r.setting]
    return [f"Best settings found: {'; '.join(tuned)}."] if tuned else []


def describe(machine: dict[str, Any]) -> str:
    """One line about a :func:`machine`."""
    return (
        f"{machine['cpu']}, cores: {machine['cores']}, threads: {machine['threads']}, torch {machine['torch']}, "
        f"transformers {machine['transformers']}, Python {machine['python']}, pipespec {machine['pipespec']}, fp32"
    )


def _timed(contender: HuggingFace | _Ours, ids: torch.Tensor, new_tokens: int) -> Run:
    began = time.perf_counter()
    output, stages = contender.generate(ids, new_tokens)
    seconds = time.perf_counter() - began
    return Run(output, output.shape[1] - ids.shape[1], seconds, stages)


def _speed(runs: Sequence[Run]) -> float:
    return sum(run.tokens for run in runs) / sum(run.seconds for run in runs)


def _ratio(speeds: Sequence[float], others: Sequence[float]) -> float:
    return median(speed / other for speed, other in zip(speeds, others, strict=True))
