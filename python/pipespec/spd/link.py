"""Link: messages of known size between ranks, with a bound on every wait.

Three events end a wait: the message arrives; the connection breaks, because a peer has ended; or the watchdog ends the process, because
the message is overdue or a rank gives no sign of life.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pipespec.process.ranks import START_S, RankError, join_store

TIMEOUT_S = 6.0
"""Longest time of a rank for its part of a cycle or of a chunk of the prefill."""

_TIMEOUT = "timeout_s, on the command line --timeout"
"""How a user sets that time."""

_SILENCE_S = 6.0
"""A rank without a sign of life for this time counts as lost. A thread of it gives one every ``_BEAT_S``."""

_BEAT_S = 0.25

_GRACE_S = 1.0
"""Time between the watchdog's decision and the end of the process, in which the main thread may raise by itself."""

_FOREVER = timedelta(days=7)  # gloo's own timeout; the watchdog takes its place

_OUTSTANDING = 64
"""Most sends that may be under way."""


class _Deadline(NamedTuple):
    """The end of a block that must not take longer, see :meth:`Watchdog.within`."""

    at: float
    seconds: float
    doing: str
    limit: str
    peer: int | None

    def __str__(self) -> str:
        doing = self.doing if self.peer is None else f"{self.doing} rank {self.peer}"
        return f"{doing} took too long, more than {self.seconds:g} s (if the machine is only slow, raise {self.limit})"


class _Within:
    """The block of a deadline. A class, as each message has one and a generator takes several times as long."""

    __slots__ = ("_before", "_deadline", "_watchdog")

    def __init__(self, watchdog: Watchdog, deadline: _Deadline | None) -> None:
        self._watchdog, self._deadline = watchdog, deadline

    def __enter__(self) -> None:
        self._before = self._watchdog.deadline
        if self._deadline is not None:
            self._watchdog.deadline = self._deadline

    def __exit__(self, *error: object) -> None:
        self._watchdog.deadline = self._before


class Watchdog:
    """Exchanges heartbeats through the group's store, and enforces deadlines of this rank's waits.

    It has two threads, since the store may block for as long as the rank that holds it is stopped.

    Args:
        store: A client of its own, as a client that waits for a key cannot do anything else.
        rank: This rank.
        world: Number of ranks.
        end: Called from a thread with a message if the main thread does not raise in time.
        start_s: Longest time until the first sign of each rank.
    """

    def __init__(self, store: Any, rank: int, world: int, end: Callable[[str], None], start_s: float) -> None:
        self._store, self._rank, self._end, self._start_s = store, rank, end, start_s
        self._others = [r for r in range(world) if r != rank]
        self._stopped = threading.Event()
        self.deadline: _Deadline | None = None
        self._away = 0.0  # how long this process was stopped
        now = self._now()
        self._seen: dict[int, tuple[bytes | None, float]] = dict.fromkeys(self._others, (None, now))
        self._round = now  # when the store last answered
        self.cause: str | None = None
        self._sign(0)
        self._threads = [
            threading.Thread(target=target, daemon=True, name=f"pipespec-{target.__name__}")
            for target in (self._beat, self._watch)
        ]
        for thread in self._threads:
            thread.start()

    def within(self, seconds: float | None, doing: str, limit: str, peer: int | None = None) -> _Within:
        """Set a deadline for a block, ``seconds`` from now; None: no deadline. ``limit``: the argument that it follows from. ``peer``: the rank that it
        waits for."""
        return _Within(self, None if seconds is None else _Deadline(self._now() + seconds, seconds, doing, limit, peer))

    def _now(self) -> float:
        """The time, less the time that this process was stopped: then nothing that it waits for is late."""
        return time.monotonic() - self._away

    def tell(self, what: str, ended: int | None = None) -> str | None:
        """Publish why this rank ends. Return the cause that another rank has published before, if any.

        ``ended``: a rank whose connection broke, which reads no cause any more.
        """
        try:
            first: str = self._store.compare_set("failed", "", what).decode()
        except Exception:  # the store has ended, which the other ranks notice
            return self.cause
        with suppress(Exception):
            for rank in {self._rank, self._rank if ended is None else ended}:
                self._store.set(f"knows/{rank}", "+")
        return self.cause if first == what else first

    def stop(self) -> None:
        self._stopped.set()

    def join(self) -> None:
        """Wait for the threads after ``stop``. A thread inside the store at the interpreter's end would abort the process."""
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
                            self._seen[r] = value, self._now()
                if self.cause is None and self._store.check(["failed"]):
                    self.cause = self._store.get("failed").decode()
                    self._store.set(f"knows/{self._rank}", "+")
            except Exception:
                if self.cause is None:
                    self.cause = "the ranks' store does not answer any more: the process that held it (rank 0, or torchrun) has ended"
                return
            self._round = self._now()

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._stopped.wait(_BEAT_S):
            now = time.monotonic()
            if now - before > _SILENCE_S:
                self._away += now - before
            before = now
            if self.cause is None:
                self.cause = self._late(self._now())
            if self.cause is not None:
                if not self._stopped.wait(_GRACE_S):
                    self._end(f"pipespec: rank {self._rank} ends: {self.cause}")
                return

    def _late(self, now: float) -> str | None:
        deadline = self.deadline
        if deadline is not None and now > deadline.at:
            return str(deadline)
        if now - self._round > _SILENCE_S:
            return "the ranks' store does not answer any more: the process that holds it (rank 0, or torchrun) hangs"
        for r, (value, since) in self._seen.items():
            # Measured at the store's last answer: a store that hangs does not make its clients late.
            if self._round - since > (self._start_s if value is None else _SILENCE_S):
                return f"rank {r} gives no sign of life"
        return None


