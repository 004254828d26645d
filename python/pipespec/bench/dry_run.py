"""``pipespec bench --dry-run``: what would run, where, and for how long by prediction. No weight is read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from pipespec.bench import datasets, planted
from pipespec.bench.config import BenchConfig
from pipespec.bench.predict import HARDWARE, ModelSize, SystemPrediction, of_shape, predict_run, size_of
from pipespec.bench.systems import STAGED, draft_names, systems_of
from pipespec.bench.timing import read_bytes_per_second
from pipespec.preflight.devices import device_facts
from pipespec.process.progress import readable_time
from pipespec.process.table import aligned

PLANTED_STEP_S = 0.03
"""Most seconds of a planted target's step: its shapes are divided until the weights can be read in this time."""

PLANTED_SHARE = 0.4
"""Share of the free memory that planted weights may take."""


@dataclass(frozen=True)
class PlannedModel:
    """A model of a dry run. ``bytes``: of its weights; None where its size is not known."""

    name: str
    path: str
    device: str
    bytes: int | None
    known_from: str


@dataclass
class DryRun:
    """The result of :func:`plan_run`.

    Attributes:
        title: Of the configuration.
        models: Drafts first, the target last.
        bandwidth: Where the bandwidth of each device comes from.
        predictions: One per dataset and system; empty where the size of a model is not known.
        missing: What a real run would lack.
        notes: Assumptions.
        seconds: Of all samples together, without starts and tuning; None where nothing was predicted.
    """

    title: str
    models: list[PlannedModel]
    bandwidth: dict[str, str] = field(default_factory=dict)
    predictions: list[SystemPrediction] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float | None = None

    def __str__(self) -> str:
        sizes = (
            (m.name, m.path, m.device, "?" if m.bytes is None else readable_bytes(m.bytes), m.known_from)
            for m in self.models
        )
        parts = [aligned([("model", "path", "device", "weights", "size from"), *sizes], left=5)]
        if self.title:
            parts.insert(0, self.title)
        parts += [f"{device}: {source}" for device, source in self.bandwidth.items()]
        for dataset in dict.fromkeys(p.dataset for p in self.predictions):
            rows = [(f"{dataset}, predicted", "samples", "tokens/s", "time")]
            for p in (p for p in self.predictions if p.dataset == dataset):
                rate = "-" if p.tokens_per_second is None else f"{p.tokens_per_second:.1f}"
                time = "-" if p.seconds is None else readable_time(p.seconds)
                rows.append((p.system, str(p.samples), rate, time))
            parts.append(aligned(rows))
        remarks: dict[str, list[str]] = {}
        for p in self.predictions:
            if p.why:
                remarks.setdefault(p.why, []).append(p.system)
        parts += [f"{', '.join(dict.fromkeys(systems))}: {why}" for why, systems in remarks.items()]
        parts += self.notes
        if self.seconds is not None:
            parts.append(
                f"All samples: about {readable_time(self.seconds)}, and as much again for starts, warm-up and tuning of short runs."
            )
        parts += [f"Missing: {what}" for what in self.missing]
        return "\n".join(parts)


def readable_bytes(number: int) -> str:
    """``"3.21 GB"``, ``"4.3 MB"``."""
    return f"{number / 1e9:.2f} GB" if number >= 1e8 else f"{number / 1e6:.1f} MB"


def planted_shapes(
    config: BenchConfig, device: str, bytes_per_weight: int, threads: int
) -> tuple[dict[str, planted.Shape], tuple[int, int]]:
    """The shapes of a configuration's planted models, divided until they fit this machine, see :func:`pipespec.bench.planted.fitted`."""
    rate = 1e12 if torch.device(device).type == "cuda" else read_bytes_per_second(threads)
    least = max(config.stages, default=2) if set(STAGED) & set(config.systems) else 2
    free = device_facts([device])[0].free
    return planted.fitted(config.planted, PLANTED_SHARE * free, PLANTED_STEP_S * rate, bytes_per_weight, least)


def planted_device(config: BenchConfig) -> str:
    """The device of planted models: the one that the configuration names, where it is a single one that is here; otherwise the CPU."""
    named = set(config.device)
    if len(named) == 1 and torch.cuda.is_available() and (only := next(iter(named))) != "auto":
        return only
    return "cpu"


def planted_dtype(config: BenchConfig, device: str) -> torch.dtype:
    """The dtype of planted models: bfloat16 on a GPU and float32 on a CPU, unless the configuration's device is used and it names one."""
    if config.dtype in (None, "auto") or (device == "cpu" and "cpu" not in config.device):
        return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    found: torch.dtype = getattr(torch, str(config.dtype))
    return found


