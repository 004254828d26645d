"""schedule="auto": measures a chain, predicts its candidates, and runs each call with the best measured rate.

The profile is measured once and stored on disk. The drafts' agreement comes from a text that the target generates, and later from
the texts of calls. A table of measured rates per number of rows and sampling mode corrects the predictions.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from pipespec.drivers import Driver, GenerationRequest, WorkersDriver
from pipespec.drivers.base import CacheOwner, Decoder, SpeedWarning, StageFailure, TextSource
from pipespec.drivers.graphed.driver import host_reason
from pipespec.engine.ngram import NGRAM, NgramDraft
from pipespec.engine.stage import StageInputs, stage_names
from pipespec.errors import NotCapturable
from pipespec.models.properties import head_size
from pipespec.models.rope import rope_changes_at
from pipespec.planning import agreement, measure, planner, profile_store
from pipespec.planning.drafts import written
from pipespec.planning.driver_pool import DriverPool
from pipespec.planning.planner import CallShape, Candidate, Key, Plan
from pipespec.planning.profile import SHORT_CONTEXT, Profile, StepTimes
from pipespec.planning.profile_store import StoredProfile
from pipespec.planning.simulator import NOTHING, Answers
from pipespec.planning.steering import CallSteering, MeasuredRate
from pipespec.preflight.support import check_streams, check_whole
from pipespec.process.progress import say, working
from pipespec.process.signals import pass_on
from pipespec.process.threads import set_threads, threads_set
from pipespec.process.warnings import user_stacklevel

_SHARE = 0.005
"""Share of the time in calls that measurements of agreement may take, and all else that is learnt from calls."""
_LEARNT_CALLS = 8
"""Calls of one shape and mode that all are learnt from, without regard to the time."""
_TRIALS = 0.01
"""Share of the time in calls that repetitions of one trial may take."""
_WIDE = 8
"""Draft tokens of a trial that shows what wide steps take, where no call had any. What a busy moment added to them in the profile may keep drafts short."""
_LEAST = 16
"""Fewest positions of a measurement of agreement."""
_ENOUGH = 256
"""Positions of the user's texts that are measured first, without regard to their time: fewer depend on single texts."""
_MOST_PATIENCE = 16
"""Agreement that does not change is measured down to this fraction as often."""
_MOVED = 0.05
"""Change of an agreement that leads to a new plan."""
_RECENT = 1024
"""Positions of the newest texts along which the n-gram index is replayed: several calls, so that single texts do not decide."""
_NEAR = 0.92
"""A chain is tried once if its predicted rate is this close to the best: the error of predictions."""
_MOST_TRIALS = 3
_CALIBRATION_TOKENS = 64
_CALIBRATION_S = 10.0
_FADES = 0.01
"""Weight of what all candidates have in common against older measurements of a chain, per call that is learnt from and ran otherwise."""
_ALIKE_STEPS = 3
"""Fewest steps of a width whose median is a time of that width."""
_REFINED = 0.5
"""Weight of a call's step times against those of the profile."""
_CHANGED = 1.1
"""Factor between the step times of calls and those of a plan that leads to a new plan."""
_MEASURED_TOKENS = 16
"""Fewest tokens of a row from which a rate is measured."""
_CAPTURED = ("plain", "lockstep", "streams")


@dataclass
class _Agreement:
    """Agreement of the drafts with the target in one mode.

    ``table``: see :class:`Answers`. ``seen``: positions of this user's texts that were measured. ``patience``: factor of the time until the next
    measurement. ``next_s``: time in calls at which the next measurement is due. ``recent``: as ``table``, of the n-gram index alone along the texts of
    the newest calls.
    """

    table: np.ndarray | None = None
    seen: int = 0
    patience: int = 1
    next_s: float = 0.0
    recent: np.ndarray | None = None


@dataclass
class _ShapeRecord:
    """Predicted and measured rates of the calls with one number of rows and one mode. ``trials``: candidates near the best that were tried.
    ``profile`` and ``followed``: the profile and the :attr:`_Agreement.recent` of the plan. ``calls``: that ended. ``is_stale``: step times or agreement
    have changed since. ``whole_s``: time in calls from which all settings are compared again. ``trial_s``: the same for trials of other threads and
    of wide steps, by what is tried. ``trial``: that was chosen for the next call."""

    mode: str = "greedy"
    plan: Plan | None = None
    profile: Profile | None = None
    followed: np.ndarray | None = None
    measured: dict[Key, MeasuredRate] = field(default_factory=dict)
    trials: int = 0
    calls: int = 0
    is_stale: bool = False
    whole_s: float = 0.0
    trial_s: dict[tuple[str, Key], float] = field(default_factory=dict)
    trial: tuple[str, Key] | None = None
    _decided: tuple[tuple[Any, ...], Plan] | None = None

    def rate(self, key: Key) -> MeasuredRate:
        # The first call of a chain may contain what only a first call costs.
        return self.measured.setdefault(key, MeasuredRate(prior=int(not key[0].startswith("plain"))))

    def factors(self) -> dict[Key, float]:
        return {key: rate.factor for key, rate in self.measured.items() if rate.is_measured}

    def speeds(self) -> dict[Key, float]:
        """The factors without what single texts gave."""
        return {key: rate.speed for key, rate in self.measured.items() if rate.count}

    def decided(self, plan: Plan) -> Plan:
        """:func:`planner.decide` with the measured rates. The same again where nothing has changed."""
        of = (plan.candidates, self.factors(), self.speeds())
        if self._decided is None or self._decided[0] != of:
            self._decided = of, planner.decide(plan, *of[1:])
        return self._decided[1]


