"""Link: messages of known size between SPD's ranks, with a bound on every wait.

Three events end a wait: the message arrives; the connection breaks, because a peer has ended; or the process ends
(:meth:`pipespec.transport.Ranks.watch`), because the message is overdue or a rank gives no sign of life.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch

from pipespec.transport import FOREVER, START_S, RankError, Ranks

TIMEOUT_S = 6.0
"""Longest time of a rank for its part of a cycle or of a chunk of the prefill."""

_TIMEOUT = "timeout_s, on the command line --timeout"
"""How a user sets that time."""

_OUTSTANDING = 64
"""Most sends that may be under way."""


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
        """Join and connect. Arguments as for :class:`pipespec.spd.RanksPipeline`, and :meth:`pipespec.transport.Ranks.join`."""
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
            self.stop()
            try:
                for work, _ in self._sends:  # a rank that hangs takes none, and nothing watches any more
                    work.wait(min(FOREVER, timedelta(seconds=self.timeout_s)))
                self.leave()
            except RuntimeError:  # another rank has ended at the same time
                pass
        self._gloo = None  # its threads and sockets end with its last user
