"""What the terminal shows: progress on stderr, with and without a terminal, and tables in plain text."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self

_ANNOUNCE_AFTER_S = 2.0
"""Without a terminal there is no spinner: work that takes longer than this is announced in a line."""

_SAY_EVERY_S = 10.0
_BAR = 30
"""Characters of a bar."""


def say(message: str) -> None:
    """Print one line on stderr."""
    print(f"pipespec: {message}", file=sys.stderr, flush=True)


say_once = functools.cache(say)
"""The same, once per process for each message."""


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show ``what`` while the body runs: a spinner on a terminal, otherwise a line after two seconds."""
    if sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status(f"{what} ..."):
            yield
        return
    with announced(what):
        yield


@contextmanager
def announced(what: str) -> Iterator[None]:
    """Say ``what`` in a line if the body takes longer than two seconds. It draws nothing: a caller may have a display of its own."""
    timer = threading.Timer(_ANNOUNCE_AFTER_S, say, [f"{what} ..."])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class RemainingWork:
    """A bar of the parts of a long work, ``done`` of which were complete before, and the time that remains.

    On a terminal it is redrawn in place, otherwise it is a line every ten seconds. It draws only when it is called: a drawing thread would compete
    with measurements.
    """

    def __init__(self, total: int, done: int = 0) -> None:
        self.total, self.done, self._before = total, done, done
        self._began = self._shown = time.monotonic()
        self._live: Any = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, what: str) -> None:
        """Show what is done now."""
        left, new = "time unknown", self.done - self._before
        if new:  # from the parts that are complete since the beginning
            seconds = (time.monotonic() - self._began) / new * (self.total - self.done)
            left = f"about {readable_time(seconds)} left"
        line = f"{self.done} of {self.total} ({left}): {what}"
        if self._live is not None:
            from rich.text import Text

            filled = round(_BAR * self.done / max(1, self.total))
            self._live.update(Text(f"[{'#' * filled}{'.' * (_BAR - filled)}] {line}"), refresh=True)
        elif time.monotonic() - self._shown > _SAY_EVERY_S:
            say(line)
            self._shown = time.monotonic()


_LONG_PROMPT = 512
"""Tokens to read from which on a terminal shows how many are read."""

Reading = Callable[[int, int, bool], None]

_reading: ContextVar[Reading | None] = ContextVar("_reading", default=None)


def note_reading(done: int, total: int, is_target: bool = True) -> None:
    """So many tokens of the prompts of a call are read, of those that a model reads: the target, or a draft. Within :func:`reading_noted` it is called."""
    if (note := _reading.get()) is not None:
        note(done, total, is_target)


@contextmanager
def reading_noted(note: Reading) -> Iterator[None]:
    """Around a call: ``note`` is called with the arguments of :func:`note_reading` before the first chunk of a prompt and after each one. What it raises while
    the target reads ends the call."""
    token = _reading.set(note)
    try:
        yield
    finally:
        _reading.reset(token)


@contextmanager
def reading_shown() -> Iterator[None]:
    """Show on a terminal how much of a long prompt is read, in a line that goes with its last token."""
    if not sys.stderr.isatty():
        yield
        return

    def show(done: int, total: int, is_target: bool) -> None:
        if is_target and total >= _LONG_PROMPT:
            line = "" if done >= total else f"pipespec: reading the prompt: {done:,} of {total:,} tokens"
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()

    try:
        with reading_noted(show):
            yield
    finally:
        show(_LONG_PROMPT, _LONG_PROMPT, True)


def readable_time(seconds: float) -> str:
    """``"40 s"``, ``"12 min"``, ``"3.4 h"``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Disable transformers' progress bars and messages within, since they would break a display."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()


def aligned(lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """Lines of cells in columns: the first ``left`` columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
