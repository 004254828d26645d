"""Locks that survive a fork: the child of a fork has none of the parent's other threads, and one of them may have held the lock."""

from __future__ import annotations

import os
import threading
import weakref
from typing import ClassVar


class Lock:
    """A reentrant lock. The child of a fork has it free, unless the thread that forked holds it."""

    _all: ClassVar[weakref.WeakSet[Lock]] = weakref.WeakSet()

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._all.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()

    @classmethod
    def _renew(cls) -> None:
        for lock in cls._all:
            # This thread can take and release its own lock again. Another thread's lock will never be released.
            if lock._lock.acquire(blocking=False):
                lock._lock.release()
            else:
                lock._lock = threading.RLock()


os.register_at_fork(after_in_child=Lock._renew)
