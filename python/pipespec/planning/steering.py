"""Steering: what is decided while a call runs, from what it really does. Pure: the clock and the counters are passed in.

While it speculates, the rate of the last tokens is compared with what plain decoding is known to give; when it loses, the drafts rest, and
plain decoding is measured then and there. If that is no better, the machine was slow, not the drafts: they go on. Windows and wait
follow the observed acceptance. Everything is bounded: every rest is longer than the one before, and after a few it lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pipespec.planning.planner import Rung

_INTERVAL_STEPS = 12
_INTERVAL_TOKENS = 24
_PROBE_TOKENS = 16
_FIRST_REST = 64
_MOST_RESTS = 4
_LOSES = 0.97
_PROBE_SHARE = 0.01
"""Plain decoding is measured now and then although speculation wins; it may cost this much of the time."""
_FIRST_PROBE_SHARE = 0.05
_SMOOTHING = 0.3


@dataclass
class Ledger:
    """What calls of one shape have shown. Seconds per token (all rows together count as many)."""

    plain_s: float
    """Plain decoding: predicted at first, then measured."""
    measured: int = 0
    """Measurements of it."""
    unprobed: int = 0
    """Tokens since the last."""
    predicted_s: float = 0.0

    def __post_init__(self) -> None:
        self.predicted_s = self.plain_s

    def learn(self, seconds: float) -> None:
        weight = _SMOOTHING if self.measured else 1.0
        self.plain_s += weight * (seconds - self.plain_s)
        self.measured += 1
        self.unprobed = 0


@dataclass(frozen=True)
class Counts:
    """Of the target, all rows, since the call began."""

    tokens: int
    drafted: int
    accepted: int
    steps: int


def acceptance(drafted: float, accepted: float) -> float:
    """Probability that a hint holds if those before it did, from the means per verification: ``accepted`` = a + .. + a^``drafted``."""
    if not 0 <= accepted <= drafted:
        raise ValueError(f"of {drafted} drafts {accepted} cannot be accepted")
    if drafted == 0:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(30):
        a = (low + high) / 2
        if a * (1 - a**drafted) / (1 - a) < accepted:
            low = a
        else:
            high = a
    return (low + high) / 2


@dataclass
class Steering:
    """Call :meth:`look` after every step of the target's.

    ``counts``: reads the counters; ``tokens``: only the number of tokens, cheap; ``apply``: windows and wait from the next step on;
    ``policy``: what it begins with; ``rows``: of the call; ``what``, ``other``: names of the two ways. It can compare any two ways of decoding:
    windows of 0 stand for the other one.
    """

    policy: tuple[tuple[int, ...], int]
    ladder: Sequence[Rung]
    ledger: Ledger
    apply: Callable[[tuple[int, ...], int], None]
    counts: Callable[[], Counts]
    tokens: Callable[[], int]
    clock: Callable[[], float]
    rows: int = 1
    expected: float | None = None
    """Acceptance that the plan reckoned with."""
    what: str = "drafting"
    other: str = "plain decoding"
    loses: float = _LOSES
    """It is left where its rate is below this much of the other's."""
    probes: bool = True
    """Whether the other way is measured now and then although this one wins."""
    decisions: list[str] = field(default_factory=list)
    speculated: list[tuple[int, float, int]] = field(default_factory=list)
    """Tokens, seconds and steps of every interval in which it speculated."""

    def __post_init__(self) -> None:
        self._steps = 0
        self._resting = False
        self._rests = 0
        self._rest_until = 0
        self._rest_length = _FIRST_REST * self.rows
        self._spec_s = 0.0  # per token, when it was last left
        self._probing = False
        self._last: Counts | None = None
        self._acceptance = self.expected
        self._begin: tuple[int, float] | None = None

    @property
    def resting(self) -> bool:
        return self._resting

    def look(self) -> None:
        self._steps += 1
        if self._steps % 4:
            return
        now, tokens = self.clock(), self.tokens()
        if self._begin is None:  # what came before holds the start of everything
            if self._steps >= 8:
                self._mark(tokens, now)
            return
        tokens0, began = self._begin
        new, seconds = tokens - tokens0, now - began
        if self._resting:
            if new >= _PROBE_TOKENS * self.rows and seconds > 0:
                self._rested(new, seconds, tokens, now)
        elif new >= _INTERVAL_TOKENS * self.rows and self._steps - self._at >= _INTERVAL_STEPS and seconds > 0:
            self._speculated(new, seconds, tokens, now)

    def _mark(self, tokens: int, now: float) -> None:
        self._begin = (tokens, now)
        self._at = self._steps

    def _speculated(self, new: int, seconds: float, tokens: int, now: float) -> None:
        self.speculated.append((new, seconds, self._steps - self._at))
        self.ledger.unprobed += new
        rate, plain = new / seconds, 1 / self.ledger.plain_s
        self._mark(tokens, now)
        if rate < self.loses * plain and self._rests < _MOST_RESTS:
            self._rests += 1
            self._rest(seconds / new, probing=False)
            self._say(
                tokens, f"{self.what} gives {rate:.0f} tokens/s, {self.other} {plain:.0f}: changed to {self.other}"
            )
            return
        gain = rate / plain
        share = _PROBE_SHARE if self.ledger.measured else _FIRST_PROBE_SHARE
        if (
            self.probes
            and self.ledger.unprobed * share > _PROBE_TOKENS * self.rows * max(gain - 1, 0.0)
            and (self._rests < _MOST_RESTS)
        ):
            self._rest(seconds / new, probing=True)
            return
        self._adapt(tokens)

    def _rest(self, spec_s: float, *, probing: bool) -> None:
        self._resting, self._probing, self._spec_s = True, probing, spec_s
        self._last = None
        self._rest_until = 0
        self.apply((0,) * len(self.policy[0]), 0)

    def _rested(self, new: int, seconds: float, tokens: int, now: float) -> None:
        measured = seconds / new
        self._mark(tokens, now)
        self.ledger.learn(measured)
        if self._rest_until:  # a long rest
            if tokens >= self._rest_until and self._rests < _MOST_RESTS:
                self._resume(tokens, f"{self.what} is tried again")
            return
        if measured >= self._spec_s * self.loses:  # no better
            quiet = self._probing
            self._resume(
                tokens, None if quiet else f"{self.other} gives no more ({1 / measured:.0f}): back to {self.what}"
            )
            return
        if self._probing:
            self._rests += 1
            self._say(
                tokens, f"{1 / self._spec_s:.0f} tokens/s, plain decoding gives {1 / measured:.0f}: the drafts rest"
            )
        self._probing = False
        self._rest_until = tokens + self._rest_length
        self._rest_length *= 4

    def _resume(self, tokens: int, why: str | None) -> None:
        self._resting = False
        self.apply(*self.policy)
        if why:
            self._say(tokens, why)

    def _adapt(self, tokens: int) -> None:
        """Windows and wait for the acceptance of the last interval."""
        if len(self.ladder) < 2:
            return
        now = self.counts()
        last, self._last = self._last, now
        if last is None:
            return
        drafted, steps = now.drafted - last.drafted, now.steps - last.steps
        if drafted < 16 or steps < 1:
            return
        seen = acceptance(drafted / steps, (now.accepted - last.accepted) / steps)
        self._acceptance = seen if self._acceptance is None else self._acceptance + 0.5 * (seen - self._acceptance)
        rung = min(self.ladder, key=lambda r: abs(r.acceptance - (self._acceptance or 0.0)))
        if (rung.windows, rung.wait) != self.policy:
            self.policy = (rung.windows, rung.wait)
            self.apply(*self.policy)
            self._say(
                tokens,
                f"acceptance {self._acceptance:.2f}: windows {'/'.join(map(str, rung.windows))}, wait {rung.wait}",
            )

    def _say(self, tokens: int, what: str) -> None:
        if len(self.decisions) < 32:
            self.decisions.append(f"at {tokens} tokens: {what}")
