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
    summary = Summary(complete=True)
    for dataset in settings.datasets:
        found: dict[str, list[Sample]] = {}
        for system in settings.systems:
            keys = [(dataset.name, system.key, name) for name in dataset.samples]
            found[system.key] = [folder.samples[key] for key in keys if key in folder.samples]
            whole = len(keys) == sum(s.error is None for s in found[system.key])
            summary.complete = summary.complete and (whole or system.not_measured is not None)
        good = {key: {s.sample: s for s in own if s.error is None} for key, own in found.items()}
        baseline = _strongest({key: good[key] for key in settings.baselines if good.get(key)})
        if baseline is not None:
            summary.baseline[dataset.name] = baseline
        reference = good[baseline] if baseline is not None else {}
        for system in settings.systems:
            failed = [s for s in found[system.key] if s.error is not None]
            summary.rows.append(_row(dataset.name, system, list(good[system.key].values()), failed, reference))
    return summary


def _strongest(samples: dict[str, dict[str, Sample]]) -> str | None:
    """The fastest system, over the samples that all of them have."""
    common = set.intersection(*(set(s) for s in samples.values())) if samples else set()
    rates = {
        key: median(
            [s.seconds_per_token for n, s in own.items() if s.tokens and (n in common or not common)] or [float("inf")]
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
    row.tokens_per_second = median(1 / s.seconds_per_token for s in written)
    first = [s.seconds_to_first_token for s in written if s.seconds_to_first_token is not None]
    row.seconds_to_first_token = median(first) if first else None
    decoding = [
        1e3 * (s.seconds - s.seconds_to_first_token) / (len(s.tokens) - 1)
        for s in written
        if s.seconds_to_first_token is not None and len(s.tokens) > 1
    ]
    row.decode_ms_per_token = median(decoding) if decoding else None
    pairs = [(baseline[s.sample], s) for s in written if s.sample in baseline and baseline[s.sample].tokens]
    row.speedup = median(plain.seconds_per_token / own.seconds_per_token for plain, own in pairs) if pairs else None
    compared = [s.identical for s in samples if s.identical is not None]
    row.identical = sum(compared) / len(compared) if compared else None
    row.accepted_length, row.acceptance_rate = accepted_by_model([s.stages for s in samples])
    cycles = sum(s.cycles or 0 for s in samples)
    stages = max(len(s.stage_seconds or ()) for s in samples)
    if cycles > 0 and stages:
        row.equivalent_accepted_length = stages * sum(s.verified or 0 for s in samples) / cycles
    return row
