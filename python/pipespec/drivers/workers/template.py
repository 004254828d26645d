"""Worker processes as forks of one template process, which imports torch and transformers only once.

The template is a plain command: multiprocessing's spawn would run an unguarded script of the user again. It has one thread, runs no torch operation
    and makes no CUDA call, so that its forks can use torch and CUDA. It ends with the process that started it. Where a fork is not
possible, each worker is a plain command and does the imports itself.
"""

from __future__ import annotations

import atexit
import errno
import gc
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

from pipespec.process.forks import Lock
from pipespec.process.signals import suppressed

_ANSWER_TIMEOUT_S = 5.0
"""A template that has done its imports answers in milliseconds. One that takes longer than this is stopped or hangs, and is given up."""

_CHECK_S = 0.5
_IDLE_S = 300.0
"""A template without workers ends after this time, since it occupies as much memory as a worker."""

_WANTED = b"\1"
"""The caller's answer to a fork. Without it the fork ends."""

LOST = 255
"""Exit status of a worker whose template ended before it could report the true one."""

_MAX_FDS = 64

_READ_AT_IMPORT = (
    *("PYTHON", "LD_", "MALLOC_", "GLIBC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ATEN_", "DNNL_", "ONEDNN_"),
    *("TORCH", "PYTORCH", "TRITON_", "CUDA_", "NVIDIA_", "HF_", "TRANSFORMERS_", "TOKENIZERS_"),
    *("PIPESPEC_OPS", "PIPESPEC_SIMD"),
)
"""Prefixes of the environment variables that libraries read when they are loaded: a fork cannot change them any more."""


def start(fds: Sequence[int], *, fork: bool, timeout_s: float) -> Process:
    """Start a worker process that runs :func:`pipespec.drivers.workers.process.main`.

    The worker has the caller's present environment, ``sys.path``, directory, output, priority and processor affinity. It has a process
    group of its own: the terminal's Ctrl-C does not reach it.

    Args:
        fds: File descriptors. The worker receives copies of them as its arguments, in this order.
        fork: Fork the template where possible, else always run a command.
        timeout_s: Longest wait for a template that is still importing. After that the worker is a command, too.
    """
    if fork and _has_pidfd():
        with _lock, suppressed(OSError, EOFError):
            return _current_template().fork(fds, timeout_s)
    return _command("pipespec.drivers.workers.process", fds, _environment())


def prepare() -> None:
    """Start the template without waiting for it, so that the next :func:`start` takes less time."""
    if _has_pidfd():
        with _lock, suppressed(OSError):
            _current_template()


@dataclass(frozen=True)
class _Origin:
    """The properties of a template that its forks cannot change. A template fits only a caller with the same ones."""

    pid: int
    executable: str
    environment: dict[str, str]

    @staticmethod
    def present() -> _Origin:
        environment = {k: v for k, v in _environment().items() if k.startswith(_READ_AT_IMPORT)}
        return _Origin(os.getpid(), sys.executable, environment)


@dataclass(frozen=True)
class _Request:
    """Request for one worker. Its file descriptors are sent with it: status pipe, directory, stdout, stderr, arguments of ``main``."""

    environment: dict[str, str]
    affinity: set[int]
    niceness: int


