"""Schedule ``workers``: each draft stage runs in its own process, the target in the caller's. They share the state block.

A worker that dies, hangs or fails costs speed and never changes the text: the target does not wait for it.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import chain

from transformers import PreTrainedModel

from pipespec.checks.support import check_shareable
from pipespec.config import SpeculationConfig
from pipespec.engine.sampling import SamplingParams
from pipespec.engine.stage import Stage
from pipespec.process.threads import lowered_threads, target_threads
from pipespec.schedules.base import Driver
from pipespec.schedules.request import GenerationRequest
from pipespec.schedules.workers import template
from pipespec.schedules.workers.channel import Channel, ChannelError, Closed
from pipespec.schedules.workers.process import Setup, Status, WorkerCall
from pipespec.schedules.workers.weights import share
from pipespec_kernels.state import Action, SharedMemory, StateBlock

_READY_TIMEOUT_S = 120.0
"""Workers are awaited for this time. Without a template each imports torch and transformers, which takes many seconds on a busy machine."""

_EXIT_TIMEOUT_S = 5.0
"""A worker that has reported its failure, or closed its connection, ends within this time, or is killed."""

_FINISH_TIMEOUT_S = 10.0
"""A worker finishes its current forward when a call ends. One that needs longer than this counts as hung."""

_LOOK_S = 0.4
"""Time between two looks whether a process is alive whose message is awaited. A fork of another thread may keep its connection open."""


class CannotStart(RuntimeError):
    """A worker process cannot start."""


class _Worker:
    """The caller's handle on the process of one draft stage.

    Args:
        name: Of the draft, for messages.
        setup: What the worker builds, but for the ``parts`` of its memories.
        parts: The shared memories, and the numbers of the parts of each that the worker may write.

    Attributes:
        status: The last message of the worker; None before it is ready.
        cause: Why it takes part no more; empty while it does. Its process may not have ended yet.
        cache: Rows, and a lower bound of the positions.

    Raises:
        CannotStart: No process can be started.
    """

    def __init__(self, name: str, setup: Setup, parts: Sequence[tuple[SharedMemory, set[int]]]) -> None:
        self.name = name
        self.status: Status | None = None
        self.cause = ""
        self._generation = 0  # the last one that it was sent
        if not sys.executable:
            raise CannotStart(
                f"{name} could not start: a worker process needs a Python interpreter, and sys.executable names none (an embedded Python?): set "
                "it, or use schedule='lockstep'"
            )
        try:
            # A library may touch CUDA while it is imported, and CUDA does not survive a fork.
            self._start(fork=setup.weights.device.type == "cpu")
            self._set_up(setup, parts)
        except ChannelError as error:
            raise CannotStart(f"{name} could not start: {error}") from error
        except OSError as error:
            if error.errno is None:  # of a signal handler, not of the system
                raise
            raise CannotStart(f"{name} could not start: {error}{_REMEDIES.get(error.errno, '')}") from error

    def _start(self, *, fork: bool) -> None:
        self.conn, theirs = Channel.pair()
        _open_workers.add(self)  # before the start, because another thread may fork
        with theirs:
            try:
                self.process = template.start(theirs.fileno(), fork=fork)
                return
            except BaseException as error:
                self.conn.close()
                if not (fork and isinstance(error, ChannelError)):
                    raise
        self._start(fork=False)

    def _set_up(self, setup: Setup, parts: Sequence[tuple[SharedMemory, set[int]]]) -> None:
        try:
            with ExitStack() as stack:
                lent = [stack.enter_context(shared.lent(writable)) for shared, writable in parts]
                self.conn.send(replace(setup, parts=[len(fds) for fds in lent]), list(chain(*lent)))
        except Closed:
            pass  # it has ended already, which is found where it is awaited
        except BaseException:
            self.kill()
            raise

    def await_ready(self, deadline: float) -> None:
        """Wait until the worker has built its model.

        Raises:
            CannotStart: It cannot, or is not ready at ``deadline``. The message has the worker's own error.
        """
        if not self.await_idle(deadline):
            is_late = not self.cause and not self.is_dead() and time.monotonic() >= deadline
            reason = f"its process was not ready within {_READY_TIMEOUT_S:.0f} s" if is_late else self.exit_reason()
            details = self.status.details if self.status else ""
            self.kill()
            raise CannotStart(f"{self.name} could not start: {reason}\n{details}".rstrip())

    def is_dead(self) -> bool:
        return self.process.poll() is not None

    def exit_reason(self) -> str:
        """The worker's last error, or else the exit status of its process."""
        try:
            code = self.process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = None
        self.receive_sent()
        if self.cause:
            return self.cause
        if code is None:
            return "its process has closed its connection, but has not ended"
        if code == template.LOST:
            return "its process ended together with the template that started it"
        return f"killed by {_signal_name(-code)}" if code < 0 else f"its process ended with status {code}"

    def run(self, call: WorkerCall) -> None:
        self._generation = call.generation
        with self._whole("a call to it was interrupted"), suppress(Closed):
            self.conn.send(call)

    def _receive(self) -> None:
        with self._whole("a message of it was interrupted"):
            self.status, _ = self.conn.receive()
            self.cause = self.cause or self.status.failure

    @contextmanager
    def _whole(self, interrupted: str) -> Iterator[None]:
        """Around a message. If it is interrupted, the worker ends, since the message may be lost."""
        try:
            yield
        except Closed:
            raise
        except BaseException as error:
            self.cause = str(error) if isinstance(error, ChannelError) else interrupted
            self._end_process()
            if not isinstance(error, ChannelError):
                raise

    def receive_sent(self) -> None:
        """Receive the messages that the worker has sent, without waiting for more."""
        with suppress(Closed):
            while not self.cause and self.conn.poll():
                self._receive()

    def await_idle(self, deadline: float | None = None) -> bool:
        """Wait until the worker has ended its last generation. Return False if it is dead, or does not answer until ``deadline``."""
        if deadline is None:
            deadline = time.monotonic() + _FINISH_TIMEOUT_S
        try:
            while not self.cause and not self._is_idle:
                left = max(0.0, deadline - time.monotonic())
                if self.conn.poll(min(_LOOK_S, left)):
                    self._receive()
                elif left == 0 or self.is_dead():
                    break
        except Closed:
            with suppress(subprocess.TimeoutExpired):  # the kernel closes the files of a process shortly before its end
                self.process.wait(1)
            return False
        return not self.cause and self._is_idle and not self.is_dead()

    @property
    def _is_idle(self) -> bool:
        return self.status is not None and self.status.generation == self._generation

    def kill(self) -> None:
        self.conn.close()
        self._end_process()

    def _end_process(self) -> None:
        # A process of another user, from before this one dropped its rights, ends by itself: its connection is closed.
        with suppress(PermissionError):
            self.process.kill()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_EXIT_TIMEOUT_S)

    def leave(self) -> None:
        """In a fork of the caller, whose worker this is no more."""
        self.conn.close()
        process = getattr(self, "process", None)  # none while another thread starts it
        if isinstance(process, template.ForkedProcess):
            process.leave()


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
    """The asynchronous chain in processes: each draft runs ahead in its own while the target verifies in the caller's.

    Args:
        models: The chain, smallest draft first, the target last.
        config: Lookahead, trace.

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
        self._target_threads = target_threads(drafts)
        self._target = self._make_stage(self.block.target)
        self.block.set_alive(self.block.target, True)
        self._generation = 0
        # By stage.
        self._weights = {i: share(model) for i, model in zip(config.model_stages[:-1], models[:-1], strict=True)}
        self._workers: dict[int, _Worker] = {}
        # At interpreter exit, too, and when the driver is collected as garbage.
        weakref.finalize(self, _shut_down, self._workers)
        for failure in self._start_missing().values():
            self.close()
            raise failure

    def _make_block(self) -> StateBlock:
        return StateBlock.create(self._stage_count, 1, 64, SharedMemory.create([1]))

    @property
    def target(self) -> Stage:
        return self._target

    def _start_missing(self) -> dict[int, CannotStart]:
        """Start the missing workers, and wait until they are ready. Return the errors of those that cannot start."""
        missing = [i for i in self._weights if i not in self._workers]
        failures: dict[int, CannotStart] = {}
        deadline = time.monotonic() + _READY_TIMEOUT_S
        try:
            # All import and build their models together.
            for step in (self._start_worker, lambda i: self._workers[i].await_ready(deadline)):
                for i in missing:
                    try:
                        if i not in failures:
                            step(i)
                    except CannotStart as failure:
                        failures[i] = failure
                        self._workers.pop(i, None)
        except BaseException:
            self.close()
            raise
        for i in missing:
            self.block.set_alive(i, i not in failures)
        return failures

    def _start_worker(self, i: int) -> None:
        self.block.set_alive(i, False)
        assert isinstance(self.block.memory, SharedMemory)
        (weights, memory), trace = self._weights[i], self._trace_memory
        stages = self.config.stages_of(i)
        parts = [(memory, {0}), (self.block.memory, self.block.parts_of(set(stages)))]
        if trace is not None:
            parts.append((trace.memory, set(stages)))
        drafts = self.config.drafts[stages[0] : i + 1]
        setup = Setup(i, weights, [], trace.entries if trace else 0, self.config.native, drafts)
        self._workers[i] = _Worker(self._draft_name(i), setup, parts)

    def _begin(self, request: GenerationRequest) -> None:
        """Start the generation in every worker."""
        deadline = time.monotonic() + _FINISH_TIMEOUT_S  # of all workers together
        for i, worker in list(self._workers.items()):
            if not worker.await_idle(deadline):
                if worker.is_dead() or worker.cause:
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
            with lowered_threads(self._target_threads):
                self._target.prefill(request.inputs, request.record)
                most = self.config.max_draft_tokens(self._target.index)
                while self._target.step(0, most) != Action.FINISHED:
                    self._tend()
                    request.committed(self.block)
        finally:
            self.block.start(0)
        if self._trace_memory is not None or any(draft.translates for draft in self.config.drafts):
            # The steps under way belong to the call, so that its trace and its counters agree.
            for worker in self._workers.values():
                worker.await_idle()

    @property
    def forms(self) -> Sequence[str]:
        for worker in self._workers.values():
            worker.receive_sent()
        said = {i: worker.status.form for i, worker in self._workers.items() if worker.status}
        return self._forms(said | {self.block.target: self._target.form})

    @property
    def translated(self) -> Mapping[int, tuple[int, int]]:
        said = {i: worker.status for i, worker in self._workers.items() if worker.status}
        return {i: s.translated for i, s in said.items() if s.translated and s.generation == self._generation}

    def close(self) -> None:
        """Shut the workers down. A later ``run`` starts them again."""
        self.block.start(0)
        _shut_down(self._workers)


_open_workers: weakref.WeakSet[_Worker] = weakref.WeakSet()


def _leave_workers() -> None:
    """In a fork of the caller, the workers are its parent's. For the fork they have ended."""
    for worker in _open_workers:
        worker.leave()


os.register_at_fork(after_in_child=_leave_workers)


def _shut_down(workers: dict[int, _Worker]) -> None:
    # In a fork of the caller this does nothing: for it, the processes have ended.
    for worker in workers.values():
        worker.kill()
    workers.clear()
