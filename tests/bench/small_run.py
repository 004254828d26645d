"""A results folder of real runs of the bundled family, in the format of ``pipespec bench``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from pipespec.bench.contenders import Contender, Family, HFContender, PipelineContender, StagedContender, Workload
from pipespec.bench.machine import provenance
from pipespec.bench.results import DatasetSettings, ResultsFolder, Sample, Settings, SystemSettings
from pipespec.bench.summary import summarise
from pipespec.demo import draft_module_path, family_path, prompts
from pipespec.planning.auto import AutoDriver


def small_run(
    folder: Path,
    *,
    names: Sequence[str] = ("small",),
    schedules: Sequence[str] = ("lockstep",),
    lookaheads: Sequence[int] = (2, 4),
    minima: Sequence[int] = (0,),
    stages: Sequence[int] = (2, 4),
    texts: int = 2,
    new_tokens: int = 24,
    datasets: Sequence[str] = ("functions",),
    profile: bool = True,
) -> ResultsFolder:
    """Measure the bundled family, with every kind of row that the report knows.

    Args:
        folder: Where the results go.
        names: Drafts.
        schedules: Of the chains.
        lookaheads: Of each chain.
        minima: ``min_draft_tokens`` of asynchronous chains.
        stages: Numbers of layer stages of SPD with an n-gram index.
        texts: Samples per dataset.
        new_tokens: Of each text.
        datasets: Names; the prompts of a dataset follow those of the one before.
        profile: Measure step times.
    """
    family = Family.load("bundled", family_path("target"), {name: family_path(name) for name in names})
    found = prompts(texts * len(datasets))
    rows: list[tuple[SystemSettings, Contender | None]] = [
        (SystemSettings(key="hf", kind="hf", label="HF generate()"), HFContender("hf", "HF generate()")),
        (SystemSettings(key="plain", kind="plain", label="plain"), PipelineContender("plain", "plain", "plain")),
        (SystemSettings(key="eagle3", kind="eagle3", label="EAGLE-3", not_measured="its head is not published"), None),
    ]
    chains = [(name,) for name in names] + ([tuple(names)] if len(names) > 1 else [])
    for schedule in schedules:
        for chain in chains:
            for lookahead in lookaheads:
                for minimum in minima if schedule != "lockstep" else (None,):
                    parts = [
                        schedule,
                        "+".join(chain),
                        f"L{lookahead}",
                        *([f"w{minimum}"] if minimum is not None else []),
                    ]
                    key, options = "-".join(parts), {"lookahead": [lookahead] * len(chain)}
                    axes = {"lookahead": lookahead}
                    if minimum is not None:
                        axes["min_draft_tokens"] = options["min_draft_tokens"] = minimum
                    label = f"{schedule}, {' + '.join(chain)}, {' '.join(parts[2:])}"
                    system = SystemSettings(
                        key=key, kind=schedule, label=label, drafts=list(chain), lookahead=options["lookahead"],
                        min_draft_tokens=minimum, axes=axes,
                    )  # fmt: skip
                    rows.append((system, PipelineContender(key, label, schedule, chain, **options)))
    for n, drafter in [*((n, "ngram") for n in stages), (4, "module")]:
        key, label = f"spd-{drafter}-n{n}", f"spd, {n} stages, {drafter}"
        axes = {"stages": n, "drafter": drafter}
        system = SystemSettings(key=key, kind="spd", label=label, options=dict(axes), axes=axes)
        place = drafter if drafter == "ngram" else str(draft_module_path())
        rows.append((system, StagedContender(key, label, n, place)))
    settings = Settings(
        target="bundled target",
        drafts={name: name for name in names},
        parameters={name: model.num_parameters() for name, model in family.models.items()},
        layers={name: model.config.num_hidden_layers for name, model in family.models.items()},
        devices=dict.fromkeys(family.models, "cpu"),
        systems=[system for system, _ in rows],
        datasets=[
            DatasetSettings(name=name, format="jsonl", samples=[str(i) for i in range(texts)], new_tokens=new_tokens)
            for name in datasets
        ],
        traced=1,
        machine=provenance(),
        threads=torch.get_num_threads(),
        started="2026-01-01T00:00:00+00:00",
        finished="2026-01-01T01:00:00+00:00",
    )
    results = ResultsFolder(folder)
    results.write_settings(settings)
    encoded = [family.encode(text) for text in found]
    workload = Workload(
        family,
        new_tokens,
        max(ids.shape[1] for ids in encoded),
        torch.get_num_threads(),
        times_commits=True,
        traced_steps=4096,
    )
    reference: dict[tuple[str, str], list[int]] = {}
    for system, contender in rows:
        if contender is None:
            continue
        contender.start(workload)
        try:
            contender.run(encoded[0], new_tokens, 0)
            for number, ids in enumerate(encoded):
                dataset, sample = datasets[number // texts], str(number % texts)
                text = contender.run(ids, new_tokens, 0)
                figures = dict(text.figures)
                if sample != "0":
                    figures.pop("steps", None)
                expected = reference.setdefault((dataset, sample), text.tokens)
                first = text.commits[0][0]
                results.write_sample(
                    Sample(
                        dataset=dataset, system=system.key, sample=sample, prompt_tokens=ids.shape[1], tokens=text.tokens,
                        seconds=text.commits[-1][0], seconds_to_first_token=first, commits=list(text.commits), stages=list(text.stages),
                        identical=text.tokens == expected, energy_joules={"cpu package 0": 0.5 * len(text.tokens)} if system.key == "plain" else None,
                        utilization={"cpu": 0.5} if system.key in ("plain", "hf") else None, **figures,
                    )
                )  # fmt: skip
        finally:
            contender.close()
    if profile:
        models = list(family.models.values())
        auto = AutoDriver(models, names=list(family.models))
        try:
            results.write_profile(auto.profile.to_json())
        finally:
            auto.close()
    results.write_summary(summarise(results, settings))
    return results
