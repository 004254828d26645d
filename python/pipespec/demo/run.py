"""``pipespec demo``: the pipeline's text as it comes, then the table of who is how fast."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pipespec.demo import prompts
from pipespec.demo.comparison import (
    HEADER,
    Comparison,
    Family,
    Result,
    cells,
    describe,
    footnotes,
    format_table,
    machine,
)
from pipespec.observe.text import TextStream
from pipespec.pipeline import Pipeline
from pipespec.progress import quiet_transformers, say, working

_REPORT_EVERY_S = 5.0
_CALIBRATION = 2


@dataclass(frozen=True)
class Size:
    """How much the demo does: about a minute and a half on two cores, or a few seconds' worth of measuring."""

    prompts: int
    new_tokens: int
    repeats: int
    settings: int | None


FULL = Size(prompts=4, new_tokens=64, repeats=3, settings=None)
QUICK = Size(prompts=2, new_tokens=24, repeats=1, settings=1)


def run_demo(size: Size, prompt: str | None = None, folder: Path | None = None) -> bool:
    """Show the demo on stdout, its progress on stderr; True if every row's text was identical to ``generate()``'s.

    ``prompt``: stream and measure this text, not function heads of the standard library. ``folder``: another family.
    """
    with working("reading the standard library's held-out modules"):
        held_out = prompts((1 if prompt else size.prompts) + _CALIBRATION)
    measured, calibration = held_out[:-_CALIBRATION], held_out[-_CALIBRATION:]
    if prompt:
        measured = [prompt]
    console = Console(highlight=False, soft_wrap=True)
    with quiet_transformers(), _Display(console) as display:
        with working("loading the models"):
            family = Family.load(folder)
        new_tokens = min(size.new_tokens, family.room(measured + calibration))
        with Comparison(family, measured, new_tokens, progress=display.progress) as comparison:
            with working("starting a worker process for each draft"):
                pipe = comparison.pipeline("workers-3")
            _stream(console, family, pipe, measured[0], min(2 * new_tokens, family.room(measured[:1])))
            display.start()
            comparison.start()
            comparison.tune(calibration, size.settings)
            comparison.warm_up()
            results: list[Result] = []
            for results in comparison.measure(size.repeats):
                display.show(results)
            hardware = describe(machine() | {"threads": comparison.threads})
    for line in footnotes(results):
        console.print(line, markup=False)
    console.print(
        f"Medians over repeats: {size.repeats}; prompts: {len(measured)}; up to {new_tokens} tokens each. {hardware}.",
        markup=False,
    )
    if not all(result.is_identical for result in results):
        console.print("NOT every row generated the same text: this is a bug, please report it.", style="bold red")
        return False
    best = max((r for r in results if r.acceptance_rate), key=lambda r: r.tokens_per_second)
    console.print(
        f"Every row generated the same text, token for token. Ours at its best: {best.label}, "
        f"{best.ratio_to_plain:.2f} times generate().",
        markup=False,
    )
    return True


def _stream(console: Console, family: Family, pipe: Pipeline, prompt: str, new_tokens: int) -> None:
    """Generate for one prompt, showing the text as it is committed."""

    def write(text: str, drafted: bool) -> None:
        console.print(Text(text, style="green" if drafted else "bold yellow"), end="")

    stream = TextStream(lambda tokens: family.tokenizer.decode(tokens, skip_special_tokens=True), write)
    ids = family.encode(prompt)
    pipe.generate(ids, max_new_tokens=1, do_sample=False)  # the first call is slow; do not show that one
    sizes = ", ".join(f"{count / 1e6:.1f} M" for count in family.parameters().values())
    console.rule(f"three models at once ({sizes} parameters), one text")
    console.print(Text("drafted and accepted", style="green"), "/", Text("the target's own", style="bold yellow"))
    console.print()
    console.print(Text(prompt, style="dim"), end="")
    pipe.generate(ids, max_new_tokens=new_tokens, do_sample=False, streamer=stream)
    console.print("\n")
    console.print(str(pipe.report), markup=False)
    console.rule()


class _Display:
    """The table, growing: in place on a terminal, otherwise progress on stderr and the table once at the end.

    Nothing is drawn while a row runs: a drawing thread would take its core from what is measured.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._results: Sequence[Result] = ()
        self._status = ""
        self._said = 0.0

    def __enter__(self) -> _Display:
        return self

    def start(self) -> None:
        """From here on the terminal's last lines are the table's."""
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
            sys.stdout.write(format_table(self._results) + "\n")

    def progress(self, what: str, done: int, total: int) -> None:
        self._status = f"{what} ({done + 1} of {total})"
        if self._live:
            self._draw()
        elif time.monotonic() - self._said > _REPORT_EVERY_S:
            say(self._status)
            self._said = time.monotonic()

    def show(self, results: Sequence[Result]) -> None:
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
