"""Party: a rank's share in a chain. It keeps this rank's block equal to what the other ranks publish, and sends them what this one does."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod

import numpy as np

from pipespec.schedules.ranks.link import BODY, HEAD, Link
from pipespec.transport import Ranks, break_group
from pipespec_kernels import _native
from pipespec_kernels.state import StateBlock

_CLOSE_S = 2.0
"""Longest wait for the messages under way when a rank closes."""


def stages_of(rank: int, world: int, first: int) -> list[int]:
    """The stages that a rank runs: rank 0 the target, the others the drafts, smallest first.

    Args:
        rank: The rank.
        world: Number of ranks, one per model.
        first: Number of stages without a model. They belong to the rank of the first model.
    """
    own = [first + (rank - 1) % world]
    return [*range(first), *own] if rank == 1 % world else own


class Party:
    """A rank's share in a chain.

    Each rank has the whole block. It writes its own stages, and a link's thread writes those of the link's peer. A generation has a number, given
    by the target's rank. A rank sends its state to those that have told it that they are in the same generation: whether the generation runs, and the
    number of texts in the ranks' store that it says of it.

    Args:
        ranks: All ranks.
        first: Number of stages without a model.
        block: This rank's block.

    Attributes:
        lock: Held while the block is laid out, and while a link reads or writes it.
        generation: The generation of this rank; 0: none.
        running: Whether it has not ended.
    """

    def __init__(self, ranks: Ranks, first: int, block: StateBlock) -> None:
        self.ranks, self._first, self.block = ranks, first, block
        self.rank, self._world = rank, world = ranks.rank, ranks.world
        self.lock = threading.Lock()
        self.generation, self.running, self.closed = 0, False, False
        self._said = 0
        self._boxes: dict[int, tuple[_native.Outbox, _native.Inbox]] = {}
        self._announced: dict[int, tuple[int, int]] = {}
        self._theirs: dict[int, int] = {}
        drafts = range(1, world)
        peers = drafts if rank == 0 else [0, *(peer for peer in (rank - 1, rank + 1) if peer in drafts)]
        self.group = ranks.connect()
        self.links = {peer: Link(ranks, self.group, peer, self) for peer in peers}
        for link in self.links.values():
            link.start()

    def _reads_tokens(self, reader: int, writer: int) -> bool:
        """Whether a rank reads another one's sequences: everyone the target's, otherwise neighbours."""
        at, of = ((rank - 1) % self._world for rank in (reader, writer))
        return writer == 0 or abs(at - of) == 1

    def begin(self, generation: int) -> None:
        """Take part in a generation, whose rows lie in the block. While the lock is held."""
        self.generation, self.running = generation, True
        for peer in self.links:
            own, theirs = (stages_of(rank, self._world, self._first) for rank in (self.rank, peer))
            tokens = self._reads_tokens(peer, self.rank)
            outbox = self.block.outbox(own, tokens=tokens, counters=peer == 0, controls=self.rank == 0)
            self._boxes[peer] = outbox, self.block.inbox(theirs, controls=peer == 0)

    def forget(self) -> None:
        """Before the block is laid out again. While the lock is held."""
        self._boxes, self.generation, self.running, self._said = {}, 0, False, 0

    def publish(self) -> None:
        """Send what this rank's stages have published. Returns at once."""
        for link in self.links.values():
            link.wake()

    def close(self) -> None:
        """Say goodbye to the other ranks, and end the links. A later call does nothing."""
        if self.closed:
            return
        self.closed = True
        for link in self.links.values():
            link.say_goodbye()
        # The other rank closes the connection when it has read that. A reset would overtake it.
        deadline = time.monotonic() + _CLOSE_S
        for link in self.links.values():
            link.await_end(max(0.0, deadline - time.monotonic()))
        break_group(self.group)
        for link in self.links.values():
            link.await_end(_CLOSE_S)
        self.group = None
        self.ranks.stop()

    # ---- called by the links' threads

    def compose(self, link: Link, words: np.ndarray) -> int:
        """Write the next message. Return its words, or 0 if there is nothing to send."""
        with self.lock:
            count, now = 0, (self.generation, int(self.running) + 2 * self._said)
            if link.peer in self._boxes and self._theirs.get(link.peer) == self.generation:
                count = self._boxes[link.peer][0].fill(words[HEAD:].ctypes.data, BODY)
            if not count and self._announced.get(link.peer) == now:
                return 0
            self._announced[link.peer] = now
            words[:HEAD] = *now, count
            return HEAD + count

    def receive(self, link: Link, generation: int, state: int, body: np.ndarray) -> None:
        """Use a message. Raises ``ValueError`` for one that no rank of this chain sends."""
        self._hear(link.peer, generation, bool(state & 1), state >> 1)
        with self.lock:
            if self._theirs.get(link.peer) != generation:
                self._theirs[link.peer] = generation
                link.wake()
            boxes = self._boxes.get(link.peer) if generation == self.generation else None
            if boxes is not None and len(body) and not boxes[1].apply(body.ctypes.data, len(body)):
                raise ValueError("it sent a state that does not fit the chain")

    @abstractmethod
    def _hear(self, peer: int, generation: int, runs: bool, said: int) -> None:
        """Another rank is in a generation, which runs or has ended, and has said so many texts of it."""

    def closed_by(self, link: Link) -> None:
        """Another rank has closed."""
