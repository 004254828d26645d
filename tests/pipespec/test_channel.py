"""Messages over a socket: limits, signals, descriptors, and ends that close at any place."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import socket
import threading

import pytest

from pipespec.schedules.workers.channel import Channel, ChannelError, Closed, Late
from tests.waiting import SECONDS


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with ours, theirs:
        yield Channel(ours), Channel(theirs)


@pytest.fixture
def ticks():
    """A timer of the user, as of a profiler."""
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_limits_hold_beside_signals(ends, ticks):
    """A limit of the socket itself would begin again with each of them."""
    ours, theirs = ends
    with pytest.raises(Late):
        ours.send(bytes(1 << 20), timeout_s=0.1)
    with pytest.raises(Late):  # it has a part
        theirs.receive(timeout_s=0.1)
    assert not ours.poll(0.1)


def test_a_message_that_is_larger_than_the_buffer(ends, ticks):
    ours, theirs = ends
    sent = os.urandom(3 << 20)
    sender = threading.Thread(target=ours.send, args=(sent,), kwargs={"timeout_s": SECONDS})
    sender.start()
    assert theirs.receive(timeout_s=SECONDS) == (sent, [])
    sender.join()


def test_closed_ends(ends):
    ours, theirs = ends
    ours.send("last")
    ours.close()
    assert ours.closed
    for use in (ours.poll, ours.receive, lambda: ours.send("more")):
        with pytest.raises(Closed):
            use()
    assert theirs.receive() == ("last", [])
    assert theirs.poll()
    for use in (theirs.receive, lambda: theirs.send(bytes(1 << 20))):
        with pytest.raises(Closed):
            use()


def test_an_end_that_closes_within_a_message(ends):
    ours, theirs = ends
    with pytest.raises(Late):
        ours.send(bytes(1 << 20), timeout_s=0.0)
    ours.close()
    with pytest.raises(Closed):
        theirs.receive()


def test_an_end_that_closes_does_not_end_a_program_that_asks_for_sigpipe(ends):
    ours, theirs = ends
    theirs.close()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        try:
            ours.send("lost")
        except Closed:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_a_limit_is_that_of_each_wait(ends, monkeypatch):
    """A large message takes its time where the reader is slow."""
    ours, theirs = ends
    limits, parts = [], []

    def read(channel, event, timeout_s) -> None:
        limits.append(timeout_s)
        if channel is ours:
            parts.append(theirs._socket.recv(1000))

    monkeypatch.setattr(Channel, "_await", read)
    sent = bytes(100_000)
    ours.send(sent, timeout_s=3.0)
    assert len(limits) > 10
    assert set(limits) == {3.0}
    rest = theirs._socket.recv(1 << 20)
    while rest:
        parts.append(rest)
        try:
            rest = theirs._socket.recv(1 << 20)
        except BlockingIOError:
            break
    assert pickle.loads(b"".join(parts)[8:]) == sent


def test_descriptors(ends):
    ours, theirs = ends
    reading, writing = os.pipe()
    ours.send("a pipe", [writing, writing])
    os.close(writing)
    message, fds = theirs.receive()
    assert message == "a pipe"
    for fd in fds:
        assert not os.get_inheritable(fd)
        os.write(fd, b"x")
        os.close(fd)
    assert os.read(reading, 10) == b"xx"
    assert os.read(reading, 10) == b""
    os.close(reading)


def test_a_receiver_without_room_for_descriptors(ends):
    """The message is lost, as an error, and leaves nothing open. The next one is whole."""
    ours, theirs = ends
    ours.send("lost", [0, 0, 0])
    ours.send("next", [0])
    before = len(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 2, hard))
    try:
        with pytest.raises(ChannelError, match="Too many open files"):
            theirs.receive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(os.listdir("/proc/self/fd")) == before
    message, (fd,) = theirs.receive()
    assert message == "next"
    os.close(fd)
