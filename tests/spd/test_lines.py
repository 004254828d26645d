"""Lines between ranks: messages in order, in buffers that are kept, with the tensors after the words."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

import pytest
import torch

from pipespec_spd.link import Receiver, Sender

DEPTH = 2
SHAPE = (2, 3, 1, 4)


class Work:
    def __init__(self, wire: Wire, posted: torch.Tensor | None = None) -> None:
        self.wire, self.posted, self.is_done = wire, posted, posted is None
        self.is_finished = False


class Wire:
    """A link in one process: what is sent arrives in the receive that was posted first. ``late``: sends that had to wait for a posted receive."""

    def __init__(self) -> None:
        self.posted: deque[Work] = deque()
        self.sent: deque[torch.Tensor] = deque()
        self.late, self.finished, self.posts = 0, 0, 0
        self.sends: dict[int, Work] = {}  # the last one of each buffer

    def post_send(self, raw, to, tag):
        assert (to, tag) == (1, 7)
        before = self.sends.get(raw.data_ptr())
        assert before is None or before.is_finished, "the buffer of a message that may be under way"
        self.late += not self.posted
        self.sent.append(raw.clone())
        self._deliver()
        self.sends[raw.data_ptr()] = Work(self)
        return self.sends[raw.data_ptr()]

    def post_receive(self, raw, source, tag):
        assert (source, tag) == (0, 7)
        self.posts += 1
        self.posted.append(Work(self, raw))
        self._deliver()
        return self.posted[-1] if self.posted else Work(self)

    def _deliver(self):
        while self.posted and self.sent:
            work, raw = self.posted.popleft(), self.sent.popleft()
            work.posted[: len(raw)] = raw
            work.is_done = True

    def finish(self, work, peer, doing, idle=False):
        assert work.is_done, "it would wait for ever"
        self.finished += 1
        work.is_finished = True


def lines(shape=SHAPE):
    wire = Wire()
    size = 8 * 8 + 2 * 3 * 4 * 4
    pair = Sender(wire, 1, 7, size, DEPTH), Receiver(wire, 0, 7, size, DEPTH)
    for line in pair:
        line.fit(3, shape, torch.float32)
    return wire, *pair


@pytest.mark.parametrize("under_way", [1, DEPTH])
@pytest.mark.parametrize("shape", [SHAPE, (2, 1, 1, 4)], ids=["", "a smaller batch in the same buffers"])
def test_messages_arrive_in_order(shape, under_way):
    """Words alone, with some tensors, with all of them; more messages than there are buffers. What the sender changes afterwards does not matter."""
    wire, sender, receiver = lines(shape)
    for begin in range(0, 8, under_way):
        numbers = range(begin, begin + under_way)
        for number in numbers:
            sent = [torch.full(shape[1:], number + 0.5) for _ in range(number % 3)]
            sender.send([number, -1, 2**40], sent)
            for tensor in sent:
                tensor.zero_()
        for number in numbers:
            words, values = receiver.receive()
            assert words == [number, -1, 2**40]
            assert len(values) == number % 3
            assert all(value.shape == shape[1:] and (value == number + 0.5).all() for value in values)
    assert wire.late == 0  # a receive was always posted ahead


def test_receives_are_posted_in_blocks():
    """Each post wakes a thread of the sender. Twice the depth is posted first, and again when half of them have come."""
    wire, sender, receiver = lines()
    posts = [wire.posts]
    for number in range(4 * DEPTH):
        sender.send([number, 0, 0])
        receiver.receive()
        posts.append(wire.posts)
    assert posts[0] == 2 * DEPTH
    new = [after - before for before, after in pairwise(posts)]
    assert set(new) == {0, DEPTH}
    assert new.count(DEPTH) == 4 - 1
