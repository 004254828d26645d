"""Errors of the caller's signal handlers. They end the call, whatever they interrupted."""

from __future__ import annotations

import inspect
import signal
import sys
from contextlib import suppress
from itertools import pairwise
from types import CodeType, FrameType, TracebackType


def from_handler(error: BaseException) -> bool:
    """Whether a signal handler raised ``error``, or an error that led to it.

    Python calls a handler with the signal's number and the frame that it interrupts. So a frame of a traceback is that of a handler if these
    two are among its arguments, and the frame before it is the interrupted one. A handler that drops or replaces an argument is known by its code, as
    long as it is installed.

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
    before, installed = None, _installed()
    while trace is not None:
        if before is not None and (
            trace.tb_frame.f_code in installed
            or any(
                value is before and isinstance(number, int) and number in signal.valid_signals()
                for number, value in pairwise(_arguments(trace.tb_frame))
            )
        ):
            return True
        before, trace = trace.tb_frame, trace.tb_next
    return False


def _installed() -> set[CodeType]:
    """The code of the present handlers that are functions or methods."""
    handlers = map(signal.getsignal, signal.valid_signals())
    codes = (getattr(handler, "__code__", None) for handler in handlers)
    return {code for code in codes if code is not None}


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
