"""Progress on stderr, with and without a terminal."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_ANNOUNCE_AFTER_S = 2.0
"""Without a terminal there is no spinner: work that takes longer than this is announced in a line."""


def say(message: str) -> None:
    """Print one line on stderr."""
    print(f"pipespec: {message}", file=sys.stderr, flush=True)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show ``what`` while the body runs: a spinner on a terminal, otherwise a line after two seconds."""
    if sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status(f"{what} ..."):
            yield
        return
    timer = threading.Timer(_ANNOUNCE_AFTER_S, say, [f"{what} ..."])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


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
