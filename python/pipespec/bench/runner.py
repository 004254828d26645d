"""Run the systems of a configuration over its prompts into a folder of results.

A run can be interrupted at any time and started again: it does what is missing. Systems take turns prompt by prompt, the first one changing with each
prompt. Every text is compared with the reference's.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pipespec.bench import datasets
from pipespec.bench.comparison import IsolatedComparison, differs_at
from pipespec.bench.config import BenchConfig, DatasetRequest
from pipespec.bench.contenders import Contender, Family, Workload
from pipespec.bench.datasets import Conversation
from pipespec.bench.machine import provenance, utc
from pipespec.bench.results import DatasetSettings, ResultsFolder, Sample, Settings, Summary, SystemSettings
from pipespec.bench.summary import summarise
from pipespec.bench.systems import KINDS, REFERENCE, contender_of, draft_names, systems_of
from pipespec.checks.devices import arrange
from pipespec.process.progress import RemainingWork, say
from pipespec.registry import PLAIN

CALIBRATION = 2
"""Prompts that tune and warm up. They are not measured where a dataset has enough others."""

TRIES = 2
"""Failures of a system in a row, after which it is not tried again in this process."""

OPEN = 6
"""Systems that keep processes or graphs at the same time. The others start again, and warm up, before their turn."""

_WARM_UP_TOKENS = 8


@dataclass
class PreparedDataset:
    """One dataset: its prompts by sample, and prompts for calibration, LongTensors ``[1, S]``."""

    settings: DatasetSettings
    prompts: dict[str, torch.Tensor]
    calibration: list[torch.Tensor]


@dataclass
class PreparedRun:
    settings: Settings
    family: Family
    datasets: list[PreparedDataset]


def prepare(config: BenchConfig, *, trust_remote_code: bool = False, source: str | None = None) -> PreparedRun:
    """Load the models and read the prompts. The target of ``config`` is a path. ``source``: name of the configuration file.

    Raises:
        ValueError: The options do not fit together, or no prompt fits the models.
        FileNotFoundError: A model or a file is missing.
        DoesNotFit: The models do not fit the memory.
    """
    threads(config)
    family, paths = load_models(config, trust_remote_code)
    if not config.dataset:
        raise ValueError("no prompts: give --prompts FILE")
    run = prepared(config, family, paths, [read_prompts(config, d, family) for d in config.dataset])
    run.settings.config = source
    return run


def threads(config: BenchConfig) -> int:
    """Set torch's number of threads; returns it."""
    count = config.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(count)
    return count


def prepared(
    config: BenchConfig, family: Family, paths: dict[str, str], found: list[PreparedDataset], **about: Any
) -> PreparedRun:
    """The settings of a run over models and prompts. ``about``: further fields of :class:`Settings`."""
    models = family.models
    settings = Settings(
        target=config.target or family.name,
        drafts=paths,
        parameters={name: m.num_parameters() for name, m in models.items()},
        layers={name: m.config.num_hidden_layers for name, m in models.items()},
        devices={name: str(m.device) for name, m in models.items()},
        dtype=str(family.target.dtype).removeprefix("torch."),
        sampling=config.sampling,
        seed=config.seed,
        systems=systems_of(config, list(family.drafts)),
        datasets=[d.settings for d in found],
        reference=REFERENCE if config.temperature is None else PLAIN.name,
        machine=provenance(torch.get_num_threads()),
        threads=torch.get_num_threads(),
        started=utc(),
        **about,
    )
    settings.baselines = [s.key for s in settings.systems if not KINDS[s.kind].has_drafts]
    return PreparedRun(settings, family, found)


def load_models(config: BenchConfig, trust_remote_code: bool = False) -> tuple[Family, dict[str, str]]:
    """Load the models of a configuration. Returns them, and the paths of the drafts by name. Raises as :func:`prepare`."""
    if config.target is None:
        raise ValueError("no target: give --target, or leave out both --target and --draft for the bundled family")
    names = draft_names(config.drafts)
    dtype = config.dtype or "auto"
    device: Any = config.device[0] if len(config.device) == 1 else list(config.device)
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    devices = arrange([*config.drafts, config.target], device=device, **options)
    paths = dict(zip(names, config.drafts, strict=True))
    family = Family.load(Path(config.target).name, config.target, paths, devices=devices, **options)
    return family, paths


