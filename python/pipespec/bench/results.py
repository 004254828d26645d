"""The results folder of ``pipespec bench``: what it contains, and how it is read and written.

::

    DIR/settings.json    what was asked for, and the machine                      Settings
    DIR/samples.jsonl    one text of one system per line; a later line counts     Sample
    DIR/summary.json     medians over the samples                                 Summary

``summary.json`` follows from the others (:func:`pipespec.bench.summary.summarise`). A value that was not measured is ``null``; no file contains NaN.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pipespec.process.files import replace
from pipespec.process.records import build, parse_json
from pipespec.registry import PLAIN

VERSION = 2
"""Of the format. A reader refuses a folder of another version."""


@dataclass
class StepCounts:
    """Counts of one model in one text, those of :class:`pipespec.api.report.StageReport`. 0 where the system does not count it.

    Attributes:
        name: Of the model: the draft's name, or ``"target"``.
        steps: Forwards after the prompt's.
        histogram: Empty: unknown.
    """

    name: str
    steps: int
    produced: int = 0
    drafted: int = 0
    accepted: int = 0
    fed: int = 0
    adopted: int = 0
    rollbacks: int = 0
    wasted: int = 0
    histogram: tuple[int, ...] = ()


def accepted_by_model(texts: Iterable[Sequence[StepCounts]]) -> tuple[dict[str, float], dict[str, float]]:
    """Tokens per step, and accepted per verified draft token, of each verifying model over all texts, by its name, where they are known.

    ``texts``: counts of each text's models, the target last. The first of several models verifies nothing and is left out.
    """
    total: dict[str, StepCounts] = {}
    for stages in texts:
        for stage in stages[1:] or stages:
            t = total.setdefault(stage.name, StepCounts(stage.name, 0))
            t.steps, t.produced = t.steps + stage.steps, t.produced + stage.produced
            t.drafted, t.accepted = t.drafted + stage.drafted, t.accepted + stage.accepted
    lengths = {t.name: t.produced / t.steps for t in total.values() if t.steps and t.produced}
    return lengths, {t.name: t.accepted / t.drafted for t in total.values() if t.drafted}


@dataclass(kw_only=True)
class Sample:
    """One text of one system. A contender makes it, without its place in the results and what other texts decide.

    Attributes:
        dataset: Name of the dataset.
        system: Key of the system (:attr:`SystemSettings.key`).
        sample: Identifier within the dataset; turn 2 of conversation 81 is ``"81-2"``.
        prompt_tokens: Tokens of the prompt.
        tokens: Ids of the new tokens.
        seconds: From the call to the last token, prompt included.
        seconds_to_first_token: From the call to the first token.
        commits: ``[seconds since the call, new tokens until then]``, one entry per commit of the target, ascending.
        stages: Counts of each model, the target last.
        schedule: The schedule that ran; it may differ from the one asked for, see ``notes``.
        notes: Remarks of the system about this call.
        phases: SPD: as in :class:`pipespec_spd.report.SpeculativeReport`, like ``cycles``, ``verified``, ``stage_seconds`` and ``parallel_seconds``.
        identical: Whether the tokens equal those of the reference; None where they need not.
        differs_at: The first new token that differs.
        error: The message of the failure that ended the text; the other figures are empty then.
    """

    dataset: str = ""
    system: str = ""
    sample: str = ""
    prompt_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0
    seconds_to_first_token: float | None = None
    commits: list[tuple[float, int]] = field(default_factory=list)
    stages: list[StepCounts] = field(default_factory=list)
    schedule: str | None = None
    notes: list[str] = field(default_factory=list)
    phases: dict[str, float] | None = None
    cycles: int | None = None
    verified: int | None = None
    stage_seconds: list[float] | None = None
    parallel_seconds: float | None = None
    identical: bool | None = None
    differs_at: int | None = None
    error: str | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        return self.dataset, self.system, self.sample

    @property
    def seconds_per_token(self) -> float:
        """Of a text with tokens."""
        return self.seconds / len(self.tokens)


@dataclass(kw_only=True)
class SystemSettings:
    """One system: a row of the tables.

    Attributes:
        key: Unique in a run: ``"hf"``, ``"assisted-small"``, ``"workers-small+medium-L5-w2"``.
        kind: One of :data:`pipespec.bench.systems.KINDS`.
        label: For tables.
        drafts: Names of the draft models, smallest first.
        lookahead: Per draft; None: the system's default, or it has none.
        options: Further options of the system.
        axes: Values of ``options`` and ``lookahead`` that a sweep varied, by name.
        setting: What tuning chose, in words; None: nothing was tuned.
        tuning: Every setting that tuning tried, with its tokens per second.
        not_measured: Why the system has no samples; None: it has.
    """

    key: str
    kind: str
    label: str
    drafts: list[str] = field(default_factory=list)
    lookahead: list[int] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, Any] = field(default_factory=dict)
    setting: str | None = None
    tuning: list[dict[str, Any]] = field(default_factory=list)
    not_measured: str | None = None


@dataclass(kw_only=True)
class DatasetSettings:
    """One dataset. ``format``: one of :data:`pipespec.bench.datasets.FORMATS`, or ``"planted"`` for random prompts. ``samples``: their identifiers, in order."""

    name: str
    format: str
    files: list[str] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)
    new_tokens: int = 0
    chat_template: bool = False


@dataclass(kw_only=True)
class Settings:
    """What a run measures, and where.

    Attributes:
        target: Path or name of the target.
        drafts: Path of each draft, by its name in ``SystemSettings.drafts``, smallest first.
        parameters: Number of parameters by name; the target is ``"target"``. As ``layers`` and ``devices``.
        dtype: Of the target.
        sampling: Arguments of ``generate()`` that choose tokens; ``{"do_sample": False}`` is greedy.
        seed: Of sampling and of planted weights.
        systems: In the order of the tables, as ``datasets``.
        reference: Key of the system whose texts the others are compared with.
        baselines: Keys of the systems that decode without drafts. The fastest is what speed-ups refer to.
        planted: The record of planted models; None for other models.
        config: Name of the configuration file; None without one.
        machine: Commit, processor, GPUs, cores, versions (:func:`pipespec.bench.machine.provenance`).
        threads: CPU threads.
        started: ISO 8601, UTC: when the first process of the run began.
        resumed: The machine of each later process that continued the run.
        finished: When the last sample was complete; None before.
    """

    target: str
    drafts: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    layers: dict[str, int] = field(default_factory=dict)
    devices: dict[str, str] = field(default_factory=dict)
    dtype: str = "float32"
    sampling: dict[str, Any] = field(default_factory=lambda: {"do_sample": False})
    seed: int = 0
    systems: list[SystemSettings] = field(default_factory=list)
    datasets: list[DatasetSettings] = field(default_factory=list)
    reference: str = "hf"
    baselines: list[str] = field(default_factory=lambda: ["hf", PLAIN.name])
    planted: dict[str, Any] | None = None
    config: str | None = None
    machine: dict[str, Any] = field(default_factory=dict)
    threads: int = 1
    started: str = ""
    resumed: list[dict[str, Any]] = field(default_factory=list)
    finished: str | None = None
    version: int = VERSION

    def system(self, key: str) -> SystemSettings:
        """The system with this key; ``KeyError`` without one."""
        return {system.key: system for system in self.systems}[key]


@dataclass(kw_only=True)
class SummaryRow:
    """One system on one dataset: medians over its samples without errors.

    Attributes:
        samples: Complete samples; ``errors``: samples that failed.
        tokens_per_second: Prompt included.
        decode_ms_per_token: Time per token after the first one, in milliseconds.
        speedup: The baseline's time per token divided by this system's, for the same prompt.
        identical: Share of texts that equal the reference, between 0 and 1; None where they need not.
        accepted_length: By verifying model: tokens per step, over all samples.
        acceptance_rate: By verifying model: accepted per verified draft token, over all samples.
        equivalent_accepted_length: SPD: stages times tokens per cycle, over all samples.
        not_measured: Why there are no figures.
    """

    dataset: str
    system: str
    samples: int = 0
    errors: int = 0
    tokens_per_second: float | None = None
    seconds_to_first_token: float | None = None
    decode_ms_per_token: float | None = None
    speedup: float | None = None
    identical: float | None = None
    accepted_length: dict[str, float] = field(default_factory=dict)
    acceptance_rate: dict[str, float] = field(default_factory=dict)
    equivalent_accepted_length: float | None = None
    not_measured: str | None = None


@dataclass(kw_only=True)
class Summary:
    """The tables. ``baseline``: by dataset, the key of the strongest plain baseline; ``complete``: no sample is missing."""

    rows: list[SummaryRow] = field(default_factory=list)
    baseline: dict[str, str] = field(default_factory=dict)
    complete: bool = False
    version: int = VERSION

    def row(self, dataset: str, system: str) -> SummaryRow | None:
        """The row of a system on a dataset; None without one."""
        return next((r for r in self.rows if (r.dataset, r.system) == (dataset, system)), None)


class ResultsFolder:
    """Reads and writes the files of one run. One process writes at a time. The folder need not exist before something is written."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._is_whole = False

    @property
    def exists(self) -> bool:
        return (self.path / "settings.json").is_file()

    def settings(self) -> Settings:
        """Read ``settings.json``.

        Raises:
            FileNotFoundError: The folder has none.
            ValueError: It is of another version, or damaged.
        """
        path = self.path / "settings.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} does not exist: is {self.path} a folder that `pipespec bench --out` wrote?"
            )
        try:
            data = parse_json(path.read_bytes())
            if isinstance(data, dict) and (version := data.get("version", VERSION)) != VERSION:
                raise ValueError(f"it has version {version} of the format, this pipespec reads version {VERSION}")
            settings: Settings = build(Settings, data)
            return settings
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error

    def write(self, name: str, record: Settings | Summary) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        replace(self.path / name, json.dumps(asdict(record), indent=1, allow_nan=False) + "\n")

    @cached_property
    def samples(self) -> dict[tuple[str, str, str], Sample]:
        """All samples by :attr:`Sample.key`, as the file had them at first, and those added since.

        Raises:
            ValueError: A line is damaged. A last line without an end was interrupted and is left out.
        """
        found: dict[tuple[str, str, str], Sample] = {}
        lines = self._file.read_bytes().split(b"\n")[:-1] if self._file.is_file() else []
        for number, line in enumerate(lines, 1):
            try:
                sample = build(Sample, parse_json(line))
                if sample.tokens and not sample.seconds > 0:
                    raise ValueError(f"{len(sample.tokens)} tokens in {sample.seconds} seconds")
            except (ValueError, TypeError) as error:
                raise ValueError(f"{self._file} cannot be read: line {number}: {error}") from error
            found[sample.key] = sample
        return found

    def add(self, sample: Sample) -> None:
        line = json.dumps(asdict(sample), allow_nan=False) + "\n"
        self.samples[sample.key] = sample
        self.path.mkdir(parents=True, exist_ok=True)
        with self._file.open("a+b") as file:
            if not self._is_whole:  # an earlier process may have been interrupted within a line
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
                self._is_whole = True
            file.write(line.encode())

    @property
    def _file(self) -> Path:
        return self.path / "samples.jsonl"
