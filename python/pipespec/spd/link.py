"""Link: messages of known size between SPD's ranks, with a bound on every wait.

Three events end a wait: the message arrives; the connection breaks, because a peer has ended; or the process ends
(:meth:`pipespec.transport.Ranks.watch`), because the message is overdue or a rank gives no sign of life.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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


class Link:
    """This rank's end of the gloo group of all ranks, described by torchrun's MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE.

    Arguments as for :class:`pipespec.spd.RanksPipeline`; ``terms`` are the settings that all ranks must share, by name.

    Raises:
        RankError: A rank is missing, or the ranks have different terms. Raised on all ranks.
    """

    def __init__(self, terms: Mapping[str, Any], timeout_s: float = TIMEOUT_S, start_s: float = START_S) -> None:
        self._ranks = ranks = Ranks.join(terms, start_s)
        self.rank, self.world = ranks.rank, ranks.world
        self.timeout_s = timeout_s
        self.patience = self.world + 1
        """A wait for a message may include the work of this many ranks, so its limit is this many timeouts."""
        self.broken = False
        self._sends: deque[tuple[Any, torch.Tensor]] = deque()
        # From here on a rank that is still connecting ends when another one fails.
        ranks.watch(_exit)
        try:
            self._gloo: Any = ranks.connect()
        except RankError:
            self._end()
            raise

    def agree(self, error: BaseException | None, sign: str = "ready", mine: str = "") -> list[str]:
        try:
            return self._ranks.agree(error, sign, mine)
        except RankError:
            self._end()
            raise

    def _end(self) -> None:
        self.broken = True
        self._ranks.unwatch()

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
        before = self._ranks.deadline
        if not idle:
            self._ranks.deadline = self._deadline(self.timeout_s * self.patience, f"{doing} rank {peer}")
        try:
            work.wait(FOREVER)
        except RuntimeError as error:  # gloo's error for a closed connection
            raise self._lost(peer, doing) from error
        finally:
            self._ranks.deadline = before

    @contextmanager
    def own_part(self) -> Iterator[None]:
        """The block is this rank's part of a cycle: the process ends if it takes longer than the timeout."""
        before, self._ranks.deadline = self._ranks.deadline, self._deadline(self.timeout_s, "its own part of a cycle")
        try:
            yield
        finally:
            self._ranks.deadline = before

    def _deadline(self, seconds: float, doing: str) -> tuple[float, str]:
        late = f"{doing} took too long, more than {seconds:g} s (if the machine is only slow, raise {_TIMEOUT})"
        return self._ranks.now() + seconds, late

    def _require_whole(self) -> None:
        if self.broken:
            raise RankError("this process group broke in an earlier call; start all ranks again")

    def _lost(self, peer: int, doing: str) -> RankError:
        """The error of a message from or to a rank that has ended."""
        return self.failed(f"{doing} rank {peer}: the connection broke, it has ended", ended=peer)

    def failed(self, what: str, ended: int | None = None) -> RankError:
        """Mark the group as broken, publish the cause, and return the error to raise. ``ended``: a rank whose connection broke."""
        self._end()
        return self._ranks.failed(what, ended)

    def close(self) -> None:
        """Leave the group. Rank 0 keeps the store until all ranks have left."""
        was_broken = self.broken
        self._end()
        if not was_broken:
            try:
                for work, _ in self._sends:  # a rank that hangs takes none, and nothing watches any more
                    work.wait(min(FOREVER, timedelta(seconds=self.timeout_s)))
                self._ranks.leave()
            except RuntimeError:  # another rank has ended at the same time
                pass
        self._gloo = None  # its threads and sockets end with its last user