@dataclass
class _RunningCall:
    """One call. ``parts``: what is measured, since the target's first step and without the time in which drafts rest: first and last token of the
    row with most tokens, and seconds. ``drafted``: the drafts were alive in all parts. ``rested_at``: when the drafts began to rest.
    ``threads``: that the target's steps had, fewer than the candidate's where the user allows fewer by now, and in a fork.
    ``most_threads``: that the user allows by now. ``trial``: of other threads or of wide steps; it is always learnt from.
    ``is_bare``: its steps do no more than those of the profile: no logits processors on the host, no grammar, no recorded scores."""

    inputs: StageInputs
    mode: str
    shape: CallShape
    plan: Plan
    candidate: Candidate
    driver: Driver
    record: _ShapeRecord
    steering: CallSteering | None = None
    has_begun: bool = False
    drafted: bool = True
    rested_at: float = math.inf
    threads: int = 1
    most_threads: int = 1
    trial: tuple[str, Key] | None = None
    is_bare: bool = True
    parts: list[tuple[int, int, float]] = field(default_factory=list)
    _part: tuple[int, float] | None = None

    def new_tokens(self) -> list[int]:
        """New tokens of each row so far."""
        block = self.driver.block
        return [block.length(block.target, row) - len(p) for row, p in enumerate(self.inputs.prompts)]

    def begin_part(self, now: float) -> None:
        """Measure from now on."""
        self.has_begun, self._part = True, (max(self.new_tokens()), now)
        self._look()

    def end_part(self, now: float) -> None:
        """Measure no longer."""
        if self._part is not None:
            first, began = self._part
            self.parts.append((first, max(self.new_tokens()), now - began))
            self._part = None
            self._look()

    def _look(self) -> None:
        block, models = self.driver.block, range(int(self.driver.config.ngram is not None), self.driver.block.target)
        self.drafted &= all(block.is_alive(stage) for stage in models)

    def rate(self) -> float | None:
        """Tokens per second of the row with most tokens. None: too few for a measurement, or some were decoded without a draft that was lost."""
        tokens, seconds = (sum(last - first for first, last, _ in self.parts), sum(s for _, _, s in self.parts))
        return tokens / seconds if self.drafted and tokens >= _MEASURED_TOKENS and seconds > 0 else None

    def of_parts(self, agreement: np.ndarray) -> np.ndarray | None:
        """The positions of a table of agreement that were measured, for a single row. None: it does not have them."""
        if len(self.inputs.prompts) > 1 or not self.parts or self.parts[-1][1] > len(agreement):
            return None
        return np.concatenate([agreement[first:last] for first, last, _ in self.parts])


