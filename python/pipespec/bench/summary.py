"""Summary of a results folder: medians over the samples, one row per dataset and system."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from pipespec.bench.results import (
    ResultsFolder,
    Sample,
    Settings,
    Summary,
    SummaryRow,
    SystemSettings,
    accepted_by_model,
)


def summarise(folder: ResultsFolder, settings: Settings | None = None) -> Summary:
    """Summarise the samples that there are. Nothing is written."""
    settings = settings or folder.settings()
    summary, missing = Summary(), 0
    for dataset in settings.datasets:
        found: dict[str, dict[str, Sample]] = {}
        for system in settings.systems:
            read = ((name, folder.sample(dataset.name, system.key, name)) for name in dataset.samples)
            samples = {name: sample for name, sample in read if sample is not None}
            missing += 0 if system.not_measured else len(dataset.samples) - len(samples)
            found[system.key] = samples
        complete = {key: {n: s for n, s in samples.items() if s.error is None} for key, samples in found.items()}
        baseline = _strongest({key: complete[key] for key in settings.baselines if complete.get(key)})
        if baseline is not None:
            summary.baseline[dataset.name] = baseline
        reference = complete[baseline] if baseline is not None else {}
        for system in settings.systems:
            failed = [s for s in found[system.key].values() if s.error is not None]
            missing += len(failed)
            row = _row(dataset.name, system, list(complete[system.key].values()), failed, reference)
            summary.rows.append(row)
    summary.complete = missing == 0
    return summary


def _seconds_per_token(sample: Sample) -> float:
    return sample.seconds / len(sample.tokens)


def _strongest(samples: dict[str, dict[str, Sample]]) -> str | None:
    """The fastest system, over the samples that all of them have."""
    common = set.intersection(*(set(s) for s in samples.values())) if samples else set()
    rates = {
        key: median(
            [_seconds_per_token(s) for n, s in own.items() if s.tokens and (n in common or not common)]
            or [float("inf")]
        )
        for key, own in samples.items()
    }
    return min(rates, key=rates.__getitem__, default=None)


def _row(
    dataset: str,
    system: SystemSettings,
    samples: Sequence[Sample],
    failed: Sequence[Sample],
    baseline: dict[str, Sample],
) -> SummaryRow:
    row = SummaryRow(dataset=dataset, system=system.key, samples=len(samples), errors=len(failed))
    row.not_measured = system.not_measured
    if row.not_measured is None and failed and not samples:
        row.not_measured = failed[-1].error
    written = [s for s in samples if s.tokens]
    if not written:
        return row
    row.tokens_per_second = median(1 / _seconds_per_token(s) for s in written)
    first = [s.seconds_to_first_token for s in written if s.seconds_to_first_token is not None]
    row.seconds_to_first_token = median(first) if first else None
    decoding = [
        1e3 * (s.seconds - s.seconds_to_first_token) / (len(s.tokens) - 1)
        for s in written
        if s.seconds_to_first_token is not None and len(s.tokens) > 1
    ]
    row.decode_ms_per_token = median(decoding) if decoding else None
    pairs = [(baseline[s.sample], s) for s in written if s.sample in baseline and baseline[s.sample].tokens]
    row.speedup = median(_seconds_per_token(plain) / _seconds_per_token(own) for plain, own in pairs) if pairs else None
    compared = [s.identical for s in samples if s.identical is not None]
    row.identical = sum(compared) / len(compared) if compared else None
    row.accepted_length, row.acceptance_rate = accepted_by_model([s.stages for s in samples])
    cycles = sum(s.cycles or 0 for s in samples)
    stages = max(len(s.stage_seconds or ()) for s in samples)
    if cycles > 0 and stages:
        row.equivalent_accepted_length = stages * sum(s.verified or 0 for s in samples) / cycles
    measured = [s for s in written if s.energy_joules is not None]
    if measured:
        joules = sum(sum((s.energy_joules or {}).values()) for s in measured)
        row.joules_per_token = joules / sum(len(s.tokens) for s in measured)
    return row