class _Template:
    """The caller's handle on a template process."""

    def __init__(self, origin: _Origin) -> None:
        self.origin = origin
        self._socket, theirs = socket.socketpair()
        self._has_answered = False
        # numpy's OpenBLAS would start threads.
        environment = _environment() | {"OPENBLAS_NUM_THREADS": "1"}
        with theirs:
            # Not in the caller's directory, which may have been deleted: transformers cannot be imported there.
            self.process = _command("pipespec.drivers.workers.template", [theirs.fileno()], environment, directory="/")

    def fork(self, fds: Sequence[int], timeout_s: float) -> ForkedProcess:
        """Fork a worker. Raises ``OSError`` or ``EOFError`` if the template does not answer; it is closed then."""
        seconds = _ANSWER_TIMEOUT_S if self._has_answered else timeout_s
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            self._socket.setsockopt(
                socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), int(1e6 * (seconds % 1)))
            )
        with ExitStack() as lent, ExitStack() as failed:
            status, theirs = os.pipe()
            failed.callback(os.close, status)
            lent.callback(os.close, theirs)
            directory = os.open(".", os.O_PATH)
            lent.callback(os.close, directory)
            null = os.open(os.devnull, os.O_RDWR)
            lent.callback(os.close, null)
            output = [fd if _is_open(fd) else null for fd in (1, 2)]
            request = _Request(dict(_environment()), os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0))
            failed.callback(self.close)  # a later answer would be taken for that of the next request
            _send(self._socket, request, [theirs, directory, *output, *fds])
            pid, pidfds = _receive(self._socket)
            if not pidfds:  # the kernel drops what this process has no descriptor for
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            failed.callback(os.close, *pidfds)
            # A fork whose caller has given up must not run: the caller has started a command with the same descriptors by then.
            self._socket.sendall(_WANTED)
            failed.pop_all()
        self._has_answered = True
        return ForkedProcess(pid, pidfds[0], status, self)

    def is_usable(self) -> bool:
        return self._socket.fileno() >= 0 and self.process.poll() is None

    @property
    def answer_timeout_s(self) -> float:
        """Longest wait for a report. One that was given up has none, unless it reports at once."""
        return _ANSWER_TIMEOUT_S if self._socket.fileno() >= 0 else _CHECK_S

    def close(self) -> None:
        """Accept no further requests. The process ends with its last worker."""
        self._socket.close()


class ForkedProcess:
    """A worker that the template forked. The template is its parent and reports its exit status."""

    def __init__(self, pid: int, pidfd: int, status: int, template: _Template) -> None:
        self.pid = pid
        self._template = template
        self.returncode: int | None = None
        self._pidfd, self._status, self._caller = pidfd, status, os.getpid()

    def poll(self) -> int | None:
        if self.returncode is None and os.getpid() == self._caller and not _readable([self._pidfd], 0):
            return None
        return self.wait()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process. Raises ``subprocess.TimeoutExpired``."""
        if self.returncode is None and os.getpid() != self._caller:
            self.returncode = 0  # like Popen: a fork of the caller has no children
        if self.returncode is None:
            if not _readable([self._pidfd], timeout):
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0)
            # The template reports at once, unless something stopped or killed it.
            report = os.read(self._status, 4) if _readable([self._status], self._template.answer_timeout_s) else b""
            if not report:
                self._template.close()
            self.returncode = struct.unpack("i", report)[0] if report else LOST
            self._close()
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _close(self) -> None:
        for fd in (self._pidfd, self._status):
            os.close(fd)

    def __del__(self) -> None:
        if self.returncode is None:
            self._close()


Process: TypeAlias = subprocess.Popen[bytes] | ForkedProcess
"""A worker process. Both have ``pid``, ``returncode``, ``poll``, ``wait`` and ``kill``."""

_lock = Lock()
_templates: list[_Template] = []


def _current_template() -> _Template:
    """The template that fits the caller, a new one if none does. The others end with their last worker."""
    present = _Origin.present()
    for template in list(_templates):
        if template.is_usable() and template.origin == present:
            return template
        template.close()
        if template.process.poll() is not None:
            _templates.remove(template)
    _templates.append(_Template(present))
    return _templates[-1]


@atexit.register
def _end_templates() -> None:
    for template in _templates:
        template.close()
        template.process.kill()
        template.process.wait()


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
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, map(_absolute, sys.path)))}


def _absolute(entry: str) -> str:
    """An entry of ``sys.path`` that means the same in any directory; empty if it is relative to a directory that was deleted."""
    try:
        return os.path.abspath(entry) if not entry or os.path.isdir(entry) else entry
    except FileNotFoundError:
        return ""


def _command(
    module: str, fds: Sequence[int], environment: dict[str, str], directory: str | None = None
) -> subprocess.Popen[bytes]:
    code = f"import sys; from {module} import main; main(*map(int, sys.argv[1:]))"
    command = [sys.executable, "-P", "-c", code, *map(str, fds)]
    return subprocess.Popen(
        command, pass_fds=fds, env=environment, process_group=0, stdin=subprocess.DEVNULL, cwd=directory
    )


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError as error:
        return error.errno != errno.EBADF
    return True


def _readable(fds: Sequence[int], timeout: float | None) -> list[int]:
    """Wait up to ``timeout`` seconds until some of ``fds`` are readable or closed, and return these."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(None if timeout is None else 1e3 * timeout)]


