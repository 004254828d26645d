"""Predicted against measured, and schedule="auto" against plain decoding and the best hand-picked setting, on this machine.

    python -m bench.bench_plan survey --json bench/results/plan.json --svg bench/results/plan.svg
    python -m bench.bench_plan auto --json bench/results/auto.json

``survey``: the bundled family; every schedule, subset of drafts and window, and the plan's own choice. ``auto``: a good, a useless and a slow
draft; medians over pairs of calls with the same prompt, one after the other.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.harness import machine
from bench.theory import replace_blocks, table_of
from pipespec.demo import prompts
from pipespec.demo.comparison import Family
from pipespec.drivers import WorkersDriver
from pipespec.drivers.base import Policy
from pipespec.pipeline import Pipeline
from pipespec.planning import planner
from pipespec.planning.auto import Auto
from pipespec.planning.planner import Candidate
from pipespec.planning.profile import Profiler
from pipespec.planning.survey import Runner, calibrate, call_of, picture, settings, survey, table
from pipespec.progress import quiet_transformers, say, working

_CALIBRATION = {"survey": 24, "auto": 6}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("bench_plan", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("survey", "auto"))
    parser.add_argument("--prompts", type=int, default=6, metavar="N", help="held-out function heads (%(default)s)")
    parser.add_argument(
        "--repeats", type=int, default=5, metavar="R", help="medians are taken over these (%(default)s)"
    )
    parser.add_argument("--new-tokens", type=int, default=128, metavar="T", help="per prompt (%(default)s)")
    parser.add_argument(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="torch's, of everybody (default: one per core)",
    )
    parser.add_argument("--scenarios", nargs="+", default=list(SCENARIOS), choices=list(SCENARIOS))
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--svg", type=Path, metavar="FILE")
    parser.add_argument("--docs", type=Path, metavar="DIR", help="write the summary into theory.md there")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    before = machine()
    # A profile of this machine as it is now, not as it was.
    with tempfile.TemporaryDirectory() as folder, quiet_transformers():
        os.environ["PIPESPEC_CACHE"] = folder
        with working("loading the models"):
            family = Family.load()
        texts = [family.encode(text) for text in prompts(args.prompts + _CALIBRATION[args.what])]
        # Every so many: neighbours in the list come from one module and are alike.
        chosen = {round(i * (len(texts) - 1) / max(1, args.prompts - 1)) for i in range(args.prompts)}
        measured = [ids for i, ids in enumerate(texts) if i in chosen]
        calibration = [ids for i, ids in enumerate(texts) if i not in chosen]
        run = _survey if args.what == "survey" else _auto
        record = {"machine": before, "load_average_after": os.getloadavg(), **run(args, family, measured, calibration)}
        record["load_average_after"] = os.getloadavg()
    record |= {
        "threads": args.threads,
        "prompts": args.prompts,
        "repeats": args.repeats,
        "new_tokens": args.new_tokens,
        "dtype": "float32",
    }
    if args.docs:
        page = args.docs / "theory.md"
        block = _survey_block(record) if args.what == "survey" else _auto_block(record)
        page.write_text(replace_blocks(page.read_text(encoding="utf-8"), block), encoding="utf-8")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


def _survey_block(record: dict[str, Any]) -> dict[str, str]:
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
    lines = [table_of(head, rows), ""]
    stages = record["profile"]["stages"]
    head = ["draft", "its steps beside the target", "the target's beside it", "first step after the target's"]
    rows = [
        [name, f"+{share(s['contention'])}", f"+{share(s['burden'])}", f"+{1e3 * s['cold_s']:.2f} ms"]
        for name, s in zip(record["names"][:-1], stages[:-1], strict=True)
    ]
    lines += [table_of(head, rows), ""]
    rates = record["rates_of_the_plan"]
    what = {
        "ideal": "the steps of each stage as it has them alone, nothing else takes time",
        "looks": "and the time between two steps, and to wake up",
        "sharing": "and steps beside the other stages'",
        "measured": "",
    }
    rows = [[n, f"{r:.1f}", f"{r / rates['ideal']:.2f}", what[n]] for n, r in rates.items()]
    lines += [table_of(["the plan's choice", "tokens/s", "of ideal", ""], rows)]
    return {"plan": "\n".join(lines)}


def _auto_block(record: dict[str, Any]) -> dict[str, str]:
    rows = []
    for name, s in record["scenarios"].items():
        low, high = s["versus_plain_quartiles"]
        chosen = sorted({d[0] for d in s["decisions"][-len(s["auto"]) :]})
        rows.append(
            [
                name,
                ", ".join(chosen),
                f"{s['versus_plain']:.3f}x ({low:.3f} to {high:.3f})",
                f"{s['versus_best']:.3f}x",
                str(len(s["auto"])),
            ]
        )
    head = ["drafts", "decoded by", "of plain decoding (quartiles)", "of the best by hand", "pairs of calls"]
    return {"auto": table_of(head, rows)}


class _Progress:
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
    auto = Auto(models)
    first, cores = auto.profile, auto.cores
    auto.close()
    answers = calibrate(models, calibration, args.new_tokens)
    call = call_of(measured, args.new_tokens)
    own = planner.plan(first, answers, call, cores=cores)
    candidates = list(dict.fromkeys([*settings(first), *own.candidates]))
    # The machine changes from minute to minute: it is profiled among the measurements, so that both see the same of it.
    profiler, chain = Profiler(models, names), WorkersDriver(models, Policy((8,) * len(models[:-1])))

    def between() -> None:
        profiler.round()
        profiler.beside(chain)

    try:
        points = survey(
            models,
            first,
            answers,
            candidates,
            measured,
            args.new_tokens,
            args.repeats,
            _Progress(),
            between=between,
        )
    finally:
        chain.close()
    profile = profiler.profile()
    for point in points:
        point.candidate = planner.predict(profile, answers, point.candidate, call, cores=cores)
    print(table(points, names))
    errors = [abs(p.error) for p in points]
    # What is left when the drafts' luck with the measured texts is known: the error of the step times and of the simulation.
    replay = calibrate(models, measured, args.new_tokens)
    replayed = [planner.predict(profile, replay, p.candidate, call, cores=cores).rate for p in points]
    rest = [abs(r / p.median - 1) for r, p in zip(replayed, points, strict=True)]
    print(
        f"replaying the measured texts: median error {100 * statistics.median(rest):.1f} %, largest {100 * max(rest):.1f} %"
    )
    print(f"median error {100 * statistics.median(errors):.1f} %, largest {100 * max(errors):.1f} %")
    chosen = points[candidates.index(own.chosen)]
    # One cause of lost time after the other, on the measured texts.
    apart = replace(profile, stages=tuple(replace(s, contention=0.0, burden=0.0) for s in profile.stages))
    rates = {
        "ideal": planner.predict(profile, replay, chosen.candidate, call, ideal=True).rate,
        "looks": planner.predict(apart, replay, chosen.candidate, call).rate,
        "sharing": planner.predict(profile, replay, chosen.candidate, call, cores=cores).rate,
        "measured": chosen.median,
    }
    share = rates["measured"] / rates["ideal"]
    print(f"the plan: {own.why}; measured {share:.2f} of its ideal")
    print(", ".join(f"{name} {rate:.1f}" for name, rate in rates.items()))
    print(f"slowness {profile.slowness:.3f}")
    for s in profile.stages[:-1]:
        print(
            f"{s.name}: {s.contention:+.2f} beside the target, which has {s.burden:+.2f}; cold {1e3 * s.cold_s:.2f} ms"
        )
    if args.svg:
        load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
        caption = f"Bundled family, fp32, {machine()['cores']} cores, medians of {args.repeats} repeats, load {load}."
        args.svg.write_text(picture(points, names, caption), encoding="utf-8")
    return {
        "names": names,
        "profile": profile.to_json(),
        "agreement": [float(x) for x in (answers.table == 0).mean(axis=0)],
        "plan": own.to_dict(),
        "points": [p.to_dict() | {"replayed": r} for p, r in zip(points, replayed, strict=True)],
        "median_error_replayed": statistics.median(rest),
        "median_error": statistics.median(errors),
        "of_ideal": share,
        "rates_of_the_plan": rates,
        "identical": all(p.identical for p in points),
    }


def _random(like: PreTrainedModel) -> PreTrainedModel:
    """A model of the same shape that has learnt nothing."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(like.config)).float().eval()


