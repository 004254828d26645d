"""Party: a rank's share in a chain. It keeps this rank's block equal to what the other ranks publish, and sends them what this one does.

Link: messages to and from one other rank, over the gloo group of all ranks. It never blocks the stage of this rank.

A message has :data:`HEAD` words of 32 bits and at most :data:`BODY` more: the sender's generation, what it says of it, and the number of words behind
them, which are records of ``csrc/runtime/replica.hpp``. A thread sends, with at most one message under way: what happens meanwhile is in the next one.
Another thread receives. A connection that breaks affects no other one, and is not made again.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pipespec.config import SpeculationConfig
from pipespec.process import ranks as transport
from pipespec.process.ranks import FOREVER, Ranks, break_group, first_line
from pipespec_kernels import _native
from pipespec_kernels.state import StateBlock

HEAD = 3
BODY = 4096 - HEAD

_CLOSES = -1
"""In place of a generation: the sender closes."""

_WINDOW = 32
"""Receives that are posted at once. The sender needs no answer before so many messages."""

_MESSAGES = 0
"""Tag."""

_CLOSE_S = 2.0
"""Longest wait for the messages under way when a rank closes."""


class Link:
    """This rank's end of the connection to rank ``peer``, over the gloo group of all ranks. ``party`` composes and uses the messages.

    Attributes:
        cause: Why there is no connection any more; None while there is one.
    """

    def __init__(self, ranks: Ranks, group: Any, peer: int, party: Party) -> None:
        self.peer, self._ranks, self._group, self._party = peer, ranks, group, party
        self.cause: str | None = None
        self._wake, self._closing = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=self._guarded, args=(loop,), daemon=True, name=f"pipespec-{name}-{peer}")
            for loop, name in ((self._send, "to"), (self._receive, "from"))
        ]

    def start(self) -> None:
        """Start the threads. The party is ready for messages."""
        for thread in self._threads:
            thread.start()

    def wake(self) -> None:
        """There may be something to send. Returns at once."""
        self._wake.set()

    def trouble(self) -> str | None:
        """Why the other rank cannot be expected to send; None if it can."""
        silent = self._ranks.silence(self.peer)
        return self.cause or (f"it has given no sign for {silent:.0f} s" if silent > transport.SILENCE_S else None)

    def say_goodbye(self) -> None:
        """Close behind the message under way. Returns at once."""
        self._closing.set()
        self._wake.set()

    def await_end(self, seconds: float) -> None:
        """Wait until both ranks have closed."""
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(seconds)
        if not any(thread.is_alive() for thread in self._threads):
            self._group = None  # gloo's threads end with the last reference to the group

    # ---- threads

    def _guarded(self, loop: Callable[[], str]) -> None:
        try:
            cause = loop()
        except RuntimeError as error:
            cause = f"its connection broke ({first_line(error)})"
        except Exception as error:
            cause = f"{type(error).__name__}: {first_line(error)}"
        if self.cause is None and not self._closing.is_set():
            self.cause = cause
        self._wake.set()

    def _send(self) -> str:
        message = torch.empty(HEAD + BODY, dtype=torch.int32)
        words = message.numpy()
        while self.cause is None:
            if closes := self._closing.is_set():
                words[:HEAD] = _CLOSES, 0, 0
            count = HEAD if closes else self._party.compose(self, words)
            if count == 0:
                self._wake.wait()
                self._wake.clear()
                continue
            self._group.send([message[:count]], self.peer, _MESSAGES).wait(FOREVER)
            if closes:
                break
        return self.cause or "it is closed"

    def _receive(self) -> str:
        messages = [torch.empty(HEAD + BODY, dtype=torch.int32) for _ in range(_WINDOW)]
        posted = deque((self._group.recv([m], self.peer, _MESSAGES), m) for m in messages)
        while True:
            work, message = posted.popleft()
            work.wait(FOREVER)
            words = message.numpy()
            generation, state, count = words[:HEAD].tolist()
            if generation == _CLOSES:
                self._party.closed_by(self)
                return "it has closed"
            self._party.receive(self, generation, state, words[HEAD : HEAD + count])
            posted.append((self._group.recv([message], self.peer, _MESSAGES), message))


def stages_of(rank: int, config: SpeculationConfig) -> range:
    """The stages that a rank runs: rank 0 the target, the others a draft each, and each the inline ones upstream of it."""
    return config.stages_of(config.model_stages[rank - 1])


class Party:
    """A rank's share in a chain.

    Each rank has the whole block. It writes its own stages, and a link's thread writes those of the link's peer. A generation has a number, given
    by the target's rank. A rank sends its state to those that have told it that they are in the same generation: whether the generation runs, and the
    number of texts in the ranks' store that it says of it.

    Args:
        ranks: All ranks.
        config: Of the whole chain.
        block: This rank's block.

    Attributes:
        lock: Held while the block is laid out, and while a link reads or writes it.
        generation: The generation of this rank; 0: none.
        running: Whether it has not ended.
    """

    def __init__(self, ranks: Ranks, config: SpeculationConfig, block: StateBlock) -> None:
        self.ranks, self._config, self.block = ranks, config, block
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
            own, theirs = (list(stages_of(rank, self._config)) for rank in (self.rank, peer))
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
