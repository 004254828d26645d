"""Profile: measured step times of the stages of a chain.

:mod:`pipespec.planning.measure` makes profiles, :mod:`pipespec.planning.profile_store` keeps them on disk.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import numpy as np

from pipespec.planning.validation import non_negative, positive, same_length
from pipespec.process.records import build

SHORT_CONTEXT = 64
"""Context of the finer measurements, in tokens."""

_SPLIT = 1.1
"""Most time of a step, divided by that of several narrower ones with as many columns."""


@dataclass(frozen=True)
class StepTimes:
    """Step times of one model for one number of threads, rows and context.

    Attributes:
        threads: CPU threads.
        rows: Rows of the batch.
        context: Tokens in the cache before the step.
        widths: Tokens that one row feeds in a step, ascending.
        seconds: ``seconds[i]`` is the time of a step of ``widths[i]``.
        prefill_s: Seconds per token of a prompt, for all rows together.
        captured: The steps are captured, and their time runs from the end of one step to the end of the next.

    Raises:
        ValueError: A value is out of range.
    """

    threads: int
    rows: int
    context: int
    widths: tuple[int, ...]
    seconds: tuple[float, ...]
    prefill_s: float = 0.0
    captured: bool = False

    def __post_init__(self) -> None:
        same_length("seconds", self.seconds, len(self.widths), "width")
        if not self.widths or list(self.widths) != sorted(set(self.widths)) or self.widths[0] < 1:
            raise ValueError(f"widths must grow from at least 1, not {self.widths}")
        for s in self.seconds:
            positive(s, "a step time")
        non_negative(self.prefill_s, "the time of a prompt's token")
        if min(self.threads, self.rows, self.context) < 1:
            raise ValueError(
                f"threads, rows and context must be at least 1: {self.threads}, {self.rows}, {self.context}"
            )

    def at(self, widths: Sequence[float]) -> np.ndarray:
        """Seconds of steps of ``widths``, float64: interpolated, and extrapolated from the last two widths."""
        w, s = self.widths, self.seconds
        found = np.interp(widths, w, s)
        if len(w) > 1:
            slope = max(0.0, (s[-1] - s[-2]) / (w[-1] - w[-2]))
            found += slope * np.maximum(0.0, np.subtract(widths, w[-1]))
        return found


def _distance(context: float, other: float) -> float:
    """Between two numbers of tokens, by their quotient."""
    return abs(math.log(context / max(other, 1)))


def without_outliers(widths: Sequence[int], seconds: Sequence[float]) -> tuple[float, ...]:
    """Step times within the bounds that those of other widths give: what else a machine runs only adds to a time.

    A step takes no longer than a wider one, and no longer than :data:`_SPLIT` times as many narrower steps as give its width.
    """
    found = np.minimum.accumulate(np.asarray(seconds, dtype=np.float64)[::-1])[::-1].copy()
    for i, width in enumerate(widths):
        for j in range(i):
            found[i] = min(found[i], _SPLIT * -(-width // widths[j]) * found[j])
    return tuple(float(s) for s in found)


@dataclass(frozen=True)
class StageProfile:
    """Measured times of one stage.

    Attributes:
        name: Of the stage.
        parameters: Number of the model's parameters.
        times: One entry per measured number of threads, rows and context.
        contention: Of a draft: relative slowdown of its steps beside the target's (0: none, 1: twice as long).
        burden: Of a draft: relative slowdown of the target's steps beside it.
        cold_s: Of a draft: extra seconds of its first step after a step of the target in the same process.
        device: Stages with one number are on the same device.
        ngram: An n-gram index, only as the first stage. Its times are per draft token of a row; it runs in the process of the next stage.

    Raises:
        ValueError: There are no times, or a value is negative.
    """

    name: str
    parameters: int
    times: tuple[StepTimes, ...]
    contention: float = 0.0
    burden: float = 0.0
    cold_s: float = 0.0
    device: int = 0
    ngram: bool = False

    def __post_init__(self) -> None:
        if not self.times:
            raise ValueError(f"{self.name}: a stage needs at least one step time")
        for what in ("parameters", "contention", "burden", "cold_s"):
            non_negative(getattr(self, what), what)

    def has(self, rows: int, *, captured: bool = False) -> bool:
        """Whether steps of ``rows`` rows were measured."""
        return any((t.rows, t.captured) == (rows, captured) for t in self.times)

    def _nearest(self, threads: int, rows: int, captured: bool) -> list[StepTimes]:
        """The entries of the nearest number of rows and threads, by context."""
        found = [t for t in self.times if t.captured == captured]
        if not found:
            raise ValueError(f"{self.name}: no {'captured' if captured else 'eager'} steps were measured")
        best = min(found, key=lambda t: (abs(math.log(t.rows / rows)), abs(t.threads - threads)))
        return sorted((t for t in found if (t.threads, t.rows) == (best.threads, best.rows)), key=lambda t: t.context)

    def step_times(
        self,
        widths: Sequence[float],
        *,
        threads: int,
        rows: int = 1,
        context: float = SHORT_CONTEXT,
        captured: bool = False,
    ) -> list[float]:
        """Seconds of one step of each width, for the nearest measured numbers of threads and rows: interpolated between the two nearest contexts, or
        extrapolated from them.

        Raises:
            ValueError: No step of this kind was measured.
        """
        same = self._nearest(threads, rows, captured)
        last = len(same) - 1
        above = min(max(bisect([t.context for t in same], context), 1), last)
        low, high = same[max(above - 1, 0)], same[above]
        a, b = low.at(widths), high.at(widths)
        if high.context != low.context:
            along = a + (b - a) * (context - low.context) / (high.context - low.context)
            a = np.maximum(np.minimum(a, b), along)
        return [float(s) for s in a]

    def seconds(
        self, width: float, *, threads: int, rows: int = 1, context: float = SHORT_CONTEXT, captured: bool = False
    ) -> float:
        """:meth:`step_times` of one width."""
        return self.step_times((width,), threads=threads, rows=rows, context=context, captured=captured)[0]

    def refined(
        self,
        observed: Mapping[int, float],
        *,
        threads: int,
        rows: int,
        context: float,
        prefill_s: float | None = None,
        weight: float = 1.0,
        known: int = 0,
    ) -> StageProfile:
        """The profile with what uncaptured steps of a call took. The same where no steps of these threads and rows were measured.

        Times of other widths change by the quotient of the nearest observed widths. So do those of contexts less than twice as long or as short: if
        there is none, one is added. The first observation changes all contexts, since the profile may be of a busy moment, unless it is of a far
        longer one: what steps take there is extrapolated.

        Args:
            observed: Seconds by width, at least one, without what other stages' steps add (:attr:`cold_s`, which changes alike).
            threads: Of the steps, as ``rows``.
            context: Mean tokens in the cache during these steps.
            prefill_s: See :class:`StepTimes`. None: not observed.
            weight: Of an observation that is not the first, against the profile: 0 to 1.
            known: The widest step that was observed before, 0 if none was.
        """
        old = [t for t in self.times if (t.threads, t.rows, t.captured) == (threads, rows, False)]
        if not old:
            return self
        nearest = min(old, key=lambda t: _distance(t.context, context))
        is_new, added = _distance(nearest.context, context) >= math.log(2), []
        if is_new:
            seconds = self.step_times(nearest.widths, threads=threads, rows=rows, context=context)
            added = [replace(nearest, context=round(context), seconds=tuple(seconds))]
        everywhere = not known and context < 2 * max(t.context for t in old)
        widths = sorted(observed)
        expected = self.step_times(widths, threads=threads, rows=rows, context=context)
        weights = [weight if w <= known and not is_new else 1.0 for w in widths]
        quotients = (np.array([observed[w] for w in widths]) / expected) ** weights

        def corrected(t: StepTimes) -> StepTimes:
            if prefill_s is not None:
                t = replace(t, prefill_s=t.prefill_s + (weight if known else 1.0) * (prefill_s - t.prefill_s))
            if not everywhere and _distance(t.context, context) >= math.log(2):
                return t
            seconds = np.interp(t.widths, widths, quotients) * t.seconds
            return replace(t, seconds=without_outliers(t.widths, seconds.tolist()))

        times = [corrected(t) if t in old else t for t in self.times]
        cold_s = self.cold_s * float(quotients[0])
        return replace(self, times=(*times, *map(corrected, added)), cold_s=cold_s)

    def prompt_s(self, tokens: int, *, threads: int, rows: int = 1, captured: bool = False) -> float:
        """Seconds of the prefill of ``rows`` prompts of ``tokens`` tokens.

        Raises:
            ValueError: No step of this kind was measured.
        """
        same = self._nearest(threads, rows, captured)
        nearest = min(same, key=lambda t: _distance(t.context, tokens))
        return nearest.prefill_s * tokens * rows / nearest.rows


@dataclass(frozen=True)
class Profile:
    """Measured times of all stages of a chain.

    Attributes:
        stages: Draft 0 first, the target last.
        threads: CPU threads that the caller may use.
        key: Digest of models, hardware and versions, see :func:`pipespec.planning.profile_store.digest`.

    Raises:
        ValueError: There are no stages, or a value is out of range.
    """

    stages: tuple[StageProfile, ...]
    threads: int
    key: str = ""

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("a profile needs at least one stage")
        if self.threads < 1:
            raise ValueError(f"threads must be at least 1, not {self.threads}")
        if any(stage.ngram for stage in (*self.stages[1:], self.stages[-1])):
            raise ValueError("an n-gram index is the first stage of a profile, before the target")

    @property
    def has_ngram(self) -> bool:
        """Whether the first stage is an n-gram index."""
        return self.stages[0].ngram

    def models(self, stages: Sequence[int]) -> tuple[int, ...]:
        """Those of ``stages`` (indices) that have a model."""
        return tuple(i for i in stages if not self.stages[i].ngram)

    @property
    def target(self) -> StageProfile:
        """The last stage."""
        return self.stages[-1]

    def adding(self, times: Sequence[Sequence[StepTimes]]) -> Profile:
        """Return a profile with more step times, one sequence per stage with a model."""
        times = [*[()] * self.has_ngram, *times]
        stages = (replace(s, times=(*s.times, *more)) for s, more in zip(self.stages, times, strict=True))
        return replace(self, stages=tuple(stages))

    def to_json(self) -> dict[str, Any]:
        """Return the profile as plain values."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Profile:
        """Build a profile from the output of :meth:`to_json`. Fields that older versions did not write get their defaults.

        Raises:
            ValueError: A value is out of range, or a field is unknown.
            TypeError: A field is missing or has the wrong type.
        """
        return cast(Profile, build(Profile, data, "the profile"))
