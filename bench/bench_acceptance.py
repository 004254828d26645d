"""What each rule of acceptance accepts: ``python -m bench.bench_acceptance [--quick] [--json FILE] [--docs FILE]``

The bundled family on held-out function heads, one at a time, one draft, in lockstep: coupled sampling and rejection sampling at
three temperatures. Rules take turns prompt by prompt, so that other load on the machine affects them alike. Acceptance is a count and exact for these
seeds; tokens/s depends on the load of the machine during the run.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import torch

from bench.harness import choose_sizes, markdown_table, replace_table, save
from pipespec.bench.comparison import SpeedComparison
from pipespec.bench.contenders import PipelineContender, Workload
from pipespec.bench.machine import provenance
from pipespec.config import ACCEPTANCES
from pipespec.demo import load_family, prompts
from pipespec.process.progress import quiet_transformers

TEMPERATURES = (0.5, 0.8, 1.0)
DRAFTS = ("small", "medium")


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    names = DRAFTS[-1:] if options.quick else DRAFTS
    with quiet_transformers():
        family = load_family()
    texts = [family.encode(text) for text in prompts(options.prompts)]
    found = []
    for temperature in TEMPERATURES:
        sampling = {"do_sample": True, "top_k": 0, "temperature": temperature, "eos_token_id": None}
        longest = max(ids.shape[1] for ids in texts)
        workload = Workload(family, options.new_tokens, longest, torch.get_num_threads(), sampling)
        rows: dict[str, tuple[str, str]] = {"alone": ("none", "alone")}
        contenders = [PipelineContender("alone", "the target alone", "plain")]
        for name, rule in itertools.product(names, ACCEPTANCES):
            key = f"{name}, {rule}"
            rows[key] = name, rule
            settings = {"lookahead": options.lookahead, "acceptance": rule}
            contenders.append(PipelineContender(key, key, "lockstep", [name], **settings))
        with SpeedComparison(workload, contenders) as comparison:
            comparison.start(texts[0])
            for _ in comparison.measure(texts, options.repeats):
                pass
            for row in comparison.results():
                if row.reason is not None:
                    raise RuntimeError(f"{row.label}: {row.reason}")
                draft, rule = rows[row.key]
                found.append(
                    {
                        "draft": draft,
                        "rule": rule,
                        "temperature": temperature,
                        "acceptance_rate": row.acceptance_rate.get("target"),
                        "tokens_per_verification": row.accepted_length.get("target"),
                        "tokens_per_second": row.tokens_per_second,
                        "tokens": sum(len(text.tokens) for text in comparison.runs[row.key].values()),
                    }
                )
    return found


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
    setting = {k: v for k, v in vars(options).items() if k not in ("json", "docs")}
    save(options.json, {"machine": info, "setting": setting, "results": results})
    if options.docs is not None:
        replace_table(options.docs, table(results), "acceptance")


if __name__ == "__main__":
    main()
