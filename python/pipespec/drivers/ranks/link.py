"""Link: messages to and from one other rank, over the gloo group of all ranks. It never blocks the stage of this rank.

A thread sends, with at most one message under way: what happens meanwhile is in the next one. Another thread receives. A connection that breaks affects no
other one, and is not made again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from pipespec import transport
from pipespec.drivers.ranks.wire import BODY, BYE, HEAD, BadMessage, write_head
from pipespec.transport import FOREVER, Ranks, first_line

_WINDOW = 32
"""Receives that are posted at once. The sender needs no answer before so many messages."""

_MESSAGES = 0
"""Tag."""


class Owner(Protocol):
    """What a link serves. The methods are called from its threads."""

    def compose(self, link: Link, words: np.ndarray) -> int:
        """Write the next message. Return its words, or 0 if there is nothing to send."""
        ...

    def receive(self, link: Link, words: np.ndarray) -> bool:
        """Use a message. Return False if the sender closes. Raises ``BadMessage``."""
        ...


class Link:
    """This rank's end of the connection to another rank.

    Args:
        ranks: All ranks.
        group: Their gloo group.
        peer: The other rank.
        owner: What composes and uses the messages.

    Attributes:
        cause: Why there is no connection any more; None while there is one.
        messages: Sent so far.
        sent_bytes: In these messages.
    """

    def __init__(self, ranks: Ranks, group: Any, peer: int, owner: Owner) -> None:
        self.peer, self._ranks, self._group, self._owner = peer, ranks, group, owner
        self.cause: str | None = None
        self.messages = self.sent_bytes = 0
        self._wake, self._closing = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=self._guarded, args=(loop,), daemon=True, name=f"pipespec-{name}-{peer}")
            for loop, name in ((self._send, "to"), (self._receive, "from"))
        ]

    def start(self) -> None:
        """Start the threads. The owner is ready for messages."""
        for thread in self._threads:
            thread.start()

    def wake(self) -> None:
        """There may be something to send. Returns at once."""
        self._wake.set()

    def trouble(self) -> str | None:
        """Why the other rank cannot be expected to send; None if it can."""
        if self.cause is not None:
            return self.cause
        silent = self._ranks.silence(self.peer)
        return f"it has given no sign for {silent:.0f} s" if silent > transport.SILENCE_S else None

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

    def _guarded(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except BadMessage as error:
            self._lose(str(error))
        except RuntimeError as error:
            self._lose(f"its connection broke ({first_line(error)})")
        except Exception as error:
            self._lose(f"{type(error).__name__}: {first_line(error)}")

    def _lose(self, cause: str) -> None:
        if self.cause is None and not self._closing.is_set():
            self.cause = cause
        self._wake.set()

    def _send(self) -> None:
        message = torch.empty(HEAD + BODY, dtype=torch.int32)
        words = message.numpy()
        while self.cause is None:
            closes = self._closing.is_set()
            count = write_head(words, BYE, 0, 0) if closes else self._owner.compose(self, words)
            if count == 0:
                self._wake.wait()
                self._wake.clear()
                continue
            self._group.send([message[:count]], self.peer, _MESSAGES).wait(FOREVER)
            self.messages, self.sent_bytes = self.messages + 1, self.sent_bytes + 4 * count
            if closes:
                return

    def _receive(self) -> None:
        window: deque[tuple[Any, torch.Tensor]] = deque()

        def post(message: torch.Tensor) -> None:
            window.append((self._group.recv([message], self.peer, _MESSAGES), message))

        for _ in range(_WINDOW):
            post(torch.empty(HEAD + BODY, dtype=torch.int32))
        while True:
            work, message = window.popleft()
            work.wait(FOREVER)
            if not self._owner.receive(self, message.numpy()):
                self._lose("it has closed")
                return
            post(message)
