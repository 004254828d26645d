"""Worker processes as forks of one template process, which imports torch and transformers only once.

The template is a plain command: multiprocessing's spawn would run an unguarded script of the user again. It has one thread, runs no torch operation
and makes no CUDA call, so that its forks can use torch and CUDA. It ends with the process that started it. Where a fork is not
possible, each worker is a plain command and does the imports itself.
"""

from __future__ import annotations

import atexit
import gc
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from functools import cache
from multiprocessing.connection import wait
from typing import TypeAlias

from pipespec.process.threads import Lock
from pipespec.schedules.workers.channel import Channel, ChannelError

_ANSWER_TIMEOUT_S = 5.0
"""A template that has done its imports answers in milliseconds. One that takes longer than this is given up."""

_CHECK_S = 0.5
_IMPORT_TIMEOUT_S = 60.0
"""A template whose imports take longer than this is given up."""
_IDLE_S = 300.0
"""A template without workers ends after this time, since it occupies as much memory as a worker."""

LOST = 255
"""Exit status of a worker whose template ended before it could report the true one."""

_READ_AT_IMPORT = (
    *("PYTHON", "LD_", "MALLOC_", "GLIBC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ATEN_", "DNNL_", "ONEDNN_"),
    *("TORCH", "PYTORCH", "TRITON_", "CUDA_", "NVIDIA_", "HF_", "TRANSFORMERS_", "TOKENIZERS_"),
    *("PIPESPEC_OPS", "PIPESPEC_PDL", "PIPESPEC_SIMD"),
)
"""Prefixes of the environment variables that libraries read when they are loaded: a fork cannot change them any more."""


def start(fd: int, *, fork: bool) -> Process:
    """Start a worker process that runs :func:`pipespec.schedules.workers.process.main`.

    The worker has the caller's present environment, ``sys.path``, directory, output, priority and processor affinity. It has a process
    group of its own: the terminal's Ctrl-C does not reach it.

    Args:
        fd: Socket of which the worker receives a copy.
        fork: Fork the template where possible, else always run a command.

    Raises:
        OSError: No process can be started.
        ChannelError: The template does not answer. It may fork the worker all the same, whose connection the caller must close.
    """
    if fork and _has_pidfd():
        with _lock:
            template = _current_template()
            if template is not None and template.await_ready():
                return template.fork(fd)
    directory = None if _has_directory() else "/"
    return _command("pipespec.schedules.workers.process", fd, _environment(), directory)


def prepare() -> None:
    """Start the template without waiting for it, so that the next :func:`start` takes less time."""
    if sys.executable and _has_pidfd():
        try:
            with _lock:
                _current_template()
        except OSError as error:  # start() raises it again
            if error.errno is None:  # of a signal handler of the caller, not of the system
                raise


def _origin() -> tuple[object, ...]:
    """What the forks of a template cannot change. A template fits only a caller with the same."""
    environment = {k: v for k, v in _environment().items() if k.startswith(_READ_AT_IMPORT)}
    return sys.executable, environment, os.getresuid(), os.getresgid(), os.getgroups()