def _send(to: socket.socket, message: object, fds: Sequence[int]) -> None:
    data = pickle.dumps(message)
    socket.send_fds(to, [struct.pack("I", len(data))], fds)
    to.sendall(data)


def _receive(sender: socket.socket) -> tuple[Any, list[int]]:
    head, fds, _, _ = socket.recv_fds(sender, 4, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
    data = sender.recv(struct.unpack("I", head)[0], socket.MSG_WAITALL) if head else b""
    if not data:
        raise EOFError
    return pickle.loads(data), fds


# ---- in the template


def main(fd: int) -> None:
    """The template process: import, then fork a worker for each request that comes from the socket ``fd``."""
    caller = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import transformers.models.llama.modeling_llama  # noqa: F401  the class of most drafts

    import pipespec.drivers.workers.process  # noqa: F401

    if len(os.listdir("/proc/self/task")) > 1:
        os._exit(1)  # a fork has only one of the threads, and the locks of the others stay locked in it
    gc.freeze()
    _serve(socket.socket(fileno=fd), caller)
    os._exit(0)


def _serve(requests: socket.socket, caller: int) -> None:
    workers: dict[int, tuple[int, int]] = {}  # pidfd -> pid, status pipe
    gate: int | None = None  # of the newest worker, until its caller has answered
    last_use = time.monotonic()
    accepts = True
    # The workers end with their parent, so it must not outlive the caller.
    while os.getppid() == caller and (workers or (accepts and time.monotonic() < last_use + _IDLE_S)):
        ready = _readable([*workers, *([requests.fileno()] if accepts else [])], _CHECK_S)
        for pidfd in workers.keys() & ready:
            pid, status = workers.pop(pidfd)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with suppress(BrokenPipeError):  # the caller has dropped this worker
                os.write(status, struct.pack("i", code))
            os.close(pidfd)
            os.close(status)
        if accepts and requests.fileno() in ready:
            last_use = time.monotonic()
            try:
                if gate is None:
                    request, fds = _receive(requests)
                    others = [requests.fileno(), *workers, *(status for _, status in workers.values())]
                    pid, gate = _fork(request, fds, others)
                    pidfd = os.pidfd_open(pid)
                    workers[pidfd] = pid, fds[0]
                    _send(requests, pid, [pidfd])
                    continue
                if not requests.recv(len(_WANTED)):
                    raise EOFError
                with suppress(BrokenPipeError):  # it has ended
                    os.write(gate, _WANTED)
            except (EOFError, ConnectionError):
                accepts = False
            if gate is not None:
                os.close(gate)
                gate = None


def _fork(request: _Request, fds: Sequence[int], templates_fds: Sequence[int]) -> tuple[int, int]:
    """Fork a worker, which waits for :data:`_WANTED`. Returns its process id and the pipe for that, and closes ``fds`` but for the first, the status pipe."""
    gate, ours = os.pipe()
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        try:
            os.close(ours)
            if os.read(gate, len(_WANTED)):
                os.close(gate)
                _run(request, fds, templates_fds, parent)
        finally:
            os._exit(1)
    for fd in (gate, *fds[1:]):
        os.close(fd)
    return pid, ours


def _run(request: _Request, fds: Sequence[int], templates_fds: Sequence[int], parent: int) -> None:
    """In the fork: take over the caller's present environment, then run the worker."""
    from pipespec.drivers.workers import process

    status, directory, stdout, stderr, *arguments = fds
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(request.environment)
    os.sched_setaffinity(0, request.affinity)
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, request.niceness)
    os.fchdir(directory)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for fd in (status, directory, stdout, stderr, *templates_fds):
        os.close(fd)
    process.main(*arguments, parent=parent)
