"""workers: every draft stage in a process of its own, the target in the caller's; they meet in shared memory.

The target never waits for a draft that cannot come: a worker that dies, hangs or fails costs speed, not the text.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection

import torch
from transformers import PreTrainedModel

from pipespec.cache import RowCache
from pipespec.compat import compute_dtype
from pipespec.drivers.base import Driver, Policy, Request
from pipespec.drivers.weights import SharedWeights, share
from pipespec.drivers.worker import Failed, Run, Setup
from pipespec.placement import check_shareable
from pipespec.sampling import Selection
from pipespec.stage import Stage, Start
from pipespec_kernels.state import Action, SharedMemory, StateBlock
from pipespec_kernels.trace import TraceMemory

_READY_TIMEOUT_S = 120.0
"""Importing torch and transformers takes seconds, on a busy machine many."""

PATIENCE = 1.5
"""Missing drafts are awaited for this many times the time that they are expected to take; the simulator's, too."""

_ENDLESS = 2**20
"""A window that no call fills."""

_SEND_TIMEOUT_S = 5

_FINISH_TIMEOUT_S = 10.0
"""A worker told to stop finishes the forward it is in. One that needs longer than this is taken for hung."""


class _Worker:
    """One draft stage's process, seen from the caller."""

    def __init__(
        self,
        index: int,
        weights: SharedWeights,
        memory: SharedMemory,
        block: StateBlock,
        threads: int,
        trace: TraceMemory | None,
    ) -> None:
        self.index = index
        ours, theirs = socket.socketpair()
        assert isinstance(block.memory, SharedMemory)
        fds = [theirs.fileno(), memory.fd, block.memory.fd]
        setup = Setup(index, weights, memory.fd, block.memory.fd, threads)
        if trace is not None:
            fds.append(trace.memory.fd)
            setup = replace(setup, trace_fd=trace.memory.fd, trace=trace.entries)
        # '' is the current directory, which -P would leave out.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
        # A plain command, not multiprocessing's spawn: that would run the user's script again unless it is guarded. Own
        # process group: the terminal's Ctrl-C must not reach it.
        code = "from pipespec.drivers.worker import main; main()"
        command = [sys.executable, "-P", "-c", code, str(theirs.fileno())]
        self.process = subprocess.Popen(
            command, pass_fds=fds, env=environment, process_group=0, stdin=subprocess.DEVNULL
        )
        theirs.close()
        # A stopped worker reads nothing: prompts larger than the socket's buffer must not block the caller for ever.
        timeout = struct.pack("ll", _SEND_TIMEOUT_S, 0)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        self.conn = Connection(ours.detach())
        self.cache = (0, 0)  # rows, and positions that it has at least
        self.busy = 0  # generation it was told to run and has not reported the end of
        self.last_words: Failed | None = None
        with suppress(OSError):  # it was killed at once: await_ready() will say so
            self.conn.send(setup)

    def await_ready(self) -> None:
        """Raises ``RuntimeError`` with the worker's own words if it cannot start."""
        if not self.conn.poll(_READY_TIMEOUT_S):
            self.kill()
            raise RuntimeError(f"draft stage {self.index}: its process was not ready within {_READY_TIMEOUT_S:.0f} s")
        try:
            answer = self.conn.recv()
        except (EOFError, OSError):
            answer = Failed(self.obituary(), "")
        if isinstance(answer, Failed):
            self.kill()
            raise RuntimeError(f"draft stage {self.index} could not start: {answer.cause}\n{answer.details}")

    def is_dead(self) -> bool:
        return self.process.poll() is not None

    def obituary(self) -> str:
        """Why it is dead: its own last words if it had time for some."""
        code = self.process.wait()
        try:
            while self.last_words is None and self.conn.poll(0):
                self._hear()
        except (EOFError, OSError):
            pass
        if self.last_words is not None:
            return self.last_words.cause
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"its process ended with status {code}"

    def run(self, run: Run) -> None:
        rows, capacity = len(run.start.prompts), run.start.capacity
        self.cache = (rows, max(capacity, self.cache[1]) if rows == self.cache[0] else capacity)
        self.busy = run.generation
        try:
            self.conn.send(run)
        except OSError:
            self.process.kill()  # dead already, or stopped with half of the message: is_dead() will say so

    def _hear(self) -> None:
        message = self.conn.recv()
        if isinstance(message, Failed):
            self.last_words = message
        elif message == self.busy:
            self.busy = 0

    def await_idle(self) -> bool:
        """Wait for the end of the last generation it took part in. False if it is dead or does not answer."""
        deadline = time.monotonic() + _FINISH_TIMEOUT_S
        try:
            while self.busy and not self.last_words and self.conn.poll(max(0.0, deadline - time.monotonic())):
                self._hear()
        except (EOFError, OSError):
            with suppress(subprocess.TimeoutExpired):  # the kernel closes a process's files a moment before it is dead
                self.process.wait(1)
            return False
        return self.busy == 0 and not self.is_dead()

    def kill(self) -> None:
        self.conn.close()
        self.process.kill()
        self.process.wait()


