"""Link: messages of known size between ranks, and the certainty that no rank waits for ever.

Three things end a wait: the message; a broken connection (a peer that dies closes it, and whoever ends because of that closes theirs); and
a watchdog, which ends the process when the awaited message is later than it may be, or when some rank has shown no sign of life.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 6.0
"""The longest that a rank may take for its part of a cycle or of a chunk of the prefill."""

_SILENCE_S = 6.0
"""A rank that gives no sign of life for so long is taken for lost. It gives one every ``_BEAT_S``, whatever it computes."""

_BEAT_S = 0.25

_GRACE_S = 1.0
"""Between the watchdog's verdict and the end of the process: time for the main thread to raise on its own."""

START_S = 300.0
"""Importing and loading may take long. (A rank that ends meanwhile is noticed at once by torchrun.)"""

_FOREVER = timedelta(days=7)  # the watchdog decides, not gloo

_OUTSTANDING = 64
"""Sends that need not have been received yet."""


_stores: dict[tuple[str | None, ...], tuple[Any, int, int]] = {}
"""What torchrun's environment led to: one meeting place per process, however many groups follow each other."""

_groups = itertools.count()
"""All ranks make their groups in the same order; each has names of its own in the store."""


class RankError(RuntimeError):
    """Another rank is gone, late, or has failed; this process group cannot be used any more."""


class Watchdog:
    """Signs of life through the group's store, and deadlines of this rank's own waits.

    ``end(message)``: called, from a thread, when nothing else helps. Two threads: the store may block for as long as its rank is stopped.
    ``store``: nobody else's client; one that waits for a key answers to nothing else. ``start_s``: time until a rank's first sign.
    """

    def __init__(self, store: Any, rank: int, world: int, end: Callable[[str], None], start_s: float) -> None:
        self._store, self._rank, self._end, self._start_s = store, rank, end, start_s
        self._others = [r for r in range(world) if r != rank]
        self._stopped = threading.Event()
        self._deadline: tuple[float, str] | None = None
        now = time.monotonic()
        self._seen: dict[int, tuple[bytes | None, float]] = dict.fromkeys(self._others, (None, now))
        self._round = now  # when the store last answered
        self.cause: str | None = None
        self._sign(0)  # before anything can happen to this rank
        self._threads = [
            threading.Thread(target=target, daemon=True, name=f"pipespec-{target.__name__}")
            for target in (self._beat, self._watch)
        ]
        for thread in self._threads:
            thread.start()

    @contextmanager
    def within(self, seconds: float | None, doing: str) -> Iterator[None]:
        """What is done here may take ``seconds`` (None: any time)."""
        if seconds is not None:
            self._deadline = time.monotonic() + seconds, doing
        try:
            yield
        finally:
            self._deadline = None

    def tell(self, what: str) -> str | None:
        """Let the others know why this rank ends. The cause that is known by then: of the first one that has told."""
        try:
            first: str = self._store.compare_set("failed", "", what).decode()
        except Exception:  # the store is gone, or its rank: they will notice that
            return self.cause
        return self.cause if first == what else first

    def stop(self) -> None:
        self._stopped.set()

    def join(self) -> None:
        """After ``stop``, while the store still answers: a thread that is in the store when the interpreter ends aborts the process."""
        for thread in self._threads:
            thread.join(_GRACE_S)

    def _sign(self, count: int) -> None:
        self._store.set(f"beat/{self._rank}", str(count))

    def _beat(self) -> None:
        count = 0
        while not self._stopped.wait(_BEAT_S):
            count += 1
            try:
                self._sign(count)
                for r in self._others:
                    if self._store.check([f"beat/{r}"]):
                        value = self._store.get(f"beat/{r}")
                        if value != self._seen[r][0]:
                            self._seen[r] = value, time.monotonic()
                if self.cause is None and self._store.check(["failed"]):
                    self.cause = self._store.get("failed").decode()
            except Exception:
                if self.cause is None:
                    self.cause = "the ranks' store does not answer any more: the process that held it (rank 0, or torchrun) has ended"
                return
            self._round = time.monotonic()

    def _watch(self) -> None:
        while not self._stopped.wait(_BEAT_S):
            now = time.monotonic()
            if self.cause is None:
                self.cause = self._late(now)
            if self.cause is not None:
                if not self._stopped.wait(_GRACE_S):
                    self._end(f"pipespec: rank {self._rank} ends: {self.cause}")
                return

    def _late(self, now: float) -> str | None:
        deadline = self._deadline
        if deadline is not None and now > deadline[0]:
            return f"{deadline[1]} took too long"
        if now - self._round > _SILENCE_S:
            return "the ranks' store does not answer any more: the process that holds it (rank 0, or torchrun) hangs"
        for r, (value, since) in self._seen.items():
            # By the time of the last look: nobody is silent because the store is.
            if self._round - since > (self._start_s if value is None else _SILENCE_S):
                return f"rank {r} gives no sign of life"
        return None