class AutoDriver(Decoder):
    """Runs each call with the driver of the best candidate.

    Args:
        models: Drafts, then the target.
        profile: Used instead of a measurement.
        tables: Agreement by mode, ``"greedy"`` and ``"sampled"``, used instead of a measurement.
        captured: Schedules with captured steps. None: all where all models are on GPUs and can be captured, otherwise none. On a CPU the
            same steps run uncaptured.
        clock: Returns seconds.
        names: Of the stages.
        trace: Steps per stage that the trace of a call keeps.
        native: See :class:`pipespec.config.SpeculationConfig`.
        ngram: An n-gram index as a further draft, before ``models``, with the ids of its corpus. A ``profile`` that is given has its times, or it
            is no candidate.

    Attributes:
        plan: What the last call was chosen from, or the next one will be.
    """

    continues_padding = True

    def __init__(
        self,
        models: Sequence[PreTrainedModel],
        *,
        profile: Profile | None = None,
        tables: Mapping[str, np.ndarray] | None = None,
        captured: Sequence[str] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        names: Sequence[str] | None = None,
        trace: int = 0,
        native: bool = True,
        ngram: NgramDraft | None = None,
    ) -> None:
        super().__init__()
        check_measurable(models)
        self.models, self.clock, self._native = list(models), clock, native
        if profile is not None and not profile.has_ngram:
            ngram = None
        self.ngram, self._first = ngram, int(ngram is not None)
        self.stage_names = [*[NGRAM] * self._first, *(names or stage_names(len(models)))]
        self.ran_as = "auto"
        self.cores = len(os.sched_getaffinity(0))
        self.captured = _capturable(self.models) if captured is None else tuple(captured)
        self.pool = DriverPool(self.models, trace, native, ngram)
        self._records: dict[tuple[int, str], _ShapeRecord] = {}
        self._trace = trace
        # The widest step of a call that has corrected the profile, by stage, threads and rows.
        self._widest: dict[tuple[int, int, int], int] = {}
        self._unmeasurable: set[tuple[int, bool]] = set()  # rows, and whether steps are captured
        self._in_calls_s, self._next_s = 0.0, 0.0  # time in calls, and at which of it the next call is learnt from
        self._static_caches_fit = True
        self._decisions: list[str] = []
        self._call: _RunningCall | None = None
        self._has_new_call = False
        self._key, stored = "", None
        if profile is None:
            self._key = profile_store.digest(self.models, threads=torch.get_num_threads(), native=native, ngram=ngram)
            stored = profile_store.load(self._key, len(self.stage_names))
            if stored is not None:
                profile, tables = stored.profile, stored.tables
        self._agreement = {mode: _Agreement(table) for mode, table in (tables or {}).items()}
        try:
            self.profile = profile if profile is not None else self._measure()
            if stored is None:
                self._store()
            self._measure_missing(1, graphs=True)
            self.plan = self._planned(CallShape(), "greedy")
            driver = None
            # Start processes and capture steps here, so that the first call neither waits for them nor fails over them.
            if self.plan.speculates or self.plan.chosen.captured:
                self.plan, _, driver = self._driver_for(self.plan, self.plan.chosen, "greedy")
            self.pool.close_all(but=driver)
        except BaseException:
            self.close()
            raise

    # ---- interface of a decoder

    @property
    def target(self) -> CacheOwner:
        assert self._call is not None
        return self._call.driver.target

    @property
    def names(self) -> Sequence[str]:
        assert self._call is not None
        return [*(self.stage_names[i] for i in self._call.candidate.drafts), "target"]

    @property
    def forms(self) -> Sequence[str]:
        assert self._call is not None
        return self._call.driver.forms

    def traces(self) -> dict[str, np.ndarray]:
        assert self._call is not None
        if not self._trace:
            return {}
        return dict(zip(self.names, self._call.driver.traces().values(), strict=False))

    def has_static_caches(self, request: GenerationRequest) -> bool:
        self._static_caches_fit = True
        self.pool.holds_graphs = bool(self.captured) and host_reason(request, self.models[-1].device.type) is not None
        return bool(self.captured) and not self.pool.holds_graphs

    def forgo_graphs(self) -> bool:
        self._static_caches_fit = False
        return True

    def reusable_bytes(self, request: GenerationRequest) -> Mapping[str, int]:
        return self.pool.reusable_bytes(request)

    def release_unused(self, request: GenerationRequest) -> None:
        self.pool.release_unused(request)

    def close(self) -> None:
        for driver in self.pool.drivers.values():
            driver.close()

    def for_fork(self) -> Decoder:
        # A call of another thread may have been under way.
        self.pool.drivers.clear()
        self._call, self._has_new_call = None, False
        return self

    def run(self, request: GenerationRequest) -> None:
        self._has_new_call = False
        self._call = call = self._prepare(request)
        self.block = call.driver.block
        call.steering = self._steering_of(call)

        def on_commit(text: TextSource) -> None:
            request.committed(text)
            if not call.has_begun:
                call.begin_part(self.clock())
            if not call.driver.target.accepts_draft_tokens:
                call.end_part(self.clock())
            elif call.steering is not None:
                call.steering.after_step()

        began, steered = self.clock(), replace(request, on_commit=on_commit)
        call.most_threads = torch.get_num_threads()
        try:
            if call.candidate.schedule == "workers":
                call.driver.run(steered)
            else:
                with threads_set(min(call.candidate.threads, call.most_threads)):
                    call.threads = torch.get_num_threads()
                    call.driver.run(steered)
        finally:
            ended = self.clock()
            self._in_calls_s += ended - began
            if call.trial is not None:
                call.record.trial_s[call.trial] = self._in_calls_s + (ended - began) / _TRIALS
        call.end_part(ended)
        self.ran_as, self._has_new_call = call.driver.ran_as, True

    def learn(self) -> None:
        call, is_new, self._has_new_call = self._call, self._has_new_call, False
        if call is None or not is_new:
            return
        self._check_captured(call)
        record = call.record
        record.calls += 1
        is_due = call.trial is not None or self._is_due(record)
        if is_due or (call.rate() is not None and not record.rate(call.candidate.key).is_measured):
            began = self.clock()
            try:
                own = self._measure_agreement(call) if is_due else None
                if is_due:
                    self._refine(call)
                self._record_rate(call, own)
            except Exception as error:  # the text is finished, and the caller gets it
                pass_on(error)
                _warn(f"a call could not be compared with its prediction ({type(error).__name__}: {error})")
            self._spent(record, began)
        steered = call.steering.decisions if call.steering is not None else []
        self.remarks = (call.plan.why, *self._decisions, *steered, *call.driver.remarks)
        self._decisions = []

    def _is_due(self, record: _ShapeRecord) -> bool:
        """Whether the next call of this shape is learnt from, see :data:`_SHARE`."""
        return record.calls <= _LEARNT_CALLS or self._in_calls_s >= self._next_s

    def _spent(self, record: _ShapeRecord, began: float) -> None:
        """Let nothing be learnt until the time since ``began`` is a small share of the time in calls."""
        pause = (self.clock() - began) / _SHARE
        if record.calls > _LEARNT_CALLS:
            self._next_s = max(self._next_s, self._in_calls_s) + pause
        else:
            self._next_s = max(self._next_s, self._in_calls_s + pause)

    # ---- measurement of the models

    @property
    def tables(self) -> dict[str, np.ndarray]:
        """Tables of agreement by mode."""
        return {mode: known.table for mode, known in self._agreement.items() if known.table is not None}

    def _store(self) -> None:
        if self._key:
            profile_store.store(StoredProfile(self.profile, self.tables))

    def _measure(self) -> Profile:
        """Measure step times, the slowdown of concurrent stages, and the agreement on a text that the target generates."""
        with working("measuring the models (once: the profile is kept)"):
            beside: WorkersDriver | None = None
            if self.cores > 1 and len(self.models) > 1:
                try:
                    chain = tuple(range(self._first, len(self.stage_names) - 1))
                    driver = self.pool.get(Candidate("workers", chain, (8,) * len(chain), 0, 1, 0.0))
                    beside = driver if isinstance(driver, WorkersDriver) else None
                except (ValueError, RuntimeError) as error:
                    pass_on(error)
                    say(f"schedule='auto': no worker processes here ({error}); the profile is not kept")
                    # The profile lacks the slowdown of concurrent stages, and processes may start the next time.
                    self.cores, self._key = 1, ""
            names = self.stage_names[self._first :]
            found = replace(
                measure.measure_stages(self.models, names, beside=beside, native=self._native), key=self._key
            )
            if self.ngram is not None:
                found = replace(found, stages=(measure.measure_ngram(self.ngram), *found.stages))
            if len(found.stages) > 1:
                text, first = self._calibration_text(found)
                how: dict[str, Any] = {"own_text": True, "native": self._native, "ngram": self.ngram}
                self._agreement["greedy"] = _Agreement(agreement.agreement_on(self.models, text, first, **how))
            return found

    def _calibration_text(self, profile: Profile) -> tuple[np.ndarray, int]:
        """A text that the target generates from its first token, int32 [positions], and the position of its first own token."""
        config = self.models[-1].generation_config
        begin = config.bos_token_id if isinstance(config.bos_token_id, int) else 1
        step_s = profile.target.seconds(1, threads=profile.threads)
        tokens = int(max(16, min(_CALIBRATION_TOKENS, _CALIBRATION_S / step_s)))
        driver = self.pool.get(Candidate("plain", (), (), 0, profile.threads, 0.0))
        vocabulary = head_size(self.models[-1])
        return written(driver, [min(begin, vocabulary - 1)], tokens, vocabulary)

    def _lacks(self, rows: int, *, captured: bool = False) -> bool:
        """Whether steps of a batch must be measured. After a failure the nearest measured number of rows is used instead."""
        if (captured and not self.captured) or (rows, captured) in self._unmeasurable:
            return False
        return not self.profile.target.has(rows, captured=captured)

    def _measure_missing(self, rows: int, *, graphs: bool) -> None:
        """Measure the step times of a batch that the profile lacks. If captured steps fail for one row, there are no captured schedules."""
        for captured in (False, True)[: 1 + graphs]:
            if not self._lacks(rows, captured=captured):
                continue
            what = f"{'captured steps of ' if captured else ''}batches of {rows}"
            try:
                with working(f"measuring {what}"):
                    self.profile = self.profile.adding(self._step_times(rows, captured))
                self._store()
            except Exception as error:
                pass_on(error)
                if captured and not self.profile.target.has(1, captured=True):
                    self._give_up_graphs(str(error))
                    return
                self._unmeasurable.add((rows, captured))
                reason = f"{what} could not be measured ({type(error).__name__}: {error})"
                _warn(reason, SpeedWarning if captured else StageFailure)

    def _step_times(self, rows: int, captured: bool) -> Sequence[Sequence[StepTimes]]:
        """Measured step times of every model, for :meth:`Profile.adding`."""
        if captured:
            return measure.measure_captured(self.models, self.stage_names[self._first :], rows=rows)
        budget_s = 0.7 * len(self.models)
        found = measure.measure_stages(
            self.models,
            self.stage_names[self._first :],
            rows=rows,
            widths=(1, 2, 4, 9),
            budget_s=budget_s,
            native=self._native,
        )
        return [stage.times for stage in found.stages]

    def _give_up_graphs(self, why: str | None) -> None:
        """Plan without captured steps from now on. ``why``: for the user, None if a warning was given already."""
        self.captured = ()
        self._forget_plans()
        self.pool.close_all(graphed_only=True)
        if why is not None:
            _warn(why, SpeedWarning, "it continues without CUDA graphs")

    # ---- choice of a candidate

    def answers(self, mode: str) -> Answers:
        """Agreement of the drafts; where nothing was measured, one half, and an n-gram index finds nothing."""
        known = self.tables
        table = known.get(mode, known.get("greedy"))
        if table is not None:
            return Answers(table=table)
        return Answers(acceptance=(*(0.0,) * self._first, *(0.5,) * (len(self.models) - 1)))

    def record(self, rows: int, mode: str) -> _ShapeRecord:
        """Predicted and measured rates of calls of this shape."""
        return self._records.setdefault((_bucket(rows), mode), _ShapeRecord(mode))

    def _planned(self, shape: CallShape, mode: str, *, graphs: bool = True) -> Plan:
        """The plan for calls of this number of rows. It is made for the lengths of the first of them."""
        record, began = self.record(shape.rows, mode), self.clock()
        plan = before = record.plan
        if plan is None or record.is_stale:
            plan = self._plan_anew(record, shape, mode)
            record.profile, record.followed, record.is_stale = self.profile, None, False
        known = self._agreement.get(mode)
        recent = known.recent if known is not None else None
        is_open = record.followed is None or self._is_due(record)
        if recent is not None and is_open and self._differs(recent, record.followed):
            assert record.profile is not None
            plan, record.followed = planner.following(record.profile, recent, plan), recent
        if plan is not before:
            record.plan = plan
            if before is not None:  # nothing was learnt before the first one
                self._spent(record, began)
        return record.decided(plan if graphs else planner.eager_only(plan))

    def _plan_anew(self, record: _ShapeRecord, shape: CallShape, mode: str) -> Plan:
        """Compare all settings. If that was done not long ago, predict the candidates of the present plan again."""
        if record.plan is not None and self._in_calls_s < record.whole_s:
            return planner.again(self.profile, self.answers(mode), record.plan, cores=self.cores)
        began = self.clock()
        found = planner.plan(
            self.profile,
            self.answers(mode),
            replace(shape, rows=_bucket(shape.rows)),
            schedules=("lockstep", "workers") if self.cores > 1 else ("lockstep",),
            captured=self.captured,
            cores=self.cores,
        )
        if self._in_calls_s > 0:  # what the constructor planned does not know this user's texts
            record.whole_s = self._in_calls_s + (self.clock() - began) / _SHARE
        return found

    def _differs(self, recent: np.ndarray, followed: np.ndarray | None) -> bool:
        """Whether the n-gram index finds more or less in the newest texts than where its rate was predicted, or it was not predicted."""
        if followed is None or len(recent) >= 2 * len(followed):
            return True
        changes = (abs((recent == answer).mean() - (followed == answer).mean()) for answer in (0, NOTHING))
        return bool(max(changes) > _MOVED / 2)

    def _forget_plans(self) -> None:
        """Forget all plans: there are other candidates."""
        for record in self._records.values():
            record.plan = None

    def _agreement_moved(self, mode: str) -> None:
        """Plan again in a mode, and forget what texts gave against its plans. Greedy agreement stands for the sampled one until that is measured."""
        for (_, other), record in self._records.items():
            if mode == other or (mode == "greedy" and "sampled" not in self.tables):
                record.is_stale = True
                for rate in record.measured.values():
                    rate.forget_texts()

    def _choose(self, plan: Plan, record: _ShapeRecord) -> Candidate:
        """The plan's choice, or a candidate of about the same rate that was not tried, or that needs no new graphs."""
        known = record.factors()
        if plan.chosen.key in known:
            other = self._with_all_threads(plan, record, known) or self._with_wide_steps(plan, record)
            if other is not None:
                return other
        if not plan.speculates:
            return plan.chosen
        if plan.chosen.key in known and record.trials < _MOST_TRIALS:
            for candidate in plan.candidates:
                if candidate.rate < max(_NEAR * plan.chosen.rate, planner.MARGIN * plan.plain.rate):
                    break
                # Processes take seconds to start, so that a trial uses those that exist.
                can_run = (
                    self.pool.has(candidate)
                    if candidate.schedule == "workers"
                    else candidate.captured or candidate.threads == plan.plain.threads
                )
                if candidate.key not in known and candidate.schedule != "plain" and can_run:
                    record.trials += 1
                    self._decisions.append(f"{candidate.way} {plan.label(candidate)} is tried")
                    return candidate
        if plan.chosen.captured:
            near = [c for c in plan.candidates if c.captured and c.schedule != "plain" and self.pool.has_graphs(c)]
            best = max(near, key=lambda c: c.rate, default=plan.chosen)
            if best.rate * planner.MARGIN > plan.chosen.rate:
                return best
        return plan.chosen

    def _with_all_threads(self, plan: Plan, record: _ShapeRecord, known: Mapping[Key, float]) -> Candidate | None:
        """The plan's choice with all threads, where it has fewer and that was not measured.

        What else the machine runs decides how many are best, and the profile may be of a busy moment.
        """
        chosen, threads = plan.chosen, self.profile.threads
        alike = (chosen.way, chosen.drafts, threads)
        found = next((c for c in plan.candidates if c.key == alike and c.key not in known), None)
        if chosen.threads == threads or found is None or not self._may_try(record, "threads", alike):
            return None
        self._decisions.append(f"{found.way} {plan.label(found)} is tried with {threads} threads")
        return found

    def _with_wide_steps(self, plan: Plan, record: _ShapeRecord) -> Candidate | None:
        """The plan's choice with a long lookahead, where calls correct the step times and none had wide steps."""
        chosen = plan.chosen
        widest = self._widest.get((len(self.profile.stages) - 1, chosen.threads, plan.call.rows))
        if not plan.speculates or not chosen.is_timed or widest is None or max(widest, chosen.lookahead[-1]) >= _WIDE:
            return None
        if not self._may_try(record, "width", chosen.key):
            return None
        self._decisions.append(f"{chosen.way} {plan.label(chosen)} is tried with {_WIDE} draft tokens")
        wide = replace(chosen, lookahead=(*chosen.lookahead[:-1], _WIDE))
        return self._predicted(record, wide, plan.call)

    def _predicted(self, record: _ShapeRecord, candidate: Candidate, shape: CallShape) -> Candidate:
        """The candidate with the rate that the plan of these calls would give it."""
        profile = record.profile or self.profile
        if candidate.drafts == (0,) and profile.has_ngram and record.followed is not None:
            return planner.predict_alone(profile, record.followed, candidate, shape, cores=self.cores)
        return planner.predict(profile, self.answers(record.mode), candidate, shape, cores=self.cores)

    def _may_try(self, record: _ShapeRecord, what: str, key: Key) -> bool:
        """Whether a trial does not take too large a share of the time. If so, the next call is it."""
        if self._in_calls_s < record.trial_s.get((what, key), 0.0):
            return False
        record.trial = what, key
        return True

    def _driver_for(
        self, plan: Plan, candidate: Candidate, mode: str, *, graphs: bool = True
    ) -> tuple[Plan, Candidate, Driver]:
        """The candidate's driver. If processes do not start, or steps cannot be captured, that of a plan without them."""
        while True:
            try:
                return plan, candidate, self.pool.get(candidate)
            except (ValueError, RuntimeError) as error:
                pass_on(error)
                if candidate.captured:
                    self._give_up_graphs(str(error))
                elif candidate.schedule == "workers":
                    say(f"schedule='auto': no worker processes here ({error})")
                    self.cores = 1
                    self._forget_plans()
                else:
                    raise
            plan = self._planned(plan.call, mode, graphs=graphs)
            candidate = plan.chosen

    def _prepare(self, request: GenerationRequest) -> _RunningCall:
        """Choose the candidate of a call, and measure what is missing for that."""
        inputs = request.inputs
        mode = "greedy" if inputs.sampling_params.seeds is None else "sampled"
        new = max(limit - len(prompt) for prompt, limit in zip(inputs.prompts, inputs.limits, strict=True))
        shape = CallShape(len(inputs.prompts), max(map(len, inputs.prompts)), max(1, new))
        needs_host = host_reason(request, self.models[-1].device.type) if self.captured else None
        if self.captured and needs_host is None and not self._static_caches_fit:
            needs_host = "caches that cannot grow do not fit the memory"
        if needs_host is not None:
            self._decisions.append(f"without CUDA graphs: {needs_host}")
            self._slower(f"calls like this one run without CUDA graphs: {needs_host}")
        graphs = needs_host is None
        self._measure_missing(_bucket(shape.rows), graphs=graphs)
        plan, record = self._planned(shape, mode, graphs=graphs), self.record(shape.rows, mode)
        limit = rope_changes_at(self.models[-1])
        if plan.speculates and limit is not None and shape.prompt >= limit:
            candidate = plan.plain
            self._decisions.append("dynamic RoPE: after a prompt of this length the target accepts no draft tokens")
        else:
            candidate = self._choose(plan, record)
        trial, record.trial = record.trial, None
        self.plan, candidate, driver = self._driver_for(plan, candidate, mode, graphs=graphs)
        bucket = replace(shape, rows=_bucket(shape.rows))
        params = inputs.sampling_params
        is_bare = not params.stepwise and inputs.grammar is None and request.record is None
        return _RunningCall(inputs, mode, bucket, self.plan, candidate, driver, record, trial=trial, is_bare=is_bare)

    # ---- measured rates

    def _steering_of(self, call: _RunningCall) -> CallSteering | None:
        """The comparison with plain decoding. None: the call decodes plainly, or in captured rounds, which cannot stop drafting."""
        candidate = call.candidate
        if candidate.schedule == "plain" or (candidate.captured and candidate.schedule == "lockstep"):
            return None
        plain = planner.plain_of(call.plan, candidate)
        return CallSteering(
            partial(self._let_rest, call, plain.threads),
            lambda: max(call.new_tokens()),
            self.clock,
            predicted=1 / plain.step_s,
            plain=call.record.rate(plain.key),
            gain=candidate.decoding_rate / plain.decoding_rate,
        )

    def _let_rest(self, call: _RunningCall, plain_threads: int, rests: bool) -> None:
        """Let the drafts rest, with the threads of plain decoding, or draft again."""
        candidate, now = call.candidate, self.clock()
        plain_threads = min(plain_threads, call.most_threads)
        (call.end_part if rests else call.begin_part)(now)
        if rests:
            call.rested_at = min(call.rested_at, now)
        call.driver.steer(
            replace(
                call.driver.config,
                lookahead=(0,) * len(candidate.lookahead) if rests else candidate.lookahead,
                min_draft_tokens=0 if rests else candidate.min_draft_tokens,
                threads=plain_threads if rests else None,
            )
        )
        if candidate.schedule == "lockstep":
            set_threads(plain_threads if rests else min(candidate.threads, call.most_threads))

    def _record_rate(self, call: _RunningCall, own: np.ndarray | None) -> None:
        """Add the call to the measured rates.

        How many tokens a step gives depends on the text. So the rate is compared with the one that is predicted for the text of this call,
        where its agreement is known. Elsewhere it also corrects the table of agreement, which comes from older texts.

        Args:
            call: That has ended.
            own: Agreement of the candidate's drafts with the text, uint8 [positions, drafts]. None: not measured.
        """
        candidate, rates, measured = call.candidate, call.record, call.rate()
        if measured is not None and not _ran_uncaptured(call):
            on_text = self._predicted_on(call, own)
            if on_text is not None:
                rates.rate(candidate.key).add(measured / on_text)
            if on_text is None or rates.rate(candidate.key).overall_count:
                rates.rate(candidate.key).add_overall(measured * candidate.step_s / candidate.tokens_per_step)
        # The measurements of the other candidates become old, so that a slower one is tried again later.
        common = planner.common_factor(call.plan, rates.speeds())
        for key, other in rates.measured.items():
            if common is not None and key != candidate.key and not key[0].startswith("plain"):
                other.fade(common, _FADES)

    def _refine(self, call: _RunningCall) -> None:
        """Correct the profile by the step times of a call, and plan again where a plan's are far from them.

        A profile may be of a busy moment, or this may be one. Calls whose steps do more than those of the profile correct nothing.
        """
        candidate, rows = call.candidate, len(call.inputs.prompts)
        # On a GPU the host only queues a step.
        on_host = candidate.is_timed and all(model.device.type == "cpu" for model in self.models)
        is_as_planned = call.threads == candidate.threads and rows == call.shape.rows
        if not (self._key and on_host and call.is_bare and call.record.plan is not None and is_as_planned):
            return
        traces = list(call.driver.traces().values())
        # A rest may have other threads.
        kept = [steps["end_ns"] * 1e-9 <= call.rested_at for steps in traces]
        held = _held(traces[-1], max(map(len, call.inputs.prompts)) + max(call.new_tokens()), rows)
        held = held[kept[-1] & _is_step(traces[-1])]
        if len(held) == 0:
            return
        how: dict[str, Any] = {"threads": candidate.threads, "rows": rows, "context": float(held.mean())}
        stages, widths = list(self.profile.stages), dict[int, list[int]]()
        places = (*candidate.drafts, len(stages) - 1)
        since_others = _since_others(
            [None if stages[i].ngram else steps for i, steps in zip(places, traces, strict=True)]
        )
        for i, steps, own, since in zip(places, traces, kept, since_others, strict=True):
            if stages[i].ngram:
                continue
            # What other stages' steps add to those behind them is not the step's own time.
            warm = np.asarray(stages[i].step_times(steps["width"].tolist(), **how), dtype=np.float64)
            share = warm / (warm + stages[i].cold_s * 0.5**since)
            observed, prefill_s = _observed(steps[own], share[own], rows)
            if not observed:
                continue
            at = (i, candidate.threads, rows)
            known = self._widest.get(at, 0)
            stages[i] = stages[i].refined(observed, prefill_s=prefill_s, weight=_REFINED, known=known, **how)
            self._widest[at], widths[i] = max(known, *observed), list(observed)
        self.profile = replace(self.profile, stages=tuple(stages))
        for record in self._records.values():
            change = self._change(record, candidate.threads, widths)
            if 1 / _CHANGED < change < _CHANGED:
                continue
            self._outdate(record)
            if record is call.record:  # its rate is compared with what is predicted by now
                call.candidate = self._predicted(record, candidate, call.plan.call)
                self._decisions.append(f"steps take {change:.2f} times as long as planned: planned again")
            self._store()

    def _change(self, record: _ShapeRecord, threads: int, widths: Mapping[int, Sequence[int]]) -> float:
        """The largest factor between the present times of steps, by stage and width, and those that a shape was planned with, for its plan."""
        changes = [1.0]
        if record.plan is not None and record.profile is not None:
            call = record.plan.call
            how: dict[str, Any] = {"threads": threads, "rows": call.rows, "context": call.context}
            for i, some in widths.items():
                before, now = (p.stages[i].step_times(some, **how) for p in (record.profile, self.profile))
                changes += [b / a for a, b in zip(before, now, strict=True)]
        return max(changes, key=lambda change: abs(math.log(change)))

    def _outdate(self, record: _ShapeRecord) -> None:
        """Plan again for other step times. Plain decoding is as fast as it was measured; other rates are measured again."""
        assert record.plan is not None
        kept = {}
        plain = [c for c in record.plan.candidates if c.schedule == "plain" and c.key in record.measured]
        before = [self._predicted(record, c, record.plan.call).decoding_rate for c in plain]
        record.profile, record.is_stale = self.profile, True
        for candidate, rate in zip(plain, before, strict=True):
            measured = record.measured[candidate.key]
            if measured.rescale(rate / self._predicted(record, candidate, record.plan.call).decoding_rate):
                kept[candidate.key] = measured
        record.measured = kept

    def _check_captured(self, call: _RunningCall) -> None:
        """Plan without captured steps from now on if a call ran without them, except where the next call may have enough memory."""
        # A model that cannot be captured has its warning already.
        if _ran_uncaptured(call) and not any("cannot be prepared" in remark for remark in call.driver.remarks):
            self._give_up_graphs(None)

    def _predicted_on(self, call: _RunningCall, own: np.ndarray | None) -> float | None:
        """Tokens per second of a row that the candidate is predicted to decode on the call's own text. None: its agreement is not known."""
        candidate, profile = replace(call.candidate, factor=1.0), call.record.profile or self.profile
        if candidate.schedule == "plain":
            return planner.predict(profile, Answers(), candidate, call.shape).decoding_rate
        own = call.of_parts(own) if own is not None else None
        if own is None:
            return None
        return planner.predict_alone(profile, own, candidate, call.shape, cores=self.cores).decoding_rate

    # ---- agreement

    def _measure_agreement(self, call: _RunningCall) -> np.ndarray | None:
        """Measure the drafts' agreement with the text of a call, within :data:`_SHARE` of the time, and plan again if it has changed.

        The n-gram index is replayed along the text of each call that is learnt from.

        Returns:
            Agreement of the drafts that ran, uint8 [positions, drafts], or None where it is not measured.
        """
        known = self._agreement.setdefault(call.mode, _Agreement())
        is_due = len(self.models) > 1 and (known.seen < _ENOUGH or self._in_calls_s >= known.next_s)
        if not is_due and self.ngram is None:
            return None
        began = self.clock()
        block, params, new = call.driver.block, call.inputs.sampling_params, call.new_tokens()
        row = int(np.argmax(new))
        prompt = call.inputs.prompts[row]
        generated = np.array(block.tokens(block.target, row, len(prompt), len(prompt) + new[row]), dtype=np.int32)
        text = np.concatenate([prompt, generated])
        drafts, table, found = call.candidate.drafts, None, None
        if self.ngram is not None and len(generated) > 0:
            found = agreement.lookups(self.ngram, text, len(prompt))
            self._add_recent(known, found)
        if is_due and not params.stepwise:
            table = self._agreement_on(text, len(prompt), own_text=True, sampling_params=params, row=row)
        if table is not None:
            self._add_agreement(call.mode, table, began)
            return table[:, list(drafts)] if drafts else None
        return found if self.ngram is not None and drafts == (0,) else None

    @staticmethod
    def _add_recent(known: _Agreement, found: np.ndarray) -> None:
        """Add what the n-gram index finds in the text of a call."""
        if known.recent is not None:
            found = np.concatenate([known.recent, found])
        known.recent = found[-_RECENT:]

    def _add_agreement(self, mode: str, table: np.ndarray, began: float) -> None:
        known = self._agreement[mode]
        old, is_first, was_young = known.table, known.seen == 0, known.seen < _ENOUGH
        known.seen += len(table)
        if old is not None and not is_first:  # the first table does not come from this user's texts
            table = np.concatenate([old, table])[-agreement.MOST_POSITIONS :]
        known.table = table
        after = (table == 0).mean(axis=0)
        has_moved = is_first or old is None or (was_young and known.seen >= _ENOUGH)
        if old is not None:
            has_moved |= bool(np.any(np.abs((old == 0).mean(axis=0) - after) > _MOVED))
        known.patience = 1 if has_moved else min(2 * known.patience, _MOST_PATIENCE)
        known.next_s = self._in_calls_s + known.patience * (self.clock() - began) / _SHARE
        if has_moved:
            self._agreement_moved(mode)
            rates = ", ".join(f"{a:.2f}" for a in after)
            self._decisions.append(f"agreement with the target is {rates}: planned again")
            self._store()

    def _agreement_on(self, text: np.ndarray, first: int, **how: Any) -> np.ndarray | None:
        """Table of agreement, or None. A model that fails gives a warning, and the call continues.

        Positions with dynamic RoPE are left out: one forward over all of them gives other logits than decoding.
        """
        text = text[: rope_changes_at(self.models[-1])]
        if len(text) - first < _LEAST:
            return None
        try:
            return agreement.agreement_on(self.models, text, first, ngram=self.ngram, **how)
        except Exception as error:
            pass_on(error)
            _warn(f"the drafts' agreement with a text could not be measured ({type(error).__name__}: {error})")
            return None


