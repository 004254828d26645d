"""Run the systems of a configuration over its prompts, one JSON file per text.

A run can be interrupted at any time and started again: it does what is missing. Systems take turns prompt by prompt, the first one changing with each
prompt. Every text is compared with the reference's.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pipespec.bench import datasets, planted
from pipespec.bench.comparison import SpeedComparison, differs_at
from pipespec.bench.config import BenchConfig, DatasetRequest
from pipespec.bench.contenders import Contender, Family, GeneratedText, Workload
from pipespec.bench.datasets import Conversation
from pipespec.bench.dry_run import planted_device, planted_dtype, planted_shapes
from pipespec.bench.energy import Meter
from pipespec.bench.machine import provenance, utc
from pipespec.bench.results import DatasetSettings, ResultsFolder, Sample, Settings, Summary, SystemSettings
from pipespec.bench.rivals import AttentionIsolation
from pipespec.bench.summary import summarise
from pipespec.bench.systems import NOT_MEASURED, PLAIN, REFERENCE, contender_of, draft_names, systems_of
from pipespec.preflight.placement import arrange
from pipespec.process.progress import RemainingWork, say

CALIBRATION = 2
"""Prompts that tune and warm up. They are not measured where a dataset has enough others."""

TRIES = 2
"""Failures of a system in a row, after which it is not tried again in this process."""

OPEN = 6
"""Systems that keep processes or graphs at the same time. The others start again, and warm up, before their turn."""

TRACED_STEPS = 1 << 14
"""Steps per stage that a traced text keeps: 1 MB."""

_WARM_UP_TOKENS = 8
_SUMMARISE_EVERY_S = 20.0


PromptOf = Callable[[Callable[[str], list[int]]], torch.Tensor]
"""Makes a prompt, LongTensor ``[1, S]``, given what returns the reference's tokens of an earlier turn by its sample."""


@dataclass
class PreparedDataset:
    """One dataset: its prompts by sample, calibration prompts (LongTensors ``[1, S]``), and the number of prompts that do not fit."""

    settings: DatasetSettings
    prompts: dict[str, PromptOf]
    calibration: list[torch.Tensor]
    longest: int
    left_out: int = 0


@dataclass
class PreparedRun:
    """Models and prompts of a run, and its settings."""

    settings: Settings
    family: Family
    datasets: list[PreparedDataset]


def prepare(config: BenchConfig, *, trust_remote_code: bool = False, source: str | None = None) -> PreparedRun:
    """Load the models and read the prompts.

    Args:
        config: What is asked for. Its target is a path, or its models are planted.
        trust_remote_code: Allow a model's own Python code to run.
        source: Name of the configuration file.

    Raises:
        ValueError: The options do not fit together, or no prompt fits the models.
        FileNotFoundError: A model or a file is missing.
        DoesNotFit: The models do not fit the memory.
    """
    threads = config.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    family, paths, record = _planted(config, threads) if config.planted else _loaded(config, trust_remote_code)
    if config.planted:
        prepared = [_planted_prompts(config, d, family) for d in config.dataset or (DatasetRequest(name="planted"),)]
    else:
        if not config.dataset:
            raise ValueError("no prompts: give --prompts FILE")
        prepared = [_read_prompts(config, d, family) for d in config.dataset]
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
        datasets=[d.settings for d in prepared],
        reference=REFERENCE if config.temperature is None else PLAIN,
        traced=config.traced,
        planted=record,
        config=source,
        machine=provenance(threads),
        threads=threads,
        started=utc(),
    )
    settings.baselines = [s.key for s in settings.systems if s.kind in (REFERENCE, PLAIN, "static", "plain-graphs")]
    return PreparedRun(settings, family, prepared)


