"""Link: messages of known size between SPD's ranks, with a bound on every wait.

Three events end a wait: the message arrives; the connection breaks, because a peer has ended; or the process ends
(:meth:`pipespec.process.ranks.Ranks.watch`), because the message is overdue or a rank gives no sign of life.

A line has the messages of one kind from one rank to another, in buffers that are allocated once. A message is some words, and some tensors behind them, in
one gloo message through host memory. Receives are posted ahead. Otherwise gloo asks the receiver for a buffer before it sends, which takes two more delays of
the link.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from pipespec.process.ranks import FOREVER, START_S, RankError, Ranks

TIMEOUT_S = 6.0
"""Longest time of a rank for its part of a cycle or of a chunk of the prefill."""

_TIMEOUT = "timeout_s, on the command line --timeout"
"""How a user sets that time."""

_OUTSTANDING = 64
"""Most sends that may be under way."""

_WORD = 8
"""Bytes of a word, an int64."""


def _exit(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
    os._exit(1)


class Link(Ranks):
    """This rank among all ranks, and its messages over their gloo group."""

    _gloo: Any = None

    def __init__(self, store: Any, rank: int, world: int, start_s: float = START_S) -> None:
        super().__init__(store, rank, world, start_s)
        self.timeout_s = TIMEOUT_S
        self.patience = world + 1
        """A wait for a message may include the work of this many ranks, so its limit is this many timeouts."""
        self._sends: deque[tuple[Any, torch.Tensor]] = deque()

    @classmethod
    def open(cls, terms: Mapping[str, Any], timeout_s: float = TIMEOUT_S, start_s: float = START_S) -> Link:
        """Join and connect. Arguments as for :class:`pipespec_spd.RanksPipeline`, and :meth:`pipespec.process.ranks.Ranks.join`."""
        link = cls.join(terms, start_s)
        link.timeout_s = timeout_s
        # From here on a rank that is still connecting ends when another one fails.
        link.watch(_exit)
        link._gloo = link.connect()
        return link

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        """Send ``tensor`` without waiting. The caller must not change it afterwards."""
        raw = tensor.detach().cpu().contiguous().view(torch.uint8)
        self._sends.append((self.post_send(raw, to, tag), raw))
        while len(self._sends) > _OUTSTANDING:
            self.finish(self._sends.popleft()[0], to, "sending to")

    def receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, source: int, tag: int, idle: bool = False
    ) -> torch.Tensor:
        """Receive the next message of a tag. ``idle``: without a deadline."""
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        self.finish(self.post_receive(tensor.view(torch.uint8), source, tag), source, "waiting for", idle)
        return tensor

    def post_send(self, raw: torch.Tensor, to: int, tag: int) -> Any:
        """Start to send the bytes of ``raw``, which must not change until :meth:`finish`."""
        self._require_whole()
        try:
            return self._gloo.send([raw], to, tag)
        except RuntimeError as error:
            raise self._lost(to, "sending to") from error

    def post_receive(self, raw: torch.Tensor, source: int, tag: int) -> Any:
        """Offer ``raw`` for the next message of a tag that has no buffer yet. The message may be shorter."""
        self._require_whole()
        try:
            return self._gloo.recv([raw], source, tag)
        except RuntimeError as error:
            raise self._lost(source, "waiting for") from error

    def finish(self, work: Any, peer: int, doing: str, idle: bool = False) -> None:
        """Wait for a send or a receive. ``idle``: without a deadline."""
        self._require_whole()
        with nullcontext() if idle else self._within(self.timeout_s * self.patience, f"{doing} rank {peer}"):
            try:
                work.wait(FOREVER)
            except RuntimeError as error:  # gloo's error for a closed connection
                raise self._lost(peer, doing) from error

    def own_part(self) -> AbstractContextManager[None]:
        """The block is this rank's part of a cycle: the process ends if it takes longer than the timeout."""
        return self._within(self.timeout_s, "its own part of a cycle")

    @contextmanager
    def _within(self, seconds: float, doing: str) -> Iterator[None]:
        late = f"{doing} took too long, more than {seconds:g} s (if the machine is only slow, raise {_TIMEOUT})"
        before, self.deadline = self.deadline, (self.now() + seconds, late)
        try:
            yield
        finally:
            self.deadline = before

    def _require_whole(self) -> None:
        if self.broken:
            raise RankError("this process group broke in an earlier call; start all ranks again")

    def _lost(self, peer: int, doing: str) -> RankError:
        """The error of a message from or to a rank that has ended."""
        return self.failed(f"{doing} rank {peer}: the connection broke, it has ended", ended=peer)

    def close(self) -> None:
        """Leave the group. Rank 0 keeps the store until all ranks have left."""
        if not self.broken:
            self.unwatch()
            try:
                # A rank that hangs takes none. Meanwhile the others still get signs of life.
                for work, _ in self._sends:
                    work.wait(min(FOREVER, timedelta(seconds=self.timeout_s)))
                self.leave()
            except RuntimeError:  # another rank has ended at the same time
                pass
        self._gloo = None  # its threads and sockets end with its last user


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
