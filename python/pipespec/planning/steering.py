"""Comparison of drafting with plain decoding while a call runs.

The rate of the last tokens, to which the predicted rate is added at the beginning, is compared with the measured rate of plain decoding. Drafts
that lose rest, and plain decoding is measured in the same call. If it is no faster, the machine was slow, and the drafts continue. Each rest is longer than the one before, and after a few the
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
_EXPECTED_TOKENS = 96
"""Tokens that the predicted rate of drafting counts as: how many draft tokens are right varies along a text."""
_MOST_DECISIONS = 32


@dataclass
class MeasuredRate:
    """Measured rate of one candidate divided by its predicted rate: exponentially weighted means.

    Where the agreement of a call's text is known, the prediction is made for that text, and the quotient measures the machine. Other calls
    measure machine and text together, and count less.

    Attributes:
        prior: Number of measurements that the prediction counts as.
        speed: Of the machine; 1 before the first measurement.
        overall: Of machine and texts, against the prediction of the plan, since the first text whose agreement was not known.
        count: Number of measurements of ``speed``.
        overall_count: Number of those of ``overall``.
        tokens_since: Tokens that were decoded in other ways since the last measurement.
    """

    prior: int = 0
    speed: float = 1.0
    overall: float = 1.0
    count: int = 0
    overall_count: int = 0
    tokens_since: int = 0

    @property
    def is_measured(self) -> bool:
        """Whether there is a measurement."""
        return self.count + self.overall_count > 0

    @property
    def factor(self) -> float:
        """By which the prediction of the plan is multiplied."""
        return self.overall if self.overall_count else self.speed

    def add(self, on_text: float) -> None:
        """Add a measurement divided by the prediction for its text, within 0.05 and 5."""
        self.count += 1
        self.speed += max(_SMOOTHING, 1 / (self.count + self.prior)) * (_bounded(on_text) - self.speed)
        self.tokens_since = 0

    def add_overall(self, planned: float) -> None:
        """Add a measurement divided by the prediction of the plan, within 0.05 and 5."""
        if not self.overall_count:
            self.overall = self.speed
        self.overall_count += 1
        self.overall += max(_SMOOTHING / 2, 1 / (self.overall_count + 1)) * (_bounded(planned) - self.overall)
        self.tokens_since = 0

    def forget_texts(self) -> None:
        """Forget what texts gave against a plan that is no more."""
        self.overall_count = 0

    def rescale(self, factor: float) -> bool:
        """Keep the measured rate where the prediction has changed by the inverse of ``factor``.

        Returns:
            Whether the result is in the range of measurements.
        """
        self.speed, self.overall = factor * self.speed, factor * self.overall
        return self.speed == _bounded(self.speed)

    def fade(self, factor: float, weight: float) -> None:
        """Move towards ``factor``, because the measurements become old."""
        self.speed += weight * (factor - self.speed)
        self.overall += weight * (factor - self.overall)


def _bounded(factor: float) -> float:
    return min(max(factor, 0.05), 5.0)


@dataclass
class CallSteering:
    """Lets the drafts of a call rest where they lose. :meth:`after_step` is called after every step of the target.

    Tokens are those of the row that has most: other rows may have ended.

    Attributes:
        let_rest: Lets the drafts rest (True) or draft again (False), from the next step on.
        tokens: Returns the new tokens of the call.
        clock: Returns seconds.
        predicted: Predicted tokens per second of plain decoding.
        plain: Measurements of plain decoding, which this object extends.
        gain: Predicted rate of drafting divided by that of plain decoding.
        decisions: What was decided, for the report.
    """

    let_rest: Callable[[bool], None]
    tokens: Callable[[], int]
    clock: Callable[[], float]
    predicted: float
    plain: MeasuredRate
    gain: float = 1.0
    decisions: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._steps = self._step_of_mark = 0
        self._mark: tuple[int, float] | None = None
        self._rests = 0
        self._is_resting = self._is_probing = False
        self._rest_until, self._rest_length = 0, _FIRST_REST
        self._rate_before = 0.0  # with drafts, when they began to rest
        # Tokens and seconds with drafts, and tokens at the predicted rate: older ones with less weight.
        self._drafted, self._expected = (0.0, 0.0), float(_EXPECTED_TOKENS)

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
            if new >= _PROBE_TOKENS:
                self._begin(tokens, now)
                self._plain_measured(new / seconds, tokens)
        elif new >= _INTERVAL_TOKENS and self._steps - self._step_of_mark >= _INTERVAL_STEPS:
            self._begin(tokens, now)
            self.plain.tokens_since += new
            self._drafted = (self._drafted[0] / 2 + new, self._drafted[1] / 2 + seconds)
            self._expected /= 2
            if self._rests < _MOST_RESTS:
                self._compare(tokens)

    def _begin(self, tokens: int, now: float) -> None:
        self._mark, self._step_of_mark = (tokens, now), self._steps

    def _compare(self, tokens: int) -> None:
        plain = self.predicted * self.plain.factor
        drafted, seconds = self._drafted
        rate = drafted / seconds
        likely = (drafted + self._expected) / (seconds + self._expected / (plain * self.gain))
        share = _PROBE_SHARE if self.plain.count else _FIRST_PROBE_SHARE
        if likely < _LOSES * plain:
            self._rests += 1
            self._rest(rate, probing=False)
            self._note(
                tokens,
                f"drafting gives {rate:.0f} tokens/s per row, plain decoding {plain:.0f}: changed to plain decoding",
            )
        else:
            # How many draft tokens are right varies along a text, so that what a rest loses is the gain over all of it.
            gain = max(likely / plain, self.gain) if self.plain.count else likely / plain
            if self.plain.tokens_since * share <= _PROBE_TOKENS * max(gain - 1, 0.0):
                return
            self._rest(likely, probing=True)

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
                    f"plain decoding gives {rate:.0f} tokens/s per row, drafting less: the drafts rest",
                )
            self._is_probing = False
            self._rest_until = tokens + self._rest_length
            self._rest_length *= 4

    def _resume(self, tokens: int, why: str | None) -> None:
        self._is_resting = False
        if not self._is_probing:
            self._drafted, self._expected = (0.0, 0.0), 0.0
        self.let_rest(False)
        if why:
            self._note(tokens, why)

    def _note(self, tokens: int, what: str) -> None:
        if len(self.decisions) < _MOST_DECISIONS:
            self.decisions.append(f"at {tokens} tokens: {what}")
