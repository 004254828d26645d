"""Locks that survive a fork: the child of a fork has none of the parent's other threads, and one of them may have held the lock."""

from __future__ import annotations

import os
import weakref
from _thread import RLock
from typing import ClassVar


class Lock(RLock):  # type: ignore[misc]  # final in typeshed only
    """A reentrant lock. The child of a fork has it free, unless the thread that forked holds it.

    ``with`` runs in C. In Python, the error of a signal handler could come between the acquisition and the block, and nothing would release it.
    """

    _all: ClassVar[weakref.WeakSet[Lock]] = weakref.WeakSet()

    def __init__(self) -> None:
        super().__init__()
        self._all.add(self)

    @classmethod
    def _renew(cls) -> None:
        for lock in cls._all:
            # This thread can take and release its own lock again. Another thread's lock will never be released.
            if lock.acquire(blocking=False):
                lock.release()
            else:
                lock._at_fork_reinit()  # type: ignore[attr-defined]  # what threading itself calls in a fork


os.register_at_fork(after_in_child=Lock._renew)
