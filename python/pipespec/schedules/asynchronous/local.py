"""Schedule ``workers``: drafts in processes that this one starts. They share the state block and the drafts' weights in memory."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import chain

from transformers import PreTrainedModel

from pipespec.checks.models import check_shareable
from pipespec.config import SpeculationConfig
from pipespec.engine.originals import is_registered_here
from pipespec.process.threads import target_threads
from pipespec.schedules.asynchronous.driver import AsynchronousDriver, Peer
from pipespec.schedules.asynchronous.messages import Call, Channel, ChannelError, Closed, Status, share
from pipespec.schedules.asynchronous.worker import Setup
from pipespec_kernels.state import SharedMemory, StateBlock

NICE = 5
"""Added to the niceness of a draft, whose priority is lower than the target's.

So a target that wakes up takes its core at once. With equal priorities it would wait for the end of a time slice. If stages outnumber cores, the
drafts share the time that the target leaves.
"""

_READY_TIMEOUT_S = 120.0
"""A process is ready within this time. It imports torch and transformers, which takes many seconds on a busy machine."""

_EXIT_TIMEOUT_S = 5.0
"""A process that has reported its failure, or closed its connection, ends within this time, or is killed."""

_FINISH_TIMEOUT_S = 10.0
"""A draft finishes its current forward when a call ends. One that needs longer than this counts as hung."""

_STOPPED_TIMEOUT_S = 1.0
"""Seconds in which a process that a signal has stopped must be continued; otherwise it counts as lost, since drafts are optional."""

_POLL_S = 0.4
"""Poll interval for liveness while waiting for a message. A fork of another thread may keep the connection of a dead process open."""

_COMMAND = "import os; os.nice({nice}); from pipespec.schedules.asynchronous.worker import main; main({fd})"


class CannotStart(RuntimeError):
    """The process of a draft cannot start."""


class LocalPeer(Peer):
    """The process of a draft.

    Args:
        setup: What the process builds, but for the ``parts`` of its memories.
        parts: The shared memories, and the numbers of the parts of each that the process may write.

    Attributes:
        process: None: there is none.
        ready_by: When it is lost unless it is ready.
    """

    returns = "its process has been started again"

    def __init__(self, setup: Setup, parts: Sequence[tuple[SharedMemory, set[int]]]) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.channel: Channel | None = None
        self._setup, self._parts = setup, parts
        self._status: Status | None = None
        self._is_ready = False
        self._failure: str | None = None  # until its process has been started again and is ready
        self._generation = 0  # the last one that it was sent
        self.ready_by = 0.0
        _peers.add(self)

    @property
    def status(self) -> Status | None:
        self._receive_sent()
        return self._status

    @property
    def has_own_attention(self) -> bool:
        """Whether its model has an attention that this process has registered, and a new one does not know."""
        return is_registered_here(self._setup.weights.config)

    # ---- its process

    def start(self) -> None:
        """Start the process, without waiting until it is ready. It is lost if that fails.

        It has the caller's present environment, ``sys.path``, directory, output and processor affinity, and a process group of its own: the terminal's
        Ctrl-C and Ctrl-Z do not reach it.
        """
        self._status, self._is_ready, self._generation = None, False, 0
        self.ready_by = time.monotonic() + _READY_TIMEOUT_S
        if self.has_own_attention:
            name = self._setup.weights.config._attn_implementation
            self._lose(f"its attention {name!r} is registered in this process alone; use schedule='lockstep'")
            return
        if not sys.executable:
            self._lose(
                "a worker process needs a Python interpreter, and sys.executable names none (an embedded Python?): set it, or use schedule='lockstep'"
            )
            return
        try:
            self.channel, end = Channel.pair()
            with end:
                self.process = _started(end.fileno())
            with ExitStack() as stack:
                lent = [stack.enter_context(shared.lent(writable)) for shared, writable in self._parts]
                setup = replace(self._setup, parts=[len(fds) for fds in lent])
                self.channel.send(_pickled(setup), list(chain(*lent)))
        except Closed:
            pass  # it has ended already, which is found where it is awaited
        except BaseException as error:
            number = error.errno if isinstance(error, OSError) else None
            self._lose(f"{error}{_REMEDIES.get(number or 0, '')}")
            # An OSError without a number is of a signal handler, not of the system.
            if not isinstance(error, ChannelError) and number is None:
                raise

    def stop(self) -> None:
        """End the process. In a fork of the caller this does nothing: for it, the process has ended."""
        if self.channel is not None:
            self.channel.close()
        if self.process is not None:
            # One of another user, from before this process dropped its rights, ends by itself: its connection is closed.
            with suppress(PermissionError):
                self.process.kill()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_EXIT_TIMEOUT_S)
        self.process = None

    # ---- its state

    def failure(self) -> str | None:
        process = self.process
        if process is None:
            return self._failure or "it has no process"
        if not self._is_ready:
            self._receive_sent()
            if not self._is_ready and time.monotonic() >= self.ready_by:
                self._lose(f"its process was not ready within {_READY_TIMEOUT_S:.0f} s")
        if process.poll() is not None and self.process is not None:
            # The draft's own error, or else the exit status.
            self._receive_sent()
            code, cause = process.returncode, self._status.failure if self._status is not None else ""
            if not cause and code < 0:
                cause = f"killed by {next((s.name for s in signal.Signals if s == -code), f'signal {-code}')}"
            self._lose(cause or f"its process ended with status {code}")
        return self._failure

    def _cause(self, cause: str) -> str:
        return cause if self._is_ready else f"could not start: {cause}"

    def _lose(self, cause: str) -> None:
        self._failure = self._cause(cause)
        self.stop()

    def _receive_sent(self) -> None:
        """Receive the messages that have been sent, without waiting for more."""
        with suppress(Closed):
            while self.channel is not None and self.channel.poll():
                self._receive()

    def _receive(self) -> None:
        assert self.channel is not None
        with self._uninterrupted("a message of it was interrupted"):
            text, _ = self.channel.receive()
            status = Status.from_json(text.decode())
            self._status, self._is_ready = status, self._is_ready or not status.failure
            self._failure = self._cause(status.failure) if status.failure else None

    @contextmanager
    def _uninterrupted(self, interrupted: str) -> Iterator[None]:
        """Around a message. If it is interrupted, the process ends, since the message may be lost."""
        try:
            yield
        except Closed:
            raise
        except BaseException as error:
            self._lose(str(error) if isinstance(error, ChannelError) else interrupted)
            if not isinstance(error, ChannelError):
                raise

    def await_idle(self, deadline: float) -> bool:
        """Wait until it has ended its last generation. Return False if it is lost, stays stopped, or has not answered at ``deadline``."""
        process, channel = self.process, self.channel
        stopped_at = None
        if process is None or channel is None:
            return False
        try:
            while self._status is None or not (self._status.failure or self._status.ended == self._generation):
                left = max(0.0, deadline - time.monotonic())
                if channel.poll(min(_POLL_S, left)):
                    self._receive()
                elif left == 0 or process.poll() is not None:
                    return False
                elif not _is_stopped(process):
                    stopped_at = None
                elif (stopped_at := stopped_at or time.monotonic()) + _STOPPED_TIMEOUT_S < time.monotonic():
                    return False
        except Closed:
            with suppress(subprocess.TimeoutExpired):  # the kernel closes the files of a process shortly before its end
                process.wait(_EXIT_TIMEOUT_S)
        return self._failure is None and process.poll() is None

    # ---- calls

    def prepare(self, deadline: float) -> None:
        """Before a call: wait until ``deadline`` for the end of the last one."""
        if self._is_ready and not self.await_idle(deadline) and self.process is not None:
            silent = f"it does not answer for {_FINISH_TIMEOUT_S:.0f} s"
            self._lose(self.failure() or ("a signal has stopped its process" if _is_stopped(self.process) else silent))

    def begin(self, call: Call) -> None:
        self._generation = call.generation
        assert self.channel is not None
        with self._uninterrupted("a call to it was interrupted"), suppress(Closed):
            self.channel.send(call.to_json().encode())

    def await_end(self) -> None:
        self.await_idle(time.monotonic() + _FINISH_TIMEOUT_S)


_REMEDIES = {
    errno.EMFILE: " (`ulimit -n` allows this process no more)",
    errno.ENFILE: " (fs.file-max allows this machine no more)",
    errno.EAGAIN: " (`ulimit -u`, or the control group, allows no more processes)",
}


def _is_stopped(process: subprocess.Popen[bytes]) -> bool:
    """Whether a signal such as SIGSTOP has stopped it. False in a fork of the caller, whose child it is not."""
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False


def _pickled(setup: Setup) -> bytes:
    """Raises ``ChannelError`` for a draft of the user's that has no pickled form."""
    try:
        return pickle.dumps(setup)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise ChannelError(f"its drafts cannot be sent to a process ({error}): use schedule='lockstep'") from error