def _loaded(config: BenchConfig, trust_remote_code: bool) -> tuple[Family, dict[str, str], None]:
    if config.target is None:
        raise ValueError(
            "no target: give --target, --planted, or leave out both --target and --draft for the bundled family"
        )
    names = draft_names(config.drafts)
    dtype = config.dtype or "auto"
    device: Any = config.device[0] if len(config.device) == 1 else list(config.device)
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    devices = arrange([*config.drafts, config.target], device=device, **options)
    paths = dict(zip(names, config.drafts, strict=True))
    family = Family.load(Path(config.target).name, config.target, paths, devices=devices, **options)
    return family, paths, None


def _planted(config: BenchConfig, threads: int) -> tuple[Family, dict[str, str], dict[str, Any]]:
    """Models of the configuration's shapes, divided until they fit this machine."""
    device = planted_device(config)
    dtype = planted_dtype(config, device)
    shapes, divisors = planted_shapes(config, device, dtype.itemsize, threads)
    prompt = min((d.typical_tokens for d in config.dataset), default=64)
    agreement = config.agreement[0] if len(config.agreement) == 1 else config.agreement
    chain = planted.plant(
        config.planted,
        agreement,
        seed=config.seed,
        device=device,
        dtype=dtype,
        prompt_tokens=min(64, prompt),
        new_tokens=min(config.new_tokens, 128),
        known=shapes,
        progress=say,
    )
    *drafts, target = chain.models
    names = list(config.planted[:-1])
    family = Family("planted " + " -> ".join(config.planted), target, dict(zip(names, drafts, strict=True)), None)
    record = chain.record() | {"divided": {"widths": divisors[0], "layers": divisors[1]}}
    return family, {name: f"planted {name}" for name in names}, record


def _planted_prompts(config: BenchConfig, request: DatasetRequest, family: Family) -> PreparedDataset:
    count = config.samples or 8
    limit = family.target.config.max_position_embeddings
    if config.new_tokens >= limit:
        raise ValueError(
            f"{config.new_tokens} new tokens: planted models take {limit} tokens with the prompt; lower --new-tokens"
        )
    tokens = min(request.typical_tokens, limit - config.new_tokens)
    ids = planted.random_prompts(family.target.config.vocab_size, count + CALIBRATION, tokens, config.seed + 3)
    names = [str(i) for i in range(count)]
    settings = DatasetSettings(name=request.name, format="planted", samples=names, new_tokens=config.new_tokens)
    prompts: dict[str, PromptOf] = {name: _always(row[None]) for name, row in zip(names, ids, strict=False)}
    return PreparedDataset(settings, prompts, [row[None] for row in ids[count:]], tokens)


def _always(ids: torch.Tensor) -> PromptOf:
    return lambda answer_of: ids


def _read_prompts(config: BenchConfig, request: DatasetRequest, family: Family) -> PreparedDataset:
    """The first prompts of a file that fit the target."""
    if request.file is None:
        raise ValueError(f"no file for the dataset {request.name!r}: give --prompts {request.name}=FILE")
    if config.chat_template and not family.tokenizer.chat_template:
        raise ValueError("the target's tokenizer has no chat template: leave out --chat")
    form, conversations = datasets.read(request.file, request.format)
    limit = getattr(family.target.config, "max_position_embeddings", None) or 1 << 30
    wanted = config.samples or len(conversations)
    chosen: list[Conversation] = []
    rest: list[torch.Tensor] = []
    left_out = 0
    for conversation in conversations:
        ids = encode(family, conversation, 0, [], config.chat_template)
        if ids.shape[1] + config.new_tokens > limit:
            left_out += 1
        elif len(chosen) < wanted:
            chosen.append(conversation)
        else:
            rest.append(ids)
        if len(rest) == CALIBRATION:
            break
    if not chosen:
        raise ValueError(
            f"{request.file}: no prompt fits: the target takes {limit} tokens, {config.new_tokens} new ones included; lower --new-tokens"
        )
    if left_out:
        say(
            f"{request.name}: {left_out} prompts are left out, as with {config.new_tokens} new tokens they exceed {limit} tokens"
        )
    prompts: dict[str, PromptOf] = {}
    longest = 0
    for conversation in chosen:
        turns = range(min(config.turns, len(conversation.turns)))
        keys = [conversation.name if config.turns == 1 else f"{conversation.name}-{turn + 1}" for turn in turns]
        for turn, key in zip(turns, keys, strict=True):

            def ids_of(
                answer_of: Callable[[str], list[int]],
                conversation: Conversation = conversation,
                turn: int = turn,
                before: tuple[str, ...] = tuple(keys[:turn]),
            ) -> torch.Tensor:
                answers = [family.tokenizer.decode(answer_of(name), skip_special_tokens=True) for name in before]
                return encode(family, conversation, turn, answers, config.chat_template)

            prompts[key] = ids_of
        longest = max(longest, encode(family, conversation, 0, [], config.chat_template).shape[1])
    # Later turns have the earlier ones and their answers in front of them.
    longest = min(limit - config.new_tokens, longest * config.turns + config.new_tokens * (config.turns - 1))
    calibration = rest or [encode(family, chosen[-1], 0, [], config.chat_template)]
    settings = DatasetSettings(
        name=request.name,
        format=form,
        files=[str(request.file)],
        samples=list(prompts),
        new_tokens=config.new_tokens,
        chat_template=config.chat_template,
    )
    return PreparedDataset(settings, prompts, calibration, longest, left_out)


