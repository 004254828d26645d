"""Threads, signals and the end of the program: what concerns the whole process while calls run.

Locks survive a fork, whose child has none of the other threads of its parent, one of which may have held the lock. torch's number of threads is one setting
of the whole process, which concurrent calls lower for a while. A call ends from outside by an error of the caller's signal handlers, or with the program while a
daemon thread generates.

Before Python 3.14, a daemon thread that returns to the interpreter during its shutdown is unwound by ``pthread_exit``. Forwards return from
C++ frames that do not allow that, and the program would abort, as it does under transformers' own ``generate()``. So the call ends, and its thread
waits for the end of the process.
"""

from __future__ import annotations

import atexit
import functools
import os
import signal
import threading
import time
import weakref
from _thread import RLock
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from enum import Enum
from types import FrameType, TracebackType
from typing import Any, ClassVar

import torch


class Lock(RLock):  # type: ignore[misc]  # final in typeshed only
    """A reentrant lock. The child of a fork has it free, unless the thread that forked holds it.

    ``with`` runs in C. In Python, the error of a signal handler could come between the acquisition and the block, and nothing would release it.
    """

    _all: ClassVar[weakref.WeakSet[Lock]] = weakref.WeakSet()

    def __init__(self) -> None:
        super().__init__()
        self._all.add(self)

    @contextmanager
    def attempt(self) -> Iterator[bool]:
        """Hold the lock within the block if it is free, and say whether it was. It is not free for the thread that holds it either.

        The error of a signal handler may come after any instruction, so the end asks the lock itself whether it is held.
        """
        if self._is_owned():  # type: ignore[attr-defined]
            yield False
            return
        try:
            yield self.acquire(blocking=False)
        finally:
            if self._is_owned():  # type: ignore[attr-defined]
                self.release()

    @classmethod
    def _renew(cls) -> None:
        for lock in cls._all:
            # This thread can take and release its own lock again. Another thread's lock will never be released.
            if lock.acquire(blocking=False):
                lock.release()
            else:
                lock._at_fork_reinit()  # type: ignore[attr-defined]  # what threading itself calls in a fork


os.register_at_fork(after_in_child=Lock._renew)


_lock = Lock()
_lowered: dict[int, int] = {}
"""What torch's number was before, by Python thread inside of :func:`lowered_threads`. All have the user's setting."""


class _Pool(Enum):
    """What torch's pool of threads is."""

    DEFAULT = "as torch has made it"
    SET = "of a number that was set here"
    INHERITED = "in a fork: the parent's, which torch has not replaced yet"
    ONE = "in a fork: torch keeps to one thread"


_pool = _Pool.DEFAULT


def _set_threads(count: int) -> None:
    global _pool
    with _lock:
        _pool = _Pool.ONE if _pool is _Pool.ONE else _Pool.SET
        torch.set_num_threads(1 if _pool is _Pool.ONE else count)


def _users_threads() -> int:
    return next(iter(_lowered.values())) if _lowered else torch.get_num_threads()


def keep_to_one() -> bool:
    """In a fork, compute with one thread from here on. Return whether the user has set more.

    The threads of OpenMP do not survive a fork, and a child that gives them work hangs. A single thread needs none of them.
    """
    global _pool
    with _lock:
        _pool, before = _Pool.ONE, _users_threads()
        torch.set_num_threads(1)
    return before > 1


def renew_pool() -> None:
    """In a fork, let torch replace its pool of threads, before several threads do. It does that unlocked, and one of them fails: "Invalid thread pool!"."""
    with _lock:
        if _pool is _Pool.INHERITED:
            _set_threads(torch.get_num_threads())


def _after_fork() -> None:
    """In the child of a fork, restore the number of threads that calls of other threads have lowered. Those calls do not exist in the child."""
    global _pool
    if _pool in (_Pool.DEFAULT, _Pool.INHERITED):
        _pool = _Pool.INHERITED
    else:
        torch.set_num_threads(torch.get_num_threads())
    thread = threading.get_ident()
    if _lowered and thread not in _lowered:
        _set_threads(_users_threads())
    for other in _lowered.keys() - {thread}:
        del _lowered[other]


