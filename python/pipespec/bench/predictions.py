"""What the closed forms and the perf model say about each measured system, from the run's own step times and acceptance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from pipespec.bench.results import Sample, Settings, SystemSettings
from pipespec.config import SpeculationConfig
from pipespec.planning.perf_model import simulate_spd
from pipespec.planning.steps import Chain, Profile
from pipespec.spd.law import spd_tokens_per_cycle

_SIMULATED = 2000
"""Tokens of a simulation of SPD."""


@dataclass(frozen=True)
class Prediction:
    """Tokens per second of one system on one dataset, prompt included.

    Attributes:
        dataset: Name of the dataset.
        system: Key of the system.
        measured: All tokens over all seconds.
        acceptance: Of each pair of neighbours, or of SPD's drafts.
        closed_form: By the formula; None: there is none for this system.
        simulated: By the perf model; None as well.
        reason: Why a prediction is missing.
    """

    dataset: str
    system: str
    measured: float
    acceptance: tuple[float, ...] = ()
    closed_form: float | None = None
    simulated: float | None = None
    reason: str | None = None


def predict(settings: Settings, samples: Sequence[Sample], profile: Profile | None) -> list[Prediction]:
    """Predict every system that speculates, on every dataset.

    Args:
        settings: Of the run.
        samples: All of its samples.
        profile: Its ``profile.json``; None: only SPD is predicted, whose texts have their own times.
    """
    found = []
    for dataset in settings.datasets:
        for system in settings.systems:
            texts = [
                s for s in samples if (s.dataset, s.system) == (dataset.name, system.key) and not s.error and s.tokens
            ]
            if not texts or system.kind in settings.baselines:
                continue
            measured = sum(len(s.tokens) for s in texts) / sum(s.seconds for s in texts)
            blank = Prediction(dataset.name, system.key, measured)
            try:
                if all(s.cycles for s in texts):
                    found.append(_spd(blank, texts))
                else:
                    found.append(_chain(blank, system, texts, profile))
            except _NotPredicted as why:
                found.append(replace(blank, reason=str(why)))
    return found


class _NotPredicted(Exception):
    """The reason why a system cannot be predicted."""


def pair_acceptance(texts: Sequence[Sample], verifier: int) -> float:
    """Share of verified positions at which a stage chose its upstream neighbour's token.

    Draft tokens behind a wrong one say nothing, so a rejection counts once: a draft rolls back once for each.

    Args:
        texts: Samples of one system.
        verifier: Index of the verifying stage.
    """
    accepted = sum(s.stages[verifier].accepted for s in texts)
    wrong = sum(s.stages[verifier - 1].rollbacks for s in texts)
    if accepted + wrong == 0:
        raise _NotPredicted("nothing was drafted")
    return accepted / (accepted + wrong)


def _chain(blank: Prediction, system: SystemSettings, texts: Sequence[Sample], profile: Profile | None) -> Prediction:
    schedule = system.kind
    if schedule not in ("lockstep", "workers"):
        raise _NotPredicted(f"there is no model of {system.kind}")
    ran = {s.schedule or schedule for s in texts}
    if ran != {schedule}:
        raise _NotPredicted(f"it ran as {', '.join(sorted(ran))}")
    if profile is None:
        raise _NotPredicted("the run has no profile of step times (profile.json)")
    count = len(system.drafts)
    if count == 0 or any(len(s.stages) != count + 1 for s in texts):
        raise _NotPredicted("the texts have no counts of each stage")
    own, beside = (1, max(1, profile.threads - count)) if schedule == "workers" else (profile.threads, profile.threads)
    try:
        stages = [*(profile.of(name, own) for name in system.drafts), profile.of("target", beside)]
    except KeyError as missing:
        raise _NotPredicted(f"no step times of {missing.args[0]}") from missing
    acceptance = tuple(pair_acceptance(texts, verifier) for verifier in range(1, count + 1))
    config = SpeculationConfig.of(
        count, schedule=schedule, lookahead=system.lookahead, min_draft_tokens=system.min_draft_tokens
    )
    chain = Chain(
        schedule,
        stages,
        acceptance,
        config.lookahead,
        config.min_draft_tokens,
        max(1, round(fmean(s.prompt_tokens for s in texts))),
        round(fmean(len(s.tokens) for s in texts)),
    )
    try:
        simulated, closed = chain.simulated(cores=profile.threads), chain.closed_form()
    except ValueError as error:
        raise _NotPredicted(str(error)) from error
    return replace(blank, acceptance=acceptance, closed_form=closed, simulated=simulated)


def _spd(blank: Prediction, texts: Sequence[Sample]) -> Prediction:
    """SPD by its law and its state machine, over the measured time of a cycle."""
    checked, accepted = (sum(getattr(s.stages[-1], name) for s in texts) for name in ("drafted", "accepted"))
    if not checked or not all(s.stage_seconds and s.phases for s in texts):
        raise _NotPredicted("nothing was drafted, or the texts have no times of the cycles")
    n = len(texts[0].stage_seconds or ())
    cycles = sum(s.cycles or 0 for s in texts)
    phases = {name: sum((s.phases or {})[name] for s in texts) for name in texts[0].phases or {}}
    prefill = phases.pop("prefill", 0.0)
    cycle, a = sum(phases.values()) / cycles, accepted / checked
    tokens = sum(len(s.tokens) for s in texts)

    def whole(per_second: float) -> float:
        """The rate with the prompts' time; a prompt gives the first token."""
        return tokens / (prefill + (tokens - len(texts)) / per_second)

    simulated = simulate_spd([cycle] * n, a, _SIMULATED)
    return replace(
        blank,
        acceptance=(a,),
        closed_form=whole(spd_tokens_per_cycle(a, n) / cycle),
        simulated=whole(simulated.rate),
    )


def error(predicted: float | None, measured: float) -> float | None:
    """Relative error of a prediction. Positive: it is too optimistic."""
    return None if predicted is None or not math.isfinite(predicted) else predicted / measured - 1.0
