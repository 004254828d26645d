"""Messages between two processes over a socket."""

from __future__ import annotations

import errno
import os
import pickle
import select
import socket
import struct
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_LENGTH = struct.Struct("Q")
_MAX_FDS = 64
_READ = 1 << 20


class ChannelError(Exception):
    """A message cannot be sent or received. No ``OSError``, as a ``TimeoutError`` of a signal handler is one."""


class Closed(ChannelError):
    """One of the two ends is closed."""


class Late(ChannelError):
    """The other process does not read, or does not complete a message."""


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

    def send(self, message: object, fds: Sequence[int] = (), *, timeout_s: float | None = None) -> None:
        """Send a message and copies of file descriptors.

        Args:
            message: Is pickled.
            fds: At most 64.
            timeout_s: Longest wait in which the reader takes nothing. After an error the reader may have a part of the message.

        Raises:
            Closed: One end is closed.
            Late: The other process does not read.
        """
        data = pickle.dumps(message)
        left = [memoryview(_LENGTH.pack(len(data))), memoryview(data)]
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        while left:
            with _closed_ends():
                try:
                    # A program may have given SIGPIPE its default effect, which ends it.
                    sent = self._socket.sendmsg(left, rights, socket.MSG_NOSIGNAL)
                except BlockingIOError:
                    sent = 0
            if not sent:
                self._await(select.POLLOUT, timeout_s)
                continue
            rights = []
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if sent:
                left[0] = left[0][sent:]

    def receive(self, *, timeout_s: float | None = None) -> tuple[Any, list[int]]:
        """Receive a message and the file descriptors that came with it.

        Raises:
            Closed: One end is closed.
            Late: Nothing came for ``timeout_s``, and the message is not complete.
            ChannelError: This process has no room for the file descriptors. The message is lost, those behind it are not.
        """
        fds = list[int]()
        try:
            length, is_complete = self._read(_LENGTH.size, timeout_s, fds)
            (size,) = _LENGTH.unpack(length)
            data, are_complete = self._read(size, timeout_s, fds)
            if not (is_complete and are_complete):
                raise ChannelError(os.strerror(errno.EMFILE))
            return pickle.loads(data), fds
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    def _read(self, size: int, timeout_s: float | None, fds: list[int]) -> tuple[bytearray, bool]:
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
                self._await(select.POLLIN, timeout_s)
                continue
            for _, _, content in rights:
                fds.extend(array("i", content[: len(content) - len(content) % array("i").itemsize]))
            if not part:
                raise Closed("the other end is closed")
            is_complete &= not flags & socket.MSG_CTRUNC
            data += part
        return data, is_complete

    def _await(self, event: int, timeout_s: float | None) -> None:
        if not self._wait(event, timeout_s):
            raise Late("the other process does not answer")

    def _wait(self, event: int, timeout_s: float | None) -> bool:
        fd = self._socket.fileno()
        if fd < 0:
            raise Closed("this end is closed")
        poll = select.poll()
        poll.register(fd, event)
        return bool(poll.poll(None if timeout_s is None else 1e3 * timeout_s))


@contextmanager
def _closed_ends() -> Iterator[None]:
    try:
        yield
    except (BrokenPipeError, ConnectionResetError) as error:
        raise Closed("the other end is closed") from error
    except OSError as error:
        if error.errno == errno.EBADF:
            raise Closed("this end is closed") from error
        if error.errno is None:  # of a signal handler, not of the system
            raise
        raise ChannelError(os.strerror(error.errno)) from error
