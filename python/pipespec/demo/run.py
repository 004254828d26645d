"""``pipespec demo``: the pipeline's text as it is committed, then a table of speeds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from pipespec.api.base import BasePipeline
from pipespec.api.text_stream import TextStream
from pipespec.bench.comparison import HEADER, IsolatedComparison, cells, footnotes
from pipespec.bench.contenders import Family, PipelineContender, Workload, standard_contenders
from pipespec.bench.machine import describe, provenance
from pipespec.demo import load_family, prompts
from pipespec.process.progress import RemainingWork, quiet_transformers, working
from pipespec.process.table import aligned

_CALIBRATION = 2


@dataclass(frozen=True)
class DemoSize:
    """How much the demo measures; ``settings``: candidates tried of each row that is tuned."""

    prompts: int
    new_tokens: int
    repeats: int
    settings: int


FULL = DemoSize(prompts=4, new_tokens=64, repeats=3, settings=8)
"""About a minute and a half on two cores."""

QUICK = DemoSize(prompts=2, new_tokens=24, repeats=1, settings=1)


def run_demo(size: DemoSize, prompt: str | None = None, folder: Path | None = None) -> bool:
    """Show the demo on stdout, its progress on stderr.

    Args:
        size: How much to measure.
        prompt: Stream and measure this text; default: function heads of the standard library.
        folder: Another family than the bundled one.

    Returns:
        Whether every row ran and its text was the one of ``generate()``.
    """
    with working("reading the held-out modules of the standard library"):
        held_out = prompts((1 if prompt else size.prompts) + _CALIBRATION)
    measured, calibration = held_out[:-_CALIBRATION], held_out[-_CALIBRATION:]
    if prompt:
        measured = [prompt]
    console = Console(highlight=False, soft_wrap=True)
    with quiet_transformers():
        with working("loading the models"):
            family = load_family(folder)
        new_tokens = min(size.new_tokens, family.most_new_tokens(measured + calibration))
        texts, others = ([family.encode(text) for text in group] for group in (measured, calibration))
        threads = len(os.sched_getaffinity(0))
        workload = Workload(family, new_tokens, max(ids.shape[1] for ids in texts + others), threads)
        contenders = standard_contenders(list(family.drafts))
        with IsolatedComparison(workload, contenders) as comparison:
            torch.set_num_threads(threads)
            first = contenders[-1]
            with working("starting a worker process for each draft"):
                comparison.start(others[0], first.key)
            if isinstance(first, PipelineContender) and first.pipe is not None and first in comparison.active:
                sizes = ", ".join(f"{model.num_parameters() / 1e6:.1f} M" for model in family.models.values())
                title = f"three models at once ({sizes} parameters), one text"
                most = min(2 * new_tokens, family.most_new_tokens(measured[:1]))
                stream_text(console, family, first.pipe, measured[0], most, title)
            with _shown(comparison):
                comparison.start(others[0])
            with _shown(comparison):
                comparison.tune(others, size.settings)
            try:
                with _shown(comparison):
                    for _ in comparison.measure(texts, size.repeats):
                        pass
            finally:
                results = comparison.results()
                console.print(aligned([HEADER, *map(cells, results)]), markup=False)
    for line in footnotes(results):
        console.print(line, markup=False)
    console.print(
        f"Medians over repeats: {size.repeats}; prompts: {len(measured)}; up to {new_tokens} tokens each. "
        f"{describe(provenance(threads))}, fp32.",
        markup=False,
    )
    if any(result.reason for result in results):
        console.print("NOT every row ran: this is a bug, please report it.", style="bold red")
        return False
    if not all(result.is_identical for result in results):
        console.print("NOT every row generated the same text: this is a bug, please report it.", style="bold red")
        return False
    # On a slow machine the drafts of a short text may all rest.
    drafting = [result for result in results if result.acceptance_rate]
    fastest = "No row of pipespec had a draft token accepted: the texts are too short."
    if drafting:
        best = max(drafting, key=lambda result: result.tokens_per_second or 0.0)
        fastest = f"Fastest row of pipespec: {best.label}, {best.vs_plain:.2f} times generate()."
    console.print(f"Every row generated the same text, token for token. {fastest}", markup=False)
    return True


def stream_text(console: Console, family: Family, pipe: BasePipeline, prompt: str, new_tokens: int, title: str) -> None:
    """Generate for one prompt, showing the text as it is committed, in two colours, for accepted and for own tokens."""
    drafted_style, own_style = "green", "bold yellow"

    def write(text: str, drafted: bool) -> None:
        console.print(Text(text, style=drafted_style if drafted else own_style), end="")

    stream = TextStream(lambda tokens: family.tokenizer.decode(tokens, skip_special_tokens=True), write)
    ids = family.encode(prompt)
    pipe.generate(ids, max_new_tokens=1, do_sample=False)  # the first call is slow
    console.rule(title)
    console.print(Text("drafted and accepted", style=drafted_style), "/", Text("the target's own", style=own_style))
    console.print()
    console.print(Text(prompt, style="dim"), end="")
    pipe.generate(ids, max_new_tokens=new_tokens, do_sample=False, streamer=stream)
    console.print("\n")
    console.print(str(pipe.report), markup=False)
    console.rule()


@contextmanager
def _shown(comparison: IsolatedComparison) -> Iterator[None]:
    """Show on stderr how far the body's part of a comparison is."""
    with RemainingWork(1) as bar:

        def progress(what: str, done: int, total: int) -> None:
            bar.done, bar.total = done, total
            bar.show(what)

        comparison.progress = progress
        yield
