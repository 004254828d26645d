"""A chain of drafts in front of a target in stages: ahead in processes of its own against lockstep. ``python -m bench.bench_spd_union [--docs FILE]``

The bundled target in stages in one process, one thread; the chain in lockstep with it (``draft_schedule="lockstep"``), and in processes that run ahead
(``"workers"``). Calls with the same prompt alternate, and the ratio is the median over such pairs, so that other work on the machine affects both.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.harness import markdown_table, replace_table, save
from pipespec.bench.machine import provenance
from pipespec.demo import family_path, load_family, prompts
from pipespec.process.progress import quiet_transformers, say
from pipespec.spd import SpeculativePipeline

CHAINS = (("small",), ("medium",), ("small", "medium"))
SCHEDULES = ("lockstep", "workers")
HEADER = ("chain", "stages", "ahead / lockstep", "tokens/s", "accepted length", "acceptance", "equal texts")


def compare(family: Any, chain: Sequence[str], stages: int, ids: Sequence[torch.Tensor], args: Any) -> dict[str, Any]:
    """Pairs of calls of one chain."""
    drafts = [str(family_path(name)) for name in chain]
    pipes = [
        SpeculativePipeline(family.target, drafts, stages=stages, dtype=torch.float32, draft_schedule=schedule)
        for schedule in SCHEDULES
    ]
    for pipe in pipes:
        pipe.generate(ids[0], max_new_tokens=8, do_sample=False)
    found: dict[str, list[Any]] = {"ratio": [], "equal": [], "speed": [], "length": [], "acceptance": []}
    for _ in range(args.repeats):
        for prompt in ids:
            texts = [pipe.generate(prompt, max_new_tokens=args.new_tokens, do_sample=False) for pipe in pipes]
            reports = [pipe.report for pipe in pipes]
            speeds = [report.tokens_per_second for report in reports if report is not None]
            found["speed"].append(speeds)
            found["ratio"].append(speeds[1] / speeds[0])
            found["equal"].append(torch.equal(*texts))
            found["length"].append([r.equivalent_accepted_length for r in reports if r is not None])
            found["acceptance"].append([r.acceptance_rate for r in reports if r is not None])
    for pipe in pipes:
        pipe.close()
    both = {
        name: [median(pair[i] for pair in found[name]) for i in (0, 1)] for name in ("speed", "length", "acceptance")
    }
    return {"chain": list(chain), "stages": stages, "ratio": median(found["ratio"]), "pairs": len(found["ratio"])} | {
        "equal": sum(found["equal"]),
        **both,
    }


def cells(r: dict[str, Any]) -> tuple[str, ...]:
    def both(name: str, digits: int) -> str:
        lockstep, ahead = r[name]
        return f"{ahead:.{digits}f} / {lockstep:.{digits}f}"

    return (
        " + ".join(r["chain"]),
        str(r["stages"]),
        f"{r['ratio']:.2f}x",
        both("speed", 0),
        both("length", 2),
        both("acceptance", 2),
        f"{r['equal']} of {r['pairs']}",
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "bench_spd_union", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--stages", type=int, nargs="+", default=[4], metavar="N", help="stages of the target (4)")
    parser.add_argument("--prompts", type=int, default=4, metavar="P", help="held-out function heads (4)")
    parser.add_argument("--new-tokens", type=int, default=64, metavar="T", help="per call (64)")
    parser.add_argument("--repeats", type=int, default=3, metavar="R", help="pairs per prompt (3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurement there")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="rewrite the table between its two comments there")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with quiet_transformers():
        family = load_family()
        ids = [family.encode(text) for text in prompts(args.prompts)]
        rows = []
        for chain in CHAINS:
            for stages in args.stages:
                say(f"{' + '.join(chain)}, {stages} stages")
                rows.append(compare(family, chain, stages, ids, args))
    machine = provenance(1)
    text = (
        f"{markdown_table(HEADER, map(cells, rows))}\n\nAhead / lockstep. Medians over {rows[0]['pairs']} pairs of calls, {args.new_tokens} tokens each, greedy, fp32. "
        f"{machine['cpu']}, {machine['cores']} cores, shared. Load average {machine['load_average'][0]}. Measured {machine['date'][:10]}."
    )
    print(text)
    if args.docs:
        replace_table(args.docs, text, "union")
    save(args.json, {"machine": machine, "new_tokens": args.new_tokens, "repeats": args.repeats, "rows": rows})
    return 0 if all(r["equal"] == r["pairs"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
