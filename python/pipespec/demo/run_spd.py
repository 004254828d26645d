"""``pipespec demo --system spd``: one model in stages and its draft module; the text as it is verified, then a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from transformers import AutoTokenizer

from pipespec.api.pipeline import Pipeline
from pipespec.bench.contenders import Family
from pipespec.bench.machine import describe, provenance
from pipespec.demo import draft_module_path, family_path, prompts
from pipespec.demo.run import DemoSize, stream_text
from pipespec.models.loading import load_model
from pipespec.process.progress import quiet_transformers, say, working
from pipespec.process.table import aligned
from pipespec.registry import PLAIN
from pipespec.spd import SpeculativePipeline
from pipespec.spd.draft_module import DraftModuleConfig
from pipespec.spd.report import SpeculativeReport

HEADER = (
    "prompt", "tokens", "cycles", "accepted drafts", "flushes", "equivalent accepted length", "stages at once", "one after the other",
    "identical text",
)  # fmt: skip


@dataclass(frozen=True)
class PromptFigures:
    """One prompt: the report of each repeat, seconds of plain decoding of each repeat, and whether every text was ``generate()``'s."""

    reports: Sequence[SpeculativeReport]
    plain: Sequence[float]
    identical: bool


def cells(name: str, lines: Sequence[PromptFigures]) -> tuple[str, ...]:
    """The sum of ``lines`` under :data:`HEADER`. Speeds are medians over the repeats, relative to the plain call of the same repeat."""
    first = [line.reports[0] for line in lines]
    cycles = sum(r.cycles for r in first)
    length = len(first[0].partition) * sum(r.verified for r in first) / cycles if cycles else float("nan")
    repeats = range(len(lines[0].plain))
    plain = [sum(line.plain[i] for line in lines) for i in repeats]
    wall = [sum(line.reports[i].seconds for line in lines) for i in repeats]
    parallel = [sum(line.reports[i].parallel_seconds for line in lines) for i in repeats]
    return (
        name,
        str(sum(r.tokens for r in first)),
        str(cycles),
        f"{sum(r.accepted for r in first)} of {sum(r.checked for r in first)}",
        str(sum(r.flushes for r in first)),
        f"{length:.2f}",
        *(f"{median(p / s for p, s in zip(plain, seconds, strict=True)):.2f}x" for seconds in (parallel, wall)),
        "yes" if all(line.identical for line in lines) else "NO",
    )


def run_spd_demo(size: DemoSize, prompt: str | None = None, folder: Path | None = None) -> bool:
    """Show the demo on stdout, its progress on stderr.

    Args:
        size: How much to measure.
        prompt: Stream and measure this text; default: function heads of the standard library.
        folder: Another ``target/`` with its ``module/``.

    Returns:
        Whether every text was the one of ``generate()``.
    """
    console = Console(highlight=False, soft_wrap=True)
    with quiet_transformers():
        with working("loading the model"):
            path = folder / "target" if folder else family_path("target")
            module = folder / "module" if folder else draft_module_path()
            config = DraftModuleConfig.load(module)
            family = Family("", load_model(path, dtype=torch.float32), {}, AutoTokenizer.from_pretrained(path))
            pipe = SpeculativePipeline(family.target, module, stages=[end - begin for begin, end in config.stages])
        plain = Pipeline(family.target, schedule=PLAIN.name)
        with working("reading the held-out modules of the standard library"):
            texts = [prompt] if prompt else prompts(size.prompts)
        new_tokens = min(size.new_tokens, family.most_new_tokens(texts))
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # one core per stage
        try:
            title = f"one model in {config.n} stages, a token in flight in each, a draft module beside them"
            most = min(2 * new_tokens, family.most_new_tokens(texts[:1]))
            stream_text(console, family, pipe, texts[0], most, title)
            lines = []
            for i, text in enumerate(texts):
                say(f"measuring: prompt {i + 1} of {len(texts)}")
                lines.append(_measure(family, pipe, plain, family.encode(text), new_tokens, size.repeats))
        finally:
            torch.set_num_threads(threads)
    rows = [cells(str(i + 1), [line]) for i, line in enumerate(lines)]
    console.print(aligned([HEADER, *rows, cells("all", lines)]), markup=False)
    console.print(
        f"Speeds relative to our own plain decoding, medians over repeats: {size.repeats}. Stages at once: computed from the measured times of drafter "
        "and stages, as if each ran on a core of its own, without transfers. One after the other: the time measured here, where the stages take turns "
        f"and every cycle reads all weights. {describe(provenance(1))}, fp32.",
        markup=False,
    )
    if not all(line.identical for line in lines):
        console.print("NOT every text was generate()'s: this is a bug, please report it.", style="bold red")
        return False
    console.print("Every text was generate()'s, token for token.", markup=False)
    return True


def _measure(
    family: Family, pipe: SpeculativePipeline, plain: Pipeline, ids: torch.Tensor, new_tokens: int, repeats: int
) -> PromptFigures:
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False}
    text = family.target.generate(ids, attention_mask=torch.ones_like(ids), **options)
    reports, seconds, identical = [], [], True
    for _ in range(repeats):
        plain.generate(ids, **options)
        identical &= torch.equal(pipe.generate(ids, **options), text)
        assert plain.report is not None
        assert pipe.report is not None
        seconds.append(plain.report.seconds)
        reports.append(pipe.report)
    return PromptFigures(reports, seconds, identical)
