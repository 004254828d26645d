"""What does confidence gain? ``python -m bench.bench_confidence [--quick] [--published-runs DIR] [--json FILE]``

The bundled family, greedy, with ``confidence`` off and on, one after the other for each prompt, in random order. Prompts of three kinds: heads of functions
(what the family was trained on), questions in prose, and functions that a prompt asks to repeat. Reported are the ratio of the times, which a busy machine
affects on both sides, and the target's steps per token, which no machine affects in lockstep.

With ``--published-runs`` also the simulated throughput at the latencies of those runs (see :mod:`bench.published_runs`). Their logs have no confidences: each
draft token gets one that the small model of the bundled family published with a token that the target kept, or rejected, at random among all of the measured ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from bench import published_runs
from bench.harness import choose_sizes, save
from pipespec import Pipeline
from pipespec.bench.machine import provenance
from pipespec.demo import FAMILY, family_path, prompts
from pipespec.planning.perf_model import Answers, SimulatedPolicy, StageModel, simulate
from pipespec.process.progress import quiet_transformers
from pipespec_kernels.confidence import confidence_of

QUESTIONS = (
    "What is the difference between a list and a tuple?",
    "Why does the moon have phases? Explain it to a child.",
    "Write a short letter to a friend about a walk in the rain.",
    "Name three ways to save water at home, with a reason for each.",
    "How do I cook rice so that it does not stick?",
    "Summarise the plot of a story about a lost dog in two sentences.",
    "Which is heavier, a kilogram of feathers or a kilogram of iron?",
    "Give advice to a child who learns to ride a bicycle.",
)
CHAINS = (("small",), ("medium",), ("small", "medium"), ("ngram",), ("ngram", "small"))
SCHEDULES = ("lockstep", "workers")


def texts(count: int) -> dict[str, list[str]]:
    """Prompts by kind."""
    heads = prompts(count)
    return {
        "code": heads,
        "chat": list(QUESTIONS[:count]),
        "repeated": [f"{head}\n    pass\n\n\n{head}" for head in heads],
    }


def compare(
    target: PreTrainedModel,
    drafts: Sequence[PreTrainedModel | str],
    schedule: str,
    inputs: Sequence[torch.Tensor],
    new_tokens: int,
    repeats: int,
    order: np.random.Generator,
) -> dict[str, Any]:
    """Both settings on the same prompts, interleaved. The first round is for learning and does not count."""
    ratios: list[float] = []
    totals = {False: np.zeros(3), True: np.zeros(3)}  # tokens, seconds, steps of the target
    with (
        Pipeline(target, list(drafts), schedule=schedule) as off,
        Pipeline(target, list(drafts), schedule=schedule, confidence=True) as on,
    ):
        pipes = {False: off, True: on}
        brier: list[float] = []
        for repeat in range(repeats + 1):
            for ids in inputs:
                took: dict[bool, float] = {}
                found: dict[bool, torch.Tensor] = {}
                for which in order.permutation([False, True]):
                    pipe = pipes[bool(which)]
                    found[bool(which)] = pipe.generate(
                        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False
                    )
                    report = pipe.report
                    assert report is not None
                    took[bool(which)] = report.seconds
                    if repeat > 0:
                        totals[bool(which)] += (report.tokens, report.seconds, report.stages[-1].steps)
                    calibration = report.stages[-1].calibration
                    if repeat > 0 and calibration is not None and calibration.outcomes:
                        brier.append(calibration.brier)
                assert torch.equal(found[False], found[True]), "confidence has changed a text"
                if repeat > 0:
                    ratios.append(took[False] / took[True])
    return {
        "ratio": float(np.exp(np.median(np.log(ratios)))),
        "quartiles": [float(x) for x in np.percentile(ratios, (25, 75))],
        "pairs": len(ratios),
        "steps_per_token": {"off": totals[False][2] / totals[False][0], "on": totals[True][2] / totals[True][0]},
        "tokens_per_second": {"off": totals[False][0] / totals[False][1], "on": totals[True][0] / totals[True][1]},
        "brier": float(np.mean(brier)) if brier else None,
    }


def stated(
    target: PreTrainedModel, draft: PreTrainedModel, inputs: Sequence[torch.Tensor], new_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """The confidences, as bytes, of the draft tokens that the target keeps, and of those that it rejects, along its own texts."""
    kept, rejected = [], []
    with torch.inference_mode():
        for ids in inputs:
            text = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
            distribution = draft(text).logits[0, ids.shape[1] - 1 : -1].double().softmax(-1)
            best = distribution.max(-1)
            bytes_ = confidence_of(best.values.numpy())
            right = (best.indices == text[0, ids.shape[1] :]).numpy()
            kept.append(bytes_[right])
            rejected.append(bytes_[~right])
    return np.concatenate(kept), np.concatenate(rejected)


def at_published_latencies(folder: Path, kept: np.ndarray, rejected: np.ndarray) -> list[dict[str, Any]]:
    """Milliseconds per token of each published pipeline, measured there, and simulated with and without confidence."""
    runs = published_runs.load(folder)
    out = []
    for run in runs:
        if run.kind != "pipeline":
            continue
        evidence = published_runs.gather(runs, run.models)
        tables = [evidence.answers(i, fill).table for fill in range(3) for i in range(len(run.samples))]
        answers = Answers(table=np.concatenate([table for table in tables if table is not None]))
        start = 1e3 * sum(evidence.start_s) / sum(sample.tokens for sample in run.samples)
        stages = evidence.stages
        counts = (
            learned_ms(stages, answers, min_draft_tokens=w, decode_meanwhile=True)
            for w in published_runs.MIN_DRAFT_TOKENS[1:]
        )
        found = {
            "no minimum": learned_ms(stages, answers),
            "best count": min(counts),
            "unknown confidence": learned_ms(stages, answers, confidence=True),
            "confidence": learned_ms(stages, with_confidence(answers, kept, rejected), confidence=True),
        }
        found = {name: ms + start for name, ms in found.items()}
        out.append({"run": run.label, "measured_ms": run.ms_per_token(), "simulated_ms": found})
    return out


def learned_ms(stages: Sequence[StageModel], answers: Answers, **policy: Any) -> float:
    """Milliseconds per token in ``workers``. The calibration has seen all texts once: it outlives a call."""
    assert answers.table is not None
    tokens = len(answers.table)
    once, twice = (
        simulate("workers", stages, answers, n, policy=SimulatedPolicy(lookahead=64, **policy)).seconds
        for n in (tokens, 2 * tokens)
    )
    return 1e3 * (twice - once) / tokens


def with_confidence(answers: Answers, kept: np.ndarray, rejected: np.ndarray) -> Answers:
    """Confidences for a table of answers: of right tokens from ``kept``, of wrong ones from ``rejected``."""
    assert answers.table is not None
    numbers = np.random.default_rng(0)
    shape = answers.table.shape
    found = np.where(answers.table == 0, numbers.choice(kept, shape), numbers.choice(rejected, shape))
    return replace(answers, confidence=found.astype(np.uint8))


def main() -> None:
    parser = argparse.ArgumentParser("bench_confidence", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer prompts, tokens and chains: a minute")
    parser.add_argument("--prompts", type=int, metavar="N", help="of each kind, at most 8 (8; quick: 2)")
    parser.add_argument("--new-tokens", type=int, metavar="T", help="per prompt (128; quick: 32)")
    parser.add_argument("--repeats", type=int, metavar="N", help="of each pair of calls (4; quick: 1)")
    parser.add_argument("--published-runs", type=Path, metavar="DIR", help="also simulate at the latencies of these")
    parser.add_argument("--only-simulate", action="store_true", help="measure no schedule")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    options = parser.parse_args()
    choose_sizes(options, prompts=(8, 2), new_tokens=(128, 32), repeats=(4, 1))
    if not 1 <= options.prompts <= len(QUESTIONS):
        parser.error(f"--prompts must be 1 to {len(QUESTIONS)}, not {options.prompts}")
    torch.set_num_threads(1)
    with quiet_transformers():
        models = {n: AutoModelForCausalLM.from_pretrained(family_path(n), dtype=torch.float32).eval() for n in FAMILY}
        tokenizer = AutoTokenizer.from_pretrained(family_path("target"))
    inputs = {
        kind: [tokenizer(text, return_tensors="pt").input_ids for text in found]
        for kind, found in texts(options.prompts).items()
    }
    info, order = provenance(), np.random.default_rng(0)
    record: dict[str, Any] = {"machine": info, "settings": []}
    chains = CHAINS[:1] if options.quick else CHAINS
    print(
        f"{'schedule':<10}{'drafts':<16}{'prompts':<10}{'ratio':>7}{'quartiles':>16}{'steps/token off, on':>22}{'Brier':>8}"
    )
    for schedule in () if options.only_simulate else SCHEDULES:
        for names in chains:
            drafts = [models.get(name, name) for name in names]
            for kind, prompts_ in inputs.items():
                found = compare(
                    models["target"], drafts, schedule, prompts_, options.new_tokens, options.repeats, order
                )
                record["settings"].append({"schedule": schedule, "drafts": names, "prompts": kind} | found)
                quartiles = "{:.3f} to {:.3f}".format(*found["quartiles"])
                steps = "{off:.3f}, {on:.3f}".format(**found["steps_per_token"])
                brier = "-" if found["brier"] is None else f"{found['brier']:.3f}"
                print(
                    f"{schedule:<10}{'+'.join(names):<16}{kind:<10}{found['ratio']:>6.3f}x{quartiles:>16}"
                    f"{steps:>22}{brier:>8}",
                    flush=True,
                )
    if options.published_runs is not None:
        kept, rejected = stated(models["target"], models["small"], inputs["code"], options.new_tokens)
        record["published"] = at_published_latencies(options.published_runs, kept, rejected)
        for entry in record["published"]:
            gains = ", ".join(
                f"{n} {ms:.2f} ({entry['measured_ms'] / ms:.2f}x)" for n, ms in entry["simulated_ms"].items()
            )
            print(f"{entry['run']}: measured {entry['measured_ms']:.2f} ms/token; simulated: {gains}")
    save(options.json, record)


if __name__ == "__main__":
    main()
