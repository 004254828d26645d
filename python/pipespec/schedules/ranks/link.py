"""Link: messages to and from one other rank, over the gloo group of all ranks. It never blocks the stage of this rank.

A message has :data:`HEAD` words of 32 bits and at most :data:`BODY` more: the sender's generation, what it says of it, and the number of words behind
them, which are records of ``csrc/runtime/replica.hpp``. A thread sends, with at most one message under way: what happens meanwhile is in the next one.
Another thread receives. A connection that breaks affects no other one, and is not made again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from pipespec import transport
from pipespec.transport import FOREVER, Ranks, first_line

if TYPE_CHECKING:
    from pipespec.schedules.ranks.party import Party

HEAD = 3
BODY = 4096 - HEAD

_CLOSES = -1
"""In place of a generation: the sender closes."""

_WINDOW = 32
"""Receives that are posted at once. The sender needs no answer before so many messages."""

_MESSAGES = 0
"""Tag."""


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
