"""torch's number of threads: one setting of the whole process, which concurrent calls lower for a while."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pipespec.process.forks import Lock

_lock = Lock()
_lowering: set[int] = set()
"""Python threads inside of :func:`restored_threads`."""
_before_all = 0
"""The setting before the first of them entered."""
_has_one = False
"""In a fork: torch keeps to one thread."""
_has_set = False
"""torch has a pool of threads, since its number was set here."""
_has_old_pool = False
"""In a fork: torch has not replaced its parent's pool yet."""


def set_threads(count: int) -> None:
    """``torch.set_num_threads``; a fork that keeps to one thread stays at one."""
    global _has_set
    with _lock:
        _has_set = True
        torch.set_num_threads(1 if _has_one else count)


def keep_to_one() -> bool:
    """In a fork, compute with one thread from here on. Return whether the user has set more.

    The threads of OpenMP do not survive a fork, and a child that gives them work hangs. A single thread needs none of them.
    """
    global _has_one, _has_old_pool
    with _lock:
        _has_old_pool = False
        _has_one, before = True, _before_all if _lowering else torch.get_num_threads()
        torch.set_num_threads(1)
    return before > 1


def renew_pool() -> None:
    """In a fork, let torch replace its pool of threads, before several threads do. It does that unlocked, and one of them fails: "Invalid thread pool!"."""
    global _has_old_pool
    with _lock:
        if _has_old_pool:
            _has_old_pool = False
            torch.set_num_threads(torch.get_num_threads())


def _after_fork() -> None:
    """In the child of a fork, restore the number of threads that calls of other threads have lowered. Those calls do not exist in the child."""
    global _has_old_pool
    _has_old_pool = True
    if _has_set:
        renew_pool()
    if _lowering and threading.get_ident() not in _lowering:
        set_threads(_before_all)
    _lowering.intersection_update({threading.get_ident()})


# No thread sets the number during a fork: the child would wait for ever for the lock of its parent's pool.
os.register_at_fork(before=_lock.__enter__, after_in_parent=_lock.__exit__, after_in_child=_lock.__exit__)
os.register_at_fork(after_in_child=_after_fork)


def target_threads(drafts: int) -> int:
    """Threads that a target computes with beside the worker processes of ``drafts``, of one thread each.

    The user's setting, at most the cores that this process may use, less one per worker; at least 1.
    """
    with _lock:
        return max(1, min(_users_threads(), len(os.sched_getaffinity(0))) - drafts)


def _users_threads() -> int:
    """The user's setting: torch's own, unless another thread has lowered that for a while."""
    is_lowered_by_others = bool(_lowering) and threading.get_ident() not in _lowering
    return _before_all if is_lowered_by_others else torch.get_num_threads()


@contextmanager
def restored_threads() -> Iterator[int]:
    """Restore torch's number of threads on exit.

    Several threads may be inside at once: each restores the user's setting, not what another one has lowered it to.

    Yields:
        The user's setting.
    """
    global _before_all
    with _lock:
        before, is_first = _users_threads(), threading.get_ident() not in _lowering
    try:
        with _lock:
            if not _lowering:
                _before_all = before
            _lowering.add(threading.get_ident())
        yield before
    finally:
        try:
            _restore(before, is_first)
        except BaseException:  # the error of a signal handler must not leave the setting lowered
            _restore(before, is_first)
            raise


def _restore(threads: int, is_last: bool) -> None:
    with _lock:
        set_threads(threads)
        if is_last:
            _lowering.discard(threading.get_ident())
