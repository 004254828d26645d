"""Errors of the caller's signal handlers. They end the call, whatever they interrupted."""

from __future__ import annotations

import inspect
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any


def from_handler(error: BaseException) -> bool:
    """Whether a signal handler raised ``error``, or an error that led to it.

    Python calls a handler with the signal's number and the frame that it interrupts. So a frame of a traceback is that of a handler if these
    two are among its arguments, and the frame before it is the interrupted one.

    Python sets an error that is being handled as the context of a new one, even if the two are unrelated. A caller that tries again within ``except``
    is still handling the first error: a running frame has caught it.
    """
    running: list[FrameType | None] = [sys._getframe()]
    while running[-1] is not None:
        running.append(running[-1].f_back)
    chain: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and not any(found is e for e in chain):
        chain.append(found)
        found = found.__cause__ or _led_to(found, running)
    return any(_passed_a_handler(e.__traceback__) for e in chain)


def _led_to(error: BaseException, running: list[FrameType | None]) -> BaseException | None:
    """The context of ``error``, unless one of the frames ``running`` has caught it."""
    context = error.__context__
    if context is None or context.__traceback__ is None:
        return context
    # A traceback begins at the frame that caught the error.
    caught_in = context.__traceback__.tb_frame
    return None if any(frame is caught_in for frame in running) else context


def _passed_a_handler(trace: TracebackType | None) -> bool:
    before = None
    while trace is not None:
        if before is not None and any(
            value is before and isinstance(number, int) and number in signal.valid_signals()
            for number, value in pairwise(_arguments(trace.tb_frame))
        ):
            return True
        before, trace = trace.tb_frame, trace.tb_next
    return False


def _arguments(frame: FrameType) -> list[object]:
    names, more, _, values = inspect.getargvalues(frame)
    return [*(values.get(name) for name in names), *(values.get(more) or () if more else ())]


def pass_on(error: BaseException) -> None:
    """Raise ``error`` if a signal handler raised it: it is not the error of what was running."""
    if from_handler(error):
        raise error


class suppressed(suppress):
    """Like ``contextlib.suppress``, except that errors of a signal handler pass."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return not (error is not None and from_handler(error)) and super().__exit__(kind, error, trace)


class DelayedHandlers:
    """Delays the caller's signal handlers, Ctrl-C above all. Their errors may come between any two instructions: a message whose bookkeeping is incomplete
    would be confused with a later one, and a lock of the standard library that is held would not be released.

    Around a call (``with delayed.handled()``) it takes the place of the handlers. Within, ``with delayed:`` delays them until the end of
    the block. That costs two stores, where a change of the handlers for each message would cost more than the rest of its bookkeeping.
    """

    def __init__(self) -> None:
        self._delays = 0  # blocks that the thread is in
        self._came: list[int] = []

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Take over the handlers in Python for the block, where they interrupt this thread."""
        found: dict[int, Callable[[int, FrameType | None], Any]] = {}
        if threading.current_thread() is threading.main_thread():
            found = {int(s): h for s in signal.valid_signals() if callable(h := signal.getsignal(s))}

        def handle(number: int, frame: FrameType | None) -> None:
            if self._delays:
                self._came.append(number)
            else:
                found[number](number, frame)

        self._came.clear()
        try:
            for number in found:
                signal.signal(number, handle)
            yield
        finally:
            for number, handler in found.items():
                if signal.getsignal(number) is handle:  # else the caller's code has set another one meanwhile
                    signal.signal(number, handler)

    def __enter__(self) -> None:
        self._delays += 1

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._delays -= 1
        if self._came and not self._delays:
            came = list(dict.fromkeys(self._came))
            self._came.clear()
            for number in came:
                if kind is None or number != signal.SIGINT:
                    signal.raise_signal(number)


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process. False where ``/proc`` does not tell."""
    try:
        # Behind the name of the program, which may contain anything.
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].startswith(b"T")
    except OSError:
        return False


STOPPED_S = 2.0
"""A process that is stopped (SIGSTOP) for so long while something waits for it counts as lost."""


class StopWatch:
    """Looks for how long a process has been stopped."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._since: float | None = None  # when it was first seen stopped

    def look_again(self) -> None:
        """Forget what was seen. Since then it may have run."""
        self._since = None

    def has_stopped_for(self, seconds: float) -> bool:
        """Whether it is stopped, and was at each look of the last ``seconds``."""
        if not is_stopped(self._pid):
            self._since = None
            return False
        now = time.monotonic()
        self._since = self._since or now
        return now - self._since > seconds
