"""What each rule of acceptance accepts: ``python -m bench.bench_acceptance [--quick] [--json FILE] [--docs FILE]``

The bundled family on held-out function heads, one at a time, one draft in lockstep: coupled sampling, rejection sampling and block verification at
three temperatures. Rules take turns prompt by prompt, so that other load on the machine affects them alike. Acceptance is a count, for these seeds
exact; tokens/s are those of the machine as it was.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.harness import choose_sizes, markdown_table, replace_table, save
from pipespec import Pipeline
from pipespec.bench.machine import provenance
from pipespec.config import ACCEPTANCES
from pipespec.demo import family_path, prompts
from pipespec.process.progress import quiet_transformers

TEMPERATURES = (0.5, 0.8, 1.0)
DRAFTS = ("small", "medium")


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    names = DRAFTS[-1:] if options.quick else DRAFTS
    with quiet_transformers():
        models = {
            name: AutoModelForCausalLM.from_pretrained(family_path(name), dtype="float32").eval()
            for name in ("target", *names)
        }
        tokenizer = AutoTokenizer.from_pretrained(family_path("target"))
    texts = [tokenizer(text, return_tensors="pt").input_ids for text in prompts(options.prompts)]
    chains = {
        (name, rule): Pipeline(
            models["target"], models[name], schedule="lockstep", lookahead=options.lookahead, acceptance=rule
        )
        for name in names
        for rule in ACCEPTANCES
    }
    alone = Pipeline(models["target"])
    sums: dict[tuple[Any, ...], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for repeat in range(options.repeats + 1):  # the first one warms up, with one prompt
        for at, ids in enumerate(texts if repeat else texts[:1]):
            for temperature in TEMPERATURES:
                rules = [(("none", "alone"), alone), *chains.items()]
                for key, pipe in rules:
                    given = {"do_sample": True, "top_k": 0, "temperature": temperature, "eos_token_id": None}
                    began = time.perf_counter()
                    pipe.generate(ids, max_new_tokens=options.new_tokens, seed=1000 * repeat + at, **given)
                    took = time.perf_counter() - began
                    if repeat == 0:
                        continue
                    assert pipe.report is not None
                    one, last = sums[*key, temperature], pipe.report.stages[-1]
                    for name, value in (("seconds", took), ("tokens", pipe.report.tokens), ("steps", last.steps)):
                        one[name] += value
                    one["drafted"] += last.drafted
                    one["accepted"] += last.accepted
    return [
        {
            "draft": name,
            "rule": rule,
            "temperature": temperature,
            "acceptance_rate": one["accepted"] / one["drafted"] if one["drafted"] else None,
            "tokens_per_verification": one["tokens"] / one["steps"],
            "tokens_per_second": one["tokens"] / one["seconds"],
            "tokens": one["tokens"],
        }
        for (name, rule, temperature), one in sums.items()
    ]


def table(results: list[dict[str, Any]]) -> str:
    """Markdown: a row per draft and temperature, tokens per verification of each rule, and tokens/s against the target alone."""
    found = {(r["draft"], r["rule"], r["temperature"]): r for r in results}
    rows = []
    for name in dict.fromkeys(r["draft"] for r in results if r["draft"] != "none"):
        for temperature in TEMPERATURES:
            base = found["none", "alone", temperature]["tokens_per_second"]
            cells = [found[name, rule, temperature] for rule in ACCEPTANCES]
            shown = [f"{c['tokens_per_verification']:.2f} ({c['tokens_per_second'] / base:.2f}x)" for c in cells]
            rows.append((name, str(temperature), *shown))
    return markdown_table(("draft", "temperature", *ACCEPTANCES), rows)


def main() -> None:
    parser = argparse.ArgumentParser("bench_acceptance", description="What each rule of acceptance accepts.")
    parser.add_argument("--quick", action="store_true", help="one draft, fewer prompts and repeats")
    parser.add_argument("--prompts", type=int, metavar="N", help="held-out function heads (8; quick: 2)")
    parser.add_argument("--repeats", type=int, metavar="R", help="(2; quick: 1)")
    parser.add_argument("--new-tokens", type=int, metavar="T", help="per prompt (96; quick: 24)")
    parser.add_argument("--lookahead", type=int, metavar="L", default=4, help="%(default)s")
    parser.add_argument("--threads", type=int, metavar="N", help="of torch; on a busy machine, 1")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="write the table into this page, between its marks")
    options = parser.parse_args()
    choose_sizes(options, prompts=(8, 2), repeats=(2, 1), new_tokens=(96, 24))
    info = provenance()
    results = measure(options)
    print(table(results))
    info["load_average_after"] = provenance()["load_average"]
    setting = {k: v for k, v in vars(options).items() if k not in ("json", "docs")}
    save(options.json, {"machine": info, "setting": setting, "results": results})
    if options.docs is not None:
        replace_table(options.docs, table(results), "acceptance")


if __name__ == "__main__":
    main()
