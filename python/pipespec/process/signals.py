"""The caller's signal handlers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

_NUMBERS = [int(number) for number in signal.valid_signals()]

_raised: list[BaseException] = []
"""What handlers raised in the present call, in the main thread."""


@contextmanager
def handlers_watched() -> Iterator[None]:
    """Around a call: record what the caller's signal handlers raise, so that it does not count as the failure of a draft.

    Python runs handlers in the main thread, between any two instructions. ``KeyboardInterrupt`` is no ``Exception`` and needs no record, so
    Python's own handler of Ctrl-C stays in place.
    """
    global _raised
    handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
    if threading.current_thread() is threading.main_thread():
        found = ((number, signal.getsignal(number)) for number in _NUMBERS)
        handlers = {n: h for n, h in found if callable(h) and h is not signal.default_int_handler}

    def handle(number: int, frame: FrameType | None) -> Any:
        try:
            return handlers[number](number, frame)
        except BaseException as error:
            _raised.append(error)
            raise

    if not handlers:
        yield
        return
    before, _raised = _raised, []  # a call inside of a call of another pipeline
    try:
        for number in handlers:
            signal.signal(number, handle)
        yield
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) is handle:  # else code of the caller has set another one meanwhile
                signal.signal(number, handler)
        _raised = before


def raise_handlers_error() -> None:
    """Raise what a signal handler of the caller raised in this call, if one did: it ends the call, whatever caught it."""
    if _raised and threading.current_thread() is threading.main_thread():
        raise _raised[0]


def is_handlers_error(error: BaseException) -> bool:
    """Whether a signal handler of the caller raised an error in this call."""
    return any(error is raised for raised in _raised)


class draft_errors:
    """Around what a draft computes: hand its error to ``failed``. A signal handler's error is the caller's, and passes."""

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._failed = failed

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        raise_handlers_error()
        self._failed(error)
        return True


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
                if number not in self._came:
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

    def __exit__(self, *error: object) -> None:
        self._delays -= 1
        if not self._delays:
            self._run_handlers()

    def _run_handlers(self) -> None:
        try:
            while self._came:
                signal.raise_signal(self._came.pop(0))
        finally:
            if self._came:  # a handler has raised an error; the others run all the same, as Python has it
                self._run_handlers()
