"""Messages between two processes over a socket."""

from __future__ import annotations

import errno
import os
import select
import socket
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

_MAX_FDS = 64
_MAX_PACKET = 1 << 15
_IN_A_FILE = b"\0file"
"""In place of a larger message, which lies in a file in memory: its descriptor comes last. No other message begins like that."""


class ChannelError(Exception):
    """A message cannot be sent or received. No ``OSError``, as a ``TimeoutError`` of a signal handler is one."""


class Closed(ChannelError):
    """One of the two ends is closed."""


class Channel:
    """One end of a socket over which two processes send each other messages and file descriptors.

    A message is one packet, which arrives whole or not at all. So neither process waits for the other one to read or to complete it.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """An end for this process, and one for another process."""
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(own), other

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
        fd = self._socket.fileno()
        if fd < 0:
            raise Closed("this end is closed")
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else 1e3 * timeout_s))

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send a message, which is not empty, and copies of at most 63 file descriptors, without waiting.

        Raises:
            Closed: One end is closed.
            ChannelError: The other process has too many unread messages, or there is no room for a large one.
        """
        with _system_errors(), ExitStack() as stack:
            if len(data) > _MAX_PACKET:
                file = stack.enter_context(open(os.memfd_create("pipespec-message"), "wb"))
                file.write(data)
                file.flush()
                data, fds = _IN_A_FILE, [*fds, file.fileno()]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
            # A program may have given SIGPIPE its default effect, which ends it.
            self._socket.sendmsg([data], rights, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)

    def receive(self) -> tuple[bytes, list[int]]:
        """Wait for the next message. Return it and the file descriptors that came with it.

        Raises:
            Closed: One end is closed.
            ChannelError: This process has no room for the file descriptors. The message is lost, those after it are not.
        """
        fds = array("i")
        try:
            with _system_errors():
                space = socket.CMSG_SPACE(_MAX_FDS * fds.itemsize)
                receive = partial(self._socket.recvmsg, _MAX_PACKET, space, socket.MSG_CMSG_CLOEXEC)
                try:
                    data, rights, flags, _ = receive()
                except ConnectionResetError:  # once, if the other end left messages unread; its own last ones follow
                    data, rights, flags, _ = receive()
            for _, _, content in rights:
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
            if not data:
                raise Closed("the other end is closed")
            if flags & socket.MSG_CTRUNC:
                raise ChannelError(os.strerror(errno.EMFILE))
            if data == _IN_A_FILE:
                with open(fds.pop(), "rb") as file:
                    file.seek(0)
                    data = file.read()
            return data, fds.tolist()
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise


@contextmanager
def _system_errors() -> Iterator[None]:
    try:
        yield
    except (BrokenPipeError, ConnectionResetError) as error:
        raise Closed("the other end is closed") from error
    except OSError as error:
        if error.errno is None:  # of a signal handler, not of the system
            raise
        if error.errno == errno.EBADF:
            raise Closed("this end is closed") from error
        raise ChannelError(os.strerror(error.errno)) from error