# No thread sets the number during a fork: the child would wait forever for the lock of its parent's pool.
os.register_at_fork(before=_lock.__enter__, after_in_parent=_lock.__exit__, after_in_child=_lock.__exit__)
os.register_at_fork(after_in_child=_after_fork)


def target_threads(drafts: int) -> int:
    """Threads that a target computes with while ``drafts`` run in worker processes, of one thread each.

    The user's setting, at most the cores that this process may use, less one per worker; at least 1.
    """
    with _lock:
        return max(1, min(_users_threads(), len(os.sched_getaffinity(0))) - drafts)


@contextmanager
def lowered_threads(limit: int) -> Iterator[None]:
    """Lower torch's number of threads to ``limit`` within the block. Other threads may do that, too, and each restores the user's setting."""
    thread = threading.get_ident()
    if thread in _lowered:  # a call inside of a call of another pipeline
        yield
        return
    try:
        with _lock:
            _lowered[thread] = before = _users_threads()
            _set_threads(min(limit, before))
        yield
    finally:
        try:
            _restore(thread)
        except BaseException:  # the error of a signal handler must not leave the setting lowered
            _restore(thread)
            raise


def _restore(thread: int) -> None:
    with _lock:
        if thread in _lowered:
            _set_threads(_lowered[thread])
            del _lowered[thread]


_NUMBERS = [int(number) for number in signal.valid_signals()]

_raised: list[BaseException] = []
"""What handlers raised in the present call, in the main thread."""


@contextmanager
def handlers_watched(*, delayable: bool = False) -> Iterator[None]:
    """Around a call: record what the caller's signal handlers raise, so that it does not count as the failure of a draft.

    Python runs handlers in the main thread, between any two instructions. ``KeyboardInterrupt`` is no ``Exception`` and needs no record, so
    Python's own handler of Ctrl-C stays in place.

    Args:
        delayable: :data:`delayed` delays the handlers, that of Ctrl-C too.
    """
    global _raised
    raised: list[BaseException] = []
    handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
    if threading.current_thread() is threading.main_thread():
        found = ((number, signal.getsignal(number)) for number in _NUMBERS)
        handlers = {n: h for n, h in found if callable(h) and (delayable or h is not signal.default_int_handler)}

    def handle(number: int, frame: FrameType | None) -> Any:
        if delayable and delayed.delays(number):
            return None
        try:
            return handlers[number](number, frame)
        except BaseException as error:
            raised.append(error)
            raise

    if not handlers:
        yield
        return
    before, _raised = _raised, raised  # a call inside of one of another pipeline, whose handler records the error, too
    try:
        for number in handlers:
            signal.signal(number, handle)
        yield
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) is handle:  # else code of the caller has set another one meanwhile
                signal.signal(number, handler)
        _raised = before


class _Delayed(ContextDecorator):
    """``with delayed:`` or ``@delayed``, within ``handlers_watched(delayable=True)``, delays the caller's signal handlers until the end of the block or the function.

    Their errors may come between any two instructions: a message whose bookkeeping is incomplete would be confused with a later one, and a lock of the
    standard library that is held would not be released. A block costs two stores, where a change of the handlers for each message would cost more than the
    rest of its bookkeeping.
    """

    def __init__(self) -> None:
        self._blocks = 0  # that the thread is in
        self._came: list[int] = []

    def delays(self, number: int) -> bool:
        """Whether the handler of a signal runs at the end of the block."""
        if self._blocks and number not in self._came:
            self._came.append(number)
        return bool(self._blocks)

    def __enter__(self) -> None:
        self._blocks += 1

    def __exit__(self, *error: object) -> None:
        self._blocks -= 1
        if not self._blocks:
            self._run_handlers()

    def _run_handlers(self) -> None:
        try:
            while self._came:
                signal.raise_signal(self._came.pop(0))
        finally:
            if self._came:  # a handler has raised an error; the others run all the same, as Python has it
                self._run_handlers()


delayed = _Delayed()


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
def program_end_awaited() -> Iterator[None]:
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


def raise_program_end() -> None:
    """Raise :class:`ProgramEnds` if the program ends. Called between steps."""
    if _is_over():
        raise ProgramEnds
