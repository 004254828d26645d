"""Progress on stderr: what is being done, whenever it takes more than a moment. Works without a terminal, too."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_PATIENCE_S = 2.0
"""What takes longer than this is announced where there is no terminal to show a spinner."""


_INSIDE = {"pipespec", "pipespec_kernels", "transformers", "torch"}
"""Packages between the user's line and a warning."""


def say(message: str) -> None:
    """One line on stderr."""
    print(f"pipespec: {message}", file=sys.stderr, flush=True)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show that ``what`` is being done: a spinner on a terminal, otherwise a line once it takes more than two seconds."""
    if sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status(f"{what} ..."):
            yield
        return
    timer = threading.Timer(_PATIENCE_S, say, [f"{what} ..."])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without transformers' progress bars and remarks, which would tear a display apart."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()


def level_of_caller() -> int:
    """``stacklevel`` for a warning of our caller's that is to point at the user's line, behind us and transformers."""
    level, frame = 0, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _INSIDE:
        level, frame = level + 1, frame.f_back
    return level