def _exit(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
    os._exit(1)


class Link:
    """This rank's end of a gloo process group, described by torchrun's MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE.

    Args:
        terms: Settings that all ranks must share, as text.
        timeout_s: Longest time of a rank for its part of a cycle.
        start_s: Longest time until all ranks are there, and again until all are ready.

    Raises:
        RuntimeError: There is a process group already.
        RankError: A rank is missing, or the ranks have different terms. Raised on all ranks.
    """

    def __init__(self, terms: str, timeout_s: float = TIMEOUT_S, start_s: float = START_S) -> None:
        if dist.is_initialized():
            raise RuntimeError("torch.distributed is initialised already; pipespec makes its own process group")
        store, self.rank, self.world = join_store(start_s)
        try:
            self._watchdog = Watchdog(store.clone(), self.rank, self.world, _exit, start_s)
        except dist.DistError as error:
            raise RankError(f"not all ranks have come within {start_s:g} s, or one has ended: {error}") from error
        self.timeout_s, self._start_s = timeout_s, start_s
        self.patience = self.world + 1
        """Parts of other ranks that a wait for a message includes at most, a factor of the timeout."""
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
        with self._watchdog.within(start_s, "connecting with all ranks", "start_s"):
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
        # The functions of torch.distributed check and log each call, which takes longer than to post a message.
        group: Any = dist.group.WORLD
        self._gloo: Any = group._get_backend(torch.device("cpu"))

    def _meet(self, sign: str, mine: str, until: str) -> list[str]:
        """Wait until all ranks are here, and return the text of each. Raises ``RankError`` if one does not come."""
        names = [f"{sign}/{r}" for r in range(self.world)]
        try:
            self._store.set(names[self.rank], f"+{mine}")  # the store has no empty values
            with self._watchdog.within(self._start_s, f"waiting until {until}", "start_s"):
                while not self._store.check(names):
                    if self._watchdog.cause is not None:
                        raise self.failed(f"ended waiting until {until}")
                    time.sleep(0.02)
            return [self._store.get(name)[1:].decode() for name in names]
        except dist.DistError as error:
            raise self.failed(
                f"ended waiting until {until}: the ranks' store broke, rank 0, or torchrun, has ended"
            ) from error

    def agree(self, error: BaseException | None, sign: str = "ready", mine: str = "") -> list[str]:
        """Wait until all ranks are here, and return the text of each. Raises ``RankError`` with the first one's message if some have an ``error``."""
        said = f"{type(error).__name__}: {error}" if error is not None else ""
        words = [json.loads(text) for text in self._meet(sign, json.dumps([said, mine]), f"all ranks are {sign}")]
        failed = [f"rank {r} failed: {what}" for r, (what, _) in enumerate(words) if what]
        if failed:
            self._leave()
            raise RankError(failed[0]) from error
        return [text for _, text in words]

    def device_groups(self) -> tuple[Any, Any]:
        """NCCL groups of all ranks for the two directions, away from rank 0 and back. Each keeps the order of its own calls."""
        return (dist.new_group(backend="nccl"), dist.new_group(backend="nccl"))

    def _leave(self) -> None:
        """End on all ranks before the group exists."""
        self._watchdog.stop()
        self.broken = True
        try:
            self._store.set(f"read/{self.rank}", "+")
        except dist.DistError:  # rank 0 has ended after its timeout
            return
        self._hold_store("read")

    def _hold_store(self, sign: str) -> None:
        """On rank 0, which may hold the store, wait until all ranks have set ``sign``, or the store ends."""
        deadline = time.monotonic() + _SILENCE_S
        names = [f"{sign}/{r}" for r in range(self.world)]
        with suppress(dist.DistError):
            while self.rank == 0 and time.monotonic() < deadline and not self._store.check(names):
                time.sleep(0.02)

    @property
    def _patient(self) -> float:
        return self.timeout_s * self.patience

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
        try:
            with self._watchdog.within(None if idle else self._patient, doing, _TIMEOUT, peer):
                work.wait()
        except RuntimeError as error:  # gloo's error for a closed connection
            raise self._lost(peer, doing) from error

    def own_part(self) -> AbstractContextManager[None]:
        """The block is this rank's part of a cycle: the process ends if it takes longer than the timeout."""
        return self._watchdog.within(self.timeout_s, "its own part of a cycle", _TIMEOUT)

    def _require_whole(self) -> None:
        if self.broken:
            raise RankError("this process group broke in an earlier call; start all ranks again")

    def _lost(self, peer: int, doing: str) -> RankError:
        """The error of a message from or to a rank that has ended."""
        return self.failed(f"{doing} rank {peer}: the connection broke, it has ended", ended=peer)

    def failed(self, what: str, ended: int | None = None) -> RankError:
        """Mark the group as broken, publish the cause, and return the error to raise. ``ended``: a rank whose connection broke.

        Rank 0 waits until the others have read the cause. Otherwise they would find a broken connection and no store.
        """
        self.broken = True
        cause = self._watchdog.cause
        known = self._watchdog.tell(f"rank {self.rank} failed: {what}" + (f" ({cause})" if cause else ""), ended)
        self._watchdog.stop()
        if cause is None:  # the others' watchdogs find what this rank's watchdog has found
            self._hold_store("knows")
        return RankError(f"rank {self.rank}: {what}" + (f" ({known})" if known else ""))

    def close(self) -> None:
        """Leave the group. Rank 0 keeps the store until all ranks have left."""
        self._watchdog.stop()
        if not self.broken:
            self.broken = True
            try:
                for work, _ in self._sends:  # a rank that hangs takes none, and the watchdog has stopped
                    work.wait(timedelta(seconds=min(self.timeout_s, _FOREVER.total_seconds())))
                self._watchdog.join()
                self._store.set(f"bye/{self.rank}", "+")
                self._hold_store("bye")
            except RuntimeError:  # another rank has ended at the same time
                pass
        self._gloo = None  # its threads and sockets end with its last user
        if dist.is_initialized():
            dist.destroy_process_group()