def _started(fd: int) -> subprocess.Popen[bytes]:
    """A process that runs :func:`pipespec.schedules.asynchronous.worker.main` over a copy of the socket ``fd``.

    It is a plain command: multiprocessing's spawn would run an unguarded script of the user again, and a fork has none of the threads that torch needs.
    """
    try:
        os.getcwd()
        directory, path = None, [os.path.abspath(entry) for entry in sys.path]
    except FileNotFoundError:  # in a directory that was deleted, transformers cannot be imported
        directory, path = "/", [entry for entry in sys.path if os.path.isabs(entry)]
    return subprocess.Popen(
        # -P would leave out '', the current directory, which is in sys.path by its name.
        [sys.executable, "-P", "-c", _COMMAND.format(nice=NICE, fd=fd)],
        pass_fds=[fd],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        process_group=0,
        stdin=subprocess.DEVNULL,
        cwd=directory,
    )


class LocalDriver(AsynchronousDriver):
    """The driver of schedule ``workers``.

    Raises:
        ValueError: A model cannot live in shared memory.
        CannotStart: A process cannot start.
    """

    schedule = "workers"
    peers: dict[int, LocalPeer]

    def __init__(self, models: Sequence[PreTrainedModel], config: SpeculationConfig) -> None:
        check_shareable(models)
        super().__init__(models, config)
        self._target_threads = target_threads(len(models) - 1)
        assert isinstance(self.block.memory, SharedMemory)
        trace, self.peers = self._trace_memory, {}
        for i in config.model_stages[:-1]:
            (weights, memory), stages = share(self._model_of(i)), config.stages_of(i)
            parts = [(memory, {0}), (self.block.memory, self.block.parts_of(stages))]
            if trace is not None:
                parts.append((trace.memory, set(stages)))
            drafts = config.drafts[stages[0] : i + 1]
            setup = Setup(i, weights, [], trace.entries if trace else 0, config.native, drafts, config.prefix_cache)
            self.peers[i] = LocalPeer(setup, parts)
        self._is_open = False
        # At interpreter exit, too, and when the driver is collected as garbage.
        weakref.finalize(self, _stop, self.peers)
        self._open()
        for i, peer in self.peers.items():
            # Without such a draft calls go on, as after a loss.
            if (failure := peer.failure()) is not None and not peer.has_own_attention:
                details = peer.status.details if peer.status else ""
                self.close()
                raise CannotStart(f"{self._draft_name(i)} {failure}\n{details}".rstrip())

    def _make_block(self) -> StateBlock:
        return StateBlock.create(self._stage_count, 1, 64, SharedMemory.create([1]))

    def _open(self) -> None:
        """Start all processes, which import and build their models together, and wait until they are ready."""
        try:
            for peer in self.peers.values():
                peer.start()
            for i, peer in self.peers.items():
                peer.await_idle(peer.ready_by)
                self.block.set_alive(i, peer.failure() is None)
        except BaseException:
            self.close()
            raise
        self._absent.clear()
        self._is_open = True

    def _prepare_peers(self) -> None:
        if not self._is_open:  # it has been closed
            self._open()
            self.tend()
            return
        deadline = time.monotonic() + _FINISH_TIMEOUT_S  # of all together
        for peer in self.peers.values():
            peer.prepare(deadline)
        self.tend()
        for peer in self.peers.values():
            if peer.process is None:
                peer.start()

    def close(self) -> None:
        """End the processes. A later ``run`` starts them again."""
        super().close()
        self.block.start(0)
        self._is_open = False
        _stop(self.peers)


_peers: weakref.WeakSet[LocalPeer] = weakref.WeakSet()


def _leave() -> None:
    """In a fork of the caller, the processes are its parent's. For the fork they have ended."""
    for peer in _peers:
        if peer.channel is not None:
            peer.channel.close()
        if peer.process is not None:
            peer.process.returncode = 0  # so that nothing here waits for it, or kills it


os.register_at_fork(after_in_child=_leave)


def _stop(peers: dict[int, LocalPeer]) -> None:
    for peer in peers.values():
        peer.stop()
