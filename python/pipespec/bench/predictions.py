"""What the closed forms and the simulator say about each measured system, from the run's own step times and acceptance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from pipespec.bench.results import Sample, Settings, SystemSettings
from pipespec.config import SpeculationConfig
from pipespec.planning import planner
from pipespec.planning.closed_form import chain_rate, lockstep_rate
from pipespec.planning.planner import CallShape, Candidate
from pipespec.planning.profile import Profile, StageProfile
from pipespec.planning.simulator import Answers, simulate_spd
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
        simulated: By the simulator; None as well.
        reason: Why a prediction is missing.
    """

    dataset: str
    system: str
    measured: float
    acceptance: tuple[float, ...] = ()
    closed_form: float | None = None
    simulated: float | None = None
    reason: str | None = None


def predict(settings: Settings, samples: Sequence[Sample], profile: dict[str, Any] | None) -> list[Prediction]:
    """Predict every system that speculates, on every dataset.

    Args:
        settings: Of the run.
        samples: All of its samples.
        profile: Its ``profile.json``; None: only SPD is predicted, whose texts have their own times.
    """
    found = []
    times = None if profile is None else Profile.from_json(profile)
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
                    found.append(_chain(blank, system, texts, times))
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
    schedule = system.kind.removesuffix("-graphs")
    if schedule not in ("lockstep", "workers", "streams"):
        raise _NotPredicted(f"there is no model of {system.kind}")
    ran = {s.schedule or schedule for s in texts}
    if ran != {schedule}:
        raise _NotPredicted(f"it ran as {', '.join(sorted(ran))}")
    if profile is None:
        raise _NotPredicted("the run has no profile of step times (profile.json)")
    stages = {stage.name: stage for stage in profile.stages[:-1]}
    missing = [name for name in system.drafts if name not in stages]
    if missing or not system.drafts:
        raise _NotPredicted(f"no step times of {', '.join(missing) or 'a draft'}")
    own = replace(profile, stages=(*(stages[name] for name in system.drafts), profile.target))
    count = len(system.drafts)
    if any(len(s.stages) != count + 1 for s in texts):
        raise _NotPredicted("the texts have no counts of each stage")
    acceptance = tuple(pair_acceptance(texts, verifier) for verifier in range(1, count + 1))
    config = SpeculationConfig.of(
        count, schedule=schedule, lookahead=system.lookahead, min_draft_tokens=system.min_draft_tokens
    )
    captured = schedule != system.kind or schedule == "streams"
    call = CallShape(
        1, max(1, round(fmean(s.prompt_tokens for s in texts))), round(fmean(len(s.tokens) for s in texts))
    )
    threads = max(1, profile.threads - count) if schedule == "workers" else profile.threads
    candidate = Candidate(
        schedule, tuple(range(count)), config.lookahead, config.min_draft_tokens, threads, 0.0, captured=captured
    )
    try:
        simulated = planner.predict(own, Answers(acceptance=acceptance), candidate, call, cores=profile.threads).rate
        closed = _closed_form(own, acceptance, candidate, call)
    except ValueError as error:
        raise _NotPredicted(str(error)) from error
    return replace(blank, acceptance=acceptance, closed_form=closed, simulated=simulated)


def _closed_form(profile: Profile, acceptance: Sequence[float], c: Candidate, call: CallShape) -> float | None:
    """Tokens per second by :func:`lockstep_rate` for two stages in turn, and by :func:`chain_rate` for stages that run at once."""

    def seconds(stage: StageProfile, width: int, threads: int) -> float:
        return stage.seconds(width, threads=threads, context=call.context, captured=c.captured)

    in_processes = c.schedule == "workers"
    threads = [1 if in_processes else c.threads] * len(c.drafts) + [c.threads]
    widths = [1, *(1 + ahead for ahead in c.lookahead)]
    plain = [seconds(stage, 1, t) for stage, t in zip(profile.stages, threads, strict=True)]
    wide = [seconds(stage, w, t) for stage, w, t in zip(profile.stages, widths, threads, strict=True)]
    if c.schedule == "lockstep":
        if len(acceptance) > 1:
            return None
        rate = lockstep_rate(acceptance[0], c.lookahead[0], plain[0], wide[1])
    else:
        minimum = [0] * (len(acceptance) - 1) + [c.min_draft_tokens]
        rate = chain_rate(acceptance, plain[0], wide[1:], plain[1:], min_draft_tokens=minimum)
    start = profile.target.prompt_s(call.prompt, threads=c.threads, captured=c.captured)
    return call.tokens / (start + call.tokens / rate)


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