def read_prompts(config: BenchConfig, request: DatasetRequest, family: Family) -> PreparedDataset:
    """The first prompts of a file that fit the target."""
    if request.file is None:
        raise ValueError(f"no file for the dataset {request.name!r}: give --prompts {request.name}=FILE")
    if config.chat_template and not family.tokenizer.chat_template:
        raise ValueError("the target's tokenizer has no chat template: leave out --chat")
    form, conversations = datasets.read(Path(request.file), request.format)
    limit = getattr(family.target.config, "max_position_embeddings", None) or 1 << 30
    encoded = {c.name: encode(family, c, config.chat_template) for c in conversations}
    fitting = {name: ids for name, ids in encoded.items() if ids.shape[1] + config.new_tokens <= limit}
    if not fitting:
        raise ValueError(f"{request.file}: no prompt fits the {limit} tokens of the target; lower --new-tokens")
    if left_out := len(encoded) - len(fitting):
        what = f"with {config.new_tokens} new tokens they exceed {limit} tokens"
        say(f"{request.name}: {left_out} prompts are left out, as {what}")
    chosen = dict(list(fitting.items())[: config.samples])
    rest = list(fitting.values())[len(chosen) :][:CALIBRATION]
    settings = DatasetSettings(
        name=request.name,
        format=form,
        files=[request.file],
        samples=list(chosen),
        new_tokens=config.new_tokens,
        chat_template=config.chat_template,
    )
    return PreparedDataset(settings, chosen, rest or [list(chosen.values())[-1]])


