"""Does a bfloat16 text depend on drafts, schedule and batch? ``python -m bench.bench_exact [--quick] [--json FILE]``

The bundled family in bfloat16 on held-out function heads, greedy and sampled. The text of the target alone, one prompt at a time, is compared with
those of other drafts, schedules and batches of the same prompts: once with ``exact=True``, and once with ``native=False``, where the target runs
transformers' modules. Reported per setting and form: the texts that differ, of how many, and tokens per second.

With ``--graphs`` captured steps are compared, which run uncaptured on a CPU: once with ``exact=True`` and once without, streams instead of workers.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.harness import choose_sizes, save
from pipespec import Pipeline
from pipespec.bench.contenders import Family
from pipespec.bench.machine import provenance
from pipespec.bench.timing import timed
from pipespec.demo import load_family, prompts
from pipespec.process.progress import quiet_transformers

FORMS: dict[str, dict[str, bool]] = {"exact": {"exact": True}, "transformers": {"native": False}}
CAPTURED_FORMS: dict[str, dict[str, bool]] = {"exact": {"exact": True, "graphs": True}, "usual": {"graphs": True}}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 0},
}


class Setting(NamedTuple):
    """One way to generate the texts."""

    schedule: str
    drafts: tuple[str, ...]
    batch: int

    def __str__(self) -> str:
        return f"{self.schedule}, {'+'.join(self.drafts) or 'no draft'}, batch {self.batch}"


REFERENCE = Setting("plain", (), 1)
SETTINGS = (
    Setting("plain", (), 8),
    Setting("lockstep", ("medium",), 1),
    Setting("lockstep", ("small", "medium"), 3),
    Setting("workers", ("medium",), 1),
    Setting("workers", ("small", "medium"), 5),
)


def texts_of(
    family: Family,
    setting: Setting,
    rows: Sequence[torch.Tensor],
    new_tokens: int,
    pad: int,
    **options: Any,
) -> tuple[list[list[int]], float]:
    """The new tokens of each prompt, and tokens per second. Row ``i`` is sampled with seed ``i``."""
    drafts = [family.drafts[name] for name in setting.drafts]
    form = {name: options.pop(name) for name in ("exact", "native", "graphs") if name in options}

    def batches() -> list[list[int]]:
        found: list[list[int]] = []
        for begin in range(0, len(rows), setting.batch):
            some = rows[begin : begin + setting.batch]
            width = max(map(len, some))
            ids = torch.full((len(some), width), pad)
            for row, prompt in enumerate(some):
                ids[row, width - len(prompt) :] = prompt
            mask = torch.stack([torch.arange(width) >= width - len(prompt) for prompt in some]).long()
            seeds = {"seed": list(range(begin, begin + len(some)))} if options["do_sample"] else {}
            out = pipe.generate(
                ids, attention_mask=mask, max_new_tokens=new_tokens, eos_token_id=None, **options, **seeds
            )
            found += out[:, width:].tolist()
        return found

    with Pipeline(family.target, drafts, schedule=setting.schedule, **form) as pipe:
        pipe.generate(rows[0][None], max_new_tokens=4, do_sample=False)  # packs weights and starts processes
        texts, took = timed(batches)
    return texts, sum(map(len, texts)) / took


def main() -> None:
    parser = argparse.ArgumentParser("bench_exact", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer prompts and tokens: under a minute")
    parser.add_argument("--prompts", type=int, metavar="N", help="held-out function heads (50; quick: 4)")
    parser.add_argument("--new-tokens", type=int, metavar="T", help="per prompt (64; quick: 16)")
    parser.add_argument("--graphs", action="store_true", help="compare captured steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    options = parser.parse_args()
    choose_sizes(options, prompts=(50, 4), new_tokens=(64, 16))
    forms, settings = FORMS, SETTINGS
    if options.graphs:
        forms = CAPTURED_FORMS
        settings = tuple(s._replace(schedule="streams") if s.schedule == "workers" else s for s in settings)

    with quiet_transformers():
        family = load_family(dtype=torch.bfloat16)
    pad = family.target.generation_config.pad_token_id or 0
    rows = [family.encode(text)[0] for text in prompts(options.prompts)]
    info = provenance()
    print(
        f"{info['cpu']}, {info['cores']} cores, {info['threads']} threads, torch {info['torch']}, {info['simd']}; bfloat16, {len(rows)} prompts x "
        f"{options.new_tokens} tokens"
    )
    print(f"{'':44}" + "".join(f"{form + ': differ':>21}{'tokens/s':>10}" for form in forms))
    found = []
    totals = dict.fromkeys(forms, 0)
    for sampling, arguments in SAMPLING.items():
        wanted: dict[str, list[list[int]]] = {}
        for setting in (REFERENCE, *settings):
            record: dict[str, Any] = {"sampling": sampling, "setting": str(setting), "texts": len(rows)}
            for form, keywords in forms.items():
                texts, rate = texts_of(family, setting, rows, options.new_tokens, pad, **keywords, **arguments)
                differ = sum(a != b for a, b in zip(texts, wanted.setdefault(form, texts), strict=True))
                totals[form] += differ
                record[form] = {"differ": differ, "tokens_per_second": rate}
            found.append(record)
            columns = (f"{record[form]['differ']:>21}{record[form]['tokens_per_second']:>10.0f}" for form in forms)
            print(f"{sampling + ', ' + str(setting):44}" + "".join(columns), flush=True)
    compared = len(SAMPLING) * len(settings) * len(rows)
    print(f"of {compared} texts differ: " + ", ".join(f"{form} {count}" for form, count in totals.items()))
    save(options.json, {"machine": info, "compared": compared, "differ": totals, "rows": found})


if __name__ == "__main__":
    main()
