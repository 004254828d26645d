"""Ranks of :mod:`bench.kills`: forks of one process, so that a start takes a second.

``ranks``: a chain of three ranks over gloo. Drafts are killed and started again, or stopped and continued, while rank 0 generates. Their loss must
cost no text and no call. Then rank 0 is killed, and the drafts must end by themselves with ``RankError`` within ``END_S``; or it closes, and all end well.

``spd-ranks``: a target in two stages on two or three ranks. One rank is struck, at times while it starts. The others must end by themselves with a status
other than 0 and an error with a reason within ``END_S``. The tokens that rank 0 has streamed must be the beginning of the text. Then new ranks start.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.strikes import LIMIT_S, Amount, Call, Gaps, Tally, draw_signal, strike
from pipespec import Pipeline
from pipespec.demo import FAMILY, family_path
from pipespec.drivers.base import SpeedWarning
from pipespec.process.ranks import RankError
from pipespec.spd import RanksPipeline

END_S = 45.0
"""Longest time in which ranks notice that another one has ended or stopped: the limits in the documents, on a busy machine."""

_START_S = 20.0
"""``start_s`` of the ranks of a target."""

_READY_S = 180.0
_STRIKES = (15, 40)
"""At the drafts of a chain, fewest and most, before its rank 0 is struck."""

_WHILE_STARTING = 0.15
"""Share of the strikes at ranks of a target that come before all are ready."""

Say = Callable[..., None]


class Rank:
    """A fork that runs ``work(say)`` with torchrun's environment. ``say(key=value, ...)`` sends a line to this process."""

    def __init__(self, rank: int, world: int, port: int, folder: str, work: Callable[[Say], None]) -> None:
        self.rank, self.log = rank, Path(folder, f"{rank}.log")
        self.status: int | None = None
        self.is_ready = self.is_stopped = self.is_struck = False
        read, write = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(read)
            _be_rank(rank, world, port, self.log, write, work)
        os.close(write)
        self._lines, self._rest = read, b""
        os.set_blocking(read, False)

    def said(self) -> Iterator[dict[str, Any]]:
        """The lines that have arrived."""
        while True:
            try:
                part = os.read(self._lines, 1 << 16)
            except BlockingIOError:
                return
            if not part:
                return
            *lines, self._rest = (self._rest + part).split(b"\n")
            yield from map(json.loads, lines)

    @property
    def has_ended(self) -> bool:
        if self.status is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is not None

    def last_error(self) -> str:
        """The last error of the log, without notes, or else its last line."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line and line[0] != " "]
        return next(
            (line for line in reversed(lines) if re.match(r"pipespec: |[\w.]+(Error|Interrupt): ", line)),
            "".join(lines[-1:]),
        )

    def drop(self) -> None:
        """Kill what lives, and close the pipe."""
        if not self.has_ended:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._lines)


def _be_rank(rank: int, world: int, port: int, log: Path, write: int, work: Callable[[Say], None]) -> None:
    status = 1
    try:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        os.environ |= {
            "RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        work(lambda **line: os.write(write, json.dumps(line).encode() + b"\n"))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


@contextmanager
def _dropping(ranks: list[Rank]) -> Iterator[None]:
    try:
        yield
    finally:
        for rank in ranks:
            rank.drop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await_end(ranks: Sequence[Rank], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not all(rank.has_ended for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.01)


def _hang(rank: Rank, doing: str) -> TimeoutError:
    if not rank.has_ended:
        os.kill(rank.pid, signal.SIGABRT)  # faulthandler writes the stacks
        _await_end([rank], 10.0)
    return TimeoutError(f"rank {rank.rank} hangs {doing}:\n{rank.log.read_text(errors='replace')[-4000:]}")


def judge_end(rank: Rank, named: Sequence[str]) -> str | None:
    """What is wrong with the end of a rank that another one's end has ended; None if nothing is. ``named``: beginnings of documented errors."""
    if rank.status is None:
        return f"rank {rank.rank} has not ended within {END_S:g} s"
    last = rank.last_error()
    if rank.status <= 0 or not any(name in last for name in named):
        return f"rank {rank.rank} ended with status {rank.status}: {last!r}"
    return None


# ---- a chain


def _generate_for_ever(pipe: Any, calls: Sequence[Call], say: Say, stop: Path) -> None:
    for number in itertools.count():
        if stop.exists():
            return
        ids, options, text = calls[number % len(calls)]
        gaps, began = Gaps() if len(ids) == 1 else None, time.monotonic()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", SpeedWarning)
            same = torch.equal(pipe.generate(ids, streamer=gaps, **options), text)
        pause = gaps.longest if gaps else 0.0
        lost = sum(issubclass(warning.category, SpeedWarning) for warning in caught)
        say(same=same, seconds=time.monotonic() - began, pause=pause, warnings=lost)


