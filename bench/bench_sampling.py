"""What sampling costs: ``python -m bench.bench_sampling [--quick] [--json FILE]``

The bundled family on held-out function heads, one at a time. Every row is a way to choose tokens; ``fused`` and ``stepwise`` are the same
parameters and the same text, once as one threshold and one factor for all positions of a step, once position by position through
transformers' processors (forced by a processor that changes nothing). Rows take turns prompt by prompt, so that other load on the machine affects them alike;
medians of the repeats. Reported per row:

* ``tokens/s`` of the chain and of the target alone, and the ratio of the two;
* ``accepted``: drafts that the target accepted, and how many tokens it got per verification;
* ``of fused``: time of the position-by-position path over that of the fused one, for the target alone and for the chain.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessor

from bench.harness import choose_sizes, save
from pipespec import Pipeline
from pipespec.bench.machine import provenance
from pipespec.bench.timing import timed
from pipespec.demo import load_family, prompts
from pipespec.process.progress import quiet_transformers


class _Nothing(LogitsProcessor):
    """Changes nothing, but forces the path position by position."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


_STEPWISE: dict[str, Any] = {"logits_processor": [_Nothing()]}
_USUAL = {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1, "top_k": 0}


@dataclass
class SamplingRow:
    """A way to choose tokens, and its measurements: per pipeline and repeat the seconds and tokens of all prompts."""

    name: str
    arguments: dict[str, Any]
    group: str = ""  # rows of a group give the same text
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"alone": [], "chain": []})
    tokens: dict[str, list[int]] = field(default_factory=lambda: {"alone": [], "chain": []})
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    differ: int = 0  # number of texts that differ from the other path or from the target alone, by near-ties

    def rate(self, which: str) -> float:
        return statistics.median(t / s for t, s in zip(self.tokens[which], self.seconds[which], strict=True))

    def record(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "arguments": {k: v for k, v in self.arguments.items() if k not in _STEPWISE},
            "path": "position by position" if "logits_processor" in self.arguments else "fused",
            "tokens_per_second_alone": self.rate("alone"),
            "tokens_per_second_chain": self.rate("chain"),
            "acceptance_rate": self.accepted / self.drafted if self.drafted else None,
            "tokens_per_verification": self.tokens["chain"][0] * len(self.tokens["chain"]) / self.steps,
            "texts_that_differ": self.differ,
            "seconds_alone": self.seconds["alone"],
            "seconds_chain": self.seconds["chain"],
        }


def rows(quick: bool) -> list[SamplingRow]:
    sample = {"do_sample": True, "top_k": 0}
    usual = {"do_sample": True} | _USUAL
    found = [
        SamplingRow("greedy, fused", {"do_sample": False}, "greedy"),
        SamplingRow("greedy, stepwise", {"do_sample": False} | _STEPWISE, "greedy"),
        SamplingRow("t 0.8, top_p, penalty, fused", usual, "usual"),
        SamplingRow("t 0.8, top_p, penalty, stepwise", usual | _STEPWISE, "usual"),
    ]
    if not quick:
        found += [
            SamplingRow("top_k 50, fused", {"do_sample": True, "top_k": 50}, "top_k"),
            SamplingRow("top_k 50, stepwise", {"do_sample": True, "top_k": 50} | _STEPWISE, "top_k"),
        ]
    for temperature in (1.0,) if quick else (0.3, 0.7, 1.0, 1.5):
        found.append(SamplingRow(f"temperature {temperature}", sample | {"temperature": temperature}))
    return found


def measure(options: argparse.Namespace) -> list[SamplingRow]:
    with quiet_transformers():
        family = load_family()
    texts = [family.encode(text) for text in prompts(options.prompts)]
    found = rows(options.quick)
    with (
        Pipeline(family.target) as alone,
        Pipeline(family.target, list(family.drafts.values()), schedule=options.schedule) as chain,
    ):
        pipelines = {"alone": alone, "chain": chain}
        for repeat in range(options.repeats + 1):  # the first one warms up
            sums = {(row.name, which): [0.0, 0] for row in found for which in pipelines}
            for seed, ids in enumerate(texts):
                said: dict[str, list[int]] = {}
                for row in found:
                    for which, pipeline in pipelines.items():
                        given = {"max_new_tokens": options.new_tokens, "seed": seed, "eos_token_id": None}
                        out, took = timed(pipeline.generate, ids, **given, **row.arguments)
                        text = out[0].tolist()
                        row.differ += said.setdefault(row.group or row.name, text) != text
                        report = pipeline.report
                        assert report is not None
                        one = sums[row.name, which]
                        one[0] += took
                        one[1] += report.tokens
                        if which == "chain" and repeat > 0:
                            last = report.stages[-1]
                            row.drafted += last.drafted
                            row.accepted += last.accepted
                            row.steps += last.steps
            if repeat > 0:
                for row in found:
                    for which in pipelines:
                        row.seconds[which].append(sums[row.name, which][0])
                        row.tokens[which].append(int(sums[row.name, which][1]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        "bench_sampling", description="What sampling costs, fused and position by position."
    )
    parser.add_argument("--quick", action="store_true", help="fewer rows, prompts and repeats: under a minute")
    parser.add_argument("--prompts", type=int, metavar="N", help="held-out function heads (8; quick: 2)")
    parser.add_argument("--repeats", type=int, metavar="R", help="medians are taken over these (5; quick: 1)")
    parser.add_argument("--new-tokens", type=int, metavar="T", help="per prompt (96; quick: 24)")
    parser.add_argument("--schedule", choices=["lockstep", "workers"], default="lockstep", help="%(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    options = parser.parse_args()
    choose_sizes(options, prompts=(8, 2), repeats=(5, 1), new_tokens=(96, 24))

    info = provenance()
    print(
        f"{info['cpu']}, {info['cores']} cores, {info['threads']} threads, torch {info['torch']}, load {info['load_average'][0]:.1f}; "
        f"{options.prompts} prompts x {options.new_tokens} tokens, {options.schedule}, medians of {options.repeats}"
    )
    found = measure(options)
    print(f"{'':34}{'alone':>10}{'chain':>10}{'ratio':>8}{'accepted':>10}{'per step':>10}{'of fused':>16}")
    fused = {row.group: row for row in found if row.group and "logits_processor" not in row.arguments}
    results = []
    for row in found:
        r = row.record()
        line = f"{row.name:34}{r['tokens_per_second_alone']:10.1f}{r['tokens_per_second_chain']:10.1f}"
        line += f"{r['tokens_per_second_chain'] / r['tokens_per_second_alone']:8.2f}"
        line += f"{r['acceptance_rate'] or 0:10.0%}{r['tokens_per_verification']:10.2f}"
        if row.group and fused[row.group] is not row:
            r["times_fused"] = [fused[row.group].rate(w) / row.rate(w) for w in ("alone", "chain")]
            line += "".join(f"{x:8.2f}" for x in r["times_fused"])
        print(line + (f"  {row.differ} texts differ at a near-tie" if row.differ else ""))
        results.append(r)
    setting = {k: v for k, v in vars(options).items() if k != "json"}
    save(options.json, {"machine": info, "setting": setting, "results": results})


if __name__ == "__main__":
    main()
