"""Lines: messages of one kind from one rank to another, in buffers that are allocated once. A message is some words and some tensors.

The tensors are behind the words, in one gloo message through host memory.

Receives are posted ahead. Otherwise gloo asks the receiver for a buffer before it sends, which takes two more delays of the link.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pipespec.spd.link import Link

_WORD = 8
"""Bytes of a word, an int64."""


class _Line:
    """Buffers of ``depth`` messages from or to the rank ``peer``, each of at most ``size`` bytes.

    No two lines between the same ranks in the same direction have the same ``tag``.
    """

    def __init__(self, link: Link, peer: int, tag: int, size: int, depth: int) -> None:
        self._link, self.peer, self._tag = link, peer, tag
        self._buffers = [torch.empty(size, dtype=torch.uint8, device="cpu") for _ in range(depth)]

    def fit(self, words: int, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Lay out the messages of a call: ``words`` words, and up to ``shape[0]`` tensors of shape ``shape[1:]``."""
        self._head = (1 + words) * _WORD  # the first one is the number of tensors
        self._each = int(np.prod(shape[1:])) * dtype.itemsize
        end = self._head + shape[0] * self._each
        self._words = [b[: self._head].view(torch.int64).numpy() for b in self._buffers]
        # By buffer, the tensors. Views are made here, since each costs as much as to copy a small tensor.
        self._values = [tuple(b[self._head : end].view(dtype).view(*shape).unbind()) for b in self._buffers]


class Sender(_Line):
    def __init__(self, link: Link, peer: int, tag: int, size: int, depth: int) -> None:
        super().__init__(link, peer, tag, size, depth + 1)
        self._works: list[Any] = [None] * (depth + 1)
        self._next = 0

    def fit(self, words: int, shape: Sequence[int], dtype: torch.dtype) -> None:
        super().fit(words, shape, dtype)
        # By buffer and by number of tensors.
        ends = [self._head + count * self._each for count in range(shape[0] + 1)]
        self._messages = [[b[:end] for end in ends] for b in self._buffers]

    def send(self, words: Sequence[int], tensors: Sequence[torch.Tensor] = ()) -> None:
        """Send as many words as the line was fit to and the first tensors, copied now. Then wait while more than ``depth`` messages are under way."""
        at, place = self._next, self._words[self._next]
        place[0] = len(tensors)
        place[1:] = words
        for value, tensor in zip(self._values[at], tensors, strict=False):
            value.copy_(tensor)
        self._works[at] = self._link.post_send(self._messages[at][len(tensors)], self.peer, self._tag)
        self._next = at = (at + 1) % len(self._buffers)
        if self._works[at] is not None:  # behind the message, which does not wait for it
            self._link.finish(self._works[at], self.peer, "sending to")
            self._works[at] = None


class Receiver(_Line):
    """The end of a line that receives.

    Receives are posted in blocks, since each post is a message to the sender and wakes a thread of it.
    """

    def __init__(self, link: Link, peer: int, tag: int, size: int, depth: int) -> None:
        super().__init__(link, peer, tag, size, 2 * depth)
        self._depth = depth
        self._posted: deque[tuple[int, Any]] = deque()
        self._free: deque[int] = deque(range(2 * depth))
        self._last: int | None = None
        self._post()

    def _post(self) -> None:
        while self._free:
            at = self._free.popleft()
            self._posted.append((at, self._link.post_receive(self._buffers[at], self.peer, self._tag)))

    def receive(self) -> tuple[list[int], Sequence[torch.Tensor]]:
        """Wait for the next message. Return its words and its tensors, which are valid until the next call."""
        if self._last is not None:
            self._free.append(self._last)
        if len(self._posted) <= self._depth:
            self._post()
        at, work = self._posted.popleft()
        self._last = at
        self._link.finish(work, self.peer, "waiting for")
        count, *words = self._words[at].tolist()
        return words, self._values[at][:count]