def encode(family: Family, conversation: Conversation, turn: int, answers: Sequence[str], chat: bool) -> torch.Tensor:
    """The ids of a turn's prompt, LongTensor ``[1, S]``."""
    if not chat:
        return family.encode(datasets.prompt_text(conversation, turn, answers))
    said = datasets.messages(conversation, turn, answers)
    encoded = family.tokenizer.apply_chat_template(
        said, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids: torch.Tensor = encoded["input_ids"]
    return ids


def continued(before: Settings, now: Settings) -> Settings:
    """The settings of a run that a second start continues. Systems, datasets and samples may be added.

    Raises:
        ValueError: Something else differs, so that the new samples would not compare with the old ones.
    """
    differing = [
        f"{name} is {getattr(before, name)!r} there and {getattr(now, name)!r} here"
        for name in ("target", "drafts", "parameters", "devices", "dtype", "sampling", "seed", "threads", "reference")
        if getattr(before, name) != getattr(now, name)
    ]
    for name in ("cpu", "gpus", "torch", "transformers", "pipespec"):
        if before.machine.get(name) != now.machine.get(name):
            differing.append(f"{name} is {before.machine.get(name)!r} there and {now.machine.get(name)!r} here")
    old = {system.key: system for system in before.systems}
    for system in now.systems:
        if (known := old.get(system.key)) is not None:
            for name in ("kind", "drafts", "lookahead", "min_draft_tokens", "options"):
                if getattr(known, name) != getattr(system, name):
                    differing.append(
                        f"{name} of {system.key} is {getattr(known, name)!r} there and {getattr(system, name)!r} here"
                    )
    known_data = {dataset.name: dataset for dataset in before.datasets}
    for dataset in now.datasets:
        if (earlier := known_data.get(dataset.name)) is not None:
            for name in ("format", "files", "new_tokens", "chat_template"):
                if getattr(earlier, name) != getattr(dataset, name):
                    differing.append(
                        f"{name} of {dataset.name} is {getattr(earlier, name)!r} there and {getattr(dataset, name)!r} here"
                    )
    if differing:
        raise ValueError(f"the folder holds a run with other settings: {'; '.join(differing)}. Give another --out")
    merged = replace(before, resumed=[*before.resumed, now.machine], finished=None)
    merged.systems = [*before.systems, *(s for s in now.systems if s.key not in old)]
    for system in merged.systems:
        if system.kind not in NOT_MEASURED and "it needs" not in (system.not_measured or ""):
            system.not_measured = None  # it is tried again
    merged.datasets = [*before.datasets, *(d for d in now.datasets if d.name not in known_data)]
    for dataset in now.datasets:
        if (earlier := known_data.get(dataset.name)) is not None:
            earlier.samples = list(dict.fromkeys([*earlier.samples, *dataset.samples]))
    merged.baselines = list(dict.fromkeys([*before.baselines, *now.baselines]))
    return merged


class _IsolatedComparison(SpeedComparison):
    """Contenders that do not see the attention implementations that others set."""

    def __init__(self, workload: Workload, contenders: Sequence[Contender], **options: Any) -> None:
        super().__init__(workload, contenders, **options)
        self._attention = AttentionIsolation(list(workload.family.models.values()))

    @contextmanager
    def turn(self, contender: Contender) -> Iterator[None]:
        with self._attention.of(contender.key):
            yield


class Runner:
    """Measures what is missing in a results folder.

    Args:
        prepared: Models, prompts and settings.
        folder: Where the results are, and go.
        tuning: Candidates tried of each system that is tuned; 0: none.
        profile: Measure the models' step times at the end.
        make: Makes the contender of a system.

    Raises:
        ValueError: The folder holds a run with other settings.
    """

    def __init__(
        self,
        prepared: PreparedRun,
        folder: ResultsFolder,
        *,
        tuning: int = 4,
        profile: bool = False,
        make: Callable[[SystemSettings], Contender] = contender_of,
    ) -> None:
        self.folder, self.family, self.tuning, self.profile = folder, prepared.family, tuning, profile
        self.settings = continued(folder.settings(), prepared.settings) if folder.exists else prepared.settings
        # Samples of systems and datasets that this start does not name are kept, and not continued.
        asked = {system.key for system in prepared.settings.systems}
        self.systems = [s for s in self.settings.systems if s.key in asked and s.not_measured is None]
        self.datasets = prepared.datasets
        self.workload = Workload(
            self.family,
            max(d.settings.new_tokens for d in self.datasets),
            max(d.longest for d in self.datasets),
            self.settings.threads,
            self.settings.sampling,
            times_commits=True,
            traced_steps=TRACED_STEPS if self.settings.traced else 0,
        )
        self.contenders = {s.key: make(s) for s in self.systems}
        self.meter = Meter(list(self.settings.devices.values()))
        self.settings.machine = {**self.settings.machine, "not_readable": self.meter.not_readable}
        self._failures: dict[str, int] = {}
        self._open: list[str] = []
        self._summarised = time.monotonic()

    def missing(self) -> int:
        """Number of samples that are not complete."""
        return sum(
            self._is_missing(d, s, name) for d in self.datasets for s in self.systems for name in d.settings.samples
        )

    def _is_missing(self, dataset: PreparedDataset, system: SystemSettings, name: str) -> bool:
        sample = self.folder.sample(dataset.settings.name, system.key, name)
        return sample is None or sample.error is not None

    def run(self) -> Summary:
        """Measure; returns the summary. Whatever is raised, the samples that are complete are in the folder."""
        self.folder.write_settings(self.settings)
        total = len(self.systems) * sum(len(d.settings.samples) for d in self.datasets)
        todo = self.missing()
        if 0 < todo < total:
            say(f"{total - todo} of {total} samples are there already")
        contenders = list(self.contenders.values())
        with (
            RemainingWork(total, total - todo) as bar,
            _IsolatedComparison(
                self.workload, contenders, seed=self.settings.seed, progress=lambda what, done, parts: bar.show(what)
            ) as comparison,
        ):
            self.comparison, self.bar = comparison, bar
            try:
                for dataset in self.datasets:
                    for i, name in enumerate(dataset.settings.samples):
                        self._round(dataset, i, name)
            finally:
                self.folder.write_settings(self.settings)
                summary = summarise(self.folder, self.settings)
                self.folder.write_summary(summary)
        if self.profile and self.folder.profile() is None and self.family.drafts:
            self._measure_profile()
        if summary.complete:
            self.settings.finished = utc()
            self.folder.write_settings(self.settings)
        return summary

    def _round(self, dataset: PreparedDataset, number: int, name: str) -> None:
        """One sample in all systems that lack it."""
        first = number % max(1, len(self.systems))
        order = [*self.systems[first:], *self.systems[:first]]
        pending = [s for s in order if self._is_missing(dataset, s, name) and self._failures.get(s.key, 0) < TRIES]
        if pending:
            ids = dataset.prompts[name](lambda earlier: self._answer(dataset, earlier))
            for system in pending:
                self.bar.show(f"{dataset.settings.name} {name}: {system.label}")
                self._measure(dataset, system, name, number, ids)
        self._compare(dataset, name)
        if time.monotonic() - self._summarised > _SUMMARISE_EVERY_S:
            self.folder.write_summary(summarise(self.folder, self.settings))
            self._summarised = time.monotonic()

    def _answer(self, dataset: PreparedDataset, name: str) -> list[int]:
        sample = self.folder.sample(dataset.settings.name, self.settings.reference, name)
        if sample is None or sample.error is not None:
            raise RuntimeError(
                f"{dataset.settings.name} {name}: the reference has no answer that the next turn could follow"
            )
        return sample.tokens

    def _measure(
        self, dataset: PreparedDataset, system: SystemSettings, name: str, number: int, ids: torch.Tensor
    ) -> None:
        """Write one sample: a text, or the error."""
        contender = self.contenders[system.key]
        sample = Sample(dataset=dataset.settings.name, system=system.key, sample=name, prompt_tokens=ids.shape[1])
        if self._ready(system, contender, dataset):
            self.meter.start()
            text = self.comparison.run(contender, ids, dataset.settings.new_tokens)
            self.meter.stop()
            if text is not None:
                self._fill(sample, text, number)
        if self.comparison.lost:
            raise RuntimeError(f"{self.comparison.lost}; start the command again to continue")
        sample.error = self.comparison.reasons.get(system.key)
        self.folder.write_sample(sample)
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
        self.folder.write_settings(self.settings)

    def _fill(self, sample: Sample, text: GeneratedText, number: int) -> None:
        sample.tokens, sample.seconds = list(text.tokens), text.seconds
        sample.commits = [(at, tokens) for at, tokens in text.commits]
        sample.seconds_to_first_token = text.commits[0][0] if text.commits else None
        sample.stages = list(text.stages)
        sample.notes = [text.note] if text.note else []
        sample.energy_joules, sample.utilization = self.meter.energy_joules, self.meter.utilization
        for name, value in text.figures.items():
            if name != "steps" or number < self.settings.traced:
                setattr(sample, name, value)

    def _compare(self, dataset: PreparedDataset, name: str) -> None:
        """Compare the texts of a sample with the reference's."""
        where = dataset.settings.name
        reference = self.folder.sample(where, self.settings.reference, name)
        if reference is None or reference.error is not None:
            return
        for system in self.systems:
            sample = self.folder.sample(where, system.key, name)
            if sample is None or sample.error is not None or sample.identical is not None:
                continue
            if not self.contenders[system.key].is_exact(self.workload):
                continue
            sample.differs_at = differs_at(sample.tokens, reference.tokens)
            sample.identical = sample.differs_at is None
            self.folder.write_sample(sample)

    def _measure_profile(self) -> None:
        """Write the step times of the models. A failure costs only the predictions of the report."""
        import torch

        from pipespec.planning.measure import step_times
        from pipespec.planning.steps import Profile

        self.bar.show("measuring the step times of the models")
        try:
            models, most = self.family.models, torch.get_num_threads()
            places = list(dict.fromkeys(model.device for model in models.values()))
            # All threads, and those that worker processes leave.
            counts = sorted({most, max(1, most - 1), max(1, most - len(self.family.drafts)), 1})
            times = [
                step_times(model, name, threads=count, device=places.index(model.device))
                for name, model in models.items()
                for count in counts
            ]
            self.folder.write_profile(Profile(tuple(times)))
        except Exception as error:
            say(f"no step times: {type(error).__name__}: {error}")