class WorkersDriver(Driver):
    """The asynchronous chain on a CPU: each draft runs ahead in its own process while the target verifies in the caller's."""

    schedule = "workers"

    def __init__(self, models: Sequence[PreTrainedModel], policy: Policy, trace: int = 0) -> None:
        check_shareable(models)
        super().__init__(models, policy, trace)
        drafts = len(models) - 1
        # What torch may use is what the user set, or the cores; each draft needs one of them. Drafts are small: more
        # threads would cost them more in synchronisation than they gain.
        self._target_threads = target_threads(drafts)
        self._is_running = False
        self._target = Stage(models[-1], self.block, drafts, self._trace_of(drafts))
        self.block.set_alive(drafts, True)
        self._generation = 0
        self._weights = [share(model) for model in models[:-1]]
        self._workers: dict[int, _Worker] = {}
        # Also at interpreter exit, and when the driver is garbage.
        weakref.finalize(self, _shut_down, self._workers)
        for failure in self._start_missing().values():
            self.close()
            raise failure

    @property
    def target(self) -> Stage:
        return self._target

    def _start_missing(self) -> dict[int, RuntimeError]:
        """Start the workers that are not there, all at once, and wait until they are ready. Returns those that cannot start."""
        fresh = [i for i in range(len(self._weights)) if i not in self._workers]
        failures = {}
        try:
            for i in fresh:
                weights, memory = self._weights[i]
                self._workers[i] = _Worker(i, weights, memory, self.block, threads=1, trace=self._trace_memory)
            for i in fresh:
                try:
                    self._workers[i].await_ready()
                except RuntimeError as failure:
                    failures[i] = failure
                    self._workers.pop(i).kill()
                self.block.set_alive(i, i not in failures)
        except BaseException:
            self.close()
            raise
        return failures

    def _begin(self, request: Request) -> None:
        """Every worker that can be had is told to take part."""
        for i, worker in list(self._workers.items()):
            if not worker.await_idle():
                cause = worker.obituary() if worker.is_dead() or worker.last_words else "it did not answer"
                worker.kill()
                del self._workers[i]
                if self.block.is_alive(i):  # else it has been told
                    self._lost(i, f"has gone since the last call ({cause}); it is started again")
        for i, failure in self._start_missing().items():
            self._lost(i, f"is missing, this call goes on without it: {failure}")
        self._prepare(request)
        self._generation = self._generation % (2**31) + 1
        start = replace(request.start, selection=Selection())  # theirs travels beside it
        run = Run(self._generation, start, request.draft_selection)
        self._open_windows()
        self.block.start(self._generation)
        for worker in self._workers.values():
            worker.run(run)

    @contextmanager
    def drafting(self, request: Request, draft: int) -> Iterator[Callable[[int], int]]:
        """One draft runs ahead of a target that does nothing, up to the request's limit, while the others rest; for measuring.

        Yields a function that tells how many tokens it has, once they are at least as many as its argument; 0 if it is gone.
        """
        before, begin = self.policy, len(request.start.prompts[0])
        self.policy = Policy(tuple(_ENDLESS if i == draft else 0 for i in range(len(before.windows))))

        def drafted(at_least: int) -> int:
            deadline = time.monotonic() + _READY_TIMEOUT_S
            while (count := self.block.length(draft, 0) - begin) < at_least:
                if draft not in self._workers or self._workers[draft].is_dead() or time.monotonic() > deadline:
                    return 0
                time.sleep(1e-3)
            return count

        try:
            self._begin(request)
            yield drafted
        finally:
            self.policy = before
            self.block.start(0)

    def run(self, request: Request) -> None:
        try:
            self._begin(request)
            with restored_threads() as self._all_threads:
                self._is_running = self._is_drafting = True
                self._share_threads()
                self._target.prefill(request.start, request.record)
                while self._step() != Action.FINISHED:
                    for i, worker in self._workers.items():
                        if worker.is_dead() and self.block.is_alive(i):
                            self._lost(
                                i,
                                f"is gone ({worker.obituary()}); this call goes on without it, the next one starts it again",
                            )
                    if request.on_commit is not None:
                        request.on_commit()
        finally:
            self._is_running = False
            self.block.start(0)
        if self._trace_memory is not None:
            # The steps that are under way belong to the call: its trace and its counters are to agree.
            for worker in self._workers.values():
                worker.await_idle()

    def keeps(self, start: Start, given: RowCache | None) -> Counter[str]:
        found = super().keeps(start, given)
        rows = len(start.prompts)
        for i, worker in self._workers.items():
            model, (had_rows, had) = self.models[i], worker.cache
            grows = start.reuse and rows == had_rows and start.capacity > had  # it holds both while it copies
            if not grows and not worker.is_dead():
                sizes = ((had_rows, had), (rows, start.capacity))
                found[str(model.device)] += min(
                    RowCache.bytes_for(model.config, *size, compute_dtype(model)) for size in sizes
                )
        return found

    def steer(self, policy: Policy) -> None:
        super().steer(policy)
        if self._is_running:
            self._open_windows()
            self._share_threads()

    def _open_windows(self) -> None:
        for i, window in enumerate(self.in_force.windows):
            self.block.set_window(i, window)

    def _share_threads(self) -> None:
        """While the drafts rest, their cores are the target's."""
        policy = self.in_force
        own = self._all_threads if policy.rests else self._target_threads
        torch.set_num_threads(min(policy.threads or own, self._all_threads))

    def _step(self) -> Action:
        upstream = self._target.index - 1
        if self._is_drafting and not self._target.takes_hints:
            self._is_drafting = False
            self.steer(self.policy)
        policy = self.in_force
        max_hints = policy.max_hints(self._target.index)
        action = self._target.step(0, max_hints, policy.wait)
        if action == Action.WAIT and policy.decode_meanwhile:
            return self._target.step(0, 0)
        if action == Action.WAIT:
            # The time the missing drafts are expected to take, with some slack; then go on with what there is.
            patience = int(PATIENCE * policy.wait * self.block.step_ns(upstream))
            deadline = time.perf_counter_ns() + patience
            while action == Action.WAIT:
                left = deadline - time.perf_counter_ns()
                if left <= 0:
                    action = self._target.step(0, max_hints)
                    break
                self._target.port.park(left, min(policy.wait, max_hints))
                action = self._target.step(0, max_hints, policy.wait)
        return action

    def close(self) -> None:
        """End the workers. A later ``run`` starts them again."""
        self.block.start(0)
        _shut_down(self._workers)


