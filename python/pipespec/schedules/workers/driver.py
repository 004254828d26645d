"""Schedule ``workers``: each draft stage runs in its own process, the target in the caller's. They share the state block.

A worker that dies, hangs or fails costs speed and never changes the text: the target does not wait for it.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import chain, product

from transformers import PreTrainedModel

from pipespec.config import SpeculationConfig
from pipespec.engine.ngram import NgramDraft, NgramStage
from pipespec.engine.sampling import SamplingParams
from pipespec.engine.stage import Stage
from pipespec.engine.translation import Translation
from pipespec.models.layout import CacheLayout
from pipespec.models.properties import compute_dtype
from pipespec.preflight.support import check_shareable
from pipespec.process.threads import restored_threads, set_threads, target_threads
from pipespec.schedules.base import Driver
from pipespec.schedules.request import GenerationRequest
from pipespec.schedules.workers import template
from pipespec.schedules.workers.channel import Channel, ChannelError, Late
from pipespec.schedules.workers.process import Failed, Setup, WorkerCall
from pipespec.schedules.workers.weights import SharedWeights, share
from pipespec_kernels.state import Action, SharedMemory, StateBlock
from pipespec_kernels.trace import TraceMemory

_READY_TIMEOUT_S = 120.0
"""Workers are awaited for this time. Without a template each imports torch and transformers, which takes many seconds on a busy machine."""

_EXIT_TIMEOUT_S = 5.0
"""A worker that has reported its failure, or closed its connection, ends within this time, or is killed."""

_SEND_TIMEOUT_S = 5.0
"""A worker that waits for a message reads it within this time, or counts as hung."""

_FINISH_TIMEOUT_S = 10.0
"""A worker finishes its current forward when a call ends. One that needs longer than this counts as hung."""

_LOOK_S = 0.4
"""Time between two looks whether a process is alive whose message is awaited. A fork of another thread may keep its connection open."""


class CannotStart(RuntimeError):
    """A worker process cannot start."""


class _Worker:
    """The caller's handle on the process of one draft stage.

    Args:
        index: Stage of the draft.
        name: Of the draft, for messages.
        weights: Where the model's tensors lie in ``memory``.
        memory: Shared memory of the weights.
        block: State block of the chain, in shared memory.
        threads: Number of torch's threads in the worker.
        trace: Memory of the trace, if the calls are traced.
        native: Whether the draft may run in the native form.
        upstream: The draft upstream, if it is an n-gram index; or the two tokenizers, if the draft has another one than the target.

    Raises:
        CannotStart: No process can be started.
    """

    def __init__(
        self,
        index: int,
        name: str,
        weights: SharedWeights,
        memory: SharedMemory,
        block: StateBlock,
        threads: int,
        trace: TraceMemory | None,
        native: bool,
        upstream: NgramDraft | Translation | None,
    ) -> None:
        self.index, self.name, self._upstream = index, name, upstream
        assert isinstance(block.memory, SharedMemory)
        # An n-gram index upstream runs in the same process.
        stages = {0, index} if isinstance(upstream, NgramDraft) else {index}
        parts = [(memory, {0}), (block.memory, block.parts_of(stages))]
        if trace is not None:
            parts.append((trace.memory, stages))
        if not sys.executable:
            raise CannotStart(
                f"{name} could not start: a worker process needs a Python interpreter, and sys.executable names none (an embedded Python?): set "
                "it, or use schedule='lockstep'"
            )
        try:
            # A library may touch CUDA while it is imported, and CUDA does not survive a fork.
            counts = self._start(parts, fork=weights.device.type == "cpu")
        except OSError as error:
            if error.errno is None:  # of a signal handler, not of the system
                raise
            raise CannotStart(f"{name} could not start: {error}{_REMEDIES.get(error.errno or 0, '')}") from error
        entries = trace.entries if trace is not None else 0
        self._setup = Setup(index, weights, threads, counts, entries, native, upstream is not None)
        self.last_error: Failed | None = None
        self.cache = (0, 0)  # rows, and a lower bound of the positions
        self.busy = 0  # generation that runs, 0 after the worker has reported its end
        self.form = ""
        self.translated = (0, 0)

    def _start(self, parts: Sequence[tuple[SharedMemory, set[int]]], *, fork: bool) -> list[int]:
        """Start the process. Return the number of descriptors of each part."""
        ours, theirs = socket.socketpair()
        self.conn = Channel(ours)
        with ExitStack() as failed, theirs, ExitStack() as stack:
            failed.callback(self.conn.close)
            _open_workers.add(self)  # before the start, because another thread may fork
            lent = [stack.enter_context(shared.lent(writable)) for shared, writable in parts]
            try:
                self.process = template.start([theirs.fileno(), *chain(*lent)], fork=fork)
            except ChannelError:
                if not fork:
                    raise
            else:
                failed.pop_all()
                return [len(fds) for fds in lent]
        return self._start(parts, fork=False)

    def set_up(self, deadline: float) -> None:
        """Wait until the worker has done its imports, then tell it what to build. Raises ``CannotStart`` as :meth:`await_ready`."""
        self._await_step(deadline)
        # Only now, because a message may be larger than the socket's buffer, and the worker reads from here on.
        self._send_part(self._setup, "its setup")

    def await_ready(self, deadline: float) -> None:
        """Wait until the worker has built its model.

        Raises:
            CannotStart: It cannot, or is not ready at ``deadline``. The message has the worker's own error.
        """
        self._await_step(deadline)
        if self._upstream is not None:
            self._send_part(self._upstream, "the n-gram draft or the tokenizers")

    def _await_step(self, deadline: float) -> None:
        """Receive the message with which the worker ends a step of its start."""
        while not self.conn.poll(min(_LOOK_S, max(0.0, deadline - time.monotonic()))):
            if self.is_dead() and not self.conn.poll():
                raise self._cannot_start(self.exit_reason())
            if time.monotonic() >= deadline:
                raise self._cannot_start(f"its process was not ready within {_READY_TIMEOUT_S:.0f} s")
        try:
            answer, _ = self.conn.receive(timeout_s=_SEND_TIMEOUT_S)
        except ChannelError as error:
            is_late = isinstance(error, Late)
            raise self._cannot_start("it does not complete a message" if is_late else self.exit_reason()) from error
        if isinstance(answer, Failed):
            raise self._cannot_start(f"{answer.cause}\n{answer.details}")

    def _send_part(self, part: object, name: str) -> None:
        try:
            self.conn.send(part, timeout_s=_SEND_TIMEOUT_S)
        except ChannelError as error:
            is_late = isinstance(error, Late)
            raise self._cannot_start(f"it does not read {name}" if is_late else self.exit_reason()) from error

    def _cannot_start(self, reason: str) -> CannotStart:
        self.kill()
        return CannotStart(f"{self.name} could not start: {reason}")

    def is_dead(self) -> bool:
        return self.process.poll() is not None

    def exit_reason(self) -> str:
        """The worker's last error, or else the exit status of its process."""
        try:
            code = self.process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = None
        self.receive_sent()
        if self.last_error is not None:
            return self.last_error.cause
        if code is None:
            return "its process has closed its connection, but has not ended"
        if code == template.LOST:
            return "its process ended together with the template that started it"
        if (
            code == 0
            and isinstance(self.process, subprocess.Popen)
            and signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
        ):
            return "its process has ended, with a status that is unknown since this program ignores SIGCHLD"
        return f"killed by {_signal_name(-code)}" if code < 0 else f"its process ended with status {code}"

    def run(self, call: WorkerCall) -> None:
        rows, capacity = len(call.inputs.prompts), call.inputs.capacity
        self.translated = (0, 0)
        self.cache = (rows, max(capacity, self.cache[1]) if rows == self.cache[0] else capacity)
        try:
            self.busy = call.generation
            self.conn.send(call, timeout_s=_SEND_TIMEOUT_S)
        except BaseException as error:  # the worker is dead, or has half of the message
            is_the_workers = isinstance(error, ChannelError)
            if not is_the_workers:
                self.last_error = Failed("it has a part of a call that was interrupted", "")
            elif isinstance(error, Late):
                self.last_error = Failed("it does not read the call", "")
            self._end_process()
            if not is_the_workers:
                raise

    def _receive(self) -> None:
        try:
            message, _ = self.conn.receive(timeout_s=_SEND_TIMEOUT_S)
            if isinstance(message, Failed):
                self.last_error = message
            elif isinstance(message, str):
                self.form = message
            elif isinstance(message, tuple):
                self.translated = message
            elif message == self.busy:
                self.busy = 0
        except BaseException as error:
            if not isinstance(error, ChannelError):  # the rest of the message, or what it said, is lost
                self.last_error = Failed("a message of it was interrupted", "")
                self._end_process()
            raise

    def receive_sent(self) -> None:
        """Receive the messages that the worker has sent, without waiting for more."""
        with suppress(ChannelError):
            while self.last_error is None and self.conn.poll():
                self._receive()

    def await_idle(self, deadline: float | None = None) -> bool:
        """Wait until the worker has ended its last generation. Return False if it is dead, or does not answer until ``deadline``."""
        if deadline is None:
            deadline = time.monotonic() + _FINISH_TIMEOUT_S
        try:
            while self.busy and not self.last_error:
                left = max(0.0, deadline - time.monotonic())
                if self.conn.poll(min(_LOOK_S, left)):
                    self._receive()
                elif left == 0 or self.is_dead():
                    break
        except ChannelError:
            with suppress(subprocess.TimeoutExpired):  # the kernel closes the files of a process shortly before its end
                self.process.wait(1)
            return False
        return self.busy == 0 and not self.is_dead()

    def kill(self) -> None:
        self.conn.close()
        self._end_process()

    def _end_process(self) -> None:
        # A process of another user, from before this one dropped its rights, ends by itself: its connection is closed.
        with suppress(PermissionError):
            self.process.kill()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_EXIT_TIMEOUT_S)


