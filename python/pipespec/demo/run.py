"""``pipespec demo``: the pipeline's text as it is committed, then a table of speeds."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pipespec.api.base import BasePipeline
from pipespec.bench.comparison import HEADER, Measurement, SpeedComparison, cells, footnotes
from pipespec.bench.contenders import Family, PipelineContender, Workload, standard_contenders
from pipespec.bench.machine import describe, provenance
from pipespec.demo import load_family, prompts
from pipespec.observe.text import TextStream
from pipespec.process.progress import quiet_transformers, say, working
from pipespec.process.table import aligned

_REPORT_EVERY_S = 5.0
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
    with quiet_transformers(), _Display(console) as display:
        with working("loading the models"):
            family = load_family(folder)
        new_tokens = min(size.new_tokens, family.most_new_tokens(measured + calibration))
        texts, others = ([family.encode(text) for text in group] for group in (measured, calibration))
        threads = len(os.sched_getaffinity(0))
        workload = Workload(family, new_tokens, max(ids.shape[1] for ids in texts + others), threads)
        contenders = standard_contenders(list(family.drafts))
        with SpeedComparison(workload, contenders, progress=display.progress) as comparison:
            torch.set_num_threads(threads)
            first = contenders[-1]
            with working("starting a worker process for each draft"):
                comparison.start(others[0], first.key)
            if isinstance(first, PipelineContender) and first.pipe is not None and first in comparison.active:
                sizes = ", ".join(f"{model.num_parameters() / 1e6:.1f} M" for model in family.models.values())
                title = f"three models at once ({sizes} parameters), one text"
                most = min(2 * new_tokens, family.most_new_tokens(measured[:1]))
                stream_text(console, family, first.pipe, measured[0], most, title)
            display.start()
            comparison.start(others[0])
            comparison.tune(others, size.settings)
            for _ in comparison.measure(texts, size.repeats):
                display.show(comparison.results())
            results = comparison.results()
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


class _Display:
    """The table so far: updated in place on a terminal, otherwise printed at the end, with progress on stderr.

    Nothing is drawn while a row runs, since a drawing thread would compete for its cores.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._results: Sequence[Measurement] = ()
        self._status = ""
        self._said = 0.0

    def __enter__(self) -> _Display:
        return self

    def start(self) -> None:
        """Begin to draw: the table occupies the terminal's last lines from now on."""
        if self._live:
            self._live.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._status = ""
        if self._live and self._live.is_started:
            self._draw()
            self._live.stop()
        elif self._results:
            sys.stdout.write(aligned([HEADER, *map(cells, self._results)]) + "\n")

    def progress(self, what: str, done: int, total: int) -> None:
        self._status = f"{what} ({done + 1} of {total})"
        if self._live:
            self._draw()
        elif time.monotonic() - self._said > _REPORT_EVERY_S:
            say(self._status)
            self._said = time.monotonic()

    def show(self, results: Sequence[Measurement]) -> None:
        self._results = results
        self._draw()

    def _draw(self) -> None:
        if not self._live:
            return
        table = Table(*HEADER, caption=self._status or None, caption_justify="left")
        for column in table.columns[1:]:
            column.justify = "right"
        for result in self._results:
            style = "bold" if result.acceptance_rate else None
            table.add_row(*cells(result), style=style if result.is_identical else "red")
        self._live.update(table if self._results else Text(self._status), refresh=True)
