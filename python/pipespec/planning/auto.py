"""schedule="auto": which driver a call gets, how it is steered, and what is learnt from it.

A profile is measured once and kept on disk. The drafts' agreement comes first from a text that the target writes for the purpose, or from the
first prompt; then from every generated text that there is time for: each draft is asked once what it would have said, teacher-forced.
"""

from __future__ import annotations

import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from pipespec.angles import angles_change_at
from pipespec.cache import RowCache
from pipespec.compat import head_size
from pipespec.drivers import Driver, Request, WorkersDriver, make_driver
from pipespec.drivers.base import Policy, StageFailure
from pipespec.drivers.fixed import FixedDriver
from pipespec.drivers.step import why_not
from pipespec.generation import Generation
from pipespec.observe import Report
from pipespec.placement import NotCapturable, check_streams
from pipespec.planning import planner
from pipespec.planning import profile as profiles
from pipespec.planning.planner import Call, Candidate, Key, Plan
from pipespec.planning.profile import Profile, Stored
from pipespec.planning.simulator import Answers
from pipespec.planning.steering import Counts, Ledger, Steering
from pipespec.progress import level_of_caller, say, working
from pipespec.sampling import Selection
from pipespec.stage import Start, stage_names

_SHARE = 0.005
"""Learning between calls may take this much of the time spent in calls."""
_LEAST = 16
"""Positions worth asking about."""
_ENOUGH = 256
"""Positions of the user's texts that every call is asked for first: fewer are one text's luck."""
_MOST_PATIENCE = 16
"""Agreement that does not move is asked for down to this fraction of that."""
_NEAR = 0.92
"""A chain predicted this close to the best is tried once: predictions are good to about as much."""
_MOST_TRIALS = 3
_THREADS_LOSE = 0.85
"""Another number of threads is tried where decoding falls below this much of what that is known to give."""
_CALIBRATION_TOKENS = 64
_CALIBRATION_S = 10.0
_FADES = 0.01
_LONG_PROMPT = 48
_MOVED = 0.05
_CAPTURED = ("plain", "lockstep", "streams")


class Steer(Protocol):
    """What a call is steered by: :class:`pipespec.planning.steering.Steering`, or a test's own."""

    decisions: list[str]

    def look(self) -> None: ...