class _Chain:
    """The ranks of one chain, and what is due to happen to them."""

    def __init__(self, folder: str, calls: Sequence[Call], tally: Tally, numbers: random.Random) -> None:
        self._folder, self._calls, self._tally, self._numbers = folder, calls, tally, numbers
        self.stop, self._port = Path(folder, "stop"), _free_port()
        self.ranks = [self._start(rank) for rank in range(len(FAMILY))]
        self._due: dict[int, float] = {}  # by rank that has ended or is stopped: the time to start or to continue it
        self.last_line = time.monotonic()

    def _start(self, rank: int) -> Rank:
        paths = [family_path(name) for name in reversed(FAMILY)]

        def work(say: Say) -> None:
            import faulthandler

            faulthandler.enable()
            with Pipeline(paths[-1], paths[:-1], schedule="ranks", dtype="float32") as pipe:
                say(ready=True)
                if pipe.is_controller:
                    _generate_for_ever(pipe, self._calls, say, self.stop)
                else:
                    pipe.serve()

        return Rank(rank, len(FAMILY), self._port, self._folder, work)

    def tend(self) -> None:
        """Take what the ranks have said, start again what has ended, continue what has been stopped for long enough. Raises ``TimeoutError``."""
        for rank in self.ranks:
            for line in rank.said():
                if "ready" in line:
                    rank.is_ready = True
                else:
                    self._tally.call(line["same"], line["seconds"], line["pause"])
                    self._tally.warnings += line["warnings"]
                if rank.rank == 0:
                    self.last_line = time.monotonic()
        if self.ranks[0].has_ended:
            raise RuntimeError(f"rank 0 has ended with status {self.ranks[0].status}: {self.ranks[0].last_error()}")
        if time.monotonic() - self.last_line > LIMIT_S:
            raise _hang(self.ranks[0], "in a call")
        now = time.monotonic()
        for rank in self.ranks[1:]:
            if rank.has_ended or rank.is_stopped:
                if now < self._due.setdefault(rank.rank, now + self._numbers.uniform(0, 1)):
                    continue
                del self._due[rank.rank]
                if rank.has_ended:
                    rank.drop()
                    self.ranks[rank.rank] = self._start(rank.rank)
                else:
                    os.kill(rank.pid, signal.SIGCONT)
                    rank.is_stopped = False

    def strike(self) -> None:
        """Strike a draft that runs, if one does."""
        running = [rank for rank in self.ranks[1:] if not (rank.is_struck or rank.is_stopped)]
        if not running:
            return
        rank, number = self._numbers.choice(running), draw_signal(self._numbers)
        strike(self._tally, "draft", rank.pid, number)
        rank.is_struck = number != signal.SIGSTOP  # its end takes a moment
        if number == signal.SIGSTOP:
            rank.is_stopped = True
            # Shorter and longer than the time after which it counts as lost.
            self._due[rank.rank] = time.monotonic() + self._numbers.uniform(0, 7)

    def settle(self) -> None:
        """Wait until all ranks serve."""
        deadline = time.monotonic() + _READY_S
        while not all(rank.is_ready and not (rank.is_struck or rank.is_stopped) for rank in self.ranks):
            self.tend()
            if time.monotonic() > deadline:
                raise _hang(next(rank for rank in self.ranks if not rank.is_ready), "while it starts")
            time.sleep(0.05)


def measure_chain(tally: Tally, amount: Amount, calls: Sequence[Call], seed: int) -> None:
    """Strike chains of ranks."""
    numbers = random.Random(seed)
    while not amount.is_over():
        with tempfile.TemporaryDirectory() as folder:
            chain = _Chain(folder, calls, tally, numbers)
            with _dropping(chain.ranks):
                chain.settle()
                tally.starts += 1
                left = numbers.randint(*_STRIKES)
                while left and not amount.is_over():
                    pause = time.monotonic() + numbers.uniform(0, 0.8)
                    while time.monotonic() < pause:
                        chain.tend()
                        time.sleep(0.02)
                    chain.strike()
                    left -= 1
                chain.settle()
                _end_chain(chain, tally, numbers)


def _end_chain(chain: _Chain, tally: Tally, numbers: random.Random) -> None:
    """Let rank 0 close, or kill it: then the drafts must end with an error, by themselves."""
    target, *drafts = chain.ranks
    closes = numbers.random() < 0.3
    if closes:
        chain.stop.touch()
    else:
        number = draw_signal(numbers)
        strike(tally, "target", target.pid, signal.SIGKILL if number == signal.SIGSTOP else number)
    began = time.monotonic()
    _await_end(chain.ranks, LIMIT_S if closes else END_S)
    tally.longest_end_s = max(tally.longest_end_s, time.monotonic() - began)
    for rank in chain.ranks if closes else drafts:
        # A draft that was started again just now may not be connected when rank 0 closes.
        if not (closes and rank.status == 0) and (wrong := judge_end(rank, ["RankError: "])):
            tally.error(wrong)


# ---- a target in stages


