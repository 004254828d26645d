"""The controller: which draft proposes tokens in the next round, and how many.

A round is ``k`` draft tokens and one verification by the target. With acceptance rates ``a_1, a_2, ...`` by position it commits

    E(k) = 1 + a_1 + a_1 a_2 + ... + a_1 ... a_k

tokens in ``D(k) + T(1 + k)`` seconds: the time of the draft and that of a step of the target over ``1 + k`` columns (Leviathan et al. 2023, theorem 3.8, with
measured times and a rate per position). The controller keeps ``T``, ``D`` and the rates of each kind of draft while texts are generated, and takes the ``k`` and
the draft with the most tokens per second; ``k = 0`` is plain decoding. The text and the corpus of an n-gram index are not asked in a call whose rounds with them have lost
more time than they gained, and than trials may cost. It changes the speed of a call, never its text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pipespec_kernels import _native

MAX_DRAFT_TOKENS = 16
"""Maximum number of draft tokens of a round."""

_MATCHES = (4, 8)
"""Length of the match from which on the tokens of an n-gram index belong to the next kind: longer matches are accepted more often."""

_INDEX = {
    "n-gram, short": (0.4, 2),
    "n-gram": (0.6, 2),
    "n-gram, long": (0.8, 4),
    "corpus, rare": (0.15, 1),
    "corpus": (0.35, 2),
    "corpus, frequent": (0.6, 3),
}
"""By kind of what an n-gram index has: the acceptance rate, and the draft tokens of a round at most, before the first measurement."""
_KINDS = tuple(_INDEX)
_SOURCES = ("n-gram", "corpus")
"""The beginnings of their names. What one gains pays for no trials of the other."""
_PRIORS = {"model": 0.75} | {kind: rate for kind, (rate, _) in _INDEX.items()}
"""Acceptance rate before the first measurement."""
_HEAD = 0.5
"""That of a draft head: in the rounds that an index leaves to it."""
_PRIOR_WEIGHT = 6.0
_MARGINAL = 0.1
"""Price of a further column before the first measurement, as a part of a step, without that of weights that it alone reads."""
_GAIN = 1.02
"""Drafting must be predicted to be this much faster than plain decoding."""
_REVIEW = 8
"""Rounds between two evaluations of the closed form, which takes longer than a step of a very small model allows each time."""
_SMALL_LAG = 16
"""Tokens up to which a draft that has rested catches up within its next step, at no price worth a decision."""
_FIRST_BOUND = 4
"""Draft tokens of a round at most, as long as no round has shown that more are accepted."""
_FIRST_TRIAL = 12
"""Tokens of the first call after which a draft model may be tried that compares its own choices with them: that tells whether it pays before it drafts."""
_FIRST_OF_HEAD = 6
"""The same of a draft head, which compares nothing. By then an index has shown whether it leaves tokens to it for which reading the prompt pays."""
_DOUBT = 0.5
"""What counts of the price of reading a prompt after a call in which that price alone kept the draft model from being tried: nothing else would measure it again."""
_PLAIN_EVERY = 256
"""Rounds after which a step without draft tokens measures plain decoding again."""
_FIRST_CREDIT = 0.5
"""Plain steps that the n-gram rounds of a call may lose before they have gained anything."""
_RENEWED = {"n-gram": 0.5, "corpus": 0.1}
"""Plain steps that a further call may lose beyond what the one before has left, up to the first ones. A text that repeats itself comes at once, and a corpus gains in most texts or in none."""
_MAX_CREDIT = 2.0
"""Plain steps of gains that later rounds of a call may lose again."""
_EXPLORATION = 0.01
"""Part of the time of plain decoding that trials may cost."""
_FIRST_SURPRISE = 1.4
"""How much longer than expected the first step of a width counts at most."""
_DOUBTED = 16
"""Rounds without a draft in which half of the surprise of a width goes that was measured once or twice."""
_FIRST_REST = 64
"""Rounds in which half of what is known about a resting draft is forgotten. It doubles with each rest that a trial did not end."""


class StepTimes:
    """Seconds of a step by its number of columns, learned from the steps of a call.

    A change of the machine's speed is common to all steps, and a step of one width tells it for all: each measurement corrects ``speed`` and the number of its
    own width. The price of widths that were not measured comes from a line through the others, over what their further columns cost by ``further``.

    Args:
        machine: The speed that the times of several models share.
        further: Of a number of columns, the weights that they read together and one alone does not, as a part of those of one: the other experts, if
            each column chooses by itself. None: the same weights are read for all.
    """

    def __init__(self, machine: Machine, further: Callable[[int], float] | None = None) -> None:
        self._machine, self._further = machine, further
        self._known: dict[int, list[float]] = {}  # by columns: seconds at speed 1, and the number of measurements
        self._line: tuple[float, float] | None = None

    def note(self, columns: int, seconds: float) -> None:
        """Learn from a step."""
        machine, entry = self._machine, self._known.get(columns)
        if entry is None:
            # The first step of a width may have been interrupted, and one that seems dear is not tried again.
            expected = self.seconds(columns)
            if expected is not None and columns > 1:
                seconds = min(seconds, _FIRST_SURPRISE * expected)
            self._known[columns], self._line = [seconds * machine.speed, 1.0], None
            return
        self._line = None
        # A step that was interrupted says little about the next one.
        ratio = min(max(seconds * machine.speed / entry[0], 0.5), 2.0)
        machine.speed *= ratio**-0.2
        entry[1] += 1.0
        entry[0] *= ratio ** max(1.0 / entry[1], 0.05)

    def seconds(self, columns: int) -> float | None:
        """The expected time of a step; None before the first measurement."""
        if not self._known:
            return None
        entry = self._known.get(columns)
        if entry is not None and entry[1] >= 3:
            return entry[0] / self._machine.speed
        first, slope = self._line = self._line or self._fit()
        return (first + slope * self.price(columns)) / self._machine.speed

    def doubt(self, rounds: int) -> None:
        """Bring widths nearer to what is expected without a measurement that were measured once or twice: that step may have been interrupted, and a width that seems dear is not tried again."""
        one = self._known.get(1)
        if one is None:
            return
        for columns, entry in self._known.items():
            if columns > 1 and entry[1] < 3:
                expected = one[0] * (1 + self.price(columns))
                entry[0] *= min(expected / entry[0], 1.0) ** (1 - 0.5 ** (rounds / _DOUBTED))
                self._line = None

    def price(self, columns: int) -> float:
        """What the columns after the first cost before the first measurement, as a part of a step."""
        return _MARGINAL * (columns - 1) + (0.0 if self._further is None else self._further(columns))

    def _fit(self) -> tuple[float, float]:
        """Time of one column at speed 1, and by how much the price of further ones makes it longer."""
        weights, prices = [min(n, 8.0) for _, n in self._known.values()], [self.price(n) for n in self._known]
        mean_x = sum(w * x for w, x in zip(weights, prices, strict=True)) / sum(weights)
        mean_y = sum(w * y for w, (y, _) in zip(weights, self._known.values(), strict=True)) / sum(weights)
        spread = sum(w * (x - mean_x) ** 2 for w, x in zip(weights, prices, strict=True))
        if spread == 0:
            first = mean_y / (1 + mean_x)
            return first, first
        slope = sum(
            w * (x - mean_x) * (y - mean_y) for w, x, (y, _) in zip(weights, prices, self._known.values(), strict=True)
        )
        slope = max(slope / spread, 0.0)
        return max(mean_y - slope * mean_x, 0.1 * mean_y), slope


@dataclass
class Machine:
    """Speed of the machine, relative to that of the first measurements."""

    speed: float = 1.0


class AcceptanceRates:
    """Acceptance rates of one kind of draft tokens by their position in a round. Older rounds count less.

    Args:
        prior: The rate before the first measurement.
    """

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._hits = [0.0] * MAX_DRAFT_TOKENS
        self._tries = [0.0] * MAX_DRAFT_TOKENS
        self._all_hits = self._all_tries = 0.0
        self._half_life = _FIRST_REST
        self._paid = False
        self.bound = _FIRST_BOUND
        """Draft tokens of a round at most: it doubles each time that as many are accepted."""
        self.drafted = self.accepted = 0
        """Draft tokens of the present call."""

    def note(self, drafted: int, accepted: int) -> None:
        """Learn from the verification of ``drafted`` tokens, of which the first ``accepted`` were."""
        self.drafted += drafted
        self.accepted += accepted
        if accepted == self.bound:
            self.bound = min(2 * self.bound, MAX_DRAFT_TOKENS)
        for j in range(min(drafted, accepted + 1, MAX_DRAFT_TOKENS)):
            hit = float(j < accepted)
            self._hits[j] = 0.97 * self._hits[j] + hit
            self._tries[j] = 0.97 * self._tries[j] + 1.0
            self._all_hits = 0.985 * self._all_hits + hit
            self._all_tries = 0.985 * self._all_tries + 1.0

    def note_agreement(self, agreed: int, compared: int) -> None:
        """Learn from a comparison of the draft's own choices with a text that the target has generated."""
        self._all_hits += agreed
        self._all_tries += compared

    @property
    def is_known(self) -> bool:
        """Whether there is more than the prior."""
        return self._all_tries >= 1.0

    @property
    def is_settled(self) -> bool:
        """Whether a further measurement changes little."""
        return self._all_tries >= 24.0

    def expected(self) -> list[float]:
        """``E(k)`` for ``k`` of 0 to :data:`MAX_DRAFT_TOKENS`."""
        mean = (self._all_hits + _PRIOR_WEIGHT * self._prior) / (self._all_tries + _PRIOR_WEIGHT)
        tokens, reached = [1.0], 1.0
        for hits, tries in zip(self._hits, self._tries, strict=True):
            reached *= (hits + 8.0 * mean) / (tries + 8.0)
            tokens.append(tokens[-1] + reached)
        return tokens

    def review(self, pays: bool, rounds: int) -> None:
        """Note whether the draft pays now. One that does not rests: what is known of it becomes old, so that it is tried again.

        Args:
            pays: By the closed form.
            rounds: Since the last review.
        """
        if pays:
            if self.is_settled:
                self._half_life = _FIRST_REST
        else:
            if self._paid:
                self._half_life = min(2 * self._half_life, 4096)
            self._fade(0.5 ** (rounds / self._half_life))
        self._paid = pays

    def begin(self) -> None:
        """Begin another text, about which the ones before say less."""
        self.drafted = self.accepted = 0
        self._fade(0.5 ** (_FIRST_REST / self._half_life))

    def _fade(self, factor: float) -> None:
        self._hits = [factor * n for n in self._hits]
        self._tries = [factor * n for n in self._tries]
        self._all_hits *= factor
        self._all_tries *= factor


