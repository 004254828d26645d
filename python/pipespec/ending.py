"""The end of a program while one of its daemon threads generates: the call ends, and its thread stands still.

Before Python 3.14 a daemon thread that comes back to the interpreter while that is being torn down is unwound by ``pthread_exit``. Forwards come back
from C++ that lets nothing pass: the program would abort, as it does under transformers' own ``generate()``.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_STILL_S = 1.0
"""By then the interpreter is gone, or somebody waits for the thread to end."""
_PATIENCE_S = 10.0
"""A call ends behind the step that it is in. One that takes longer than this is left to its fate."""


class Ending(BaseException):
    """The program ends. For what cleans up behind a call; its caller does not see it."""


class _Calls:
    """Those that run."""

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.changed = threading.Condition()
        self.ended_by: int | None = None  # thread that ends the program

    def are_over(self) -> bool:
        """Whether the program ends, and not by this thread: that one's other handlers may generate."""
        return self.ended_by is not None and self.ended_by != threading.get_ident()

    def end(self) -> None:
        self.ended_by = threading.get_ident()
        with self.changed:
            self.changed.wait_for(lambda: not self.threads, _PATIENCE_S)


_calls = _Calls()


@functools.cache  # late: what is registered last runs first, and worker processes should not go before
def _register() -> None:
    atexit.register(lambda: _calls.end())
    os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    """In the child of a fork, which has none of the threads."""
    global _calls
    _calls = _Calls()


@contextmanager
def call() -> Iterator[None]:
    """Around a call of ``generate()``. When the program ends, its thread stands still here, and then ends."""
    _register()
    calls, thread = _calls, threading.get_ident()
    if thread in calls.threads:  # from inside of a call of another pipeline
        yield
        return
    with calls.changed:
        calls.threads.add(thread)
    try:
        yield
    finally:
        with calls.changed:
            calls.threads.discard(thread)
            calls.changed.notify_all()
        if calls.are_over():
            threading.Event().wait(_STILL_S)
            raise SystemExit  # itself: a thread ends of it without a word


def check() -> None:
    """Raises :class:`Ending` where the program ends. Between steps."""
    if _calls.are_over():
        raise Ending
