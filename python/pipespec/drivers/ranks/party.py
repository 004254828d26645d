"""Party: a rank's share in a chain. It keeps this rank's block equal to what the other ranks publish, and sends them what this one does."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np

from pipespec.drivers.ranks.link import Link
from pipespec.drivers.ranks.wire import BODY, BYE, HEAD, STATE, BadMessage, read_head, write_head
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
    by the target's rank. A rank sends its state to those that have told it that they are in the same generation.

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
        self._boxes: dict[int, tuple[_native.Outbox, _native.Inbox]] = {}
        self._announced: dict[int, tuple[int, bool]] = {}
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
        self._boxes = {}
        for peer in self.links:
            own, theirs = (stages_of(rank, self._world, self._first) for rank in (self.rank, peer))
            outbox = self.block.outbox(
                own, tokens=self._reads_tokens(peer, self.rank), counters=peer == 0, controls=self.rank == 0
            )
            inbox = self.block.inbox(theirs, controls=peer == 0)
            self._boxes[peer] = outbox, inbox

    def forget(self) -> None:
        """Before the block is laid out again. While the lock is held."""
        self._boxes, self.generation, self.running = {}, 0, False

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
        with self.lock:
            urgent = self._urgent(link, words)
            if urgent:
                return urgent
            count, now = 0, (self.generation, self.running)
            if self.generation and self._theirs.get(link.peer) == self.generation:
                count = self._boxes[link.peer][0].fill(words[HEAD:].ctypes.data, BODY)
            if not count and self._announced.get(link.peer) == now:
                return 0
            self._announced[link.peer] = now
            return write_head(words, STATE, self.generation, count, int(self.running))

    def receive(self, link: Link, words: np.ndarray) -> bool:
        kind, generation, body, first, second = read_head(words)
        if kind == BYE:
            with self.lock:
                self._said_bye(link.peer)
            return False
        with self.lock:
            if kind != STATE:
                self._special(link.peer, kind, generation, body, first, second)
                return True
            if self._theirs.get(link.peer) != generation:
                self._theirs[link.peer] = generation
                link.wake()
            if generation and generation == self.generation and len(body):
                inbox = self._boxes[link.peer][1]
                if not inbox.apply(body.ctypes.data, len(body)):
                    raise BadMessage("it sent a state that does not fit the chain")
            if link.peer == 0 and not first:
                self._target_ended(generation)
        return True

    # ---- what ranks do differently. While the lock is held.

    def _urgent(self, link: Link, words: np.ndarray) -> int:
        """Write a message that goes before the state. Return its words; 0: there is none."""
        return 0

    def _special(self, peer: int, kind: int, generation: int, body: np.ndarray, first: int, second: int) -> None:
        """Use a message that is no state."""
        raise BadMessage("it sent a message that is not for this rank")

    def _target_ended(self, generation: int) -> None:
        """The target has ended a generation."""

    def _said_bye(self, peer: int) -> None:
        """A rank has closed."""


def parts(words: np.ndarray) -> Sequence[np.ndarray]:
    """A long message in bodies of messages."""
    return [words[at : at + BODY] for at in range(0, len(words), BODY)]