def _shut_down(workers: dict[int, _Worker]) -> None:
    # At the end of a fork of the caller it does nothing: Popen.kill() looks first whether it is our child.
    for worker in workers.values():
        worker.kill()
    workers.clear()


def target_threads(drafts: int) -> int:
    """Threads of a target beside ``drafts`` workers, each of which has one."""
    with _threads_lock:
        return max(1, min(_users_threads(), len(os.sched_getaffinity(0))) - drafts)


# torch's number of threads is the process's: what one thread lowers for a while, others find, and would put back for good.
_threads_lock = threading.Lock()
_lowering: set[int] = set()  # threads that will put it back
_before_all = 0  # what it was when the first of them began


def _users_threads() -> int:
    is_others = bool(_lowering) and threading.get_ident() not in _lowering
    return _before_all if is_others else torch.get_num_threads()


@contextmanager
def restored_threads() -> Iterator[int]:
    """torch's number of threads, which is this again afterwards, whatever other threads do meanwhile in here."""
    global _before_all
    thread = threading.get_ident()
    with _threads_lock:
        before, is_first = _users_threads(), thread not in _lowering
        if not _lowering:
            _before_all = before
        _lowering.add(thread)
    try:
        yield before
    finally:
        with _threads_lock:
            torch.set_num_threads(before)
            if is_first:
                _lowering.discard(thread)
