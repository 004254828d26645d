"""Processes of drafts as forks of one process that has imported everything, where a test is not about how such a process starts.

torch and transformers take seconds to import, which a fresh process needs for each draft. ``python -m tests.support.worker_forks FD`` is the process
that forks. It has one thread, so that a fork lacks none.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
import time
from typing import Any

from pipespec.schedules.asynchronous import local, worker

FRESH = local._started
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)
_MOST = 1 << 16


class WorkerForks:
    """Makes processes as ``pipespec.schedules.asynchronous.local._started`` does. They are children of this process, too."""

    def __init__(self) -> None:
        self._own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.support.worker_forks", str(theirs.fileno())]
            path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
            environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=environment, process_group=0, stdin=subprocess.DEVNULL
            )
        self._lock, self._owner, self._count = threading.Lock(), os.getpid(), 0

    def start(self, fd: int) -> subprocess.Popen[bytes]:
        if os.getpid() != self._owner:  # a fork of this process, which would not be the parent
            return FRESH(fd)
        try:
            directory = os.getcwd()
        except FileNotFoundError:
            directory = "/"
        libc = ctypes.CDLL(None)
        with self._lock:
            self._count += 1
            request = json.dumps([self._count, directory, dict(os.environ), sys.path])
            # The fork's parent ends at once, and this process adopts the fork.
            libc.prctl(_SUBREAPER, 1)
            try:
                socket.send_fds(self._own, [request.encode()], [fd, 1, 2])
                number = 0
                while number != self._count:  # an interrupted start leaves its answer
                    if not (reply := self._own.recv(_MOST)):
                        raise ChildProcessError("the process that forks drafts has ended, see its standard error")
                    number, pid = map(int, reply.split())
            finally:
                libc.prctl(_SUBREAPER, 0)
        started: Any = object.__new__(subprocess.Popen)
        started.__dict__ |= {"pid": pid, "returncode": None, "args": ["fork"], "_waitpid_lock": threading.Lock()}
        started.__dict__ |= {"stdin": None, "stdout": None, "stderr": None, "_child_created": True}
        return started

    def close(self) -> None:
        self._own.shutdown(socket.SHUT_RDWR)  # forks of this process may have a copy
        self._own.close()
        self._process.wait()


def _serve(requests: socket.socket) -> None:
    while True:
        request, fds, *_ = socket.recv_fds(requests, _MOST, 3)
        if not request:
            return
        if (middle := os.fork()) == 0:
            _fork(requests, request, fds)
        for fd in fds:
            os.close(fd)
        os.waitpid(middle, 0)


def _fork(requests: socket.socket, request: bytes, fds: list[int]) -> None:
    """In a child, which ends at once; its own child is the draft."""
    middle = os.getpid()
    if os.fork() != 0:
        os._exit(0)
    while os.getppid() == middle:  # not yet adopted
        time.sleep(0.001)
    number, directory, environment, path = json.loads(request)
    requests.send(f"{number} {os.getpid()}".encode())
    requests.close()
    fd, *outputs = fds
    for number, output in enumerate(outputs, 1):
        os.dup2(output, number)
        os.close(output)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path
    os.setpgid(0, 0)
    os.nice(local.NICE)
    worker.main(fd)


def main() -> None:
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    import pipespec.engine.native  # noqa: F401

    torch.set_num_threads(1)
    assert len(os.listdir("/proc/self/task")) == 1
    _serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