def _exit(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
    os._exit(1)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C comes behind what is done here: a message that is half accounted for would be taken for another one's later."""
    came: list[int] = []
    own = threading.current_thread() is threading.main_thread()  # no other thread is interrupted
    before = signal.getsignal(signal.SIGINT) if own else None
    if before is None:  # also of a handler that Python knows nothing of
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        signal.raise_signal(signal.SIGINT)


class Link:
    """This rank's end of the process group that torchrun's environment describes (gloo; MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE).

    ``terms``: what all ranks must have in common, in words. ``timeout_s``: the longest that any rank may take for its part of a cycle;
    ``start_s``: until all are there, and until all are ready. Raises ``RuntimeError`` where there is a process group already, ``RankError`` for
    ranks that do not come, and on all ranks for different terms.
    """

    def __init__(self, terms: str, timeout_s: float = TIMEOUT_S, start_s: float = START_S) -> None:
        if dist.is_initialized():
            raise RuntimeError("torch.distributed is initialised already; pipespec makes its own process group")
        here = tuple(os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"))
        try:
            if here not in _stores:
                _stores[here] = next(dist.rendezvous("env://", timeout=timedelta(seconds=start_s)))
            whole, self.rank, self.world = _stores[here]
            store: Any = dist.PrefixStore(f"pipespec/{next(_groups)}", whole)
            self._watchdog = Watchdog(store.clone(), self.rank, self.world, _exit, start_s)
        except dist.DistError as error:
            raise RankError(f"not all ranks have come within {start_s:g} s, or one has ended: {error}") from error
        self.timeout_s, self._start_s = timeout_s, start_s
        self.patience = 1
        """Parts of a cycle that may lie between one message and the next."""
        self._store = store
        self.broken = False
        self._sends: deque[tuple[Any, torch.Tensor]] = deque()
        everyone = self._meet("start", terms, "all ranks start")
        different = next((r for r, theirs in enumerate(everyone) if theirs != everyone[0]), None)
        if different is not None:
            self._leave()
            raise RankError(
                f"all ranks need the same arguments: rank 0 has {everyone[0]}, rank {different} has {everyone[different]}"
            )
        with self._watchdog.within(start_s, "connecting with all ranks"):
            try:
                dist.init_process_group(
                    "gloo",
                    store=dist.PrefixStore("gloo", store),
                    rank=self.rank,
                    world_size=self.world,
                    timeout=_FOREVER,
                )
            except RuntimeError as error:
                raise self.failed("could not connect with all ranks") from error

    def _meet(self, sign: str, mine: str, until: str) -> list[str]:
        """Wait until all ranks have come here; what each brought. ``RankError`` when one does not come."""
        names = [f"{sign}/{r}" for r in range(self.world)]
        try:
            self._store.set(names[self.rank], f"+{mine}")  # the store knows no empty values
            with self._watchdog.within(self._start_s, f"waiting until {until}"):
                while not self._store.check(names):
                    if self._watchdog.cause is not None:
                        raise self.failed(f"ended waiting until {until}")
                    time.sleep(0.02)
            return [self._store.get(name)[1:].decode() for name in names]
        except dist.DistError as error:
            raise self.failed(
                f"ended waiting until {until}: the ranks' store broke, rank 0, or torchrun, has ended"
            ) from error

    def agree(self, error: BaseException | None) -> None:
        """Wait until all ranks have come here. ``RankError`` with the first one's words where some came with an ``error``."""
        mine = "" if error is None else f"{type(error).__name__}: {error}"
        words = self._meet("ready", mine, "all ranks have loaded their weights")
        failed = [f"rank {r} failed: {what}" for r, what in enumerate(words) if what]
        if failed:
            self._leave()
            raise RankError(failed[0]) from error

    def _leave(self) -> None:
        """All ranks know that there will be no group."""
        self._watchdog.stop()
        self.broken = True
        try:
            self._store.set(f"read/{self.rank}", "+")
            self._hold_store("read")
        except dist.DistError:  # rank 0 has waited long enough
            pass

    def _hold_store(self, sign: str) -> None:
        """Rank 0, which may be the one that holds the store, goes last: when all have given the sign."""
        deadline = time.monotonic() + _SILENCE_S
        names = [f"{sign}/{r}" for r in range(self.world)]
        while self.rank == 0 and time.monotonic() < deadline and not self._store.check(names):
            time.sleep(0.02)

    @property
    def _patient(self) -> float:
        return self.timeout_s * self.patience

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        """Send it, sooner or later; it must not be changed afterwards."""
        raw = tensor.detach().cpu().contiguous().view(torch.uint8)
        with self._errors(to, "sending to"):
            self._sends.append((dist.isend(raw, to, tag=tag), raw))
            while len(self._sends) > _OUTSTANDING:
                work, _ = self._sends.popleft()
                with self._watchdog.within(self._patient, f"sending to rank {to}"):
                    work.wait()

    def receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, source: int, tag: int, idle: bool = False
    ) -> torch.Tensor:
        """The next message of this tag; ``idle``: it may come at any time."""
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        with self._errors(source, "waiting for"):
            work = dist.irecv(tensor.view(torch.uint8), source, tag=tag)
            assert work is not None, "this rank belongs to the group"
            with self._watchdog.within(None if idle else self._patient, f"waiting for rank {source}"):
                work.wait()
        return tensor

    @contextmanager
    def _errors(self, peer: int, doing: str) -> Iterator[None]:
        if self.broken:
            raise RankError("this process group broke in an earlier call; start all ranks again")
        try:
            yield
        except RuntimeError as error:  # gloo's word for a closed connection
            raise self.failed(f"{doing} rank {peer}: the connection broke, it has ended") from error

    def failed(self, what: str) -> RankError:
        """The group is no more; the error to raise."""
        self.broken = True
        cause = self._watchdog.cause
        known = self._watchdog.tell(f"rank {self.rank} failed: {what}" + (f" ({cause})" if cause else ""))
        self._watchdog.stop()
        return RankError(f"rank {self.rank}: {what}" + (f" ({known})" if known else ""))

    def close(self) -> None:
        """End of this rank's part; the first one holds the store for the others until they have said the same."""
        self._watchdog.stop()
        if not self.broken:
            self.broken = True
            try:
                for work, _ in self._sends:
                    work.wait()
                self._watchdog.join()
                self._store.set(f"bye/{self.rank}", "+")
                self._hold_store("bye")
            except RuntimeError:  # somebody is gone, just as we go
                pass
        if dist.is_initialized():
            dist.destroy_process_group()
