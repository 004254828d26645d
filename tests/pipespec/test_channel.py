"""Messages over a socket: their sizes, descriptors, and ends that close."""

import os
import resource
import signal

import pytest

from pipespec.schedules.asynchronous.messages import Channel, ChannelError, Closed
from tests.support.processes import few_descriptors


@pytest.fixture
def ends():
    ours, theirs = Channel.pair()
    with theirs:
        yield ours, Channel(theirs)
    ours.close()


@pytest.mark.parametrize("size", [1, 1 << 12, 3 << 20])
def test_messages_of_any_size_arrive_whole_and_in_order(ends, size):
    """No process waits for the other one, also where a message is larger than the socket's buffer."""
    ours, theirs = ends
    sent = [os.urandom(size) for _ in range(3)]
    before = len(os.listdir("/proc/self/fd"))
    for message in sent:
        ours.send(message)
    assert [theirs.receive() for _ in sent] == [(message, []) for message in sent]
    assert not theirs.poll(0.01)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_reader_that_does_not_read(ends):
    ours, _ = ends

    def fill() -> None:
        while True:
            ours.send(bytes(1 << 14))

    with pytest.raises(ChannelError, match="temporarily unavailable"):
        fill()


def test_closed_ends(ends):
    ours, theirs = ends
    ours.send(b"last")
    ours.close()
    assert ours.closed
    for use in (ours.poll, ours.receive, lambda: ours.send(b"more")):
        with pytest.raises(Closed):
            use()
    assert theirs.receive() == (b"last", [])
    assert theirs.poll()
    for use in (theirs.receive, lambda: theirs.send(bytes(1 << 20))):
        with pytest.raises(Closed):
            use()


def test_the_last_message_of_an_end_that_leaves_others_unread(ends):
    ours, theirs = ends
    ours.send(b"unread")
    theirs.send(b"last")
    theirs.close()
    assert ours.receive() == (b"last", [])
    with pytest.raises(Closed):
        ours.receive()


def test_a_large_message_without_room_for_it(ends):
    ours, theirs = ends
    before = len(os.listdir("/proc/self/fd"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(ChannelError, match="File too large"):
            ours.send(bytes(3 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not theirs.poll()
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_end_that_closes_does_not_end_a_program_that_asks_for_sigpipe(ends):
    ours, theirs = ends
    theirs.close()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        try:
            ours.send(b"lost")
        except Closed:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_descriptors(ends):
    ours, theirs = ends
    reading, writing = os.pipe()
    ours.send(b"a pipe", [writing, writing])
    os.close(writing)
    message, fds = theirs.receive()
    assert message == b"a pipe"
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
    ours.send(b"lost", [0, 0, 0])
    ours.send(b"next", [0])
    before = len(os.listdir("/proc/self/fd"))
    with few_descriptors(2), pytest.raises(ChannelError, match="Too many open files"):
        theirs.receive()
    assert len(os.listdir("/proc/self/fd")) == before
    message, (fd,) = theirs.receive()
    assert message == b"next"
    os.close(fd)
