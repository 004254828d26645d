"""Errors of the planner's predictions, and schedule="auto" against plain decoding and the best setting by hand, on this machine.

    python -m bench.bench_plan survey --json bench/results/plan.json --svg bench/results/plan.svg
    python -m bench.bench_plan auto --json bench/results/auto.json

``survey`` predicts and measures every schedule, subset of drafts and lookahead of the bundled family, and the plan's own choice. ``auto``
compares calls with a good, a useless and a slow draft, and with two drafts: medians over pairs of calls with the same prompt.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.harness import markdown_table, replace_table, save
from pipespec.bench.contenders import Family
from pipespec.bench.machine import provenance
from pipespec.bench.timing import timed
from pipespec.cli.survey import SettingRunner, calibrate, call_of, picture, settings, survey, table
from pipespec.config import SpeculationConfig
from pipespec.demo import load_family, prompts
from pipespec.drivers import WorkersDriver
from pipespec.engine.ngram import NgramDraft
from pipespec.pipeline import Pipeline
from pipespec.planning import planner
from pipespec.planning.auto import AutoDriver
from pipespec.planning.measure import Profiler
from pipespec.planning.planner import Candidate
from pipespec.process.progress import quiet_transformers, say, working

_CALIBRATION = {"survey": 24, "auto": 6}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("bench_plan", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("survey", "auto"))
    parser.add_argument("--prompts", type=int, default=6, metavar="N", help="held-out function heads (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, metavar="R", help="medians over these (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=128, metavar="T", help="per prompt (%(default)s)")
    cores, threads = len(os.sched_getaffinity(0)), "torch's threads in every setting (default: one per core)"
    parser.add_argument("--threads", type=int, default=cores, help=threads)
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="busy loops beside the runs (%(default)s)")
    parser.add_argument("--scenarios", nargs="+", default=list(SCENARIOS), choices=list(SCENARIOS))
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--svg", type=Path, metavar="FILE")
    parser.add_argument("--docs", type=Path, metavar="DIR", help="write the summary into theory.md there")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    record: dict[str, Any] = {"machine": provenance()}
    run, block = (_survey, _survey_block) if args.what == "survey" else (_auto, _auto_block)
    # The models are profiled now, because a stored profile may come from a busier time.
    with tempfile.TemporaryDirectory() as folder, quiet_transformers():
        os.environ["PIPESPEC_CACHE"] = folder
        with working("loading the models"):
            family = load_family()
        texts = [family.encode(text) for text in prompts(args.prompts + _CALIBRATION[args.what])]
        # Evenly spaced, because neighbours in the list come from one module and are alike.
        chosen = {round(i * (len(texts) - 1) / max(1, args.prompts - 1)) for i in range(args.prompts)}
        measured = [ids for i, ids in enumerate(texts) if i in chosen]
        calibration = [ids for i, ids in enumerate(texts) if i not in chosen]
        with _busy_loops(args.busy):
            record |= run(args, family, measured, calibration)
    record |= {name: getattr(args, name) for name in ("threads", "prompts", "repeats", "new_tokens", "busy")}
    record["dtype"] = "float32"
    print(block(record))
    if args.docs:
        replace_table(args.docs / "theory.md", block(record), args.what.replace("survey", "plan"))
    save(args.json, record)
    return 0


@contextlib.contextmanager
def _busy_loops(count: int) -> Iterator[None]:
    """Processes that never sleep, one core each."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _survey_block(record: dict[str, Any]) -> str:
    """For docs/theory.md."""

    def errors(key: str, schedule: str | None) -> list[float]:
        found = [p for p in record["points"] if schedule in (None, p["schedule"])]
        return [abs(p[key] / p["median"] - 1) for p in found]

    def share(x: float) -> str:
        return f"{100 * x:.1f}%"

    rows = []
    for name, schedule in (("all", None), ("plain", "plain"), ("lockstep", "lockstep"), ("workers", "workers")):
        own, replayed = errors("predicted", schedule), errors("replayed", schedule)
        both = [share(f(e)) for e in (own, replayed) for f in (statistics.median, max)]
        rows.append([name, str(len(own)), *both])
    head = ["schedule", "settings", "median error", "largest", "measured texts replayed", "largest"]
    lines = [markdown_table(head, rows), ""]
    stages = record["profile"]["stages"]
    head = ["draft", "its steps beside the target", "the target's beside it", "first step after the target's"]
    rows = [
        [name, f"+{share(s['contention'])}", f"+{share(s['burden'])}", f"+{1e3 * s['cold_s']:.2f} ms"]
        for name, s in zip(record["names"][:-1], stages[:-1], strict=True)
    ]
    lines += [markdown_table(head, rows), ""]
    rates = record["rates_of_the_plan"]
    what = {
        "ideal": "steps of each stage alone, no other delays",
        "delays": "and the time between two steps, and wake-ups",
        "sharing": "and the slowdown beside other stages",
        "measured": "",
    }
    rows = [[n, f"{r:.1f}", f"{r / rates['ideal']:.2f}", what[n]] for n, r in rates.items()]
    lines += [markdown_table(["the plan's choice", "tokens/s", "of ideal", ""], rows)]
    return "\n".join(lines)


