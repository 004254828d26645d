"""What the parts of :mod:`bench.kills` share: calls, signals, and what is counted."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from bench.figures import Figures
from pipespec.process.progress import RemainingWork

LIMIT_S = 300.0
"""A call that takes longer is a hang."""

_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGRTMIN + 5) * 3 + (signal.SIGSTOP,)
"""SIGSTOP is rarer: whatever waits for the stopped process waits seconds before it gives it up."""


class Call(NamedTuple):
    """Arguments of a call, and the tokens that it must return."""

    ids: torch.Tensor
    options: dict[str, Any]
    text: torch.Tensor


@dataclass
class Tally:
    """What happened under one schedule.

    Attributes:
        strikes: Signals by receiver and kind.
        starts: Pipelines, or groups of ranks, that were made.
        unstarted: Starts that failed because a process was struck meanwhile.
        calls: Calls that ended.
        wrong: Texts, or parts of texts, other than the target's.
        errors: What was raised, and ends that are not as documented.
        warnings: Calls' warnings of lost speed.
        longest_call_s: Of all calls.
        longest_pause_s: Longest time without a token in calls with one row.
        longest_end_s: Longest time from the strike at a rank until the last rank that it ends has ended.
    """

    strikes: Counter[str] = field(default_factory=Counter)
    starts: int = 0
    unstarted: int = 0
    calls: int = 0
    wrong: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    warnings: int = 0
    longest_call_s: float = 0.0
    longest_pause_s: float = 0.0
    longest_end_s: float = 0.0

    def call(self, same: bool, seconds: float, pause: float) -> None:
        self.calls += 1
        self.wrong += not same
        self.longest_call_s = max(self.longest_call_s, seconds)
        self.longest_pause_s = max(self.longest_pause_s, pause)

    def error(self, text: str) -> None:
        self.errors[text[:300]] += 1

    def note(self, figures: Figures, name: str) -> None:
        """Put everything into ``figures``. Raises ``AssertionError`` if a text was wrong, a call did not end as documented, or nothing ran."""
        for key, value in (("strikes", self.strikes.total()), ("errors", self.errors.total())):
            figures.add(f"kills.{name}.{key}", value)
        for key in ("starts", "unstarted", "calls", "wrong", "longest_call_s", "longest_pause_s", "longest_end_s"):
            figures.add(f"kills.{name}.{key}", getattr(self, key))
        details = {"strikes": dict(self.strikes), "errors": dict(self.errors), "warnings": self.warnings}
        figures.detail(name, details)
        print(json.dumps(details), flush=True)
        if self.wrong or self.errors:
            raise AssertionError(f"{self.wrong} wrong texts, {self.errors.total()} errors")
        if not (self.starts and self.calls):
            raise AssertionError(
                f"{self.starts} starts, {self.unstarted} failed ones, {self.calls} calls: nothing was tested"
            )


class Amount:
    """How long a schedule is struck: for some seconds, and for a number of strikes if one is given."""

    def __init__(self, name: str, tally: Tally, seconds: float, strikes: int | None) -> None:
        self._name, self._tally, self._strikes = name, tally, strikes
        self._began, self._seconds = time.monotonic(), seconds
        self._bar = RemainingWork(round(seconds) if strikes is None else strikes)

    def __enter__(self) -> Amount:
        self._bar.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.__exit__(*error)

    def is_over(self) -> bool:
        """Whether that is enough. Shows the progress."""
        tally, passed = self._tally, time.monotonic() - self._began
        struck = tally.strikes.total()
        self._bar.done = round(passed) if self._strikes is None else struck
        bad = f"{tally.wrong} wrong, {tally.errors.total()} errors"
        self._bar.show(f"{self._name}: {struck} strikes, {tally.starts} starts, {tally.calls} calls, {bad}")
        return passed > self._seconds or (self._strikes is not None and struck >= self._strikes)


def draw_signal(numbers: random.Random) -> int:
    return numbers.choice(_SIGNALS)


def strike(tally: Tally, who: str, pid: int, number: int) -> None:
    """Signal a process, unless it has ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        tally.strikes[f"{who} {signal.Signals(number).name if number < signal.SIGRTMIN else 'real-time'}"] += 1


class Gaps:
    """A streamer that measures the longest time without a token."""

    def __init__(self) -> None:
        self.longest, self._last = 0.0, time.monotonic()

    def put(self, tokens: torch.Tensor) -> None:
        now = time.monotonic()
        self.longest, self._last = max(self.longest, now - self._last), now

    def end(self) -> None:
        self.put(torch.empty(0))
