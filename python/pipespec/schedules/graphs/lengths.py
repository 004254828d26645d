"""RoundLengths: how many draft tokens the next captured round has. Each number is a graph of its own, and a round's length costs no host work."""

from __future__ import annotations

from pipespec.engine.controller import AcceptanceRates, Machine, StepTimes

LENGTHS = (0, 2, 4, 6)
"""Draft tokens of the rounds; 0: plain decoding."""

_FIRST = 4
_PRIOR = 0.75
"""Acceptance rate before the first measurement."""
_GAIN = 1.02
"""Drafting must be predicted to be this much faster than plain decoding."""
_REVIEW = 8
"""Rounds between two choices."""


class RoundLengths:
    """Chooses the length of captured rounds from their measured times and the acceptance rates, by the closed form of :mod:`pipespec.engine.controller`.

    It belongs to a pipeline: what it has learned serves the next call. A call measures each length that is not known for one round. Where no length pays, it goes
    on in plain rounds to its end: the draft has not read their tokens.
    """

    def __init__(self) -> None:
        self._times = StepTimes(Machine())
        self._rates = AcceptanceRates(_PRIOR)
        self._known: set[int] = set()
        self._rounds = 0
        self.length = _FIRST
        self.is_resting = False

    def begin(self) -> None:
        """Begin a call."""
        self._rates.begin()
        self._rounds, self.is_resting = 0, False
        self.length = _FIRST
        if self._known.issuperset(LENGTHS):
            self._choose()

    def note(self, length: int, drafted: int, accepted: int, rows: int, seconds: float) -> None:
        """Learn from a round.

        Args:
            length: Of the round: the draft tokens that a row may have.
            drafted: Draft tokens of all rows that the target has verified.
            accepted: How many of them were accepted.
            rows: Rows that took part.
            seconds: Time of the round.
        """
        self._rounds += 1
        # The first round of a call finds cold caches.
        if self._rounds > 1:
            self._times.note(1 + length, seconds)
            self._known.add(length)
        if drafted:
            self._rates.note(round(drafted / rows), round(accepted / rows))
        if self.is_resting or self._rounds < 2:
            return
        unknown = [n for n in (_FIRST, *LENGTHS[1:], 0) if n not in self._known]
        if unknown and self._rounds < _REVIEW:
            self.length = unknown[0]
        elif self._rounds % _REVIEW == 0:
            self._choose()
        elif self.length == 0:
            self.length = _FIRST

    def _choose(self) -> None:
        """Take the length with the most tokens per second."""
        expected, plain = self._rates.expected(), self._times.seconds(1)
        best, rate = 0, 0.0 if plain is None else _GAIN / plain
        for length in LENGTHS[1:]:
            seconds = self._times.seconds(1 + length)
            if seconds is not None and expected[length] / seconds > rate:
                best, rate = length, expected[length] / seconds
        self._rates.review(best > 0, self._rounds)
        self.length, self.is_resting = best, best == 0
