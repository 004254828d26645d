"""Comparison of drafting with plain decoding while a call runs.

The rate of the last tokens is compared with the measured rate of plain decoding. Drafts that lose rest, and plain decoding is measured in the
same call. If it is no faster, the machine was slow, and the drafts continue. Each rest is longer than the one before, and after a few the
drafts rest to the end of the call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

_INTERVAL_STEPS = 12
_INTERVAL_TOKENS = 24
_PROBE_TOKENS = 16
_FIRST_REST = 64
_MOST_RESTS = 4
_LOSES = 0.97
_PROBE_SHARE = 0.01
"""Share of the time that measurements of slower plain decoding may cost."""
_FIRST_PROBE_SHARE = 0.05
"""The same before its first measurement."""
_SMOOTHING = 0.3
_EXPECTED_TOKENS = 48
"""Tokens per row that the predicted rate of drafting counts as: how many draft tokens are right varies along a text."""
_MOST_DECISIONS = 32


@dataclass
class MeasuredRate:
    """Measured rate of one candidate divided by its predicted rate.

    A call on a text whose agreement is known measures the machine. A call on another text measures machine and text together, and counts less.

    Attributes:
        speed: Of the machine: an exponentially weighted mean; 1 before the first measurement.
        texts: Of the texts, beyond ``speed``: likewise, with the prediction as the first measurement.
        count: Number of measurements.
        texts_count: Number of those in ``texts``.
        tokens_since: Tokens that were decoded in other ways since the last measurement.
    """

    speed: float = 1.0
    texts: float = 1.0
    count: int = 0
    texts_count: int = 0
    tokens_since: int = 0

    @property
    def factor(self) -> float:
        """Of both, by which a prediction is multiplied."""
        return self.speed * self.texts

    def add(self, factor: float) -> None:
        """Add a measurement on a text whose agreement is known, within 0.05 and 5."""
        weight = _SMOOTHING if self.count > self.texts_count else 1.0
        self.speed += weight * (_bounded(factor) - self.speed)
        self._counted()

    def add_other_text(self, factor: float) -> None:
        """Add a measurement on a text whose agreement is not known, within 0.05 and 5."""
        self.texts_count += 1
        weight = max(_SMOOTHING / 2, 1 / (self.texts_count + 1))
        self.texts += weight * (_bounded(factor) / self.speed - self.texts)
        self._counted()

    def forget_texts(self) -> None:
        """Forget what the texts gave: the table of agreement has changed, and with it the prediction."""
        self.count -= self.texts_count
        self.texts, self.texts_count = 1.0, 0

    def fade(self, factor: float, weight: float) -> None:
        """Move towards a measured rate of ``factor``, since this one becomes old."""
        self.speed += weight * (factor - self.speed)
        self.texts += weight * (1.0 - self.texts)

    def _counted(self) -> None:
        self.count += 1
        self.tokens_since = 0


def _bounded(factor: float) -> float:
    return min(max(factor, 0.05), 5.0)


@dataclass
class CallSteering:
    """Lets the drafts of a call rest where they lose. :meth:`after_step` is called after every step of the target.

    Attributes:
        let_rest: Lets the drafts rest (True) or draft again (False), from the next step on.
        tokens: Returns the new tokens of the call, all rows together.
        clock: Returns seconds.
        predicted: Predicted tokens per second of plain decoding.
        plain: Measurements of plain decoding, which this object extends.
        gain: Predicted rate of drafting divided by that of plain decoding.
        rows: Of the call.
        decisions: What was decided, for the report.
    """

    let_rest: Callable[[bool], None]
    tokens: Callable[[], int]
    clock: Callable[[], float]
    predicted: float
    plain: MeasuredRate
    gain: float = 1.0
    rows: int = 1
    decisions: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._steps = self._step_of_mark = 0
        self._mark: tuple[int, float] | None = None
        self._rests = 0
        self._is_resting = self._is_probing = False
        self._rest_until, self._rest_length = 0, _FIRST_REST * self.rows
        self._rate_before = 0.0  # with drafts, when they began to rest
        # Tokens and seconds with drafts, older ones with less weight.
        expected = float(_EXPECTED_TOKENS * self.rows)
        self._drafted = (expected, expected / (self.predicted * self.plain.factor * self.gain))

    def after_step(self) -> None:
        """Compare, and let the drafts rest or continue."""
        self._steps += 1
        if self._steps % 4:
            return
        now, tokens = self.clock(), self.tokens()
        if self._mark is None:
            if self._steps >= 8:  # the first steps contain start-up costs
                self._begin(tokens, now)
            return
        new, seconds = tokens - self._mark[0], now - self._mark[1]
        if seconds <= 0:
            return
        if self._is_resting:
            if new >= _PROBE_TOKENS * self.rows:
                self._begin(tokens, now)
                self._plain_measured(new / seconds, tokens)
        elif new >= _INTERVAL_TOKENS * self.rows and self._steps - self._step_of_mark >= _INTERVAL_STEPS:
            self._begin(tokens, now)
            self.plain.tokens_since += new
            self._drafted = (self._drafted[0] / 2 + new, self._drafted[1] / 2 + seconds)
            if self._rests < _MOST_RESTS:
                self._compare(self._drafted[0] / self._drafted[1], tokens)

    def _begin(self, tokens: int, now: float) -> None:
        self._mark, self._step_of_mark = (tokens, now), self._steps

    def _compare(self, rate: float, tokens: int) -> None:
        plain = self.predicted * self.plain.factor
        share = _PROBE_SHARE if self.plain.count else _FIRST_PROBE_SHARE
        if rate < _LOSES * plain:
            self._rests += 1
            self._rest(rate, probing=False)
            self._note(
                tokens, f"drafting gives {rate:.0f} tokens/s, plain decoding {plain:.0f}: changed to plain decoding"
            )
        elif self.plain.tokens_since * share > _PROBE_TOKENS * self.rows * max(rate / plain - 1, 0.0):
            self._rest(rate, probing=True)

    def _rest(self, rate: float, *, probing: bool) -> None:
        self._is_resting, self._is_probing = True, probing
        self._rate_before, self._rest_until = rate, 0
        self.let_rest(True)

    def _plain_measured(self, rate: float, tokens: int) -> None:
        self.plain.add(rate / self.predicted)
        if self._rest_until:
            if tokens >= self._rest_until and self._rests < _MOST_RESTS:
                self._resume(tokens, "drafting is tried again")
        elif rate * _LOSES <= self._rate_before:
            back = f"plain decoding gives no more ({rate:.0f}): back to drafting"
            self._resume(tokens, None if self._is_probing else back)
        else:
            if self._is_probing:
                self._rests += 1
                self._note(
                    tokens,
                    f"drafting gives {self._rate_before:.0f} tokens/s, plain decoding {rate:.0f}: the drafts rest",
                )
            self._is_probing = False
            self._rest_until = tokens + self._rest_length
            self._rest_length *= 4

    def _resume(self, tokens: int, why: str | None) -> None:
        self._is_resting = False
        if not self._is_probing:
            self._drafted = (0.0, 0.0)
        self.let_rest(False)
        if why:
            self._note(tokens, why)

    def _note(self, tokens: int, what: str) -> None:
        if len(self.decisions) < _MOST_DECISIONS:
            self.decisions.append(f"at {tokens} tokens: {what}")
