"""Slots: calls of several threads at the same time.

The bare model runs such calls side by side, and one may wait for the other: in a streamer, a processor or a criterion. So no call waits until another one has
ended. A pipeline is one slot. Where its decoder costs little more than its caches, further slots are made as they are needed, which share the models and their
packed weights. A call that finds no free slot is decoded by transformers, beside the others.
"""

from __future__ import annotations

import copy
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import numpy as np

from pipespec.errors import Busy, DoesNotFit
from pipespec.process.threads import Lock, keep_to_one
from pipespec.schedules.base import Decoder, warn_of_speed

MAX_SLOTS = 4
"""Of a pipeline. Each keeps caches, and calls that run at the same time share the cores."""


class Slots:
    """The slots of a pipeline, which is the first of them.

    Attributes:
        report: What the call did that has ended last; None before the first.
        partial: After a call that was interrupted or failed: what it had committed, as ``generate()`` would return it.
    """

    _driver: Decoder

    def __init__(self) -> None:
        self.report: Any = None
        self.partial: Any = None
        self._lock = Lock()
        self._owner: int | None = None  # thread whose call is inside
        self._is_forked = False  # since the last call
        self._others: list[Self] = []
        self._first = weakref.ref(self)  # of all slots
        _all.add(self)

    def _another(self) -> Self | None:
        """A further slot; None where its decoder would cost too much."""
        decoder = self._driver.another()
        if decoder is None:
            return None
        slot = copy.copy(self)
        slot._lock, slot._owner, slot._others, slot._driver = Lock(), None, [], decoder
        _all.add(slot)
        return slot

    @property
    def most_slots(self) -> int:
        """How many calls of several threads run at the same time."""
        return MAX_SLOTS if self._others or self._driver.another() is not None else 1

    def _each(self, prompt: np.ndarray | None) -> Iterator[Self]:
        """The slots, that first which has read most of ``prompt`` already, and then further ones."""
        slots = [self, *self._others]
        if prompt is not None and self._others:
            slots.sort(key=lambda slot: slot._driver.tokens_kept(prompt), reverse=True)
        yield from slots
        while len(self._others) < MAX_SLOTS - 1:
            with _growing:
                slot = self._another()
                if slot is None:
                    return
                self._others.append(slot)
                for each in (self, *self._others):
                    each._driver.share_prefixes(len(self._others) + 1)
            yield slot

    def _release(self) -> None:
        """Release the caches of this slot, and of those of the pipeline in which no call runs, with the texts that they keep."""
        self._driver.release()
        first = self._first()
        for slot in () if first is None else (first, *first._others):
            with slot._lock.attempt() as is_free:
                if is_free:
                    slot._driver.release()

    @contextmanager
    def _slot(self, *, waits: bool, prompt: np.ndarray | None = None) -> Iterator[Self]:
        """A free slot, for one call.

        Args:
            waits: If there is none, wait for the first one.
            prompt: int32 ``[P]``, of a call with one row.

        Raises:
            Busy: There is none, or no memory for the caches of a further one.
            RuntimeError: The call would wait for a call of its own thread.
        """
        for slot in self._each(prompt):
            with slot._lock.attempt() as is_free:
                if not is_free:
                    continue
                with slot._inside():
                    slot.report, slot.partial = report, partial = self.report, self.partial
                    try:
                        yield slot
                    except DoesNotFit as error:
                        if slot is self:
                            raise
                        raise Busy(f"the caches of a further call at the same time do not fit: {error}") from error
                    finally:
                        # Another call may have ended meanwhile. One that was refused leaves both as they are.
                        if slot.report is not report or slot.partial is not partial:
                            self.partial = slot.partial
                        if slot.report is not report:
                            self.report = slot.report
                return
        if not waits:
            count = len(self._others) + 1
            calls = "a call runs in this pipeline" if count == 1 else f"{count} calls run in this pipeline"
            raise Busy(f"{calls}, which is as many as it runs at the same time")
        with self._turn("generate()", "use another Pipeline there"):
            yield self

    @contextmanager
    def _turn(self, what: str, instead: str) -> Iterator[None]:
        """Wait for this slot. Where a call of ``what`` would wait for a call of its own thread, it raises ``RuntimeError``."""
        with self._lock:
            self._check_outside(what, instead)
            with self._inside():
                yield

    def _check_outside(self, what: str, instead: str) -> None:
        if self._owner == threading.get_ident():
            raise RuntimeError(f"{what} was called inside a call of the same pipeline; {instead}")

    @contextmanager
    def _inside(self) -> Iterator[None]:
        try:
            self._owner = threading.get_ident()
            yield
        finally:
            self._owner = None

    def close(self) -> None:
        """End worker processes, drop graphs, and restore the models' attention. A later call starts again what it needs.

        This also happens at the end of a ``with`` block, at exit, and when the pipeline is collected as garbage. Calls of other threads that
        began earlier are completed first.

        Raises:
            RuntimeError: From inside of a call: from a streamer or a processor.
        """
        refusal = "close()", "raise an error there to end the call, and close the pipeline when it has returned"
        self._check_outside(*refusal)
        for slot in self._others:
            slot._check_outside(*refusal)
        for slot in self._others:
            slot.close()
        with self._turn(*refusal):
            self._others.clear()
            self._driver.share_prefixes(1)
            self._driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


_all: weakref.WeakSet[Slots] = weakref.WeakSet()

_growing = Lock()


def _after_fork() -> None:
    """In the child of a fork. Calls of the parent's other threads do not continue here."""
    for slot in _all:
        slot._is_forked = True
        if slot._owner != threading.get_ident():
            slot._owner = None
    if any(slot._owner is not None for slot in _all):
        keep_to_one_thread()  # its next forward comes without a call


def keep_to_one_thread() -> None:
    """In a fork, before its first forward."""
    if keep_to_one():
        warn_of_speed(
            "a forked process computes with one thread, as torch's threads do not survive a fork; to use more, start the process with "
            "multiprocessing's method 'spawn' and make the pipeline there"
        )


os.register_at_fork(after_in_child=_after_fork)