def plan_run(config: BenchConfig) -> DryRun:
    """Predict a run.

    Raises:
        ValueError: The options do not fit together, or a device that is not here needs ``hardware``.
    """
    threads = config.threads or len(os.sched_getaffinity(0))
    found: list[ModelSize | None]
    notes, missing = [], []
    if config.planted:
        device = planted_device(config)
        weight = planted_dtype(config, device).itemsize
        shapes, (width, depth) = planted_shapes(config, device, weight, threads)
        names = [*config.planted[:-1], "target"]
        paths = [f"planted {name}" for name in config.planted]
        found = [of_shape(name, shape, weight, "its shape") for name, shape in zip(names, shapes.values(), strict=True)]
        devices = [device] * len(names)
        notes.append(f"Planted shapes, widths divided by {width}, layers by {depth}, to fit this machine.")
    else:
        if config.target is None:
            raise ValueError("no target: give --target or --planted")
        names = [*draft_names(config.drafts), "target"]
        paths = [*config.drafts, config.target]
        weight = {"float32": 4}.get(config.dtype or "", 2)
        found = [size_of(name, path, weight) for name, path in zip(names, paths, strict=True)]
        devices = list(config.device) * (len(names) if len(config.device) == 1 else 1)
        if len(devices) != len(names):
            raise ValueError(f"device: one for all models or one per model ({len(names)}), not {len(devices)}")
        missing += [
            f"weights of {path}: no such folder here; a hub name is loaded from the cache"
            for path in paths
            if not Path(path).is_dir()
        ]
    samples, tokens = _samples(config, missing)
    sizes = [size for size in found if size is not None]
    run = DryRun(config.title, _models(names, paths, devices, found), missing=missing, notes=notes)
    if len(sizes) < len(found):
        run.missing.append(
            "a prediction: the size of a model is not known (no config.json here, and no shape of that name)"
        )
        return run
    hardware = None if config.planted else config.hardware
    if any(d != "cpu" for d in devices) and hardware is None and not torch.cuda.is_available():
        run.missing.append(
            f"a prediction: {', '.join(dict.fromkeys(devices))} not in this machine; --hardware names GPUs to predict for ({', '.join(HARDWARE)})"
        )
        return run
    systems = systems_of(config, names[:-1])
    run.predictions, bandwidth = predict_run(config, systems, sizes, devices, samples, tokens, threads)
    run.bandwidth = {device: f"{b.bytes_per_second / 1e9:.0f} GB/s ({b.source})" for device, b in bandwidth.items()}
    for device, b in bandwidth.items():
        needed = sum(size.bytes for size, place in zip(sizes, devices, strict=True) if place == device)
        if b.memory_bytes is not None and device != "auto" and needed > b.memory_bytes:
            run.missing.append(
                f"memory: {needed / 1e9:.0f} GB of weights on {device}, which has {b.memory_bytes / 1e9:.0f} GB"
            )
    run.notes.append(
        f"Assumed agreement with the target: {', '.join(f'{a:.3f}' for a in config.agreement)}; one text at a time; {config.new_tokens} new tokens each."
    )
    run.seconds = sum(p.seconds or 0.0 for p in run.predictions)
    return run


def _models(
    names: Sequence[str], paths: Sequence[str], devices: Sequence[str], found: Sequence[ModelSize | None]
) -> list[PlannedModel]:
    return [
        PlannedModel(name, path, device, size.bytes if size else None, size.known_from if size else "unknown")
        for name, path, device, size in zip(names, paths, devices, found, strict=True)
    ]


def _samples(config: BenchConfig, missing: list[str]) -> tuple[dict[str, int], dict[str, int]]:
    """Number of samples, and tokens of a prompt, by dataset."""
    samples, tokens = {}, {}
    for dataset in config.dataset:
        count = config.samples or 80
        if dataset.file is not None:
            _, conversations = datasets.read(dataset.file, dataset.format)
            count = min(config.samples or len(conversations), len(conversations))
            characters = sum(len(c.turns[0]) for c in conversations[:count]) / count
            tokens[dataset.name] = max(1, round(characters / 4))
        else:
            tokens[dataset.name] = dataset.typical_tokens
            if not config.planted:
                missing.append(f"the prompts of {dataset.name}: --prompts {dataset.name}=FILE")
        samples[dataset.name] = count * config.turns
    if not samples:
        if not config.planted:
            missing.append("prompts: --prompts FILE")
        samples, tokens = {"planted": config.samples or 8}, {"planted": 64}
    return samples, tokens
