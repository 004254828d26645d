"""Step times of models, and the rates that the formulas and the perf model give for a chain of them."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from pipespec.planning.closed_form import chain_rate, lockstep_rate
from pipespec.planning.perf_model import Answers, SimulatedPolicy, StageModel, simulate
from pipespec.planning.validation import non_negative, positive, same_length

_BETWEEN_S, _WAKE_S, _LATE_S = 2e-5, 1e-4, 3e-4
"""Seconds between two steps of a stage, until a sleeping stage reads a publication, and the same where all cores are taken: medians of traces."""
_WIDEST = 34
_SIMULATED = 512
"""Tokens of a simulation."""


@dataclass(frozen=True)
class StepTimes:
    """Step times of one model with one number of threads.

    Attributes:
        name: Of the model.
        threads: CPU threads.
        widths: Tokens that a step feeds, ascending.
        seconds: ``seconds[i]`` is the time of a step of ``widths[i]``.
        prefill_s: Seconds per token of a prompt.
        device: Models with one number share a device.

    Raises:
        ValueError: A value is out of range.
    """

    name: str
    threads: int
    widths: tuple[int, ...]
    seconds: tuple[float, ...]
    prefill_s: float = 0.0
    device: int = 0

    def __post_init__(self) -> None:
        same_length("seconds", self.seconds, len(self.widths), "width")
        if not self.widths or list(self.widths) != sorted(set(self.widths)) or self.widths[0] < 1 or self.threads < 1:
            raise ValueError(
                f"{self.name}: widths must grow from at least 1, on at least one thread, not {self.widths}"
            )
        for s in self.seconds:
            positive(s, f"a step time of {self.name}")
        non_negative(self.prefill_s, f"the prompt's time of {self.name}")

    def at(self, width: float) -> float:
        """Seconds of a step of ``width``: interpolated, and extrapolated from the last two widths."""
        w, s = self.widths, self.seconds
        if len(w) == 1 or width <= w[0]:
            return s[0]
        i = min(bisect(w, width), len(w) - 1)
        slope = (s[i] - s[i - 1]) / (w[i] - w[i - 1])
        if width >= w[-1]:  # a wider step is never faster
            return s[-1] + max(0.0, slope) * (width - w[-1])
        return s[i - 1] + slope * (width - w[i - 1])


@dataclass(frozen=True)
class Profile:
    """Measured step times of several models, each with several numbers of threads."""

    times: tuple[StepTimes, ...]

    def __post_init__(self) -> None:
        if not self.times:
            raise ValueError("a profile needs at least one step time")

    @property
    def threads(self) -> int:
        """The most threads that were measured."""
        return max(t.threads for t in self.times)

    def of(self, name: str, threads: int) -> StepTimes:
        """The times of a model with the nearest number of threads. ``KeyError`` for an unknown name."""
        found = [t for t in self.times if t.name == name]
        if not found:
            raise KeyError(name)
        return min(found, key=lambda t: abs(t.threads - threads))


@dataclass(frozen=True)
class Chain:
    """A chain of models and how it runs.

    Attributes:
        schedule: ``"lockstep"``, ``"workers"`` or ``"streams"``.
        stages: The target last.
        acceptance: Of each pair of neighbours.
        lookahead: Per draft.
        min_draft_tokens: Of the target.
        prompt: Tokens of the prompt.
        tokens: New tokens.
    """

    schedule: str
    stages: Sequence[StepTimes]
    acceptance: Sequence[float]
    lookahead: Sequence[int]
    min_draft_tokens: int = 0
    prompt: int = 64
    tokens: int = 128

    def closed_form(self) -> float | None:
        """Tokens per second, prompt included: by :func:`lockstep_rate` for two stages in turn, by :func:`chain_rate` for stages that run at once."""
        widths = [1, *(1 + ahead for ahead in self.lookahead)]
        plain = [stage.at(1) for stage in self.stages]
        wide = [stage.at(w) for stage, w in zip(self.stages, widths, strict=True)]
        if self.schedule == "lockstep":
            if len(self.acceptance) > 1:
                return None
            rate = lockstep_rate(self.acceptance[0], self.lookahead[0], plain[0], wide[1])
        else:
            minimum = [0] * (len(self.acceptance) - 1) + [self.min_draft_tokens]
            rate = chain_rate(self.acceptance, plain[0], wide[1:], plain[1:], min_draft_tokens=minimum)
        return self.tokens / (self.stages[-1].prefill_s * self.prompt + self.tokens / rate)

    def simulated(self, *, cores: int | None = None) -> float:
        """Tokens per second, prompt included, by the perf model. ``cores``: that worker processes share; None: one for each."""
        waits = self.schedule != "lockstep"
        prompts = [stage.prefill_s * self.prompt for stage in self.stages]
        start = max(prompts) if waits else sum(prompts)
        stages = [
            StageModel(
                [stage.at(w) + _BETWEEN_S for w in range(1, _WIDEST + 1)],
                prompt_s if waits else start,
                device=stage.device if self.schedule == "streams" else 0,
            )
            for stage, prompt_s in zip(self.stages, prompts, strict=True)
        ]
        result = simulate(
            "workers" if waits else "lockstep",
            stages,
            Answers(acceptance=tuple(self.acceptance)),
            _SIMULATED,
            policy=SimulatedPolicy(
                tuple(self.lookahead),
                self.min_draft_tokens,
                wake_s=_WAKE_S if waits else 0.0,
                late_s=_LATE_S if waits else None,
            ),
            contention=1.0 if self.schedule == "streams" else 0.0,
            cores=cores if self.schedule == "workers" else None,
        )
        return self.tokens / (start + (result.seconds - start) * self.tokens / _SIMULATED)
