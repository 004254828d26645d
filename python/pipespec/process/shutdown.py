"""The end of a program while a daemon thread generates: the call ends, and its thread waits for the end of the process.

Before Python 3.14, a daemon thread that returns to the interpreter during its shutdown is unwound by ``pthread_exit``. Forwards return from
C++ frames that do not allow that, and the program would abort, as it does under transformers' own ``generate()``.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_HOLD_S = 1.0
"""A thread whose call was ended waits this long: by then the interpreter is gone, or another thread joins this one."""

_CALLS_TIMEOUT_S = 10.0
"""A call ends after its present step. The shutdown waits at most this long for all calls."""

_POLL_S = 0.005
"""Poll interval of the shutdown."""

_calling: set[int] = set()
"""Threads that are in a call. Without a lock: additions and removals are atomic, and a signal handler's error cannot come between a lock and its release."""

_ended_by: int | None = None
"""The thread that ends the program. It may generate itself, in its exit handlers."""


class ProgramEnds(BaseException):
    """Raised at the end of the program. It unwinds a call with its cleanup, and does not reach the caller."""


def _is_over() -> bool:
    return _ended_by is not None and _ended_by != threading.get_ident()


def _end() -> None:
    global _ended_by
    _ended_by = threading.get_ident()
    deadline = time.monotonic() + _CALLS_TIMEOUT_S
    while _calling and time.monotonic() < deadline:
        time.sleep(_POLL_S)


# Registered with the first call, not on import: handlers run in reverse order, and worker processes must end after this one.
@functools.cache
def _register() -> None:
    atexit.register(_end)
    os.register_at_fork(after_in_child=_reset)


def _reset() -> None:
    """For the child of a fork, which has none of the threads."""
    global _ended_by
    _ended_by = None
    _calling.clear()


@contextmanager
def call() -> Iterator[None]:
    """Surround a call of ``generate()``. When the program ends, the thread waits on exit from here, and then ends.

    Raises:
        SystemExit: in a thread whose call was ended.
    """
    _register()
    thread = threading.get_ident()
    # A call inside a call of another pipeline.
    if thread in _calling:
        yield
        return
    try:
        _calling.add(thread)
        yield
    finally:
        _calling.discard(thread)
        if _is_over():
            threading.Event().wait(_HOLD_S)
            # The exception itself: threading ends a thread that raises it without a message.
            raise SystemExit


def check() -> None:
    """Check for the end of the program, between steps.

    Raises:
        ProgramEnds: the program ends.
    """
    if _is_over():
        raise ProgramEnds
