"""Predicted against measured, and schedule="auto" against plain decoding and the best hand-picked setting, on this machine.

    python -m bench.bench_plan survey --json bench/results/plan.json --svg bench/results/plan.svg
    python -m bench.bench_plan auto --json bench/results/auto.json

``survey``: the bundled family; every schedule, subset of drafts and window, and the plan's own choice. ``auto``: a good, a useless and a slow
draft; the contenders take turns prompt by prompt, medians over the repeats.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.harness import machine
from pipespec.demo import prompts
from pipespec.demo.comparison import Family
from pipespec.pipeline import Pipeline
from pipespec.planning import planner
from pipespec.planning.auto import Auto
from pipespec.planning.planner import Candidate
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
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    before = machine()
    # A profile of this machine as it is now, not as it was.
    with tempfile.TemporaryDirectory() as folder, quiet_transformers():
        os.environ["PIPESPEC_CACHE"] = folder
        with working("loading the models"):
            family = Family.load()
        texts = [family.encode(text) for text in prompts(args.prompts + _CALIBRATION[args.what])]
        measured, calibration = texts[: args.prompts], texts[args.prompts :]
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
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


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
    profile = auto.profile
    auto.close()
    answers = calibrate(models, calibration, args.new_tokens)
    own = planner.plan(profile, answers, call_of(measured, args.new_tokens))
    candidates = list(dict.fromkeys([*settings(profile), *(c for c in own.candidates)]))
    points = survey(models, profile, answers, candidates, measured, args.new_tokens, args.repeats, _Progress())
    print(table(points, names))
    errors = [abs(p.error) for p in points]
    # What is left when the drafts' luck with the measured texts is known: the error of the step times and of the simulation.
    replay = calibrate(models, measured, args.new_tokens)
    call = call_of(measured, args.new_tokens)
    replayed = [planner.predict(profile, replay, p.candidate, call).rate for p in points]
    rest = [abs(r / p.median - 1) for r, p in zip(replayed, points, strict=True)]
    print(
        f"replaying the measured texts: median error {100 * statistics.median(rest):.1f} %, largest {100 * max(rest):.1f} %"
    )
    chosen = next(p for p in points if p.candidate.key == own.chosen.key and p.candidate.windows == own.chosen.windows)
    share = chosen.median / own.chosen.ideal
    print(f"median error {100 * statistics.median(errors):.1f} %, largest {100 * max(errors):.1f} %")
    print(f"the plan: {own.why}; measured {share:.2f} of its ideal")
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
    """Auto (the last contender) against plain decoding (the first) and what somebody would try."""
    threads = torch.get_num_threads()
    candidates = [Candidate("plain", (), (), 0, threads, 0.0), *_hand_picked(len(drafts), threads)]
    progress, decisions = _Progress(), []
    runner = Runner([*drafts, target])
    with Pipeline(target, drafts, schedule="auto") as auto:

        def run(i: int, ids: torch.Tensor) -> tuple[torch.Tensor, int, float]:
            began = time.perf_counter()
            if i < len(candidates):
                text, tokens, _ = runner.run(candidates[i], ids, args.new_tokens)
            else:
                text = auto.generate(ids, max_new_tokens=args.new_tokens, do_sample=False)
                assert auto.report is not None
                tokens = auto.report.tokens
            return text, tokens, time.perf_counter() - began  # what a caller waits for, learning included

        everyone = range(len(candidates) + 1)
        for done, ids in enumerate(calibration):  # to warm up; auto looks around meanwhile
            progress("warming up", done, len(calibration))
            for i in everyone:
                run(i, ids)
        rates: list[list[float]] = [[] for _ in everyone]
        identical = True
        for repeat in range(args.repeats):
            total = [[0, 0.0] for _ in everyone]
            for number, ids in enumerate(measured):
                progress("measuring", repeat * len(measured) + number, args.repeats * len(measured))
                turn = (repeat * len(measured) + number) % len(everyone)
                wanted = None
                for i in (*everyone[turn:], *everyone[:turn]):
                    text, tokens, seconds = run(i, ids)
                    total[i][0] += tokens
                    total[i][1] += seconds
                    wanted = text if wanted is None else wanted
                    identical &= torch.equal(text, wanted)
                    if i == len(candidates) and auto.report is not None:
                        decisions.append([auto.report.schedule, *(auto.report.decisions or ())])
            for i in everyone:
                rates[i].append(total[i][0] / total[i][1])
        plan = auto.plan
    runner.close()
    medians = [statistics.median(r) for r in rates]
    best = max(range(len(candidates)), key=lambda i: medians[i])
    versus_plain = statistics.median(a / b for a, b in zip(rates[-1], rates[0], strict=True))
    versus_best = statistics.median(a / b for a, b in zip(rates[-1], rates[best], strict=True))
    print(plan)
    print(
        f"plain {medians[0]:.1f}, auto {medians[-1]:.1f}: {versus_plain:.3f}x plain, {versus_best:.3f}x the best by hand"
    )
    for c, m in zip(candidates, medians, strict=False):
        print(f"  {c.schedule:<9} drafts {c.drafts!s:<7} windows {c.windows!s:<7} wait {c.wait}: {m:.1f}")
    return {
        "versus_plain": versus_plain,
        "versus_best": versus_best,
        "auto": rates[-1],
        "best": best,
        "hand_picked": [
            {"schedule": c.schedule, "drafts": c.drafts, "windows": c.windows, "wait": c.wait, "rates": r}
            for c, r in zip(candidates, rates, strict=False)
        ],
        "plan": None if plan is None else plan.to_dict(),
        "decisions": decisions,
        "identical": identical,
    }


if __name__ == "__main__":
    sys.exit(main())