def check_measurable(models: Sequence[PreTrainedModel]) -> None:
    """Check that models can be measured. ``ValueError`` for one that is not whole on one device."""
    check_whole(models, "schedule='auto', which measures them,")


def _capturable(models: Sequence[PreTrainedModel]) -> tuple[str, ...]:
    """Schedules that are candidates with captured steps."""
    if any(model.device.type != "cuda" for model in models):
        return ()
    try:
        check_streams(models)
    except (NotCapturable, ValueError) as error:
        say(f"schedule='auto': {error}; it continues without CUDA graphs")
        return ()
    return _CAPTURED


def _is_step(steps: np.ndarray) -> np.ndarray:
    """Which entries of a trace are steps: neither parts of the prefill nor rollbacks."""
    found: np.ndarray = (steps["prefill"] == 0) & (steps["fed"] > 0)
    return found


def _held(steps: np.ndarray, length: int, rows: int) -> np.ndarray:
    """Tokens in the cache at each entry of the target's trace, which has the newest ones of a call that ended with ``length`` tokens."""
    new = np.where(_is_step(steps), 1 + steps["accepted"] / rows, 0)
    return np.maximum(length - np.cumsum(new[::-1])[::-1], 1)


def _since_others(traces: Sequence[np.ndarray | None]) -> list[np.ndarray]:
    """For each entry of each trace, how many entries of this stage precede it since the last one of another stage. None: of a stage without a model."""
    stages = np.concatenate([np.full(0 if steps is None else len(steps), i) for i, steps in enumerate(traces)])
    known = [steps for steps in traces if steps is not None]
    order = np.argsort(np.concatenate([steps["launched_ns"] for steps in known]), kind="stable")
    order = order[np.concatenate([steps["fed"] > 0 for steps in known])[order]]  # a rollback disturbs no caches
    begins = np.flatnonzero(np.diff(stages[order], prepend=-1))
    since = np.zeros(len(stages))
    since[order] = np.arange(len(order)) - np.repeat(begins, np.diff(begins, append=len(order)))
    return [since[stages == i] for i in range(len(traces))]