class _Template:
    """The caller's handle on a template process."""

    def __init__(self, origin: tuple[object, ...]) -> None:
        self.origin = origin
        self._channel, theirs = Channel.pair()
        self._is_ready = False
        # numpy's OpenBLAS would start threads.
        environment = _environment() | {"OPENBLAS_NUM_THREADS": "1"}
        with theirs:
            self.process = _command("pipespec.schedules.workers.template", theirs.fileno(), environment, "/")
        self._began = time.monotonic()
        self.has_failed = False
        """Whether it could not do its imports, and another one could not either: they start a thread, for instance, or never end."""

    def await_ready(self) -> bool:
        """Wait until it has done its imports. Return False, and end it, if it cannot do them."""
        if self._is_ready:
            return True
        with suppress(ChannelError):
            if self._channel.poll(max(0.0, self._began + _IMPORT_TIMEOUT_S - time.monotonic())):
                self._channel.receive()
                self._is_ready = True
                return True
        self.has_failed = True
        self.end()
        return False

    def fork(self, fd: int) -> ForkedProcess:
        """Fork a worker. The template is ready.

        Raises:
            OSError: This process has no room for descriptors.
            ChannelError: The template cannot fork; or it does not answer, and is closed. Its fork may come nevertheless.
        """
        with ExitStack() as lent, ExitStack() as failed:
            status, theirs = os.pipe()
            failed.callback(os.close, status)
            lent.callback(os.close, theirs)
            directory = os.open(".", os.O_PATH)
            lent.callback(os.close, directory)
            output = list[int]()
            for number in (1, 2):
                output.append(_output(number))
                lent.callback(os.close, output[-1])
            request = _environment(), os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)
            try:
                self._channel.send(request, [theirs, directory, *output, fd])
                if not self._channel.poll(_ANSWER_TIMEOUT_S):
                    raise ChannelError("the template does not answer")
                answer, pidfds = self._channel.receive()
            except BaseException:
                self.close()  # a later answer would be taken for that of the next request
                raise
            if isinstance(answer, ChannelError):
                raise answer
            failed.pop_all()
        return ForkedProcess(answer, pidfds[0], status, self)

    def is_usable(self) -> bool:
        return not self._channel.closed and self.process.poll() is None

    def close(self) -> None:
        """Accept no further requests. The process ends with its last worker."""
        self._channel.close()

    def end(self) -> None:
        """Kill it. It ends with its last worker if it belongs to another user by now."""
        self.close()
        with suppress(PermissionError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait(_ANSWER_TIMEOUT_S)


class ForkedProcess:
    """A worker that the template forked. The template is its parent and reports its exit status."""

    def __init__(self, pid: int, pidfd: int, status: int, template: _Template) -> None:
        self.pid = pid
        self._template = template
        self.returncode: int | None = None
        self._pidfd, self._status = pidfd, status

    def poll(self) -> int | None:
        if self.returncode is None:
            ends = select.poll()  # at each step of the target, for which wait() is slow
            ends.register(self._pidfd, select.POLLIN)
            if not ends.poll(0):
                return None
        return self.wait()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process. Raises ``subprocess.TimeoutExpired``."""
        if self.returncode is None:
            if not wait([self._pidfd], timeout):
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0)
            # The template reports at once, unless something stopped or killed it.
            report = os.read(self._status, 4) if wait([self._status], _ANSWER_TIMEOUT_S) else b""
            if not report:
                self._template.close()
            self._ended(struct.unpack("i", report)[0] if report else LOST)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def leave(self) -> None:
        """In a fork of the caller, the process is no child and has ended."""
        if self.returncode is None:
            self._ended(0)

    def _ended(self, code: int) -> None:
        self.returncode = code
        for fd in (self._pidfd, self._status):
            os.close(fd)

    __del__ = leave


Process: TypeAlias = subprocess.Popen[bytes] | ForkedProcess
"""A worker process. Both have ``pid``, ``returncode``, ``poll``, ``wait`` and ``kill``."""

_lock = Lock()
_templates: list[_Template] = []


def _current_template() -> _Template | None:
    """The template that fits the caller, a new one if none does. None: there can be none. The others end with their last worker."""
    present = _origin()
    for template in list(_templates):
        if template.origin == present and (template.is_usable() or template.has_failed):
            return None if template.has_failed else template
        template.close()
        if template.process.poll() is not None:
            _templates.remove(template)
    _templates.append(_Template(present))
    return _templates[-1]


@atexit.register
def _end_templates() -> None:
    for template in _templates:
        template.end()


def _leave_templates() -> None:
    """In a fork of the caller, the templates are its parent's. Only the parent may send to them and close them."""
    for template in _templates:
        template.close()
        template.process.returncode = 0
    _templates.clear()


os.register_at_fork(after_in_child=_leave_templates)


@cache
def _has_pidfd() -> bool:
    """Whether the platform, and a sandbox around this process, allow pidfds."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def _environment() -> dict[str, str]:
    # The process may run in another directory, and -P would leave out '', the current one.
    path = map(os.path.abspath, sys.path) if _has_directory() else filter(os.path.isabs, sys.path)
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)}


def _has_directory() -> bool:
    """Whether the current directory exists. In one that was deleted, transformers cannot be imported."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _output(number: int) -> int:
    """A copy of the caller's stdout or stderr; of the null device where it is closed."""
    try:
        return os.dup(number)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


def _command(module: str, fd: int, environment: dict[str, str], directory: str | None) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-c", f"from {module} import main; main({fd})"]
    return subprocess.Popen(
        command, pass_fds=[fd], env=environment, process_group=0, stdin=subprocess.DEVNULL, cwd=directory
    )


# ---- in the template


def main(fd: int) -> None:
    """The template process: import, then fork a worker for each request that comes from the socket ``fd``."""
    caller = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # inherited: where the caller ignores it, no status could be had
    import transformers.models.llama.modeling_llama  # noqa: F401  the class of most drafts

    import pipespec.schedules.workers.process  # noqa: F401

    if len(os.listdir("/proc/self/task")) > 1:
        os._exit(1)  # a fork has only one of the threads, and the locks of the others stay locked in it
    gc.freeze()
    with suppress(ChannelError):
        requests = Channel(socket.socket(fileno=fd))
        requests.send("ready")
        _serve(requests, caller)
    os._exit(0)


def _serve(requests: Channel, caller: int) -> None:
    workers: dict[int, tuple[int, int]] = {}  # pidfd -> pid, status pipe
    last_use = time.monotonic()
    accepts = True
    # The workers end with their parent, so it must not outlive the caller.
    while os.getppid() == caller and (workers or (accepts and time.monotonic() < last_use + _IDLE_S)):
        ready = wait([*workers, *([requests.fileno()] if accepts else [])], _CHECK_S)
        for pidfd in workers.keys() & ready:
            pid, status = workers.pop(pidfd)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.close(pidfd)
            with suppress(BrokenPipeError):  # the caller has dropped this worker
                os.write(status, struct.pack("i", code))
            os.close(status)
        if accepts and requests.fileno() in ready:
            last_use = time.monotonic()
            try:
                _answer(requests, workers)
            except ChannelError:
                accepts = False


def _answer(requests: Channel, workers: dict[int, tuple[int, int]]) -> None:
    """Receive a request, fork a worker, enter it into ``workers``, and send its process id and a descriptor of it, or why there is none."""
    (environment, affinity, niceness), (status, *lent) = requests.receive()
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:  # no room for a process: the other workers live on
        for fd in (status, *lent):
            os.close(fd)
        requests.send(ChannelError(str(error)))
        return
    if pid == 0:
        try:
            from pipespec.schedules.workers.process import main

            directory, stdout, stderr, conn = lent
            os.setpgid(0, 0)
            os.environ.clear()
            os.environ.update(environment)
            # The system may refuse what it allowed before: a core that was taken from this process, or a higher priority.
            with suppress(OSError):
                os.sched_setaffinity(0, affinity)
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, 0, niceness)
            with suppress(OSError):
                os.fchdir(directory)
            os.dup2(stdout, 1)
            os.dup2(stderr, 2)
            for fd in (*lent[:-1], status, requests.fileno(), *workers, *(s for _, s in workers.values())):
                os.close(fd)
            main(conn, parent)
        finally:
            os._exit(1)
    for fd in lent:
        os.close(fd)
    pidfd = os.pidfd_open(pid)
    workers[pidfd] = pid, status
    requests.send(pid, [pidfd])