class _Tokens(Gaps):
    """Sends each token of one row."""

    def __init__(self, say: Say) -> None:
        super().__init__()
        self._say = say

    def put(self, tokens: torch.Tensor) -> None:
        super().put(tokens)
        if tokens.numel():
            self._say(tokens=tokens.flatten().tolist())


def _stage(calls: Sequence[Call], stages: int) -> Callable[[Say], None]:
    def work(say: Say) -> None:
        options: dict[str, Any] = {"stages": stages, "start_s": _START_S, "dtype": torch.float32}
        with RanksPipeline(family_path("target"), "ngram", **options) as pipe:
            say(ready=True)
            if not pipe.is_controller:
                pipe.serve()
                return
            for number in itertools.count():
                ids, given, text = calls[number % len(calls)]
                say(call=number % len(calls))
                tokens, began = _Tokens(say) if len(ids) == 1 else None, time.monotonic()
                try:
                    same = torch.equal(pipe.generate(ids, streamer=tokens, **given), text)
                except RankError:
                    assert pipe.partial is not None
                    say(partial=pipe.partial.tolist())
                    raise
                say(same=same, seconds=time.monotonic() - began, pause=tokens.longest if tokens else 0.0)

    return work


def measure_stages(tally: Tally, amount: Amount, calls: Sequence[Call], seed: int) -> None:
    """Strike ranks of a target in stages."""
    numbers = random.Random(seed)
    while not amount.is_over():
        world, port = numbers.choice((2, 3)), _free_port()
        with tempfile.TemporaryDirectory() as folder:
            ranks = [Rank(rank, world, port, folder, _stage(calls, 2)) for rank in range(world)]
            with _dropping(ranks):
                _strike_stages(tally, ranks, calls, numbers)


def _strike_stages(tally: Tally, ranks: Sequence[Rank], calls: Sequence[Call], numbers: random.Random) -> None:
    while_starting = numbers.random() < _WHILE_STARTING
    began, call, streamed, partial = time.monotonic(), -1, list[int](), list[list[int]]()

    def listen() -> None:
        nonlocal call, streamed, partial
        for rank in ranks:
            for line in rank.said():
                rank.is_ready = True
                if "partial" in line:
                    partial = line["partial"]
                elif "tokens" in line:
                    streamed += line["tokens"]
                elif "call" in line:
                    call, streamed = line["call"], []
                elif "same" in line:
                    tally.call(line["same"], line["seconds"], line["pause"])

    if while_starting:
        time.sleep(numbers.uniform(0, 2))
        tally.unstarted += 1
    else:
        while not all(rank.is_ready for rank in ranks):
            listen()
            late = next((rank for rank in ranks if rank.has_ended), None)
            if late is not None:
                _await_end(ranks, END_S)
                tally.error(f"rank {late.rank} ended while it started: {late.last_error()}")
                return
            if time.monotonic() - began > _READY_S:
                raise _hang(next(rank for rank in ranks if not rank.is_ready), "while it starts")
            time.sleep(0.01)
        tally.starts += 1
        pause = time.monotonic() + numbers.uniform(0, 1.0)
        while time.monotonic() < pause:
            listen()
            time.sleep(0.005)
    victim, number = numbers.choice(ranks), draw_signal(numbers)
    others = [rank for rank in ranks if rank is not victim]
    if any(rank.has_ended for rank in ranks):
        tally.error(f"a rank ended that was not struck: {[rank.last_error() for rank in ranks]}")
        return
    strike(tally, "rank 0" if victim.rank == 0 else "stage", victim.pid, number)
    struck = time.monotonic()
    _await_end(others, END_S + _START_S * while_starting)
    tally.longest_end_s = max(tally.longest_end_s, time.monotonic() - struck)
    for rank in others:
        # A watchdog ends a process whose main thread cannot raise.
        if wrong := judge_end(rank, ["RankError: ", f"pipespec: rank {rank.rank} ends: "]):
            tally.error(
                f"{wrong}, after {signal.Signals(number).name if number < 34 else number} of rank {victim.rank}"
            )
    listen()
    if call >= 0:
        _judge_partial(tally, calls[call], streamed, partial)


def _judge_partial(tally: Tally, call: Call, streamed: Sequence[int], partial: Sequence[Sequence[int]]) -> None:
    """Check what is left of a call that was ended. A rank that a watchdog ends leaves only what it has streamed."""
    text, pad = call.text.tolist(), call.options.get("pad_token_id")
    if len(text) == 1 and list(streamed) != text[0][: len(streamed)]:
        tally.wrong += 1
    for part, row in zip(partial, text, strict=False):
        length = len(part)
        while length and part[length - 1] == pad:  # a shorter row
            length -= 1
        if list(part[:length]) != row[:length]:
            tally.wrong += 1
    if partial and len(text) == 1 and len(partial[0]) < len(streamed):
        tally.error("tokens that were streamed are missing in .partial")