def _auto_block(record: dict[str, Any]) -> str:
    rows = []
    for name, s in record["scenarios"].items():
        low, high = s["versus_plain_quartiles"]
        chosen = sorted({d[0] for d in s["decisions"][-len(s["auto"]) :]})
        rows.append(
            [
                name,
                ", ".join(chosen),
                f"{s['versus_plain']:.3f}x ({low:.3f} to {high:.3f})",
                f"{min(_ratios(s['auto'], s['plain'])):.2f}x",
                f"{s['versus_best']:.3f}x",
                str(len(s["auto"])),
            ]
        )
    head = [
        "drafts",
        "decoded by",
        "of plain decoding (quartiles)",
        "worst call",
        "of the best by hand",
        "pairs of calls",
    ]
    return markdown_table(head, rows)


def _ratios(ours: Sequence[float], others: Sequence[float]) -> list[float]:
    """Pair by pair."""
    return [a / b for a, b in zip(ours, others, strict=True)]


class _Progress:
    """Reports the progress, at most every ten seconds."""

    last = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        if time.monotonic() - self.last > 10:
            say(f"{what} ({done + 1} of {total})")
            self.last = time.monotonic()


def _survey(
    args: argparse.Namespace, family: Family, measured: list[torch.Tensor], calibration: list[torch.Tensor]
) -> dict[str, Any]:
    models = [*family.drafts.values(), family.target]
    names = [*family.drafts, "target"]
    auto = AutoDriver(models)
    first, cores = auto.profile, auto.cores
    auto.close()
    answers = calibrate(models, calibration, args.new_tokens)
    call = call_of(measured, args.new_tokens)
    own = planner.plan(first, answers, call, cores=cores)
    candidates = list(dict.fromkeys([*settings(first), *own.candidates]))
    # The profile is measured between the runs, since the load of the machine changes from minute to minute.
    profiler = Profiler(models, names)
    chain = WorkersDriver(models, SpeculationConfig(lookahead=(8,) * len(models[:-1])))

    def between() -> None:
        profiler.round()
        profiler.beside(chain)

    try:
        points = survey(
            models, first, answers, candidates, measured, args.new_tokens, args.repeats, _Progress(), between
        )
    finally:
        chain.close()
    profile = profiler.profile()
    for point in points:
        point.candidate = planner.predict(profile, answers, point.candidate, call, cores=cores)
    print(table(points, names))
    # Replaying the measured texts leaves the error of the step times and of the simulation.
    replay = calibrate(models, measured, args.new_tokens)
    replayed = [planner.predict(profile, replay, p.candidate, call, cores=cores).rate for p in points]
    chosen = points[candidates.index(own.chosen)]
    # The causes of lost time, one after the other, on the measured texts.
    apart = replace(profile, stages=tuple(replace(s, contention=0.0, burden=0.0) for s in profile.stages))
    rates = {
        "ideal": planner.predict(profile, replay, chosen.candidate, call, ideal=True).rate,
        "delays": planner.predict(apart, replay, chosen.candidate, call).rate,
        "sharing": planner.predict(profile, replay, chosen.candidate, call, cores=cores).rate,
        "measured": chosen.median,
    }
    print(f"the plan: {own.why}")
    if args.svg:
        load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
        caption = f"Bundled family, fp32, {cores} cores, medians of {args.repeats} repeats, load {load}."
        args.svg.write_text(picture(points, names, caption), encoding="utf-8")
    return {
        "names": names,
        "profile": profile.to_json(),
        "agreement": [float(x) for x in (answers.table == 0).mean(axis=0)],
        "plan": own.to_dict(),
        "points": [p.to_dict() | {"replayed": r} for p, r in zip(points, replayed, strict=True)],
        "rates_of_the_plan": rates,
        "identical": all(p.identical for p in points),
    }


