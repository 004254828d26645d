"""Processes as forks of one process that has imported everything: drafts, and programs, where a test is not about how such a process starts.

torch and transformers take seconds to import, which a fresh process needs. ``python -m tests.support.forks FD`` is the process that forks. It has one
thread, so that a fork lacks none.
"""

import atexit
import ctypes
import functools
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Sequence
from typing import Any

from pipespec.schedules.asynchronous import local, worker

FRESH = local._started
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)
_MOST = 1 << 20


class Forks:
    """The process that forks, of the process that makes this. The forks are children of the latter.

    Args:
        here: It is a fork of the present process, which has imported everything and has one thread, and forks drafts only.
    """

    def __init__(self, here: bool = False) -> None:
        self._own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._own, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MOST)
        self._lock, self.owner, self._count = threading.Lock(), os.getpid(), 0
        with theirs:
            if here:
                if (pid := os.fork()) == 0:
                    gc.freeze()  # nothing that is held here closes a descriptor that has its number later
                    for begin, end in ((3, theirs.fileno()), (theirs.fileno() + 1, os.sysconf("SC_OPEN_MAX"))):
                        os.closerange(begin, end)  # their other ends wait for it
                    os.setpgid(0, 0)
                    _serve(theirs)
                    os._exit(0)
                self._wait = functools.partial(os.waitpid, pid, 0)
                return
            command = [sys.executable, "-m", "tests.support.forks", str(theirs.fileno())]
            path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
            environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=environment, process_group=0, stdin=subprocess.DEVNULL
            )
            self._wait = process.wait

    def start(self, fds: Sequence[int], **what: Any) -> int:
        """The id of a fork that does ``what``, see ``_fork``, with copies of ``fds``."""
        libc = ctypes.CDLL(None)
        with self._lock:
            self._count += 1
            request = json.dumps(what | {"number": self._count})
            # The fork's parent ends at once, and this process adopts the fork.
            libc.prctl(_SUBREAPER, 1)
            try:
                socket.send_fds(self._own, [request.encode()], fds)
                number = pid = 0
                while number != self._count:  # an interrupted start leaves its answer
                    if not (reply := self._own.recv(_MOST)):
                        raise ChildProcessError("the process that forks has ended, see its standard error")
                    number, pid = map(int, reply.split())
            finally:
                libc.prctl(_SUBREAPER, 0)
        return pid

    def close(self) -> None:
        self._own.shutdown(socket.SHUT_RDWR)  # forks of this process may have a copy
        self._own.close()
        self._wait()


_made: Forks | None = None


def forks(here: bool = False) -> Forks:
    """Of this process, also where it is a fork of one that has such a process."""
    global _made
    if _made is None or _made.owner != os.getpid():
        _made = Forks(here or _made is not None)
        atexit.register(_made.close)
    return _made


def fork_drafts_here() -> None:
    """At the beginning of a program that is a fork: its drafts are forks of what it is now."""
    forks(here=True)
    local._started = draft


class Fork(subprocess.Popen):
    """``Popen`` of a program as a fork. ``args``: what follows ``python`` on a command line: ``-c CODE``, ``-m MODULE`` or a file, and its arguments.

    Of the options of ``Popen`` it knows the streams, ``text``, ``cwd``, ``env`` and ``start_new_session``. PYTHONPATH, and what else Python reads when it
    starts, has no effect: ``sys.path`` is that of the caller.
    """

    def _execute_child(self, args, executable, preexec, close_fds, pass_fds, cwd, env, *rest: Any) -> None:
        _, _, _, *pipes, _, _, _, _, _, session, _ = rest
        theirs = [fd if fd != -1 else standard for standard, fd in enumerate((pipes[0], pipes[3], pipes[5]))]
        what = {"program": [str(word) for word in args], "path": sys.path, "session": session}
        what |= {"directory": str(cwd or os.getcwd()), "environment": dict(os.environ if env is None else env)}
        self.pid = forks().start([*theirs, *pass_fds], **what)
        self._child_created = True
        self._close_pipe_fds(*pipes)


def ran(*args: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run`` with captured text, of a :class:`Fork`."""
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options  # fmt: skip
    given, timeout = options.pop("input", None), options.pop("timeout", None)
    if given is not None:
        options["stdin"] = subprocess.PIPE
    with Fork(args, **options) as process:
        try:
            out, errors = process.communicate(given, timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(args, process.returncode, out, errors)


def draft(fd: int) -> subprocess.Popen[bytes]:
    """As ``pipespec.schedules.asynchronous.local._started``."""
    try:
        directory = os.getcwd()
    except FileNotFoundError:
        directory = "/"
    return Fork([], pass_fds=[fd], cwd=directory, stdin=subprocess.DEVNULL)


# ---- the process that forks


def _serve(requests: socket.socket) -> None:
    while True:
        request, fds, *_ = socket.recv_fds(requests, _MOST, 4)
        if not request:
            return
        if (middle := os.fork()) == 0:
            _fork(requests, json.loads(request), fds)
            return
        for fd in fds:
            os.close(fd)
        os.waitpid(middle, 0)


def _fork(requests: socket.socket, what: dict[str, Any], fds: list[int]) -> None:
    """In a child, which ends at once; its own child is the draft or the program."""
    middle = os.getpid()
    if os.fork() != 0:
        os._exit(0)
    while os.getppid() == middle:  # not yet adopted
        time.sleep(0.001)
    requests.send(f"{what['number']} {os.getpid()}".encode())
    requests.close()
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(what["directory"])
    os.environ.clear()
    os.environ.update(what["environment"])
    sys.path[:] = what["path"]
    if what["session"]:
        os.setsid()
    if what["program"]:
        run(*what["program"])
    else:
        os.setpgid(0, 0)
        os.nice(local.NICE)
        worker.main(fds[3])


def run(first: str, *rest: str) -> None:
    """Run a program in this process, as ``python first *rest`` does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # What the descriptors were before may have been of another kind.
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif first == "-m":
        sys.argv = list(rest)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, os.path.dirname(first))
        runpy.run_path(first, run_name="__main__")


def main() -> None:
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import torch.distributed
    import transformers.models.llama.modeling_llama

    import pipespec.engine.native

    _ = pipespec.Pipeline, transformers.AutoModelForCausalLM, transformers.AutoTokenizer
    torch.set_num_threads(1)
    assert len(os.listdir("/proc/self/task")) == 1
    gc.freeze()  # a fork's collection of garbage would write to all pages
    _serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