@dataclass(frozen=True)
class Choice:
    """What a round does.

    Attributes:
        source: ``"model"``, ``"ngram"``, or empty: plain decoding.
        tokens: Draft tokens per row, at most.
    """

    source: str = ""
    tokens: int = 0


_REST = Choice()


class Controller:
    """Chooses the draft and the number of draft tokens of each round. It belongs to a pipeline: what it has learned serves the next call.

    Args:
        relative_cost: Time of a step of the draft model as a part of the target's, before the first measurement: the ratio of their bytes. None: there is
            no draft model.
        further: Of the target, see :class:`StepTimes`. As a text goes on, the measured times of its own steps count.
        at_once: Whether one step of the draft model drafts all tokens of a round. ``note_draft`` is then called once per round.
        compares: Whether the draft model compares its own choices with the text that it reads before it drafts, as a draft head cannot.
    """

    def __init__(
        self,
        relative_cost: float | None,
        further: Callable[[int], float] | None = None,
        *,
        at_once: bool = False,
        compares: bool = True,
    ) -> None:
        machine = Machine()
        self.target, self.draft = StepTimes(machine, further), StepTimes(machine)
        self._relative_cost, self._at_once = relative_cost, at_once
        self._first_trial = _FIRST_TRIAL if compares else _FIRST_OF_HEAD
        priors = _PRIORS if compares else _PRIORS | {"model": _HEAD}
        self.rates = {kind: AcceptanceRates(prior) for kind, prior in priors.items()}
        self._rounds = self._aged = 0
        self._plain_age = self._reviewed = -1
        self._model, self._model_rate = _REST, 0.0
        self._plain_rate = 0.0
        self._tables: dict[str, list[tuple[int, float]]] = {kind: [(0, 0.0)] for kind in _INDEX}
        self._generated = 0
        self._lag = self._readings = 0
        self._reading, self._reading_counts = 0.0, 1.0  # seconds per token, and the part of it that counts
        self._is_too_dear = False
        self._credit = dict.fromkeys(_SOURCES, _FIRST_CREDIT)
        self._spent = 0.0
        self.rested = 0
        """Rounds of the present call without draft tokens."""

    @property
    def may_draft(self) -> bool:
        """Whether the draft model pays if each of its tokens is accepted, by what is known before the first measurement."""
        return self._relative_cost is not None and _GAIN * (1 + self.target.price(2) + self._relative_cost) < 2

    def begin(self) -> None:
        """Begin a call."""
        if self._is_too_dear:
            self._reading_counts, self._is_too_dear = _DOUBT * self._reading_counts, False
        self._credit = {source: min(left + _RENEWED[source], _FIRST_CREDIT) for source, left in self._credit.items()}
        self._rounds, self._reviewed, self._aged, self._generated, self.rested = 0, -1, 0, 0, 0
        for rates in self.rates.values():
            rates.begin()

    def choose(self, matches: Sequence[tuple[int, int]], lag: int, remaining: int) -> Choice:
        """Choose what the next round does.

        Args:
            matches: Per row, draft tokens that an n-gram index has, and the length of its match; empty without one.
            lag: Tokens that the draft model has not read yet; -1: there is no draft model.
            remaining: Tokens that a row may still generate.
        """
        self._rounds, self._lag = self._rounds + 1, lag
        if self.target.seconds(1) is None or self._plain_age >= _PLAIN_EVERY or remaining < 2:
            return self._resting()
        if self._reviewed < 0 or self._rounds - self._reviewed >= _REVIEW:
            self._review(lag, remaining)
        best, rate = _REST, _GAIN * self._plain_rate
        if any(tokens and self._credit[_source(match)] >= 0 for tokens, match in matches):
            tokens, expected = self._of_matches(matches, remaining)
            if expected > rate:
                best, rate = Choice("ngram", tokens), expected
        if lag >= 0 and self._model_rate > rate:
            best = Choice("model", min(self._model.tokens, remaining - 1))
        if best.source:
            self._plain_age += 1
            if best.source == "model":
                self._earn(_EXPLORATION, _SOURCES)
            return best
        return self._resting()

    def note_target(self, columns: int, seconds: float) -> None:
        """Learn from a step of the target."""
        self._spent = seconds
        # The first step of a call finds cold caches.
        if self._rounds > 1:
            self.target.note(columns, seconds)
        if columns == 1:
            self._plain_age = 0

    def note_draft(self, columns: int, seconds: float) -> None:
        """Learn from a step of the draft model."""
        self.draft.note(columns, seconds)

    def note_reading(self, seconds: float) -> None:
        """Learn from the first step of the draft model in a call, which reads the end of the prompt before. The first one of all finds cold weights, and tells nothing."""
        each = seconds / max(self._lag, 1)
        if self._readings:
            self._reading = each if self._readings == 1 else (self._reading * each) ** 0.5
        self._readings, self._reading_counts = self._readings + 1, 1.0

    def note_round(
        self, choice: Choice, matches: Sequence[tuple[int, int]], outcome: Sequence[tuple[int, int]]
    ) -> None:
        """Learn from a verification: per row, how many draft tokens there were, and how many were accepted."""
        self._generated += 1 + max(accepted for _, accepted in outcome)
        if choice.source == "ngram" and (plain := self.target.seconds(1)):
            gained = 1 + sum(accepted for _, accepted in outcome) / len(outcome) - self._spent / plain
            self._earn(
                max(gained, -1.0), {_source(match) for (n, _), (_, match) in zip(outcome, matches, strict=True) if n}
            )
        for row, (drafted, accepted) in enumerate(outcome):
            if drafted:
                kind = "model" if choice.source == "model" else _kind(matches[row][1])
                rates = self.rates[kind]
                rates.note(drafted, accepted)
                if not rates.is_settled:
                    self._reviewed = -1

    def _resting(self) -> Choice:
        self.rested += 1
        self._generated += 1
        self._earn(_EXPLORATION, _SOURCES)
        return _REST

    def _earn(self, steps: float, sources: Iterable[str]) -> None:
        """Add plain steps, or lost ones below 0, to what may be lost with tokens from these sources."""
        for source in sources:
            self._credit[source] = min(self._credit[source] + steps, _MAX_CREDIT)

    def _draft_seconds(self, columns: int, plain: float) -> float:
        known = self.draft.seconds(columns)
        if known is None:
            assert self._relative_cost is not None
            return self._relative_cost * plain * (1 + self.draft.price(columns))
        return known

    def _review(self, lag: int, remaining: int) -> None:
        """Evaluate the closed form."""
        plain = self.target.seconds(1)
        assert plain is not None
        since, self._aged = self._rounds - self._aged, self._rounds
        self._reviewed, self._plain_rate = self._rounds, 1.0 / plain
        times = [max(self.target.seconds(1 + k) or plain, plain) for k in range(MAX_DRAFT_TOKENS + 1)]
        for kind, (_, first) in _INDEX.items():
            table, best = [(0, self._plain_rate)], (0, self._plain_rate)
            rates = self.rates[kind]
            bound = rates.bound if rates.is_known else first
            for k, expected in enumerate(rates.expected()[1:], 1):
                if k <= bound and expected > best[1] * times[k]:
                    best = k, expected / times[k]
                table.append(best)
            self._tables[kind] = table
            rates.review(best[0] > 0, since)
        self._model_rate = 0.0
        if lag >= 0:
            self._review_model(times, lag, remaining, since)
        if not self._model_rate and all(table[-1][0] == 0 for table in self._tables.values()):
            self.target.doubt(since)

    def _review_model(self, times: Sequence[float], lag: int, remaining: int, since: int) -> None:
        plain, rates = times[0], self.rates["model"]
        each = self._draft_seconds(1, plain)
        best, rate = 0, 0.0
        bound = rates.bound if rates.is_known else 1
        for k, expected in enumerate(rates.expected()[1 : bound + 1], 1):
            if (now := expected / (times[k] + (each if self._at_once else k * each))) > rate:
                best, rate = k, now
        pays = rate > _GAIN * self._plain_rate and (rates.is_known or self._generated >= self._first_trial)
        if pays and lag > _SMALL_LAG:
            # Reading what it has missed must pay within the tokens that are likely to follow: half of the gain stays.
            price = (self._reading * lag if self._readings > 1 else self._draft_seconds(lag, plain)) - each
            left = min(remaining, max(64, self._generated))
            pays = (plain - 1.0 / rate) * left > 2 * price * self._reading_counts
            self._is_too_dear = not pays
        rates.review(pays, since)
        self._model, self._model_rate = Choice("model", best), rate if pays else 0.0

    def _of_matches(self, matches: Sequence[tuple[int, int]], remaining: int) -> tuple[int, float]:
        """Draft tokens and tokens per second and row of a round with the n-gram index."""
        if len(matches) == 1:
            available, length = matches[0]
            table = self._tables[_kind(length)]
            return table[min(available, remaining - 1, len(table) - 1)]
        # Rows without a match get their one token in the longer step. Each table has the rate of its rows alone.
        tokens = max(self._tables[_kind(n)][min(a, remaining - 1, MAX_DRAFT_TOKENS)][0] for a, n in matches)
        if not tokens:
            return 0, 0.0
        expected = [self.rates[_kind(n)].expected()[min(a, tokens)] for a, n in matches]
        return tokens, sum(expected) / len(matches) / (self.target.seconds(1 + tokens) or 1.0)

    def summary(self) -> list[str]:
        """What the present call did, for its report."""
        counts: dict[str, tuple[int, int]] = {}
        for kind, rates in self.rates.items():
            name = "draft model" if kind == "model" else kind.split(",")[0]
            drafted, accepted = counts.get(name, (0, 0))
            counts[name] = drafted + rates.drafted, accepted + rates.accepted
        lines = [
            f"{name}: {accepted} of {drafted} draft tokens accepted"
            for name, (drafted, accepted) in counts.items()
            if drafted
        ]
        if self.rested:
            lines.append(f"plain decoding in {self.rested} of {self._rounds} rounds")
        return lines


def _source(match: int) -> str:
    """Where the tokens of a match are from."""
    return _SOURCES[match > _native.MAX_MATCH]


def _kind(match: int) -> str:
    """The kind of what an n-gram index has, by the length of its match (``NgramIndex::Match``)."""
    in_corpus = match - _native.MAX_MATCH
    return _KINDS[2 + in_corpus if in_corpus > 0 else sum(match >= length for length in _MATCHES)]
