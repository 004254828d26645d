"""The results folder of ``pipespec bench``: what it contains, and how it is read and written.

::

    DIR/settings.json                               what was asked for, and the machine        Settings
    DIR/samples/<dataset>/<system>/<sample>.json    one text of one system                     Sample
    DIR/profile.json                                step times of the models, where measured   Profile
    DIR/summary.json                                medians over the samples                   Summary

Every file is written in one step. ``summary.json`` follows from the others (:func:`pipespec.bench.summary.summarise`). A value that was not measured is
``null``; no file contains NaN. Names in paths are those of :func:`file_name`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from pipespec.planning.steps import Profile
from pipespec.process.files import replace
from pipespec.process.records import build, parse_json

VERSION = 1
"""Of the format. A reader refuses a folder of another version."""

T = TypeVar("T")


@dataclass
class StepCounts:
    """Counts of one model in one text. 0 where the system does not count it.

    Attributes:
        name: Of the model: the draft's name, or ``"target"``.
        steps: Forwards after the prompt's.
        produced: Tokens from them, accepted draft tokens and the model's own.
        drafted: Draft tokens that it verified.
        accepted: Draft tokens that it accepted.
        fed: Tokens that it ran.
        adopted: Tokens that it took over from its downstream neighbour.
        rollbacks: Number of rollbacks.
        wasted: Tokens that it rolled back.
        histogram: Entry j: steps that accepted j draft tokens. The last entry counts those with more, too. Empty: unknown.
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
    """Tokens per step, and accepted per verified draft token, of each verifying model over all texts.

    Args:
        texts: Counts of each text's models, the target last. The first of several models verifies nothing and is left out.

    Returns:
        Both by the model's name, where they are known.
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
class Step:
    """One step of a stage in a traced text. Times are seconds since the call.

    Attributes:
        start: When it began.
        end: When it ended.
        fed: Tokens that it ran.
        draft_tokens: Draft tokens among them.
        accepted: Of these.
        rolled_back: Tokens that a correction removed before it.
    """

    start: float
    end: float
    fed: int
    draft_tokens: int
    accepted: int
    rolled_back: int


@dataclass(kw_only=True)
class Sample:
    """One text of one system.

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
        phases: SPD: seconds of each phase of the cycles (``prefill``, ``draft``, ``stages``, ``verify``, ``other``).
        cycles: SPD: cycles of the pipeline.
        verified: SPD: tokens that the target emitted, those behind the end of the text included.
        stage_seconds: SPD: seconds that each stage was busy.
        parallel_seconds: SPD in one process: estimate of ``seconds`` with drafter and stages at the same time.
        energy_joules: By device (``"gpu 0"``, ``"cpu package 0"``), over ``seconds``.
        utilization: By device (``"gpu 0"``, ``"cpu"``), the busy share between 0 and 1, over ``seconds``.
        identical: Whether the tokens equal those of the reference; None where they need not.
        differs_at: The first new token that differs.
        error: The message of the failure that ended the text; the other figures are empty then.
        steps: By stage, its steps; only of traced samples (:attr:`Settings.traced`).
    """

    dataset: str
    system: str
    sample: str
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
    energy_joules: dict[str, float] | None = None
    utilization: dict[str, float] | None = None
    identical: bool | None = None
    differs_at: int | None = None
    error: str | None = None
    steps: dict[str, list[Step]] | None = None


@dataclass(kw_only=True)
class SystemSettings:
    """One system: a row of the tables.

    Attributes:
        key: Name of its folder, unique in a run: ``"hf"``, ``"assisted-small"``, ``"workers-small+medium-L5-w2"``.
        kind: ``"hf"``, ``"plain"``, ``"assisted"``, ``"lookup"``, ``"lockstep"``, ``"workers"``, ``"streams"``, ``"ngram"``, ``"spd"``, ...
        label: For tables.
        drafts: Names of the draft models, smallest first.
        lookahead: Per draft; None: the system's default, or it has none.
        min_draft_tokens: As for ``Pipeline``; None: the default.
        options: Further options of the system.
        axes: Values of ``options``, ``lookahead`` and ``min_draft_tokens`` that a sweep varied, by name.
        setting: What tuning chose, in words; None: nothing was tuned.
        tuning: Every setting that tuning tried, with its tokens per second.
        not_measured: Why the system has no samples; None: it has.
    """

    key: str
    kind: str
    label: str
    drafts: list[str] = field(default_factory=list)
    lookahead: list[int] | None = None
    min_draft_tokens: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, Any] = field(default_factory=dict)
    setting: str | None = None
    tuning: list[dict[str, Any]] = field(default_factory=list)
    not_measured: str | None = None


@dataclass(kw_only=True)
class DatasetSettings:
    """One dataset.

    Attributes:
        name: Name of its folder.
        format: One of :data:`pipespec.bench.datasets.FORMATS`; ``"planted"`` for random prompts.
        files: Files that it was read from.
        samples: Identifiers of the samples that are measured, in order.
        new_tokens: Most new tokens per sample.
        chat_template: Whether the target's chat template wraps the prompts.
    """

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
        parameters: Number of parameters by name; the target is ``"target"``.
        layers: Number of layers by name.
        devices: Device of each model by name.
        dtype: Of the target.
        sampling: Arguments of ``generate()`` that choose tokens; ``{"do_sample": False}`` is greedy.
        seed: Of sampling and of planted weights.
        systems: In the order of the tables.
        datasets: In the order of the tables.
        reference: Key of the system whose texts the others are compared with.
        baselines: Keys of the systems that decode without drafts. The fastest is what speed-ups refer to.
        traced: Samples per dataset and system whose steps are kept.
        planted: The record of planted models (:meth:`pipespec.bench.planted.PlantedChain.record`); None for other models.
        config: Name of the configuration file; None without one.
        machine: Commit, processor, GPUs, cores, versions (:func:`pipespec.bench.machine.provenance`).
        threads: CPU threads.
        started: ISO 8601, UTC: when the first process of the run began.
        resumed: The machine of each later process that continued the run.
        finished: When the last sample was complete; None before.
        version: Of the format.
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
    baselines: list[str] = field(default_factory=lambda: ["hf", "plain"])
    traced: int = 0
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
        dataset: Name of the dataset.
        system: Key of the system.
        samples: Complete samples.
        errors: Samples that failed.
        tokens_per_second: Median over samples, prompt included.
        seconds_to_first_token: Median over samples.
        decode_ms_per_token: Median over samples of the time per token after the first one, in milliseconds.
        speedup: Median over samples of the baseline's time per token divided by this system's, for the same prompt.
        identical: Share of texts that equal the reference, between 0 and 1; None where they need not.
        accepted_length: By verifying model: tokens per step, over all samples.
        acceptance_rate: By verifying model: accepted per verified draft token, over all samples.
        equivalent_accepted_length: SPD: stages times tokens per cycle, over all samples.
        joules_per_token: Sum over the devices and samples, per token.
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
    joules_per_token: float | None = None
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
    """Reads and writes the files of one run.

    Args:
        path: The folder; it need not exist before something is written.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    @property
    def exists(self) -> bool:
        """Whether a run has written its settings here."""
        return (self.path / "settings.json").is_file()

    def settings(self) -> Settings:
        """Read ``settings.json``.

        Raises:
            FileNotFoundError: The folder has none.
            ValueError: It is of another version, or damaged.
        """
        return self._read("settings.json", Settings)

    def write_settings(self, settings: Settings) -> None:
        self._write("settings.json", settings)

    def sample_path(self, dataset: str, system: str, sample: str) -> Path:
        """Where a sample lies, or would lie."""
        return self.path / "samples" / file_name(dataset) / file_name(system) / f"{file_name(sample)}.json"

    def sample(self, dataset: str, system: str, sample: str) -> Sample | None:
        """Read a sample; None where it does not exist. ``ValueError`` where it is damaged."""
        path = self.sample_path(dataset, system, sample)
        if not path.is_file():
            return None
        found = self._read(str(path.relative_to(self.path)), Sample)
        if (found.dataset, found.system, found.sample) != (dataset, system, sample):
            raise ValueError(
                f"{path} cannot be read: it is sample {found.sample!r} of {found.system!r} on {found.dataset!r}"
            )
        if found.tokens and not found.seconds > 0:
            raise ValueError(f"{path} cannot be read: {len(found.tokens)} tokens in {found.seconds} seconds")
        return found

    def write_sample(self, sample: Sample) -> None:
        path = self.sample_path(sample.dataset, sample.system, sample.sample)
        self._write(str(path.relative_to(self.path)), sample)

    def samples(self, settings: Settings | None = None) -> Iterator[Sample]:
        """All samples that exist, in the order of the settings: datasets, systems, samples."""
        settings = settings or self.settings()
        for dataset in settings.datasets:
            for system in settings.systems:
                for name in dataset.samples:
                    if (sample := self.sample(dataset.name, system.key, name)) is not None:
                        yield sample

    def summary(self) -> Summary:
        """Read ``summary.json``; raises as :meth:`settings`."""
        return self._read("summary.json", Summary)

    def write_summary(self, summary: Summary) -> None:
        self._write("summary.json", summary)

    def profile(self) -> Profile | None:
        """The models' step times; None where they were not measured. ``ValueError`` where the file is damaged."""
        if not (self.path / "profile.json").is_file():
            return None
        return self._read("profile.json", Profile)

    def write_profile(self, profile: Profile) -> None:
        self._write("profile.json", profile)

    def _write(self, name: str, record: Any) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = asdict(record) if is_dataclass(record) and not isinstance(record, type) else record
        replace(path, json.dumps(data, indent=1, allow_nan=False) + "\n")

    def _read(self, name: str, kind: type[T]) -> T:
        path = self.path / name
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} does not exist: is {self.path} a folder that `pipespec bench --out` wrote?"
            )
        try:
            data = parse_json(path.read_bytes())
            if isinstance(data, dict) and (version := data.get("version", VERSION)) != VERSION:
                raise ValueError(f"it has version {version} of the format, this pipespec reads version {VERSION}")
            return cast(T, build(kind, data))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error


_MOST_BYTES = 200
"""Of a name: file systems allow 255, of which the suffix takes some."""


def file_name(name: str) -> str:
    """``name`` as the name of a file or folder: ``"HumanEval/0"`` becomes ``"HumanEval_0"``. Of a long one, the first part and a digest."""
    found = re.sub(r"[^\w.+=-]", "_", name).strip(".") or "_"
    if len(found.encode()) <= _MOST_BYTES:
        return found
    first = found.encode()[: _MOST_BYTES - 17].decode(errors="ignore")
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{first}-{digest[:16]}"
