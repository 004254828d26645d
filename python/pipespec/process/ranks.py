"""Ranks: the processes of a program that torchrun, or another launcher with its environment variables, has started, and what they exchange."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist

from pipespec_kernels import __version__

START_S = 300.0
"""Longest time for importing and loading. If a rank ends meanwhile, torchrun ends the others at once."""

_stores: dict[tuple[str | None, ...], tuple[Any, int, int]] = {}
"""The store of each torchrun environment: one per process for all groups, which follow each other."""

_groups = itertools.count()
"""Number of the next group. All ranks make their groups in the same order, and each has its own prefix in the store."""


class RankError(RuntimeError):
    """Another rank has ended, is late, or has failed. The group of ranks cannot be used any more."""


def rank_and_world() -> tuple[int, int]:
    """This process's rank and the number of ranks. Raises ``ValueError`` where no launcher has set them."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise ValueError(
            "there are no ranks: start this with torchrun --nproc-per-node ... (RANK and WORLD_SIZE are not set)"
        )
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def difference(terms_of_ranks: Sequence[Mapping[str, Any]]) -> str | None:
    """What the ranks do not share, for a message; None if they share all. Values by name for each rank; None is unknown, and not compared."""
    for name, first in terms_of_ranks[0].items():
        for rank, terms in enumerate(terms_of_ranks):
            if first is not None and terms.get(name, "none") not in (first, None):
                other = terms.get(name, "none")
                return f"all ranks need the same {name}: rank 0 has {first}, rank {rank} has {other}; start all with the same"
    return None


BEAT_S = 0.25
"""Each rank gives a sign of life after this time, from a thread of its own."""

SILENCE_S = 6.0
"""A rank without a sign of life for this time counts as lost."""

GRACE_S = 1.0
"""Longest wait for a thread that is to end."""

FOREVER = timedelta(days=7)
"""Waits for messages have no limit of gloo's: it would break the connections to all ranks."""

_POLL_S, _POLL_FAST_S = 0.02, 0.001
"""Poll intervals for the store, and for an answer that is on its way."""

_KEPT = 8
"""Calls whose texts stay in the store."""