SCENARIOS = {
    "good": lambda family: [family.drafts["medium"]],
    "two drafts": lambda family: list(family.drafts.values()),
    "useless": lambda family: [_random(family.drafts["small"])],
    "slow": lambda family: [copy.deepcopy(family.target)],
}


def _hand_picked(drafts: int, threads: int) -> list[Candidate]:
    """What somebody would try."""
    found = []
    for subset in [(i,) for i in range(drafts)] + ([tuple(range(drafts))] if drafts > 1 else []):
        for window in (2, 4, 8):
            found.append(Candidate("lockstep", subset, (window,) * len(subset), 0, threads, 0.0))
        for window, wait in ((4, 0), (8, 0), (8, 2)):
            left = max(1, threads - len(subset))
            found.append(Candidate("workers", subset, (window,) * len(subset), wait, left, 0.0))
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
    """Auto against plain decoding and what somebody would try.

    First everybody in turn over the calibration prompts: auto looks around, and the best setting by hand is found. Then, over the measured
    prompts, plain decoding, that setting and auto; their order is drawn anew each time.
    """
    threads = torch.get_num_threads()
    candidates = [Candidate("plain", (), (), 0, threads, 0.0), *_hand_picked(len(drafts), threads)]
    progress, decisions = _Progress(), []
    runner = Runner([*drafts, target])
    generator = random.Random(0)
    texts: dict[int, torch.Tensor] = {}
    identical = True
    with Pipeline(target, drafts, schedule="auto") as auto:

        def run(i: int, ids: torch.Tensor) -> tuple[int, float]:
            """Tokens and seconds of contender ``i``; auto is the last."""
            nonlocal identical
            began = time.perf_counter()
            if i < len(candidates):
                text, tokens, _ = runner.run(candidates[i], ids, args.new_tokens)
            else:
                text = auto.generate(ids, max_new_tokens=args.new_tokens, do_sample=False)
                assert auto.report is not None
                tokens = auto.report.tokens
                decisions.append([auto.report.schedule, *(auto.report.decisions or ())])
            seconds = time.perf_counter() - began  # what a caller waits for, learning included
            identical &= torch.equal(text, texts.setdefault(id(ids), text))
            return tokens, seconds

        everyone = [*range(len(candidates) + 1)]
        found: list[list[float]] = [[] for _ in everyone]
        for done, ids in enumerate(calibration):
            progress("looking for the best setting by hand", done, len(calibration))
            for i in generator.sample(everyone, len(everyone)):
                tokens, seconds = run(i, ids)
                if done > 0:  # the first warms up
                    found[i].append(tokens / seconds)
        medians = [statistics.median(r) for r in found[:-1]]
        best = max(range(len(candidates)), key=lambda i: medians[i])
        duel = list(dict.fromkeys([0, best, len(candidates)]))
        rates: dict[int, list[float]] = {i: [] for i in duel}
        for repeat in range(args.repeats):
            for number, ids in enumerate(measured):
                progress("measuring", repeat * len(measured) + number, args.repeats * len(measured))
                for i in generator.sample(duel, len(duel)):
                    tokens, seconds = run(i, ids)
                    rates[i].append(tokens / seconds)
        plan = auto.plan
    runner.close()
    own = rates[duel[-1]]

    def versus(i: int) -> tuple[float, list[float]]:
        """Auto over contender ``i``, prompt by prompt: the median, and the quartiles."""
        ratios = [a / b for a, b in zip(own, rates[i], strict=True)]
        return statistics.median(ratios), statistics.quantiles(ratios, n=4)[::2] if len(ratios) > 1 else ratios * 2

    (versus_plain, plain_quartiles), (versus_best, best_quartiles) = versus(0), versus(best)
    print(plan)
    for c, m in zip(candidates, medians, strict=True):
        print(f"  {c.schedule:<9} drafts {c.drafts!s:<7} windows {c.windows!s:<7} wait {c.wait}: {m:.1f}")
    print(
        f"plain {statistics.median(rates[0]):.1f}, auto {statistics.median(own):.1f}: {versus_plain:.3f}x plain "
        f"({plain_quartiles[0]:.3f} to {plain_quartiles[1]:.3f}), {versus_best:.3f}x the best by hand"
    )
    return {
        "versus_plain": versus_plain,
        "versus_plain_quartiles": plain_quartiles,
        "versus_best": versus_best,
        "versus_best_quartiles": best_quartiles,
        "auto": own,
        "plain": rates[0],
        "best": best,
        "best_rates": rates[best],
        "hand_picked": [
            {"schedule": c.schedule, "drafts": c.drafts, "windows": c.windows, "wait": c.wait, "rates": r}
            for c, r in zip(candidates, found, strict=False)
        ],
        "plan": None if plan is None else plan.to_dict(),
        "decisions": decisions,
        "identical": identical,
    }


if __name__ == "__main__":
    sys.exit(main())