def encode(family: Family, conversation: Conversation, chat: bool) -> torch.Tensor:
    """The ids of the first turn's prompt, LongTensor ``[1, S]``."""
    if not chat:
        return family.encode(conversation.turns[0])
    ids: torch.Tensor = family.tokenizer.apply_chat_template(
        datasets.messages(conversation), add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    return ids


_RUN = ("target", "drafts", "parameters", "devices", "dtype", "sampling", "seed", "threads", "reference")
_MACHINE = ("cpu", "gpus", "torch", "transformers", "pipespec")
_SYSTEM = ("kind", "drafts", "lookahead", "options")
_DATASET = ("format", "files", "new_tokens", "chat_template")


def continued(before: Settings, now: Settings) -> Settings:
    """The settings of a run that a second start continues. Systems, datasets and samples may be added.

    Raises:
        ValueError: Something else differs, so that the new samples would not compare with the old ones.
    """
    systems = {s.key: s for s in before.systems}
    data = {d.name: d for d in before.datasets}
    pairs = [("", asdict(before), asdict(now), _RUN), ("", before.machine, now.machine, _MACHINE)]
    pairs += [(f" of {s.key}", asdict(systems[s.key]), asdict(s), _SYSTEM) for s in now.systems if s.key in systems]
    pairs += [(f" of {d.name}", asdict(data[d.name]), asdict(d), _DATASET) for d in now.datasets if d.name in data]
    differing = [
        f"{name}{what} is {old.get(name)!r} there and {new.get(name)!r} here"
        for what, old, new, names in pairs
        for name in names
        if old.get(name) != new.get(name)
    ]
    if differing:
        raise ValueError(f"the folder holds a run with other settings: {'; '.join(differing)}. Give another --out")
    merged = replace(before, resumed=[*before.resumed, now.machine], finished=None)
    reasons = {s.key: s.not_measured for s in now.systems}
    merged.systems = [*before.systems, *(s for s in now.systems if s.key not in systems)]
    for system in merged.systems:
        system.not_measured = reasons.get(system.key, system.not_measured)
    merged.datasets = [*before.datasets, *(d for d in now.datasets if d.name not in data)]
    for dataset in now.datasets:
        if (earlier := data.get(dataset.name)) is not None:
            earlier.samples = list(dict.fromkeys([*earlier.samples, *dataset.samples]))
    merged.baselines = list(dict.fromkeys([*before.baselines, *now.baselines]))
    return merged


class Runner:
    """Measures what is missing in a results folder.

    ``tuning``: candidates tried of each system that is tuned; 0: none. ``make`` makes the contender of a system.

    Raises:
        ValueError: The folder holds a run with other settings.
    """

    def __init__(
        self,
        prepared: PreparedRun,
        folder: ResultsFolder,
        *,
        tuning: int = 4,
        make: Callable[[SystemSettings], Contender] = contender_of,
    ) -> None:
        self.folder, self.family, self.tuning = folder, prepared.family, tuning
        self.settings = continued(folder.settings(), prepared.settings) if folder.exists else prepared.settings
        # Samples of systems and datasets that this start does not name are kept, and not continued.
        asked = {system.key for system in prepared.settings.systems}
        self.systems = [s for s in self.settings.systems if s.key in asked and s.not_measured is None]
        self.datasets = prepared.datasets
        self.workload = Workload(
            self.family,
            max(d.settings.new_tokens for d in self.datasets),
            max(ids.shape[1] for d in self.datasets for ids in (*d.prompts.values(), *d.calibration)),
            self.settings.threads,
            self.settings.sampling,
            times_commits=True,
        )
        self.contenders = {s.key: make(s) for s in self.systems}
        self._failures: dict[str, int] = {}
        self._open: list[str] = []

    def missing(self) -> int:
        """Number of samples that are not complete."""
        return sum(
            self._is_missing(d, s, name) for d in self.datasets for s in self.systems for name in d.settings.samples
        )

    def _is_missing(self, dataset: PreparedDataset, system: SystemSettings, name: str) -> bool:
        sample = self.folder.samples.get((dataset.settings.name, system.key, name))
        return sample is None or sample.error is not None

    def run(self) -> Summary:
        """Measure; returns the summary. Whatever is raised, the samples that are complete are in the folder."""
        self.folder.write("settings.json", self.settings)
        total = len(self.systems) * sum(len(d.settings.samples) for d in self.datasets)
        todo = self.missing()
        if 0 < todo < total:
            say(f"{total - todo} of {total} samples are there already")
        contenders = list(self.contenders.values())
        with (
            RemainingWork(total, total - todo) as bar,
            IsolatedComparison(
                self.workload, contenders, seed=self.settings.seed, progress=lambda what, done, parts: bar.show(what)
            ) as comparison,
        ):
            self.comparison, self.bar = comparison, bar
            try:
                for dataset in self.datasets:
                    for i, name in enumerate(dataset.settings.samples):
                        self._round(dataset, i, name)
            finally:
                self.folder.write("settings.json", self.settings)
                summary = summarise(self.folder, self.settings)
                self.folder.write("summary.json", summary)
        if summary.complete:
            self.settings.finished = utc()
            self.folder.write("settings.json", self.settings)
        return summary

    def _round(self, dataset: PreparedDataset, number: int, name: str) -> None:
        """One sample in all systems that lack it."""
        first = number % max(1, len(self.systems))
        order = [*self.systems[first:], *self.systems[:first]]
        pending = [s for s in order if self._is_missing(dataset, s, name) and self._failures.get(s.key, 0) < TRIES]
        for system in pending:
            self.bar.show(f"{dataset.settings.name} {name}: {system.label}")
            self._measure(dataset, system, name, dataset.prompts[name])
        self._compare(dataset, name)

    def _measure(self, dataset: PreparedDataset, system: SystemSettings, name: str, ids: torch.Tensor) -> None:
        """Write one sample: a text, or the error."""
        contender = self.contenders[system.key]
        sample = None
        if self._ready(system, contender, dataset):
            sample = self.comparison.run(contender, ids, dataset.settings.new_tokens)
        if self.comparison.lost:
            raise RuntimeError(f"{self.comparison.lost}; start the command again to continue")
        sample = sample or Sample(error=self.comparison.reasons.get(system.key))
        sample.dataset, sample.system, sample.sample = dataset.settings.name, system.key, name
        sample.prompt_tokens = ids.shape[1]
        sample.seconds_to_first_token = sample.commits[0][0] if sample.commits else None
        self.folder.add(sample)
        if sample.error is None:
            self._failures[system.key] = 0
            self.bar.done += 1
            return
        self._failures[system.key] = self._failures.get(system.key, 0) + 1
        if self._failures[system.key] < TRIES:
            self.comparison.retry(contender)
            if system.key in self._open:
                self._open.remove(system.key)
        else:
            say(f"{system.label}: not tried again in this run ({sample.error})")

    def _ready(self, system: SystemSettings, contender: Contender, dataset: PreparedDataset) -> bool:
        """Start, tune and warm up a contender where it needs that. False where it failed."""
        warm_up = dataset.calibration[0][:, : self.workload.longest]
        if system.key not in self._open:
            fresh = system.key not in self.comparison.started
            self.comparison.start(warm_up, system.key)
            if system.key in self.comparison.reasons:
                return False
            if fresh and len(contender.settings) > 1 and self.tuning:
                self._tune(system, contender, dataset)
            if not fresh:
                self.comparison.run(contender, warm_up, _WARM_UP_TOKENS)
            self._open.append(system.key)
        self._open.remove(system.key)
        self._open.append(system.key)
        while len(self._open) > OPEN:
            oldest = self._open.pop(0)
            self.contenders[oldest].pause()
            gc.collect()
        return system.key not in self.comparison.reasons

    def _tune(self, system: SystemSettings, contender: Contender, dataset: PreparedDataset) -> None:
        """Use the setting that an earlier process found, or find the fastest one."""
        known = {str(setting): setting for setting in contender.settings}
        if system.setting in known:
            contender.use(known[system.setting])
            return
        self.comparison.tune(dataset.calibration, self.tuning, [contender])
        if system.key in self.comparison.reasons:
            return
        system.tuning = self.comparison.tuning.get(system.key, [])
        system.setting = str(contender.setting)
        self.folder.write("settings.json", self.settings)

    def _compare(self, dataset: PreparedDataset, name: str) -> None:
        """Compare the texts of a sample with the reference's."""
        where = dataset.settings.name
        reference = self.folder.samples.get((where, self.settings.reference, name))
        if reference is None or reference.error is not None:
            return
        for system in self.systems:
            sample = self.folder.samples.get((where, system.key, name))
            if sample is None or sample.error is not None or sample.identical is not None:
                continue
            if not self.contenders[system.key].is_exact(self.workload):
                continue
            sample.differs_at = differs_at(sample.tokens, reference.tokens)
            sample.identical = sample.differs_at is None
            self.folder.add(sample)
