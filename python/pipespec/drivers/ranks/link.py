"""Link: messages to and from one other rank, over a gloo group of the two. It never blocks the stage of this rank.

A thread sends, with at most one message under way: what happens meanwhile is in the next one. Another thread receives. Each two ranks have a
group of their own, so that the loss of one affects no other connection. A connection that breaks is made again.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from pipespec.drivers.ranks.wire import BODY, BYE, HEAD, BadMessage, write_head

BEAT_S = 0.25
"""A rank without news sends an empty message after this time."""

SILENCE_S = 3.0
"""A rank without a message for this time counts as lost, until the next one."""

_CONNECT_S = 3.0
_POLL_S = 0.02
"""Between two looks at the store while there is no connection."""

_CLOSE_S = 2.0
"""Longest wait for a message under way when a link closes."""

_WINDOW = 32
"""Receives that are posted at once. The sender needs no answer before so many messages."""

_MESSAGES, _BREAK = 0, 1
"""Tags."""

_FOREVER = timedelta(days=7)


class Owner(Protocol):
    """What a link serves. The methods are called from its threads."""

    def compose(self, link: Link, words: np.ndarray, beat: bool) -> int:
        """Write the next message. Return its words, or 0 if there is nothing to send. ``beat``: send an empty one then."""
        ...

    def receive(self, link: Link, words: np.ndarray) -> bool:
        """Use a message. Return False if the sender closes. Raises ``BadMessage``."""
        ...

    def connected(self, link: Link) -> None:
        """Called for each new connection, before its first message."""
        ...


class Link:
    """This rank's end of the connection to another rank.

    Args:
        store: The group's store.
        rank: This rank.
        peer: The other one.
        owner: What composes and uses the messages.

    Attributes:
        cause: Why there is no connection; None while there is one.
        since: When that changed, or the last message came (``time.monotonic()``).
        is_over: Whether there will be no other connection: rank 0 has closed, or the store has ended.
        store_has_ended: And so rank 0, or torchrun.
        messages: Sent so far.
        sent_bytes: In these messages.
    """

    def __init__(self, store: Any, rank: int, peer: int, owner: Owner) -> None:
        self.rank, self.peer, self._owner = rank, peer, owner
        self._store, self._key = store.clone(), f"link/{min(rank, peer)}-{max(rank, peer)}"
        self.cause: str | None = "it is not connected yet"
        self.since = time.monotonic()
        self.messages = self.sent_bytes = 0
        self.is_over = self.store_has_ended = False
        self._wake, self._closing, self._broken = threading.Event(), threading.Event(), threading.Event()
        self._group: Any = None
        self._said_goodbye = False
        self._connected = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"pipespec-rank-{peer}")
        self._thread.start()

    def wake(self) -> None:
        """There may be something to send. Returns at once."""
        self._wake.set()

    def await_connection(self, seconds: float) -> bool:
        """Wait for the first connection. Return whether there is one."""
        return self._connected.wait(seconds)

    def trouble(self) -> str | None:
        """Why the other rank cannot be expected to send; None if it can."""
        if self.cause is not None:
            return self.cause
        silent = time.monotonic() - self.since
        return f"it has given no sign for {silent:.0f} s" if silent > SILENCE_S else None

    def close(self) -> None:
        """Say goodbye if the connection allows that, and end the threads."""
        self._closing.set()
        self._wake.set()
        self._thread.join(2 * _CLOSE_S)
        if self._thread.is_alive():
            _break(self._group)
            self._thread.join(_CLOSE_S + _CONNECT_S)

    # ---- threads

    def _run(self) -> None:
        attempt = 0  # number of the connection
        while not self._closing.is_set() and not self.is_over:
            connected = self._connect(attempt)
            if connected is None:
                return
            self._group, attempt = connected
            self._broken.clear()
            self._owner.connected(self)
            self.since, self.cause = time.monotonic(), None
            self._connected.set()
            receiver = threading.Thread(
                target=self._guarded, args=(self._receive,), daemon=True, name=f"pipespec-from-{self.peer}"
            )
            try:
                receiver.start()
            except RuntimeError as error:  # no more threads
                self._lose(_first_line(error))
                _break(self._group)
                self._group = None
                self._closing.wait(BEAT_S)
                continue
            self._guarded(functools.partial(self._send, attempt))
            if self._said_goodbye:
                # The other rank closes the connection when it has read that. A reset would overtake it.
                receiver.join(_CLOSE_S)
            _break(self._group)
            receiver.join()
            self._group = None

    def _connect(self, seen: int) -> tuple[Any, int] | None:
        """A new group of the two ranks, and its number; None if the link closes. The higher rank chooses the number."""
        high, cause = max(self.rank, self.peer), self.cause or "it is not connected"
        while not self._closing.is_set():
            try:
                number = self._store.add(self._key, int(self.rank == high))
                if number != seen:
                    seen = number
                    store = dist.PrefixStore(f"{self._key}/{number}", self._store)
                    group = dist.ProcessGroupGloo(store, int(self.rank == high), 2, timedelta(seconds=_CONNECT_S))
                    if self._agreed(store, self.rank == high):
                        return group, seen
                    _break(group)
            except dist.DistNetworkError:
                self.is_over, self.store_has_ended = True, True
                return None
            except RuntimeError as error:  # one rank is not there, or not any more
                self.cause = f"{cause}; the last try to connect: {_first_line(error)}"
                self._closing.wait(BEAT_S)
            self._closing.wait(_POLL_S)
        return None

    def _agreed(self, store: Any, is_high: bool) -> bool:
        """Whether the other rank has this connection, too. One that has given it up after its time limit would break it at once."""
        own, other = ("high", "low") if is_high else ("low", "high")
        if not is_high:
            store.set(own, "connected")
        deadline = time.monotonic() + 2 * _CONNECT_S
        while not store.check([other]):
            if self._closing.is_set() or time.monotonic() > deadline:
                return False
            self._closing.wait(_POLL_S)
        if is_high:
            store.set(own, "connected")
        return True

    def _guarded(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except BadMessage as error:
            self._lose(str(error))
        except RuntimeError as error:
            self._lose(f"its connection broke ({_first_line(error)})")
        except Exception as error:  # a thread that ends would take the link with it
            self._lose(f"{type(error).__name__}: {_first_line(error)}")
        self._broken.set()
        self._wake.set()

    def _lose(self, cause: str) -> None:
        if self.cause is None and not self._closing.is_set() and not self._broken.is_set():
            self.cause, self.since = cause, time.monotonic()
            self._broken.set()
            _break(self._group)

    def _send(self, attempt: int) -> None:
        message = torch.empty(HEAD + BODY, dtype=torch.int32)
        words, to, beaten = message.numpy(), int(self.rank < self.peer), 0.0
        while not self._broken.is_set():
            if self._closing.is_set():
                self._group.send([message[: write_head(words, BYE, 0, 0)]], to, _MESSAGES).wait(_FOREVER)
                self._said_goodbye = True
                return
            beat = time.monotonic() - beaten > BEAT_S
            # A machine that was switched off closes no connection. Its rank may have started again.
            if beat and self.rank < self.peer and self.trouble() and self._store.add(self._key, 0) != attempt:
                raise RuntimeError("it has started again")
            count = self._owner.compose(self, words, beat)
            if count == 0:
                self._wake.wait(BEAT_S)
                self._wake.clear()
                continue
            self._group.send([message[:count]], to, _MESSAGES).wait(_FOREVER)
            self.messages, self.sent_bytes = self.messages + 1, self.sent_bytes + 4 * count
            beaten = time.monotonic()

    def _receive(self) -> None:
        window: deque[tuple[Any, torch.Tensor]] = deque()
        source = int(self.rank < self.peer)

        def post(message: torch.Tensor) -> None:
            window.append((self._group.recv([message], source, _MESSAGES), message))

        for _ in range(_WINDOW):
            post(torch.empty(HEAD + BODY, dtype=torch.int32))
        while True:
            work, message = window.popleft()
            work.wait(_FOREVER)
            if not self._owner.receive(self, message.numpy()):
                # Rank 0 ends the chain. A draft may be started again.
                self.is_over = self.peer == 0
                self._lose("it has closed")
                return
            self.since = time.monotonic()
            post(message)


def _break(group: Any) -> None:
    """End all waits on the connection: gloo closes it after a wait that takes too long."""
    if group is not None:
        with suppress(RuntimeError):
            group.recv([torch.empty(1, dtype=torch.int32)], 1 - group.rank(), _BREAK).wait(timedelta(milliseconds=1))


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