def _observed(steps: np.ndarray, share: np.ndarray, rows: int) -> tuple[dict[int, float], float | None]:
    """Times of a call, from the trace of a stage: median seconds of its steps by width, and seconds of the prefill per token of a row. Widths of few
    steps are left out, as is a prefill of fewer tokens than a profile's: its time per token is longer.

    Args:
        steps: The trace.
        share: Of each step's time that is its own.
        rows: Of the call.
    """
    seconds = (steps["end_ns"] - steps["launched_ns"]) * 1e-9
    is_step, tokens = _is_step(steps), steps["prefill"].sum() / rows
    widths, counts = np.unique(steps["width"][is_step], return_counts=True)
    alike, own = widths[counts >= _ALIKE_STEPS], seconds * share
    found = {int(w): float(np.median(own[is_step & (steps["width"] == w)])) for w in alike}
    return found, float(seconds[steps["prefill"] > 0].sum() / tokens) if tokens >= SHORT_CONTEXT / 2 else None


def _ran_uncaptured(call: _RunningCall) -> bool:
    """Whether a call with captured steps ran without them after all."""
    return call.candidate.captured and bool(call.driver.remarks)


def _warn(
    what: str, kind: type[SpeedWarning] = StageFailure, then: str = "it continues with what was measured before"
) -> None:
    warnings.warn(f"schedule='auto': {what}; {then}", kind, stacklevel=user_stacklevel())


def _bucket(rows: int) -> int:
    """The next power of two: batches of similar size share a plan."""
    return 1 << (rows - 1).bit_length()
