"""Threads: locks that survive a fork, whose child has none of the parent's other threads, one of which may have held the lock. And torch's number of threads:
one setting of the whole process, which concurrent calls lower for a while."""

from __future__ import annotations

import os
import threading
import weakref
from _thread import RLock
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import ClassVar

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