_REMEDIES = {
    errno.EMFILE: " (`ulimit -n` allows this process no more)",
    errno.ENFILE: " (fs.file-max allows this machine no more)",
    errno.EAGAIN: " (`ulimit -u`, or the control group, allows no more processes)",
}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


class WorkersDriver(Driver):
    """The asynchronous chain on a CPU: each draft runs ahead in its own process while the target verifies in the caller's.

    Args:
        models: The chain, smallest draft first, the target last.
        config: Lookahead, minimum of draft tokens, trace.

    Raises:
        ValueError: A model cannot live in shared memory.
        CannotStart: A worker cannot start.
    """

    schedule = "workers"

    def __init__(self, models: Sequence[PreTrainedModel], config: SpeculationConfig) -> None:
        check_shareable(models)
        if any(model.device.type == "cpu" for model in models[:-1]):
            template.prepare()
        super().__init__(models, config)
        drafts = len(models) - 1
        # The target gets the threads that the user set, or the cores, less one per draft. Drafts are small: more threads
        # would cost them more in synchronisation than they gain.
        self._target_threads = target_threads(drafts)
        at, ngram = self.block.target, None if drafts else self._make_ngram()
        self._target = self._make_stage(at, ngram)
        self.block.set_alive(at, True)
        self._generation = 0
        # By stage.
        self._weights = {i: share(model) for i, model in enumerate(models[:-1], self._first)}
        self._workers: dict[int, _Worker] = {}
        # At interpreter exit, too, and when the driver is collected as garbage.
        weakref.finalize(self, _shut_down, self._workers)
        for failure in self._start_missing().values():
            self.close()
            raise failure

    def _make_block(self) -> StateBlock:
        return StateBlock.create(self._first + len(self.models), 1, 64, SharedMemory.create([1]))

    @property
    def target(self) -> Stage:
        return self._target

    def _start_missing(self) -> dict[int, CannotStart]:
        """Start the missing workers, and wait until they are ready. Return the errors of those that cannot start."""
        missing = [i for i in self._weights if i not in self._workers]
        failures: dict[int, CannotStart] = {}
        deadline = time.monotonic() + _READY_TIMEOUT_S
        steps: tuple[Callable[[int], object], ...] = (
            self._start_worker,
            lambda i: self._workers[i].set_up(deadline),
            lambda i: self._workers[i].await_ready(deadline),
            lambda i: self.block.set_alive(i, True),
        )
        try:
            # Step by step, so that all import and build their models together.
            for step, i in product(steps, missing):
                if i not in failures:
                    try:
                        step(i)
                    except CannotStart as failure:
                        failures[i] = failure
                        self._workers.pop(i, None)
        except BaseException:
            self.close()
            raise
        return failures

    def _start_worker(self, i: int) -> None:
        self.block.set_alive(i, False)
        weights, memory = self._weights[i]
        self._workers[i] = _Worker(
            i,
            self._draft_name(i),
            weights,
            memory,
            self.block,
            threads=1,
            trace=self._trace_memory,
            native=self.config.native,
            upstream=(self.config.ngram or self.config.translation) if i == self._first else None,
        )

    def _begin(self, request: GenerationRequest) -> None:
        """Start the generation in every worker."""
        deadline = time.monotonic() + _FINISH_TIMEOUT_S  # of all workers together
        for i, worker in list(self._workers.items()):
            if not worker.await_idle(deadline):
                if worker.is_dead() or worker.last_error:
                    what = f"has ended since the last call ({worker.exit_reason()})"
                else:
                    what = f"does not answer for {_FINISH_TIMEOUT_S:.0f} s"
                worker.kill()
                del self._workers[i]
                if self.block.is_alive(i):  # otherwise the user has been warned
                    self._lost(i, f"{what}; it is started again")
        for i, failure in self._start_missing().items():
            self._lost(i, f"is missing, this call continues without it: {failure}")
        self._prepare(request)
        self._generation = self._generation % (2**31) + 1
        # The drafts' own parameters are sent separately. Only the target continues padding and has the matchers of a grammar.
        inputs = replace(request.inputs, sampling_params=SamplingParams(), grammar=None)
        call = WorkerCall(self._generation, inputs, request.draft_sampling_params)
        self._open_lookahead()
        self.block.start(self._generation)
        for worker in self._workers.values():
            worker.run(call)
        self._tend()

    def _tend(self) -> None:
        """Continue without the workers that have ended. The user is warned once for each loss."""
        for i, worker in self._workers.items():
            if worker.is_dead() and self.block.is_alive(i):
                self._lost(
                    i,
                    f"has ended ({worker.exit_reason()}); this call continues without it, the next one starts it again",
                )

    def _generate(self, request: GenerationRequest) -> None:
        try:
            self._begin(request)
            with restored_threads() as own:
                set_threads(min(self._target_threads, own))
                self._target.prefill(request.inputs, request.record)
                most = self.config.max_draft_tokens(self._target.index)
                while self._target.step(0, most) != Action.FINISHED:
                    self._tend()
                    request.committed(self.block)
        finally:
            self.block.start(0)
        if self._trace_memory is not None or self.config.translation is not None:
            # The steps under way belong to the call, so that its trace and its counters agree.
            for worker in self._workers.values():
                worker.await_idle()

    @property
    def forms(self) -> Sequence[str]:
        for worker in self._workers.values():
            worker.receive_sent()
        drafts = [self._workers[i].form if i in self._workers else "" for i in self._weights]
        return [*[NgramStage.form] * self._first, *drafts, self._target.form]

    @property
    def translated(self) -> Mapping[int, tuple[int, int]]:
        if self.config.translation is None or 0 not in self._workers:
            return {}
        return {0: self._workers[0].translated}

    def reusable_bytes(self, request: GenerationRequest) -> Counter[str]:
        found, inputs = super().reusable_bytes(request), request.inputs
        rows = len(inputs.prompts)
        for i, worker in self._workers.items():
            model, (had_rows, had) = self.models[i - self._first], worker.cache
            # A cache that grows exists twice while it is copied.
            grows = inputs.reuse and rows == had_rows and inputs.capacity > had
            if not grows and not worker.is_dead():
                sizes = ((had_rows, had), (rows, inputs.capacity))
                found[str(model.device)] += min(
                    CacheLayout.of(model.config).bytes_for(*size, compute_dtype(model)) for size in sizes
                )
        return found

    def close(self) -> None:
        """Shut the workers down. A later ``run`` starts them again."""
        self.block.start(0)
        _shut_down(self._workers)


_open_workers: weakref.WeakSet[_Worker] = weakref.WeakSet()


def _leave_workers() -> None:
    """In a fork of the caller, the workers are its parent's. For the fork they have ended."""
    for worker in _open_workers:
        worker.conn.close()


os.register_at_fork(after_in_child=_leave_workers)


def _shut_down(workers: dict[int, _Worker]) -> None:
    # In a fork of the caller this does nothing: the workers are no children of the fork, and kill() checks that.
    for worker in workers.values():
        worker.kill()
    workers.clear()