class Auto:
    """The drivers of one chain and what is known about them.

    Parameters
    ----------
    models: drafts, then the target.
    profile, tables: instead of measuring (tests). ``tables``: agreement by mode, ``"greedy"`` and ``"sampled"``.
    captured: schedules that are considered with captured steps. None: all, where all models are on GPUs and can be captured; on a CPU
        the same steps run uncaptured (tests).
    clock: of steering and learning. steering: what makes a call's. names: of the stages. trace: as for a driver.
    """

    def __init__(
        self,
        models: Sequence[PreTrainedModel],
        *,
        profile: Profile | None = None,
        tables: dict[str, np.ndarray] | None = None,
        captured: Sequence[str] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        steering: Callable[..., Steer] = Steering,
        names: Sequence[str] | None = None,
        trace: int = 0,
    ) -> None:
        self.models = list(models)
        self.names = list(names) if names else stage_names(len(models))
        self._trace = trace
        self.clock, self.steering = clock, steering
        self.cores = len(os.sched_getaffinity(0))
        self.captured = _capturable(self.models) if captured is None else tuple(captured)
        self._drivers: dict[tuple[str, tuple[int, ...]], Driver] = {}  # by way and drafts
        self._is_eager = False  # the call that is about to run needs the host
        self._unmeasured: dict[bool, set[int]] = {False: set(), True: set()}  # rows, by whether steps are captured
        self._plans: dict[tuple[int, str], Plan] = {}
        self._ladders: dict[tuple[int, str, Key], tuple[planner.Rung, ...]] = {}
        self._ledgers: dict[tuple[int, Key], Ledger] = {}
        self._corrections: dict[int, dict[Key, float]] = {}
        self._trials: dict[int, int] = {}
        self._seen: dict[str, int] = {}  # positions of this user's texts that a mode's table was made of
        self._asked = bool(tables)  # the first prompt, before anything is known
        self._in_calls = 0.0
        self._learning = 0.0
        self._next: dict[str, float] = {}  # seconds in calls until a mode's agreement is looked at again
        self._patience: dict[str, int] = {}
        self._decisions: list[str] = []
        self._key = ""
        stored = None
        if profile is None:
            self._key = profiles.digest(self.models, threads=torch.get_num_threads())
            stored = profiles.load(self._key, len(self.models))
            if stored is not None:
                profile, tables, self._asked = stored.profile, stored.tables, True
        self.tables: dict[str, np.ndarray] = dict(tables or {})
        try:
            self.profile = profile if profile is not None else self._measure()
            known = stored is not None and not self._lacks_captured(1)
            if self._lacks_captured(1):
                self._measure_captured(1)
            if not known:
                self._store()
            self.plan = self._planned(Call(), "greedy")
            chosen = None
            # Processes take seconds to start, and what cannot be captured should be told: not in the first call.
            if self.plan.speculates or self.plan.chosen.captured:
                self.plan, _, chosen = self._driver_for(self.plan, self.plan.chosen, "greedy")
            for at, driver in list(self._drivers.items()):  # measured with, and not needed now
                if driver is not chosen:
                    driver.close()
                    del self._drivers[at]
        except BaseException:
            self.close()
            raise

    # ---- measuring

    def _measure(self) -> Profile:
        """Step times, agreement on a text of the target's own, and what stages at once cost each other."""
        with working("measuring the models (once: the profile is kept)"):
            beside: WorkersDriver | None = None
            if self.cores > 1 and len(self.models) > 1:
                try:
                    chain = tuple(range(len(self.models) - 1))
                    driver = self._driver(Candidate("workers", chain, (8,) * len(chain), 0, 1, 0.0))
                    beside = driver if isinstance(driver, WorkersDriver) else None
                except (ValueError, RuntimeError) as error:
                    say(f"schedule='auto': no worker processes here ({error}); the profile is not kept")
                    # What stages at once cost each other stays unknown; the next time they may well start.
                    self.cores, self._key = 1, ""
            found = profiles.measure_stages(self.models, self.names, beside=beside)
            found = replace(found, key=self._key)
            if len(self.models) > 1:
                text, first = self._calibration_text(found)
                self.tables["greedy"] = profiles.agreement_on(self.models, text, first, own_text=True)
            return found

    def _lacks(self, rows: int, *, captured: bool = False) -> bool:
        """Whether steps of a batch are to be measured. Where that has failed, the nearest that was measured stands for them."""
        return rows not in self._unmeasured[captured] and not self.profile.target.has(rows, captured=captured)

    def _lacks_captured(self, rows: int) -> bool:
        return bool(self.captured) and self._lacks(rows, captured=True)

    def _measure_captured(self, rows: int) -> None:
        """Captured step times of a batch; none, and no such schedules, where a model cannot be captured or the memory does not suffice."""
        try:
            with working(f"measuring captured steps (batches of {rows})"):
                found = profiles.measure_captured(self.models, self.names, rows=rows)
        except (ValueError, RuntimeError) as error:
            if not self.profile.target.has(1, captured=True):
                self._give_up_graphs(str(error))
                return
            self._unmeasured[True].add(rows)
            _tell_failure(
                f"captured steps of batches of {rows} could not be measured ({type(error).__name__}: {error})"
            )
            return
        self.profile = self.profile.adding(found)

    def _give_up_graphs(self, why: str | None) -> None:
        """From here on no captured steps. ``why``: for the user; None: who has been told."""
        self.captured = ()
        self._plans.clear()
        self._ladders.clear()
        for at, driver in list(self._drivers.items()):
            if isinstance(driver, FixedDriver):
                driver.close()
                del self._drivers[at]
        if why is not None:
            _tell_failure(why, "it goes on without CUDA graphs")

    def _calibration_text(self, found: Profile) -> tuple[np.ndarray, int]:
        """Something that the target says when nobody has asked it anything, and where its own words begin."""
        config = self.models[-1].generation_config
        begin = config.bos_token_id if isinstance(config.bos_token_id, int) else 1
        step = found.target.seconds(1, threads=found.threads)
        tokens = int(max(16, min(_CALIBRATION_TOKENS, _CALIBRATION_S / step)))
        driver = self._driver(Candidate("plain", (), (), 0, found.threads, 0.0))
        vocabulary = head_size(self.models[-1])
        prompt = np.array([min(begin, vocabulary - 1)], dtype=np.int32)
        driver.run(Request(Start([prompt], [1 + tokens], Selection(), vocabulary), []))
        said = driver.block.tokens(driver.block.target, 0, 1, 1 + tokens)
        return np.concatenate([prompt, np.array(said, dtype=np.int32)]), 1

    def _store(self) -> None:
        if self._key:
            profiles.store(Stored(self.profile, self.tables))

    # ---- planning

    def answers(self, mode: str) -> Answers:
        table = self.tables.get(mode, self.tables.get("greedy"))
        return Answers(table=table) if table is not None else Answers(acceptance=(0.5,) * (len(self.models) - 1))

    def _planned(self, call: Call, mode: str, *, graphs: bool = True) -> Plan:
        """The plan for calls of so many rows; the length that the first of them had is taken for all. ``graphs``: whether the call can be
        run in captured steps."""
        at = (_bucket(call.rows), mode)
        if at not in self._plans:
            schedules = ("lockstep", "workers") if self.cores > 1 else ("lockstep",)
            self._plans[at] = planner.plan(
                self.profile,
                self.answers(mode),
                replace(call, rows=at[0]),
                schedules=schedules,
                captured=self.captured,
                cores=self.cores,
            )
        plan = self._plans[at]
        return planner.decide(plan if graphs else planner.eager_only(plan), self._corrections.get(at[0], {}))

    def _replan(self, mode: str) -> None:
        """Forget what followed from a table that has changed."""
        follows = {mode} if mode != "greedy" or "sampled" in self.tables else {"greedy", "sampled"}
        self._plans = {at: plan for at, plan in self._plans.items() if at[1] not in follows}
        self._ladders = {at: rungs for at, rungs in self._ladders.items() if at[1] not in follows}

    def _choose(self, plan: Plan, rows: int) -> Candidate:
        """The plan's choice; or one that is as good as that and has not been tried."""
        if not plan.speculates:
            return plan.chosen
        known = self._corrections.get(rows, {})
        if plan.chosen.key in known and self._trials.get(rows, 0) < _MOST_TRIALS:
            for candidate in plan.candidates:
                if candidate.rate < max(_NEAR * plan.chosen.rate, planner.MARGIN * plan.plain.rate):
                    break
                # To start processes takes seconds: only what the plan chooses is worth that.
                is_there = candidate.schedule != "workers" or (candidate.way, candidate.drafts) in self._drivers
                if candidate.key not in known and candidate.schedule != "plain" and is_there:
                    self._trials[rows] = self._trials.get(rows, 0) + 1
                    self._decisions.append(f"{candidate.way} {plan.label(candidate)} is tried")
                    return candidate
        if plan.chosen.captured:  # another than what there is would have to be captured anew
            there = {
                at for at, driver in self._drivers.items() if isinstance(driver, FixedDriver) and driver.target.rooms()
            }
            near = [c for c in plan.candidates if c.captured and (c.way, c.drafts) in there and c.schedule != "plain"]
            best = max(near, key=lambda c: c.rate, default=plan.chosen)
            if best.rate * planner.MARGIN > plan.chosen.rate:
                return best
        return plan.chosen

    # ---- drivers

    def _driver(self, candidate: Candidate) -> Driver:
        """The driver of this schedule and these drafts; made at its first use and kept."""
        at = (candidate.way, candidate.drafts)
        driver = self._drivers.get(at)
        policy = Policy(candidate.windows, candidate.wait, candidate.decode_meanwhile)
        if driver is None:
            models = [*(self.models[i] for i in candidate.drafts), self.models[-1]]
            with working("starting draft processes") if candidate.schedule == "workers" else nullcontext():
                driver = make_driver(candidate.schedule, models, policy, self._trace, graphs=candidate.captured)
            self._drivers[at] = driver
        driver.steer(policy)
        for other in self._drivers.values():
            if other is not driver and not self._stays(other):
                other.forget()
        return driver

    def _stays(self, driver: Driver) -> bool:
        """A call in between that needs the host does not cost the others their graphs."""
        return self._is_eager and isinstance(driver, FixedDriver)

    def _driver_for(
        self, plan: Plan, candidate: Candidate, mode: str, *, graphs: bool = True
    ) -> tuple[Plan, Candidate, Driver]:
        """The candidate's driver; where no processes can be started, or steps not be captured, that of a plan without them."""
        try:
            return plan, candidate, self._driver(candidate)
        except (ValueError, RuntimeError) as error:
            if candidate.captured:
                self._give_up_graphs(str(error))
            elif candidate.schedule == "workers":
                say(f"schedule='auto': no worker processes here ({error})")
                self.cores = 1
                self._plans.clear()
            else:
                raise
        plan = self._planned(plan.call, mode, graphs=graphs)
        return self._driver_for(plan, plan.chosen, mode, graphs=graphs)

    def run(self, generation: Generation, *, has_room: bool = True) -> Report:
        """Run one call and learn from it. ``has_room``: whether caches of captured steps, which cannot grow, fit the memory."""
        session = self._begin(generation, has_room)
        session.run(generation)
        seconds, traces = generation.seconds, session.driver.traces()
        ran_as = session.driver.ran_as if session.candidate.schedule != "plain" else "plain"
        decisions = session.end(generation, seconds)
        return generation.report(ran_as, session.names, decisions, seconds, traces)

    def _begin(self, generation: Generation, has_room: bool) -> _Session:
        """Driver and steering for a call that is about to run."""
        selection: Selection = generation.request.start.selection
        mode = "greedy" if selection.seeds is None else "sampled"
        prompts, limits = generation.prompts, generation.limits
        rows = len(prompts)
        call = Call(
            rows, max(len(p) for p in prompts), max(1, max(n - len(p) for p, n in zip(prompts, limits, strict=True)))
        )
        began = self.clock()
        needs_host = None
        if self.captured:
            needs_host = why_not(generation.request, self.models[-1].device.type)
            if needs_host is None and not has_room:
                needs_host = "caches that cannot grow do not fit the memory"
            if needs_host is not None:
                self._decisions.append(f"without CUDA graphs: {needs_host}")
        graphs = needs_host is None
        lacks = self._lacks(_bucket(rows)) or (graphs and self._lacks_captured(_bucket(rows)))
        if len(self.models) > 1 and lacks:
            try:
                self._measure_rows(_bucket(rows), graphs=graphs)
            except Exception as error:
                self._unmeasured[False].add(_bucket(rows))
                _tell_failure(f"batches of {rows} could not be measured ({type(error).__name__}: {error})")
        prompt = max(prompts, key=len)
        if not self._asked and len(self.models) > 1 and len(prompt) >= _LONG_PROMPT:
            # Better than a text about nothing: the models' opinions on the user's own words.
            self._asked = True
            found = self._ask(prompt, len(prompt) // 4, own_text=False)
            if found is not None:
                self.tables["greedy"] = found
                self._replan("greedy")
        plan = self.plan = self._planned(call, mode, graphs=graphs)
        limit = angles_change_at(self.models[-1])
        if plan.speculates and limit is not None and call.prompt >= limit:
            candidate = plan.plain
            self._decisions.append("rotary angles that depend on the length: no hints behind a prompt of this length")
        else:
            candidate = self._choose(plan, _bucket(rows))
        self.plan, candidate, driver = self._driver_for(plan, candidate, mode, graphs=graphs)
        plan = self.plan
        session = _Session(self, driver, candidate, plan, mode, _bucket(rows))
        self._learning += self.clock() - began
        return session

    def _measure_rows(self, rows: int, *, graphs: bool) -> None:
        """Step times of a batch, when the first comes."""
        if self._lacks(rows):
            with working(f"measuring batches of {rows}"):
                found = profiles.measure_stages(
                    self.models, self.names, rows=rows, widths=(1, 2, 4, 9), budget_s=0.7 * len(self.models)
                )
            self.profile = self.profile.adding([stage.times for stage in found.stages])
        if graphs and self._lacks_captured(rows):
            self._measure_captured(rows)
        self._store()

    def expect(self, request: Request) -> bool:
        """Before the memory for a call is counted. Whether it can run in captured steps; if not, its caches lie beside those of the graphs."""
        self._is_eager = bool(self.captured) and why_not(request, self.models[-1].device.type) is not None
        return bool(self.captured) and not self._is_eager

    def keeps(self, start: Start, given: RowCache | None) -> Counter[str]:
        """As :meth:`Driver.keeps`: the most that one of them has, since one of them runs the call."""
        found: Counter[str] = Counter()
        for driver in self._drivers.values():
            if not self._stays(driver):
                found |= driver.keeps(start, given)
        return found

    def spare(self, start: Start, given: RowCache | None) -> None:
        for driver in self._drivers.values():
            if self._stays(driver):
                driver.forget()
            else:
                driver.spare(start, given)

    def close(self) -> None:
        for driver in self._drivers.values():
            driver.close()

    # ---- learning

    def ledger(self, rows: int, plain: Candidate, call: Call) -> Ledger:
        """Of one way of plain decoding."""
        at = (rows, plain.key)
        if at not in self._ledgers:
            step = planner.step_s(self.profile, self.profile.target, 1, plain, call, plain.threads)
            self._ledgers[at] = Ledger((step + planner.between_s(plain)) / call.rows)
        return self._ledgers[at]

    def correct(self, rows: int, key: Key, ratio: float) -> None:
        """Measured over predicted, of one call."""
        known = self._corrections.setdefault(rows, {})
        ratio = min(max(ratio, 0.05), 5.0)
        known[key] = ratio if key not in known else known[key] + 0.3 * (ratio - known[key])

    def fade(self, rows: int) -> None:
        """What was measured of chains counts a little less with each call that is decoded plainly, so that they are tried again some day."""
        for key, ratio in self._corrections.get(rows, {}).items():
            if not key[0].startswith("plain"):
                self._corrections[rows][key] = ratio + _FADES * (1.0 - ratio)

    def set_correction(self, rows: int, key: Key, ratio: float) -> None:
        self._corrections.setdefault(rows, {})[key] = ratio

    def learn(self, session: _Session, generation: Generation, seconds: float) -> None:
        """After a call: ask the drafts about its text, as far as there is time for that."""
        self._in_calls += seconds
        if len(self.models) == 1:
            return
        mode = session.mode
        seen = self._seen.get(mode, 0)
        is_young = seen < _ENOUGH
        if not is_young and (self._learning > _SHARE * self._in_calls or self._in_calls < self._next.get(mode, 0.0)):
            return
        began = self.clock()
        selection: Selection = generation.request.start.selection
        row = int(np.argmax([len(t) for t in generation.generated()]))
        prompt, said = generation.prompts[row], generation.generated()[row]
        table = None
        if len(said) >= _LEAST and not selection.stepwise:
            text = np.concatenate([prompt, np.array(said, dtype=np.int32)])
            table = self._ask(text, len(prompt), own_text=True, selection=selection, row=row)
        if table is not None:
            self._seen[mode] = seen + len(table)
            old = self.tables.get(mode)
            before = None if old is None else (old == 0).mean(axis=0)
            if old is not None and seen > 0:  # what it began with was not this user's text
                table = np.concatenate([old, table])[-profiles.MOST_POSITIONS :]
            self.tables[mode] = table
            after = (table == 0).mean(axis=0)
            moved = (
                before is None
                or seen == 0
                or (is_young and self._seen[mode] >= _ENOUGH)
                or bool(np.any(np.abs(before - after) > _MOVED))
            )
            # As long as it says the same it is asked ever more seldom.
            self._patience[mode] = 1 if moved else min(2 * self._patience.get(mode, 1), _MOST_PATIENCE)
            self._next[mode] = self._in_calls + self._patience[mode] * (self.clock() - began) / _SHARE
            if moved:
                self._replan(mode)
                self._decisions.append(
                    f"agreement with the target is {', '.join(f'{a:.2f}' for a in after)}: planned anew"
                )
                self._store()
        # What it takes to begin is not held against it.
        self._learning = 0.0 if is_young else self._learning + self.clock() - began

    def _ask(self, text: np.ndarray, first: int, **how: Any) -> np.ndarray | None:
        """The table of agreement; None, and a warning, where a model fails: the call goes on.

        None, too, where little of the text lies before its rotary angles change: there one forward does not say what decoding says.
        """
        text = text[: angles_change_at(self.models[-1])]
        if len(text) - first < _LEAST:
            return None
        try:
            return profiles.agreement_on(self.models, text, first, **how)
        except Exception as error:
            _tell_failure(f"the drafts could not be asked about a text ({type(error).__name__}: {error})")
            return None

    def told(self) -> list[str]:
        """What was decided since the last call."""
        out, self._decisions = self._decisions, []
        return out


class _Session:
    """One call under ``Auto``."""

    def __init__(self, auto: Auto, driver: Driver, candidate: Candidate, plan: Plan, mode: str, rows: int) -> None:
        self.auto, self.driver, self.candidate, self.plan, self.mode, self.rows = (
            auto,
            driver,
            candidate,
            plan,
            mode,
            rows,
        )
        self.names = [auto.names[i] for i in candidate.drafts] + ["target"]
        self.steering: Steer | None = None
        self._threads = torch.get_num_threads()
        # What it is compared with while it runs: plain decoding, or plain decoding with other threads.
        self._reference: Candidate | None = planner.plain_of(plan, candidate)
        if candidate.schedule == "plain":
            others = [c for c in plan.candidates if c.schedule == "plain" and c.way == candidate.way]
            self._reference = next((c for c in others if c.key != candidate.key), None)
        self._ledger = auto.ledger(rows, self._reference or candidate, plan.call)
        self._tokens: Callable[[], int] = lambda: 0
        self._marks: list[tuple[int, float]] = []
        self._looks, self._texts = 0, 0  # how often steps of the target's were told; rows of the call

    def _start(self, generation: Generation) -> Callable[[], None]:
        """Before the driver runs; returns what is to be called after each step of the target's."""
        auto, block, rows = self.auto, self.driver.block, len(generation.prompts)
        target = block.target
        starts = sum(len(p) for p in generation.prompts)
        self._texts = rows

        def tokens() -> int:
            return sum(block.length(target, row) for row in range(rows)) - starts

        self._tokens = tokens
        if self._reference is None or (self.candidate.captured and self.candidate.schedule == "lockstep"):
            return self._mark  # what it does now cannot be changed: a captured round drafts, whatever its windows are
        common = {"ledger": self._ledger, "tokens": tokens, "clock": auto.clock, "rows": rows}
        if self.candidate.schedule == "plain":
            other = self._reference
            # The same machinery: is another number of threads better, now?
            threads = (self.candidate.threads, other.threads)
            self.steering = auto.steering(
                policy=((1,), 0),
                ladder=(),
                apply=lambda windows, wait: torch.set_num_threads(threads[0] if any(windows) else threads[1]),
                counts=lambda: Counts(tokens(), 0, 0, 0),
                what=_threads(threads[0]),
                other=_threads(threads[1]),
                loses=_THREADS_LOSE,
                probes=False,
                **common,
            )
            return self.steering.look

        def counts() -> Counts:
            found = [block.counters(target, row) for row in range(rows)]
            return Counts(tokens(), *(sum(c[k] for c in found) for k in ("drafted", "accepted", "steps")))

        plain = self._reference

        def apply(windows: tuple[int, ...], wait: int) -> None:
            rests = not any(windows)
            threads = plain.threads if rests else None
            self.driver.steer(Policy(windows, wait, self.candidate.decode_meanwhile, threads))
            if self.candidate.schedule == "lockstep":
                torch.set_num_threads(plain.threads if rests else self.candidate.threads)

        self.steering = auto.steering(
            policy=(self.candidate.windows, self.candidate.wait),
            ladder=self._ladder(),
            apply=apply,
            counts=counts,
            expected=planner.neighbours(auto.answers(self.mode), self.candidate.drafts, len(auto.models))[-1],
            **common,
        )
        look = self.steering.look
        # Where the target takes no hints any more, there is nothing to compare.
        return lambda: look() if self.driver.target.takes_hints else None

    def _mark(self) -> None:
        """Where it began: what came before holds the start of everything."""
        if not self._marks:
            self._marks.append((self._tokens(), self.auto.clock()))

    def _ladder(self) -> tuple[planner.Rung, ...]:
        auto = self.auto
        at = (self.rows, self.mode, self.candidate.key)
        if at not in auto._ladders:
            auto._ladders[at] = planner.ladder(
                auto.profile, auto.answers(self.mode), self.candidate, self.plan.call, cores=auto.cores
            )
        return auto._ladders[at]

    def run(self, generation: Generation) -> None:
        """Run it with the threads of the plan."""
        look = self._start(generation)

        def after_step() -> None:
            self._looks += 1
            look()

        if self.candidate.schedule == "workers":
            generation.run(self.driver, after_step)
        else:
            with profiles.threads_set(min(self.candidate.threads, self._threads)):
                generation.run(self.driver, after_step)

    def end(self, generation: Generation, seconds: float) -> tuple[str, ...]:
        """Afterwards: what was learnt and decided."""
        auto, key = self.auto, self.candidate.key
        if self.candidate.captured and self.driver.remarks:  # it was run step by step after all
            # Told already where it could not be captured; a draft that found no memory is tried again.
            if not any("cannot be prepared" in remark for remark in self.driver.remarks):
                auto._give_up_graphs(None)
        elif isinstance(self.steering, Steering) and self.steering.speculated:
            tokens, passed, steps = (sum(column) for column in zip(*self.steering.speculated, strict=True))
            if self.candidate.schedule == "plain":
                auto.ledger(self.rows, self.candidate, self.plan.call).learn(passed / tokens)
            else:
                # By its steps: how many tokens one gives is the text's luck, which the table of agreement has.
                auto.correct(self.rows, key, self._step_s() * steps * self._steps_per_look() / passed)
        elif self._marks:
            before, began = self._marks[0]
            now, new = auto.clock(), self._tokens() - before
            if new >= 16 and now > began:
                if self.candidate.schedule == "plain":
                    auto.ledger(self.rows, self.candidate, self.plan.call).learn((now - began) / new)
                else:
                    steps = (self._looks - 1) * self._steps_per_look()
                    auto.correct(self.rows, key, self._step_s() * steps / (now - began))
        if self.candidate.schedule == "plain":
            auto.fade(self.rows)
        for plain in (c for c in self.plan.candidates if c.schedule == "plain"):
            ledger = auto.ledger(self.rows, plain, self.plan.call)
            if ledger.measured:
                auto.set_correction(self.rows, plain.key, ledger.predicted_s / ledger.plain_s)
        auto.learn(self, generation, seconds)
        own = self.steering.decisions if self.steering is not None else []
        return (self.plan.why, *auto.told(), *own, *self.driver.remarks)

    def _steps_per_look(self) -> float:
        """Of the target's: a scheduler tells of several at once where they end faster than it is heard."""
        block = self.driver.block
        if not self.candidate.captured:
            return 1.0
        steps = max(block.counters(block.target, row)["steps"] for row in range(self._texts))
        return max(1.0, steps / max(1, self._looks))

    def _step_s(self) -> float:
        """Seconds of a step of the target's, as predicted."""
        profile, call = self.auto.profile, self.plan.call
        raw = self.auto._plans.get((self.rows, self.mode))
        candidate = next((c for c in (raw or self.plan).candidates if c.key == self.candidate.key), self.candidate)
        prompt = planner.start_s(profile, candidate, call)
        decoding = call.rows * call.tokens / candidate.rate - prompt
        return max(decoding, 1e-9) * candidate.tokens_per_step / call.tokens


def _capturable(models: Sequence[PreTrainedModel]) -> tuple[str, ...]:
    """Schedules that are considered with captured steps."""
    if any(model.device.type != "cuda" for model in models):
        return ()
    try:
        check_streams(models)
    except (NotCapturable, ValueError) as error:
        say(f"schedule='auto': {error}; it goes on without CUDA graphs")
        return ()
    return _CAPTURED


def _tell_failure(what: str, then: str = "it goes on with what it knows") -> None:
    warnings.warn(f"schedule='auto': {what}; {then}", StageFailure, stacklevel=level_of_caller())


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _bucket(rows: int) -> int:
    """Batches of about one size share a plan."""
    return 1 << (rows - 1).bit_length()