class Ranks:
    """This rank among all ranks of the launcher: texts and signs of life over its store, and the gloo group of all ranks.

    Args:
        store: The group's store. The signs of life have a clone of their own.
        start_s: Longest time until the first sign of each rank, and until all ranks reach a point of the start.

    Attributes:
        cause: Why the ranks cannot go on together: what a rank has published that ended, or the end of the store; None if nothing is known.
        suspended_s: How long this process was stopped.
        deadline: When what this rank does now is late, and its description, see :meth:`watch`; None: never.
        broken: Whether the group cannot be used any more.
    """

    def __init__(self, store: Any, rank: int, world: int, start_s: float = START_S) -> None:
        self.rank, self.world, self.start_s = rank, world, start_s
        self._store, self._beats = store.clone(), store.clone()
        self.cause: str | None = None
        self.broken = False
        self.suspended_s = 0.0
        self.deadline: tuple[float, str] | None = None
        now = self.now()
        self._seen: dict[int, tuple[bytes | None, float]] = {r: (None, now) for r in range(world) if r != rank}
        self._answered = now  # when the store last answered
        self._stopped, self._unwatched = threading.Event(), threading.Event()
        self._end: Callable[[str], None] = lambda message: None
        self._sign(0)
        self._thread = threading.Thread(target=self._beat, daemon=True, name="pipespec-beat")
        self._thread.start()

    @classmethod
    def join(cls, terms: Mapping[str, Any], start_s: float = START_S) -> Self:
        """The ranks that the launcher's environment variables describe. ``terms``: what all must share in addition to the version of pipespec, as JSON has it.

        Raises:
            RankError: Not all ranks have come in time, one has ended or has other terms, or MASTER_ADDR or MASTER_PORT cannot be used.
        """
        here = tuple(os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"))
        try:
            if here not in _stores:
                _stores[here] = next(dist.rendezvous("env://", timeout=timedelta(seconds=start_s)))
            whole, rank, world = _stores[here]
            ranks = cls(dist.PrefixStore(f"pipespec/{next(_groups)}", whole), rank, world, start_s)
        except dist.DistError as error:
            address, port = here[:2]
            raise RankError(
                f"not all ranks have come within {start_s:g} s, one has ended, or MASTER_ADDR={address} or MASTER_PORT={port} cannot be used: "
                f"{first_line(error)}"
            ) from error
        own = json.dumps({"version of pipespec": __version__} | dict(terms))
        texts = ranks.exchange("start", own, "all ranks start")
        if (what_differs := difference(list(map(json.loads, texts)))) is not None:
            ranks.leave()
            raise RankError(what_differs)
        return ranks

    def now(self) -> float:
        """The time, less the time that this process was stopped: then nothing that it waits for is late."""
        return time.monotonic() - self.suspended_s

    # ---- signs of life

    def silence(self, rank: int) -> float:
        """Seconds since the last sign of life of another rank, as of the store's last answer: a store that hangs makes no rank late."""
        return self._answered - self._seen[rank][1]

    def late(self) -> str | None:
        """What takes too long: this rank itself, or which rank, or the store, gives no sign of life; None if nothing does."""
        now, deadline = self.now(), self.deadline
        if deadline is not None and now > deadline[0]:
            return deadline[1]
        if now - self._answered > SILENCE_S:
            return "the ranks' store does not answer any more: the process that holds it (rank 0, or torchrun) hangs"
        for rank, (value, _) in self._seen.items():
            if self.silence(rank) > (self.start_s if value is None else SILENCE_S):
                return f"rank {rank} gives no sign of life"
        return None

    def watch(self, end: Callable[[str], None]) -> None:
        """From now on call ``end``, with a message, where ranks cannot go on, or something takes too long, and this rank does not raise in time."""
        self._end = end

        def watch() -> None:
            while not self._unwatched.wait(BEAT_S):
                self.cause = self.cause or self.late()
                if self.cause is not None:
                    if not self._unwatched.wait(GRACE_S):
                        end(f"pipespec: rank {self.rank} ends: {self.cause}")
                    return

        threading.Thread(target=watch, daemon=True, name="pipespec-watch").start()

    def unwatch(self) -> None:
        """Watch nothing any more. The signs of life go on."""
        self.broken = True
        self._unwatched.set()

    @contextmanager
    def _last_words(self, words: str) -> Iterator[None]:
        """The block uses the store of a rank that ends. :meth:`watch`'s ``end`` is called if it takes too long: a store that hangs has no time limit."""
        late = threading.Timer(SILENCE_S + GRACE_S, lambda: self._end(f"pipespec: rank {self.rank} ends: {words}"))
        late.daemon = True
        late.start()
        try:
            with suppress(Exception):  # the store has ended, which the other ranks notice
                yield
        finally:
            late.cancel()

    def _sign(self, count: int) -> None:
        self._beats.set(f"beat/{self.rank}", str(count))

    def _beat(self) -> None:
        count, before = 0, time.monotonic()
        while not self._stopped.wait(BEAT_S):
            if (passed := time.monotonic() - before) > SILENCE_S:
                self.suspended_s += passed
            count += 1
            try:
                self._sign(count)
                for rank, (known, _) in self._seen.items():
                    if self._beats.check([f"beat/{rank}"]):
                        value = self._beats.get(f"beat/{rank}")
                        if value != known:
                            self._seen[rank] = value, self.now()
                if self.cause is None and self._beats.check(["failed"]):
                    self.cause = self._beats.get("failed").decode()
                    self._beats.set(f"read/{self.rank}", "+")
            except Exception:
                self.cause = self.cause or (
                    "the ranks' store does not answer any more: the process that held it (rank 0, or torchrun) has ended"
                )
                return
            self._answered = self.now()
            before = time.monotonic()

    # ---- texts

    def put(self, name: str, number: int, text: str) -> None:
        """Store a text for the other ranks, of call ``number``. The last few calls' stay. It is lost where the store has ended."""
        with suppress(dist.DistError):
            self._store.set(f"{name}/{number % _KEPT}", f"{number} {text}")

    def fetch(self, name: str, number: int) -> str | None:
        """A text that another rank has just put; None if the store does not have it any more, or does not get it."""
        key, deadline = f"{name}/{number % _KEPT}", self.now() + SILENCE_S
        with suppress(dist.DistError):
            while self.now() < deadline:
                if self._store.check([key]):
                    found, _, text = self._store.get(key).decode().partition(" ")
                    if int(found) >= number:
                        return text if int(found) == number else None
                time.sleep(_POLL_FAST_S)
        return None

    # ---- the start

    def exchange(self, sign: str, own: str, until: str) -> list[str]:
        """Wait until all ranks are here, and return the text of each. Raises ``RankError`` if one does not come."""
        names = [f"{sign}/{r}" for r in range(self.world)]
        deadline = self.now() + self.start_s
        try:
            self._store.set(names[self.rank], f"+{own}")  # the store has no empty values
            while not self._store.check(names):
                cause = self.cause or self.late()
                if cause is None and self.now() > deadline:
                    missing = [str(r) for r in range(self.world) if not self._store.check([names[r]])]
                    cause = f"rank {', '.join(missing)} took too long, more than start_s={self.start_s:g} s"
                if cause is not None:
                    raise self.failed(f"ended waiting until {until}: {cause}")
                time.sleep(_POLL_S)
            return [self._store.get(name)[1:].decode() for name in names]
        except dist.DistError as error:
            raise self.failed(
                f"ended waiting until {until}: the ranks' store broke, rank 0, or torchrun, has ended"
            ) from error

    def agree(self, error: BaseException | None, sign: str = "ready", own: str = "") -> list[str]:
        """:meth:`exchange`, unless some ranks have an ``error``: all leave then. Raises ``RankError`` with the first one's message."""
        said = f"{type(error).__name__}: {error}" if error is not None else ""
        texts = self.exchange(sign, json.dumps([said, own]), f"all ranks are {sign}")
        words = [json.loads(text) for text in texts]
        failed = next((f"rank {r} failed: {what}" for r, (what, _) in enumerate(words) if what), None)
        if failed is not None:
            self.leave()
            raise RankError(failed) from error
        return [text for _, text in words]

    def connect(self) -> Any:
        """The gloo group of all ranks. Raises ``RankError`` unless all connect within ``start_s``."""
        try:
            group: Any = dist.ProcessGroupGloo  # the functions of torch.distributed check and log each message
            return group(dist.PrefixStore("gloo", self._store), self.rank, self.world, timedelta(seconds=self.start_s))
        except RuntimeError as error:
            raise self.failed(f"could not connect with all ranks ({first_line(error)})") from error

    # ---- the end

    def failed(self, what: str, ended: int | None = None) -> RankError:
        """Publish why this rank ends, and return the error to raise.

        Rank 0 waits until the others have read it. Otherwise they would find a broken connection and no store.

        ``ended``: a rank whose connection broke, which reads no cause any more.
        """
        self.unwatch()
        said = f"rank {self.rank} failed: {what}" + (f" ({self.cause})" if self.cause else "")
        first = self.cause
        with self._last_words(said):
            published = self._store.compare_set("failed", "", said).decode()
            first = self.cause if published == said else published
            for rank in {self.rank, self.rank if ended is None else ended}:
                self._store.set(f"read/{rank}", "+")
        if self.cause is None:  # the others find what this rank has found
            self._hold_store("read")
        self._stopped.set()
        known = f" ({first})" if first and first not in what else ""
        return RankError(f"rank {self.rank}: {what}{known}")

    def stop(self) -> None:
        """Give no more signs of life, and watch nothing."""
        self.unwatch()
        self._stopped.set()
        self._thread.join(GRACE_S)  # a thread inside the store at the interpreter's end would abort the process

    def leave(self) -> None:
        """End together with all ranks. Rank 0, which may hold the store, waits until the others are here, too."""
        self.stop()
        with self._last_words("the ranks' store does not answer any more"):
            self._store.set(f"left/{self.rank}", "+")
        self._hold_store("left")

    def _hold_store(self, sign: str) -> None:
        deadline = time.monotonic() + SILENCE_S
        names = [f"{sign}/{r}" for r in range(self.world)]
        with suppress(dist.DistError):
            while self.rank == 0 and time.monotonic() < deadline and not self._store.check(names):
                time.sleep(_POLL_S)


def break_group(group: Any) -> None:
    """End all waits for messages of a group: gloo closes its connections after a wait that takes too long."""
    for peer in range(group.size()):
        # One that has ended already makes no wait take long.
        with suppress(RuntimeError):
            if peer != group.rank():
                group.recv([torch.empty(1, dtype=torch.int32)], peer, _BREAK).wait(timedelta(milliseconds=1))


_BREAK = 2**20
"""A tag that no message has."""


def first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
