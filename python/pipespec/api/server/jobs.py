"""Jobs: the requests that run or wait, each in a thread of its own, which compute in turns.

One thread computes at a time: with all cores, and without another one's work between its caches and itself. After each step (a chunk of a prompt, a round of
a text) the turn goes to the request that has computed least since it came. So none stands longer than a step of another one and its share, and a short request
beside long ones waits for little more than one step.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from pipespec.api.server.fields import Gone, RequestError
from pipespec.api.server.metrics import ServerMetrics
from pipespec.process.progress import say


class Turn:
    """The turn of one thread.

    Attributes:
        used: Seconds that it has computed, beginning with those of the thread that had computed least when it came.
    """

    def __init__(self, turns: Turns, used: float) -> None:
        self._turns, self.used, self.since = turns, used, 0.0
        self.is_ready = threading.Event()

    def step(self) -> None:
        """Let others compute, if it is their turn. Returns once it is this one's again."""
        self._turns.step(self)


class Turns:
    """Lets one of several threads compute at a time: the one that has used least, of equal ones the one that waits longest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: Turn | None = None
        self._waiting: list[Turn] = []

    @contextmanager
    def taken(self) -> Iterator[Turn]:
        """Wait for the first turn of this thread. It has the turn within the block, but for waits inside of :meth:`Turn.step`."""
        with self._lock:
            others = [*self._waiting, *([] if self._holder is None else [self._holder])]
            turn = Turn(self, min((other.used for other in others), default=0.0))
            self._queue(turn)
        turn.is_ready.wait()
        try:
            yield turn
        finally:
            with self._lock:
                self._pass_on()

    def step(self, turn: Turn) -> None:
        """See :meth:`Turn.step`."""
        with self._lock:
            self._count(turn)
            if not self._waiting or turn.used <= min(other.used for other in self._waiting):
                return
            turn.is_ready.clear()
            self._waiting.append(turn)
            self._pass_on()
        turn.is_ready.wait()

    def _queue(self, turn: Turn) -> None:
        self._waiting.append(turn)
        if self._holder is None:
            self._pass_on()

    def _count(self, turn: Turn) -> None:
        now = time.monotonic()
        turn.used += now - turn.since
        turn.since = now

    def _pass_on(self) -> None:
        if self._holder is not None:
            self._count(self._holder)
        self._holder = min(self._waiting, key=lambda turn: turn.used, default=None)
        if self._holder is not None:
            self._waiting.remove(self._holder)
            self._holder.since = time.monotonic()
            self._holder.is_ready.set()


_END = object()


class Job:
    """A request that runs or waits. Its thread posts events, which the event loop reads.

    Attributes:
        since: When the request came, by ``time.monotonic()``.
    """

    def __init__(self) -> None:
        self.since = time.monotonic()
        self._loop, self._events = asyncio.get_running_loop(), asyncio.Queue[Any]()
        self._stopped_by: Exception | None = None
        self.waits: Future[None] | None = None
        """Until its thread begins: what can be cancelled."""

    def stop(self, error: Exception | None = None) -> None:
        """End the job with its next step, or before it begins: by ``error``, or since its client has gone."""
        if self._stopped_by is None:
            self._stopped_by = error or Gone()
            if self.waits is not None:
                self.waits.cancel()

    def check(self) -> None:
        """Raise what has stopped the job."""
        if self._stopped_by is not None:
            raise self._stopped_by

    def post(self, event: object) -> None:
        """Called by the job's thread."""
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError as error:  # the loop has ended
            raise Gone from error

    async def events(self) -> AsyncIterator[Any]:
        """The events. Raises the error that has ended the job."""
        while (event := await self._events.get()) is not _END:
            if isinstance(event, Exception):
                raise event
            yield event


class Jobs:
    """Runs up to ``parallel`` jobs at the same time; up to ``queue`` further ones wait."""

    def __init__(self, metrics: ServerMetrics, parallel: int, queue: int) -> None:
        self.turns = Turns()
        self._metrics, self._most = metrics, parallel + queue
        self._pool = ThreadPoolExecutor(parallel, thread_name_prefix="pipespec-request")
        self._jobs: set[Job] = set()  # the event loop's
        self._closed_by: RequestError | None = None

    def enter(self) -> Job:
        """A place for a new request, which :meth:`start` or :meth:`leave` ends.

        Raises:
            RequestError: The queue is full, or the server ends.
        """
        if self._closed_by is not None:
            raise self._closed_by
        if len(self._jobs) >= self._most:
            raise RequestError("the queue is full: try again later", status=429, code="queue_full")
        self._jobs.add(job := Job())
        self._metrics.waiting.inc()
        return job

    def leave(self, job: Job) -> None:
        """Give back the place of a job that does not start."""
        self._metrics.waiting.dec()
        self._jobs.discard(job)

    def start(self, job: Job, work: Callable[[Job], None]) -> None:
        """Run ``work`` in a thread as soon as one is free."""
        job.waits = self._pool.submit(self._run, job, work)
        job.waits.add_done_callback(functools.partial(self._skipped, job))

    def _skipped(self, job: Job, future: Future[None]) -> None:
        """Give back the place of a job that was stopped before it began."""
        if future.cancelled():
            self._metrics.waiting.dec()
            self._end(job, job._stopped_by)

    def close(self) -> None:
        """End all jobs with an error, and take no further ones. From any thread."""
        self._closed_by = RequestError("the server is shutting down: try again later", status=503, code="shutting_down")
        for job in list(self._jobs):
            job.stop(self._closed_by)

    def _run(self, job: Job, work: Callable[[Job], None]) -> None:
        self._metrics.waiting.dec()
        event: object = _END
        try:
            job.check()
            work(job)
        except (Gone, RequestError) as error:
            event = error
        except Exception as error:
            say(f"a request has failed: {type(error).__name__}: {error}")
            event = RequestError(f"{type(error).__name__}: {error}", status=500)
        finally:
            self._end(job, event)

    def _end(self, job: Job, event: object) -> None:
        def end() -> None:
            self._jobs.discard(job)
            job._events.put_nowait(event)

        try:
            job._loop.call_soon_threadsafe(end)
        except RuntimeError:  # the loop has ended
            self._jobs.discard(job)