def _random(like: PreTrainedModel) -> PreTrainedModel:
    """A model of the same shape with random weights."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(like.config)).float().eval()


SCENARIOS = {
    "good": lambda family: [family.drafts["medium"]],
    "two drafts": lambda family: list(family.drafts.values()),
    "useless": lambda family: [_random(family.drafts["small"])],
    "slow": lambda family: [copy.deepcopy(family.target)],
}


def _hand_picked(drafts: int, threads: int) -> list[Candidate]:
    """Settings that a user might try. Draft 0 is the n-gram index, ``drafts`` models follow."""
    found = [Candidate("lockstep", (0,), (lookahead,), 0, threads, 0.0) for lookahead in (4, 8, 16)]
    models = [(1 + i,) for i in range(drafts)] + ([tuple(range(1, 1 + drafts))] if drafts > 1 else [])
    for subset in models:
        under = (0, *subset)
        for lookahead in (4, 8):
            found.append(Candidate("lockstep", under, (8, *(lookahead,) * len(subset)), 0, threads, 0.0))
        left = max(1, threads - len(subset))
        found.append(Candidate("workers", under, (8, *(8,) * len(subset)), 0, left, 0.0))
    for subset in models:
        for lookahead in (2, 4, 8):
            found.append(Candidate("lockstep", subset, (lookahead,) * len(subset), 0, threads, 0.0))
        for lookahead, min_draft_tokens in ((4, 0), (8, 0), (8, 2)):
            left = max(1, threads - len(subset))
            found.append(Candidate("workers", subset, (lookahead,) * len(subset), min_draft_tokens, left, 0.0))
    return found


def _auto(
    args: argparse.Namespace, family: Family, measured: list[torch.Tensor], calibration: list[torch.Tensor]
) -> dict[str, Any]:
    found = {}
    for name in args.scenarios:
        print(f"\n{name}")
        found[name] = _scenario(args, family.target, SCENARIOS[name](family), measured, calibration)
    return {"scenarios": found}


def _scenario(
    args: argparse.Namespace,
    target: PreTrainedModel,
    drafts: list[PreTrainedModel],
    measured: list[torch.Tensor],
    calibration: list[torch.Tensor],
) -> dict[str, Any]:
    """Compare auto with plain decoding and with the best of the settings by hand.

    First all contenders run the calibration prompts in turn, which selects the best setting by hand and lets auto learn. Then plain decoding,
    that setting and auto run the measured prompts, in a random order for each prompt.
    """
    threads = torch.get_num_threads()
    candidates = [Candidate("plain", (), (), 0, threads, 0.0), *_hand_picked(len(drafts), threads)]
    progress, decisions = _Progress(), []
    runner = SettingRunner([*drafts, target], NgramDraft())
    generator = random.Random(0)
    texts: dict[int, torch.Tensor] = {}
    identical = True
    with Pipeline(target, drafts, schedule="auto") as auto:

        def run(i: int, ids: torch.Tensor) -> tuple[int, float]:
            """Tokens and seconds of contender ``i``; auto is the last."""
            nonlocal identical
            # The time that a caller waits, learning included.
            if i < len(candidates):
                (text, tokens, _), seconds = timed(runner.run, candidates[i], ids, args.new_tokens)
            else:
                text, seconds = timed(auto.generate, ids, max_new_tokens=args.new_tokens, do_sample=False)
                assert auto.report is not None
                tokens = auto.report.tokens
                decisions.append([auto.report.schedule, *(auto.report.decisions or ())])
            identical &= torch.equal(text, texts.setdefault(id(ids), text))
            return tokens, seconds

        contenders = range(len(candidates) + 1)
        found: list[list[float]] = [[] for _ in contenders]
        for done, ids in enumerate(calibration):
            progress("looking for the best setting by hand", done, len(calibration))
            for i in generator.sample(contenders, len(contenders)):
                tokens, seconds = run(i, ids)
                if done > 0:  # the first warms up
                    found[i].append(tokens / seconds)
        best = max(contenders[:-1], key=lambda i: statistics.median(found[i]))
        final = list(dict.fromkeys([0, best, len(candidates)]))
        rates: dict[int, list[float]] = {i: [] for i in final}
        for repeat in range(args.repeats):
            for number, ids in enumerate(measured):
                progress("measuring", repeat * len(measured) + number, args.repeats * len(measured))
                for i in generator.sample(final, len(final)):
                    tokens, seconds = run(i, ids)
                    rates[i].append(tokens / seconds)
        plan = auto.plan
    runner.close()

    def versus(i: int) -> tuple[float, list[float]]:
        """Auto over contender ``i``, prompt by prompt: the median, and the quartiles."""
        ratios = _ratios(rates[final[-1]], rates[i])
        return statistics.median(ratios), statistics.quantiles(ratios, n=4)[::2] if len(ratios) > 1 else ratios * 2

    (versus_plain, plain_quartiles), (versus_best, best_quartiles) = versus(0), versus(best)
    settings = ("schedule", "drafts", "lookahead", "min_draft_tokens")
    by_hand = [
        {name: getattr(c, name) for name in settings} | {"rates": r} for c, r in zip(candidates, found, strict=False)
    ]
    print(plan)
    for setting in by_hand:
        *shown, measured_rates = setting.values()
        print(f"  {statistics.median(measured_rates):.1f} tokens/s:", *shown)
    return {
        "versus_plain": versus_plain,
        "versus_plain_quartiles": plain_quartiles,
        "versus_best": versus_best,
        "versus_best_quartiles": best_quartiles,
        "auto": rates[final[-1]],
        "plain": rates[0],
        "best": best,
        "best_rates": rates[best],
        "hand_picked": by_hand,
        "plan": None if plan is None else plan.to_dict(),
        "decisions": decisions,
        "identical": identical,
    }


if __name__ == "__main__":
    sys.exit(main())
