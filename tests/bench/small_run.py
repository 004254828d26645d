"""A results folder of real runs of the bundled family, written by the product's own runner."""

from __future__ import annotations

import json
from pathlib import Path

from pipespec.bench.config import BenchConfig, with_prompts
from pipespec.bench.results import ResultsFolder
from pipespec.bench.runner import Runner, prepare
from pipespec.bench.summary import summarise
from pipespec.demo import draft_module_path, family_path, prompts
from pipespec.planning.steps import Profile, StepTimes


def small_run(folder: Path) -> ResultsFolder:
    """Measure two short texts with every kind of row that the report knows.

    One system is not measured, and two fail: the target has fewer than 13 layers. The step times are given, not measured, so that
    predictions can be computed by hand. So are the meters of the plain systems, since this machine may have none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "functions.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": text}) for text in prompts(2)))
    config = BenchConfig(
        target=str(family_path("target")),
        drafts=(str(family_path("small")),),
        module=(str(draft_module_path()),),
        systems=("hf", "plain", "lockstep", "spd", "ppsd", "eagle3"),
        lookahead=(2, 4),
        stages=(2, 4, 13),
        drafters=("module", "ngram"),
        samples=2,
        new_tokens=12,
        dtype="float32",
        threads=1,
        tuning=0,
    )
    results = ResultsFolder(folder / "results")
    Runner(prepare(with_prompts(config, [str(file)])), results, tuning=0).run()
    results.write_profile(profile())
    for sample in list(results.samples()):
        if sample.system in ("hf", "plain"):
            sample.energy_joules, sample.utilization = {"cpu package 0": 0.25 * len(sample.tokens)}, {"cpu": 0.5}
            results.write_sample(sample)
    results.write_summary(summarise(results))
    return results


def profile() -> Profile:
    """Step times in whole milliseconds: 1 for the draft, 4 for the target's one token, 5 for up to eight."""

    def times(name: str, *seconds: float) -> StepTimes:
        return StepTimes(name, 1, (1, 2, 8), seconds, prefill_s=1e-4)

    return Profile((times("small", 1e-3, 1e-3, 1e-3), times("target", 4e-3, 5e-3, 5e-3)))
