"""Messages between two processes over a socket."""

from __future__ import annotations

import errno
import os
import pickle
import select
import socket
import struct
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_LENGTH = struct.Struct("Q")
_MAX_FDS = 64
_READ = 1 << 20
_CHECK_S = 0.4
"""A wait calls its ``check`` at least this often."""


class Closed(ConnectionError):
    """One of the two ends is closed."""


class Channel:
    """One end of a socket over which two processes send each other pickled messages and file descriptors.

    Limits are measured here. A limit of the socket (``SO_RCVTIMEO``) begins again with each signal that interrupts a system call.

    Args:
        end: Becomes non-blocking.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def poll(self, timeout_s: float | None = 0.0) -> bool:
        """Wait for a message, or for the end of the channel. Return whether one of them is there.

        Raises:
            Closed: This end is closed.
        """
        return self._wait(select.POLLIN, timeout_s)

    def send(
        self,
        message: object,
        fds: Sequence[int] = (),
        *,
        timeout_s: float | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        """Send a message and copies of file descriptors.

        Args:
            message: Is pickled.
            fds: At most 64.
            timeout_s: Longest wait for the reader. After an error the reader may have a part of the message.
            check: Is called during the wait. What it raises ends the wait.

        Raises:
            Closed: One end is closed.
            TimeoutError: The other process does not read.
        """
        data = pickle.dumps(message)
        left = memoryview(_LENGTH.pack(len(data)) + data)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        deadline = _deadline(timeout_s)
        while left:
            with _closed_ends():
                try:
                    left = left[self._socket.sendmsg([left], rights) :]
                    rights = []
                    continue
                except BlockingIOError:
                    pass
            self._await(select.POLLOUT, deadline, check)

    def receive(self, *, timeout_s: float | None = None) -> tuple[Any, list[int]]:
        """Receive a message and the file descriptors that came with it.

        Raises:
            Closed: One end is closed.
            TimeoutError: The message is not complete within ``timeout_s``.
            OSError: ``EMFILE``, if this process has no room for the file descriptors. The message is lost, those behind it are not.
        """
        deadline, fds = _deadline(timeout_s), list[int]()
        try:
            length, is_complete = self._read(_LENGTH.size, deadline, fds)
            (size,) = _LENGTH.unpack(length)
            data, are_complete = self._read(size, deadline, fds)
            if not (is_complete and are_complete):
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return pickle.loads(data), fds
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    def _read(self, size: int, deadline: float | None, fds: list[int]) -> tuple[bytearray, bool]:
        """``size`` bytes, and whether all file descriptors came with them, which are appended to ``fds``."""
        data, is_complete = bytearray(), True
        space = socket.CMSG_SPACE(_MAX_FDS * array("i").itemsize)
        while len(data) < size:
            with _closed_ends():
                try:
                    part, rights, flags, _ = self._socket.recvmsg(
                        min(size - len(data), _READ), space, socket.MSG_CMSG_CLOEXEC
                    )
                except BlockingIOError:
                    part, rights, flags = None, [], 0
            if part is None:
                self._await(select.POLLIN, deadline)
                continue
            for _, _, content in rights:
                fds.extend(array("i", content[: len(content) - len(content) % array("i").itemsize]))
            if not part:
                raise Closed("the other end is closed")
            is_complete &= not flags & socket.MSG_CTRUNC
            data += part
        return data, is_complete

    def _await(self, event: int, deadline: float | None, check: Callable[[], None] | None = None) -> None:
        left = None if deadline is None else deadline - time.monotonic()
        while not self._wait(event, min(_CHECK_S, _CHECK_S if left is None else max(0.0, left))):
            if check is not None:
                check()
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(errno.ETIMEDOUT, "the other process does not answer")

    def _wait(self, event: int, timeout_s: float | None) -> bool:
        fd = self._socket.fileno()
        if fd < 0:
            raise Closed("this end is closed")
        poll = select.poll()
        poll.register(fd, event)
        return bool(poll.poll(None if timeout_s is None else 1e3 * timeout_s))


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s


@contextmanager
def _closed_ends() -> Iterator[None]:
    try:
        yield
    except (BrokenPipeError, ConnectionResetError) as error:
        raise Closed("the other end is closed") from error
    except OSError as error:
        if error.errno == errno.EBADF:
            raise Closed("this end is closed") from error
        raise
