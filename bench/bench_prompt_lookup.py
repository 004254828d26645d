"""An n-gram index alone and under drafts, on prompts of three kinds: ``python -m bench.bench_prompt_lookup [--quick] [--json FILE] [--docs FILE]``

The bundled family, greedy, against transformers' prompt lookup, tuned. The prompts are those of :mod:`bench.bench_confidence`: heads of functions, questions in
prose, and functions that a prompt asks to repeat. Contenders take turns prompt by prompt (:mod:`pipespec.bench.comparison`).
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.bench_confidence import QUESTIONS, texts
from bench.harness import choose_sizes, markdown_table, replace_table, save
from pipespec.bench.comparison import Measurement, SpeedComparison
from pipespec.bench.contenders import GREEDY, Contender, HFContender, PipelineContender, Workload
from pipespec.bench.machine import provenance
from pipespec.demo import load_family
from pipespec.engine.ngram import NGRAM
from pipespec.process.progress import quiet_transformers, say

RIVAL = "lookup"


def contenders() -> list[Contender]:
    """The reference first, then the rival."""
    rows: list[Contender] = [
        HFContender("plain", "HF generate()"),
        HFContender(RIVAL, "HF prompt lookup"),
        PipelineContender("ours-plain", "ours, target alone", "plain"),
        PipelineContender("lockstep-ngram", "lockstep, n-gram", "lockstep", [NGRAM]),
    ]
    for schedule in ("lockstep", "workers"):
        for draft in ("small", "medium"):
            for chain in ([draft], [NGRAM, draft]):
                label = " + ".join("n-gram" if name == NGRAM else name for name in chain)
                rows.append(PipelineContender(f"{schedule}-{'-'.join(chain)}", f"{schedule}, {label}", schedule, chain))
    return rows


def measure(options: argparse.Namespace) -> dict[str, list[Measurement]]:
    """Results by kind of prompt."""
    with quiet_transformers():
        family = load_family()
    found = {}
    for kind, prompts in texts(options.prompts + 1).items():
        say(f"prompts of the kind {kind!r}")
        encoded = [family.encode(text) for text in prompts]
        calibration, measured = encoded[:1], encoded[1:]
        longest = max(ids.shape[1] for ids in encoded)
        workload = Workload(family, options.new_tokens, longest, torch.get_num_threads(), GREEDY)
        with SpeedComparison(workload, contenders()) as comparison:
            comparison.start(calibration[0])
            comparison.tune(calibration, options.settings)
            for _ in comparison.measure(measured, options.repeats):
                pass
            found[kind] = comparison.results()
    return found


def table(found: dict[str, list[Measurement]]) -> str:
    """Tokens per second, what it is of the rival's, and tokens per step of the target."""
    head = [""]
    for kind in found:
        head += [f"{kind}: tokens/s", "of HF prompt lookup", "tokens/step", "equal texts"]
    rows = []
    for same in zip(*found.values(), strict=True):
        row = [same[0].label]
        for kind, result in zip(found, same, strict=True):
            rival = next(r.tokens_per_second for r in found[kind] if r.key == RIVAL)
            if result.tokens_per_second is None or rival is None:
                row += ["-"] * 4
                continue
            length = result.accepted_length.get("target")
            texts_equal = "-" if result.identical is None else f"{result.identical}/{result.runs}"
            row += [
                f"{result.tokens_per_second:.0f}",
                f"{result.tokens_per_second / rival:.2f}x",
                f"{length:.2f}" if length else "-",
                texts_equal,
            ]
        rows.append(row)
    return markdown_table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser("bench_prompt_lookup", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, metavar="N", help="of each kind (6; quick: 2)")
    parser.add_argument("--new-tokens", type=int, metavar="T", help="most per prompt (128; quick: 32)")
    parser.add_argument("--repeats", type=int, metavar="R", help="of each text (3; quick: 1)")
    parser.add_argument("--settings", type=int, default=8, help="tried of each row that is tuned (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="rewrite the table between its comments there")
    options = parser.parse_args()
    if options.prompts is not None and not 1 <= options.prompts < len(QUESTIONS):
        parser.error(f"--prompts must be 1 to {len(QUESTIONS) - 1}: one more question is for tuning")
    choose_sizes(options, prompts=(6, 2), new_tokens=(128, 32), repeats=(3, 1))
    record: dict[str, Any] = {"machine": provenance()}
    found = measure(options)
    print(table(found))
    if options.docs:
        replace_table(options.docs, table(found), "prompt-lookup")
    record |= {name: getattr(options, name) for name in ("prompts", "new_tokens", "repeats")}
    save(options.json, record | {"kinds": {kind: [asdict(row) for row in rows] for kind, rows in found.items()}})


if __name__ == "__main__":
    main()
