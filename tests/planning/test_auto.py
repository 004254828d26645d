"""schedule="auto": steering with scripted clocks, plans from made-up profiles, and a text that no decision changes."""

from __future__ import annotations

import functools
import itertools
import random
import types
import warnings
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipespec import NgramDraft, Pipeline
from pipespec import pipeline as pipelines
from pipespec.config import SpeculationConfig
from pipespec.drivers import LockstepDriver, RoundsDriver, StreamsDriver, factory
from pipespec.drivers.base import SpeedWarning, StageFailure
from pipespec.drivers.graphed.driver import GraphedDriver
from pipespec.engine.sampling import SamplingParams
from pipespec.errors import DoesNotFit, NotCapturable
from pipespec.planning import agreement, measure, planner, profile_store
from pipespec.planning import auto as autos
from pipespec.planning.auto import AutoDriver
from pipespec.planning.profile_store import ProfileWarning
from pipespec.planning.steering import CallSteering, MeasuredRate
from tests.conftest import always_right, always_wrong, left_pad, noisy, random_llama, random_prompts
from tests.pipespec.faulty import Faulty
from tests.pipespec.test_lossless import check
from tests.pipespec.test_rope import LIMIT, model_of, prompt_of
from tests.planning.test_planner import captured, chain

# --- steering --------------------------------------------------------------------------------------------------------


class Machine:
    """Decodes on a clock of its own. ``plain`` and ``drafting`` return the seconds per token at a given time."""

    def __init__(self, plain, drafting, *, predicted=None, **more):
        self.plain, self.drafting = plain, drafting
        self.now = self.tokens = 0
        self.rests = False
        self.rate = MeasuredRate()
        self.steering = CallSteering(
            self.let_rest, lambda: self.tokens, lambda: self.now, 1 / (predicted or plain(0)), self.rate, **more
        )

    def let_rest(self, rests):
        self.rests = rests

    def run(self, tokens):
        """Return the share of tokens that were decoded plainly."""
        rested = 0
        while self.tokens < tokens:
            new = 1 if self.rests else 2
            self.now += new * (self.plain if self.rests else self.drafting)(self.tokens)
            self.tokens += new
            rested += new * self.rests
            self.steering.after_step()
        return rested / tokens


def always(seconds):
    return lambda tokens: seconds


def test_drafts_that_lose_rest():
    m = Machine(plain=always(1.0), drafting=always(1.5))
    assert m.run(2000) > 0.9
    assert m.now < 1.03 * 2000
    assert "changed to plain decoding" in m.steering.decisions[0]


def test_drafts_that_win_go_on():
    m = Machine(plain=always(1.0), drafting=always(0.5))
    assert m.run(4000) < 0.04  # plain decoding is measured from time to time
    assert m.now < 1.03 * 0.5 * 4000
    assert m.rate.count > 0
    assert m.steering.decisions == []


def test_a_slow_machine_is_not_the_drafts_fault():
    m = Machine(plain=always(3.0), drafting=always(2.0), predicted=1.0)  # three times slower than predicted
    assert m.run(4000) < 0.05
    assert m.rate.factor == pytest.approx(1 / 3.0)
    assert "back to drafting" in m.steering.decisions[1]


def test_plain_decoding_that_is_faster_than_predicted_is_found():
    m = Machine(plain=always(1.0), drafting=always(1.2), predicted=2.0)
    assert m.run(4000) > 0.8


def test_a_slow_beginning_is_not_the_whole_text():
    """Drafts that are predicted to gain may lose for some tokens. Those that go on losing rest, the later the more they were predicted to gain."""
    slow = lambda tokens: 1.2 if tokens < 48 else 0.5  # noqa: E731
    patient = Machine(plain=always(1.0), drafting=slow, gain=2.0)
    assert patient.run(400) < 0.05
    assert Machine(plain=always(1.0), drafting=slow).run(400) > 0.05
    rested = [Machine(plain=always(1.0), drafting=always(1.5), gain=gain).run(400) for gain in (1.0, 1.5, 3.0)]
    assert rested == sorted(rested, reverse=True)
    assert rested[-1] > 0.5


def test_plain_decoding_is_not_measured_in_a_slow_part_of_a_text():
    """Drafts that are predicted to gain, and give little for some tokens. Each rest there would lose what they give behind it."""
    uneven = lambda tokens: 0.97 if tokens % 200 < 100 else 0.4  # noqa: E731
    sure, unsure = (Machine(plain=always(1.0), drafting=uneven, gain=gain) for gain in (2.0, 1.0))
    for m in (sure, unsure):
        m.rate.add(1.0)
    assert sure.run(2000) < 0.6 * unsure.run(2000)
    assert sure.now < unsure.now


def test_what_was_predicted_counts_on_the_machine_as_it_is():
    """Where plain decoding was measured at half of its prediction, the prediction of the drafts is halved, too."""

    def first_comparison(factor):
        m = Machine(plain=always(2.0), drafting=always(2.4), predicted=1.0, gain=1.02)
        m.rate.add(factor)
        m.run(60)
        return m.steering.decisions

    assert first_comparison(0.5)
    assert "drafting gives 0 tokens/s" in first_comparison(0.5)[0]  # 0.42: what was measured, without the prediction


def test_what_was_predicted_does_not_count_after_a_loss():
    """Nor does it stay: drafts that lose from the middle on rest as they would have without a prediction."""
    late = lambda tokens: 0.5 if tokens < 300 else 1.5  # noqa: E731
    runs = [Machine(plain=always(1.0), drafting=late, gain=gain) for gain in (1.0, 3.0)]
    for m in runs:
        m.run(600)
    texts = [[d for d in m.steering.decisions if "changed" in d or "rest" in d] for m in runs]
    assert texts[0] == texts[1] != []


def test_drafts_that_recover_are_tried_again():
    m = Machine(plain=always(1.0), drafting=lambda tokens: 2.0 if tokens < 100 else 0.4)
    m.run(4000)
    assert m.now < 0.6 * 4000
    assert any("tried again" in d for d in m.steering.decisions)


def test_decisions_are_bounded():
    generator = random.Random(3)
    m = Machine(plain=lambda t: generator.uniform(0.2, 2), drafting=lambda t: generator.uniform(0.2, 2))
    m.run(50_000)
    assert len(m.steering.decisions) <= 32
    assert sum("changed" in d for d in m.steering.decisions) <= 8


def test_a_measured_rate_is_a_weighted_mean():
    rate = MeasuredRate(tokens_since=7)
    rate.add(0.5)
    assert (rate.factor, rate.count, rate.tokens_since) == (0.5, 1, 0)
    rate.add(1.5)
    assert rate.factor == 1.0
    for _ in range(20):
        rate.add(0.5)
    rate.add(1.5)
    assert rate.factor == pytest.approx(0.8, rel=0.01)
    rate.add(1e9)
    assert rate.factor <= 5.0


def test_the_prediction_counts_as_measurements():
    rate = MeasuredRate(prior=1)
    assert not rate.is_measured
    rate.add(0.5)
    assert (rate.factor, rate.is_measured) == (0.75, True)


def test_machine_and_texts_are_measured_apart():
    rate = MeasuredRate()
    rate.add(0.5)
    for _ in range(50):
        rate.add_overall(0.25)
    assert (rate.speed, rate.factor, rate.count) == (0.5, pytest.approx(0.25, rel=0.01), 1)
    for _ in range(20):
        rate.add(1.0)
    assert rate.speed == pytest.approx(1.0, rel=0.01)
    assert rate.factor == pytest.approx(0.25, rel=0.01)
    rate.forget_texts()
    assert rate.factor == rate.speed
    rate.add_overall(0.0)  # the first one begins at the speed
    assert rate.factor == pytest.approx((rate.speed + 0.05) / 2)
    for _ in range(200):
        rate.add_overall(1e9)
    assert rate.factor <= 5.0
    rate.fade(0.8, 1.0)
    assert (rate.factor, rate.speed) == pytest.approx((0.8, 0.8))


# --- steering a driver -----------------------------------------------------------------------------------------------


def test_a_policy_must_fit_the_chain(target):
    driver = LockstepDriver([always_right(target), target], SpeculationConfig(lookahead=(4,)))
    with pytest.raises(ValueError, match="1 lookahead"):
        driver.steer(SpeculationConfig(lookahead=(4, 4)))


def test_what_resting_means():
    assert SpeculationConfig(lookahead=(0,)).rests
    assert SpeculationConfig(lookahead=(4, 0)).rests
    assert SpeculationConfig(lookahead=()).rests
    assert not SpeculationConfig(lookahead=(0, 4)).rests
    assert SpeculationConfig(lookahead=(0, 4)).max_draft_tokens(1) == 0


# --- the pipeline ----------------------------------------------------------------------------------------------------


def table(*right: float, positions: int = 200) -> np.ndarray:
    """Draft i agrees with the target at this share of the positions."""
    generator = np.random.default_rng(0)
    return np.stack([np.where(generator.random(positions) < r, 0, i + 1) for i, r in enumerate(right)], 1).astype(
        np.uint8
    )


def pipeline(monkeypatch, models, profile, tables, **more) -> Pipeline:
    monkeypatch.setattr(
        "pipespec.pipeline.AutoDriver",
        functools.partial(AutoDriver, profile=profile, tables={"greedy": tables}, **more),
    )
    return Pipeline(models[-1], models[:-1], schedule="auto")


@pytest.fixture
def one_core(monkeypatch):
    monkeypatch.setattr(autos.os, "sched_getaffinity", lambda pid: {0})


class Readings:
    """A clock that counts how often it is read, as seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def reports(pipe, count, new=24, **more):
    out = []
    for prompt in random_prompts(count, seed=8):
        pipe.generate(prompt[None], max_new_tokens=new, **({"do_sample": False} | more))
        out.append(pipe.report)
    return out


def test_it_begins_as_planned_and_says_so(monkeypatch, target, one_core):
    models = [always_right(target), target]
    with pipeline(monkeypatch, models, chain(1e-3, 1e-2), table(0.9)) as pipe:
        assert pipe.plan.speculates
        report = reports(pipe, 1)[0]
        assert report.schedule == "lockstep"
        assert report.stages[-1].accepted > 0
        assert report.decisions[0].startswith("lockstep: predicted")
        assert report.decisions[0] in str(report)
        assert report.to_dict()["decisions"] == report.decisions
    assert Pipeline(target, schedule="plain").plan is None


def test_a_plan_for_nothing_learns_better(monkeypatch, target, one_core):
    """The table has a useless draft. The first text shows that the draft is useful."""
    with pipeline(monkeypatch, [always_right(target), target], chain(1e-3, 1e-2), table(0.0)) as pipe:
        assert not pipe.plan.speculates
        first, second = reports(pipe, 2)
        assert first.schedule == "plain"
        assert any("planned again" in d for d in first.decisions)
        assert second.schedule == "lockstep"


def test_a_plan_for_something_learns_better(monkeypatch, target, one_core):
    with pipeline(monkeypatch, [always_wrong(target), target], chain(1e-3, 1e-2), table(0.9)) as pipe:
        assert pipe.plan.speculates
        last = reports(pipe, 3)[-1]
        assert last.schedule == "plain"
        assert last.stages[-1].name == "target"
        assert len(last.stages) == 1


def test_agreement_that_does_not_change_is_measured_less_often(monkeypatch, target, one_core):
    """The test's clock: each measurement takes a second and each call ten."""
    clock, asked = Readings(), []

    monkeypatch.setattr(autos, "_SHARE", 0.5)
    monkeypatch.setattr(
        agreement,
        "agreement_on",
        lambda *a, **k: asked.append(auto._in_calls_s) or np.zeros((16, 1), dtype=np.uint8),
    )
    with pipeline(monkeypatch, [always_right(target), target], chain(1e-3, 1e-2), table(1.0), clock=clock) as pipe:
        auto = pipe._driver
        prompt = np.zeros(4, dtype=np.int32)
        block = types.SimpleNamespace(target=0, length=lambda *a: 20, tokens=lambda *a: [1] * 16)
        call = types.SimpleNamespace(
            mode="greedy",
            inputs=types.SimpleNamespace(prompts=[prompt], sampling_params=SamplingParams()),
            driver=types.SimpleNamespace(block=block),
            candidate=pipe.plan.chosen,
            new_tokens=lambda: [16],
        )
        for _ in range(400):
            auto._in_calls_s += 10.0
            auto._measure_agreement(call)
    first = autos._ENOUGH // 16
    assert asked[:first] == [10.0 * (i + 1) for i in range(first)]  # until there is enough
    gaps = np.diff(asked[first:])
    assert list(gaps) == sorted(gaps)
    assert gaps[0] < gaps[-1] <= autos._MOST_PATIENCE * 2 / 0.5 + 10


def test_learning_takes_a_small_share_of_the_time(monkeypatch, target, one_core):
    """The test's clock counts its readings, so that learning from a call takes as long as some steps. The first calls are all learnt from."""
    clock, learnt = Readings(), []

    monkeypatch.setattr(autos, "_SHARE", 0.1)
    monkeypatch.setattr(agreement, "agreement_on", lambda *a, **k: np.zeros((16, 1), dtype=np.uint8))
    with pipeline(monkeypatch, [always_right(target), target], chain(1e-3, 1e-2), table(1.0), clock=clock) as pipe:
        auto, record = pipe._driver, pipe._driver.record(1, "greedy")
        measure = auto._record_rate

        def measured(*args):
            learnt.append(record.calls)
            clock.now += 20.0
            measure(*args)

        monkeypatch.setattr(auto, "_record_rate", measured)
        for _ in range(120):
            pipe.generate(torch.tensor([[5, 9, 3]]), max_new_tokens=32, do_sample=False)
            if record.calls == autos._LEARNT_CALLS:
                before = auto._in_calls_s
        in_calls = auto._in_calls_s - before
    assert learnt[: autos._LEARNT_CALLS] == list(range(1, autos._LEARNT_CALLS + 1))
    later = len(learnt) - autos._LEARNT_CALLS
    assert 0 < later < 60
    assert 20.0 * (later - 1) <= 0.1 * in_calls


@pytest.mark.parametrize("new", [4, 32])  # 4: too few to be measured
def test_learning_takes_a_small_share_where_step_times_change_with_each_call(monkeypatch, target, one_core, new):
    clock, spent = Readings(), [0.0]

    def timed(method):
        def run(*args, **more):
            began = clock.now
            try:
                return method(*args, **more)
            finally:
                spent[0] += clock.now - began

        return run

    monkeypatch.setattr(autos, "_SHARE", 0.1)
    monkeypatch.setattr(agreement, "agreement_on", lambda *a, **k: np.zeros((16, 1), dtype=np.uint8))
    with pipeline(monkeypatch, [always_right(target), target], chain(1e-3, 1e-2), table(1.0), clock=clock) as pipe:
        auto, record = pipe._driver, pipe._driver.record(1, "greedy")

        def refine(call):
            clock.now += 20.0
            record.measured.clear()
            record.is_stale = True

        monkeypatch.setattr(auto, "_refine", refine)
        for name in ("learn", "_planned"):
            monkeypatch.setattr(auto, name, timed(getattr(auto, name)))
        for _ in range(300):
            pipe.generate(torch.tensor([[5, 9, 3]]), max_new_tokens=new, do_sample=False)
            if record.calls == autos._LEARNT_CALLS:
                before, spent[0] = auto._in_calls_s, 0.0
        in_calls = auto._in_calls_s - before
    # Two readings of the clock per call that is not learnt from.
    assert spent[0] - 2 * 300 <= 0.1 * in_calls + 50


def test_another_number_of_threads_is_tried_once(monkeypatch, target, one_core):
    with pipeline(monkeypatch, [always_right(target), target], chain(1e-3, 1e-2), table(0.9)) as pipe:
        auto, record = pipe._driver, pipe._driver.record(1, "greedy")
        auto.profile = replace(auto.profile, threads=2)
        plan = planner.plan(auto.profile, auto.answers("greedy"), schedules=("lockstep",))
        both = {c.threads: c for c in plan.candidates if c.schedule == "lockstep"}
        assert set(both) == {1, 2}
        one, two = (replace(plan, chosen=both[n]) for n in (1, 2))
        # The choice itself runs first.
        assert auto._choose(one, record) == both[1]
        record.rate(both[1].key).add(1.0)
        # The user allows two threads.
        assert auto._choose(one, record) == both[2]
        record.rate(both[2].key).add(0.5)
        assert auto._choose(one, record) == both[1]
        record.measured.clear()
        record.rate(both[2].key).add(0.5)
        assert auto._choose(two, record) == both[2]


def test_a_trial_takes_a_small_share_of_the_time(monkeypatch, target, one_core):
    """It is repeated where nothing was measured, or the measurements are old."""
    clock, tried = Readings(), []

    models = [always_right(target), target]
    with pipeline(monkeypatch, models, chain(1e-3, 1e-2), table(0.9), clock=clock) as pipe:
        auto, record = pipe._driver, pipe._driver.record(1, "greedy")
        auto.profile = replace(auto.profile, threads=2)
        plan = planner.plan(auto.profile, auto.answers("greedy"), schedules=("lockstep",))
        one = replace(plan, chosen=next(c for c in plan.candidates if c.schedule == "lockstep" and c.threads == 1))
        monkeypatch.setattr(auto, "_planned", lambda *a, **k: one)
        record.trials = autos._MOST_TRIALS
        monkeypatch.setattr(
            autos.AutoDriver, "_driver_for", lambda self, *a, **k: (one, a[1], auto.pool.get(one.chosen))
        )
        record.rate(one.chosen.key).add(1.0)
        for _ in range(300):
            before = auto._in_calls_s
            pipe.generate(torch.tensor([[5, 9, 3]]), max_new_tokens=4, do_sample=False)  # too few to be measured
            if auto._call.candidate.threads == 2:
                tried.append((before, auto._in_calls_s))
        assert len(tried) >= 2
        for (began, ended), (again, _) in itertools.pairwise(tried):
            assert again - ended >= (ended - began) / autos._TRIALS - 1e-6


def test_steps_of_calls_correct_a_profile_of_a_busy_moment(monkeypatch, target, one_core):
    """The profile says an hour per step. The calls' own traces say what a step takes."""
    kept = []
    profile = chain(1.0, 3600.0, threads=1)
    with pipeline(monkeypatch, [always_wrong(target), target], profile, table(0.0)) as pipe:
        auto = pipe._driver
        monkeypatch.setattr(auto, "_store", lambda: kept.append(auto.profile))
        given, asked = reports(pipe, 1)[0], {"threads": 1, "context": 20}
        assert auto.profile == profile  # one that is given stays
        auto._key = "measured here"
        first = reports(pipe, 1)[0]
        assert given.schedule == first.schedule == "plain"
        assert any("times as long as planned: planned again" in decision for decision in first.decisions)
        assert kept[-1] == auto.profile
        (steps,) = auto._call.driver.traces().values()
        took = np.median((steps["end_ns"] - steps["launched_ns"])[steps["prefill"] == 0]) * 1e-9
        assert auto.profile.target.seconds(1, **asked) == pytest.approx(took)
        assert auto.profile.target.prompt_s(10, threads=1) < 3600
        assert auto.traces() == {}  # the user asked for none
        second = reports(pipe, 1)[0]
        assert auto.profile.target.seconds(1, **asked) < 3600
        assert second.schedule == "plain"


FIELDS = ("launched_ns", "end_ns", "width", "fed", "accepted", "prefill")


def traces(*turns):
    """Of a chain that runs in turns, by stage: each turn is a sequence of steps, each the stage, its width, its seconds and its accepted tokens."""
    now, found = 0, {}
    for stage, width, seconds, accepted in itertools.chain(*turns):
        steps = found.setdefault(stage, [])
        steps.append((now, now + round(seconds * 1e9), width, width, accepted, 0))
        now += round(seconds * 1e9)
    return {str(stage): np.array(found[stage], [(f, np.int64) for f in FIELDS]) for stage in sorted(found)}


def traced_call(auto, candidate, new, traces, rows=1, prompt=3):
    """A call of ``new`` tokens that ended with these traces."""
    auto._planned(planner.CallShape(rows, prompt, new), "greedy")
    block = Block(*[0] * rows)
    call = running_call(auto, candidate, block, auto.record(rows, "greedy"))
    call.threads, call.inputs.prompts = candidate.threads, [[1] * prompt] * rows
    call.driver.traces = lambda: traces
    block.lengths = [prompt + new] * rows
    return call


@pytest.fixture
def learning_auto(monkeypatch, target, one_core):
    """One that calls correct, with a draft whose first step after the target's takes a millisecond more."""
    profile = chain(1e-3, 1e-2, threads=1, cold_s=1e-3)
    with pipeline(monkeypatch, [always_right(target), target], profile, table(0.9)) as pipe:
        calls_correct(monkeypatch, pipe._driver)
        yield pipe._driver


def test_long_and_short_texts_in_turn_are_learnt_apart(learning_auto):
    """A trace keeps the newest steps: those of a long text have a longer context than the text on the mean."""
    auto = learning_auto
    plain = next(c for c in auto.plan.candidates if c.schedule == "plain")
    replanned = []
    for _ in range(4):
        for new, seconds in ((512, 2e-3), (4000, 50e-3)):
            auto._refine(traced_call(auto, plain, new, traces([("target", 1, seconds, 0)] * 256)))
            replanned.append(len(auto._decisions))
    assert replanned[-1] == replanned[1] <= 2
    found = [auto.profile.target.seconds(1, threads=1, context=c) for c in (387, 3875)]
    assert found == pytest.approx([2e-3, 50e-3], rel=0.01)


def test_where_the_steps_of_a_trace_were():
    steps = traces([("target", 3, 1.0, 2)] * 4 + [("target", 3, 1.0, 0)] * 2)["target"]
    assert autos._held(steps, 114, 1).tolist() == [100, 103, 106, 109, 112, 113]
    steps["prefill"][0] = 50
    assert autos._held(steps, 111, 1).tolist() == [100, 100, 103, 106, 109, 110]


def test_cold_caches_are_no_step_time(learning_auto):
    """With one draft token per round, each step of the draft follows one of the target."""
    auto = learning_auto
    found = next(c for c in auto.plan.candidates if c.schedule == "lockstep" and c.threads == 1)
    for _ in range(6):
        turns = traces(*[[("draft", 1, 2e-3, 0), ("target", 2, 1e-2, 1)]] * 60)
        auto._refine(traced_call(auto, replace(found, lookahead=(1,)), 120, turns))
    draft = auto.profile.stages[0]
    assert (draft.seconds(1, threads=1), draft.cold_s) == pytest.approx((1e-3, 1e-3), rel=0.01)
    for _ in range(12):  # all takes twice as long
        turns = traces(*[[("draft", 1, 4e-3, 0), ("draft", 1, 3e-3, 0), ("target", 3, 2e-2, 2)]] * 60)
        auto._refine(traced_call(auto, replace(found, lookahead=(2,)), 180, turns))
    draft = auto.profile.stages[0]
    assert (draft.seconds(1, threads=1), draft.cold_s) == pytest.approx((2e-3, 2e-3), rel=0.02)
    since = autos._since_others(list(turns.values()))
    assert [part[:5].tolist() for part in since] == [[0, 1, 0, 1, 0], [0, 0, 0, 0, 0]]


def test_other_step_times_do_not_forget_plain_decoding(learning_auto):
    """Its measured rate stays, whatever is predicted by now. What was measured of others is forgotten, but not where step times are the same."""
    auto = learning_auto
    auto.profile = auto.profile.adding([[replace(s.times[0], rows=4)] for s in auto.profile.stages])
    both = [auto.record(rows, "greedy") for rows in (1, 4)]
    for rows, record in zip((1, 4), both, strict=True):
        plan = auto._planned(planner.CallShape(rows), "greedy")
        record.rate(plan.plain.key).add(0.5)
        record.rate(plan.chosen.key).add(0.6)
        assert plan.chosen.key != plan.plain.key
    before = auto._planned(planner.CallShape(), "greedy").plain
    call = traced_call(auto, before, 64, traces([("target", 1, 1.6e-2, 0)] * 60))
    auto._refine(call)
    assert [record.is_stale for record in both] == [True, False]
    assert len(both[1].measured) == 2
    assert list(both[0].measured) == [before.key]
    after = auto._planned(planner.CallShape(), "greedy").plain
    assert after.step_s == pytest.approx(1.6 * before.step_s, rel=0.01)
    assert after.decoding_rate == pytest.approx(0.5 / before.step_s, rel=0.01)
    # The call's own rate is compared with what is predicted by now.
    assert call.candidate.step_s == pytest.approx(after.step_s)


def test_a_rate_beyond_all_measurements_is_forgotten():
    rate = MeasuredRate()
    rate.add(1e9)
    assert rate.rescale(0.5)
    assert rate.factor == 2.5
    assert not rate.rescale(1e-6)


class Slow:
    """A logits processor that transformers does not know."""

    def __call__(self, ids, scores):
        return scores


@pytest.mark.parametrize(
    "options",
    [
        {"logits_processor": [Slow()]},
        {"output_scores": True, "return_dict_in_generate": True},
        {"no_repeat_ngram_size": 3},
    ],
    ids=["processor", "scores", "ngrams"],
)
def test_steps_that_do_more_correct_nothing(monkeypatch, target, one_core, options):
    with pipeline(monkeypatch, [always_wrong(target), target], chain(1.0, 3600.0, threads=1), table(0.0)) as pipe:
        auto = pipe._driver
        calls_correct(monkeypatch, auto)
        before = auto.profile
        reports(pipe, 1, **options)
        assert auto.profile == before
        reports(pipe, 1)
        assert auto.profile != before


def test_a_trial_whose_call_fails_had_its_turn(monkeypatch, target, one_core):
    models = [always_right(target), target]

    class Stop(Exception):
        pass

    def stop(*args, **more):
        raise Stop

    with pipeline(monkeypatch, models, chain(1e-3, 1e-2), table(0.9), clock=Readings()) as pipe:
        auto, record = pipe._driver, pipe._driver.record(1, "greedy")
        auto.profile = replace(auto.profile, threads=2)
        plan = planner.plan(auto.profile, auto.answers("greedy"), schedules=("lockstep",))
        one = replace(plan, chosen=next(c for c in plan.candidates if c.schedule == "lockstep" and c.threads == 1))
        monkeypatch.setattr(auto, "_planned", lambda *a, **k: one)
        monkeypatch.setattr(auto, "_driver_for", lambda plan, c, *a, **k: (one, c, auto.pool.get(c)))
        record.trials = autos._MOST_TRIALS
        record.rate(one.chosen.key).add(1.0)
        ids, threads = torch.tensor([[5, 9, 3]]), []
        for _ in range(3):
            with pytest.raises(Stop):
                pipe.generate(ids, max_new_tokens=24, do_sample=False, stopping_criteria=[stop])
            threads.append(auto._call.candidate.threads)
        assert threads == [2, 1, 1]
        record.measured.clear()
        pipe.generate(ids, max_new_tokens=24, do_sample=False)
        assert auto._call.trial is None


def test_a_rest_has_no_more_threads_than_the_user_allows(monkeypatch, measured_auto):
    seen = []
    monkeypatch.setattr(autos, "set_threads", seen.append)
    call = running_call(measured_auto, measured_auto.plan.chosen, Block(0))
    call.driver.steer = lambda config: seen.append(config.threads)
    for call.most_threads in (1, 2):
        for rests in (True, False):
            measured_auto._let_rest(call, 2, rests)
    threads = call.candidate.threads
    assert seen == [1, 1, None, 1, 2, 2, None, threads]


def test_the_first_plan_is_nothing_learnt(monkeypatch, target, one_core):
    models = [always_right(target), target]
    with pipeline(monkeypatch, models, chain(1e-3, 1e-2), table(0.9), clock=Readings()) as pipe:
        assert pipe._driver._next_s == 0.0


def test_an_index_that_cannot_be_replayed_costs_no_text(monkeypatch, target, one_core):
    with pipeline(monkeypatch, [always_right(target), target], chain(1e-3, 1e-2), table(0.9)) as pipe:
        monkeypatch.setattr(pipe._driver, "_measure_agreement", lambda call: 1 / 0)
        with pytest.warns(StageFailure, match="ZeroDivisionError"):
            assert reports(pipe, 1)[0].schedule == "lockstep"


def test_wide_steps_are_tried_once_where_no_call_had_any(monkeypatch, target, one_core):
    """In a profile of a busy moment they may look so slow that no plan ever drafts more than two tokens."""
    models = [always_right(target), target]
    with pipeline(monkeypatch, models, chain(1e-3, 1e-2, threads=1), table(0.9)) as pipe:
        auto, record = pipe._driver, pipe._driver.record(1, "greedy")
        plan = auto._planned(planner.CallShape(), "greedy")
        short = replace(plan.chosen, lookahead=(2,), min_draft_tokens=2)
        record.plan = plan = replace(plan, chosen=short)
        assert auto._choose(plan, record) == short
        record.rate(short.key).add(1.0)
        assert auto._choose(plan, record) == short  # calls do not correct the step times of a profile that is given
        auto._key, record.profile = "measured here", auto.profile
        monkeypatch.setattr(auto, "_store", lambda: None)
        with monkeypatch.context() as patched:
            patched.setattr(auto, "_choose", lambda plan, record: short)
            reports(pipe, 1)
        record.rate(short.key).add(1.0)
        wide = auto._choose(plan, record)
        assert wide.lookahead == (autos._WIDE,)
        assert wide.key == short.key
        # Its rate is compared with the prediction for its own lookahead.
        alone = planner.predict(
            auto.profile, auto.answers("greedy"), replace(short, lookahead=(autos._WIDE,)), plan.call
        )
        assert wide.tokens_per_step == alone.tokens_per_step > short.tokens_per_step
        record.trial_s["width", short.key] = auto._in_calls_s + 1.0
        assert auto._choose(plan, record) == short  # the trial had its turn
        auto._in_calls_s += 1.0
        assert auto._choose(plan, record) == wide
        long = replace(short, lookahead=(autos._WIDE,))
        assert auto._choose(replace(plan, chosen=long), record) == long
        elsewhere = replace(short, schedule="workers")
        record.rate(elsewhere.key).add(1.0)
        assert auto._choose(replace(plan, chosen=elsewhere), record) == elsewhere  # its steps have no times
        auto._widest = dict.fromkeys(auto._widest, autos._WIDE)
        assert auto._choose(plan, record) == short


def test_all_settings_are_compared_rarely(monkeypatch, target, one_core):
    """Where agreement or step times change soon after a plan, only its candidates are predicted again."""
    with pipeline(monkeypatch, [always_right(target), target], chain(1e-3, 1e-2), table(0.9)) as pipe:
        auto, record, shape = pipe._driver, pipe._driver.record(1, "greedy"), planner.CallShape()
        whole = []
        plan = planner.plan
        monkeypatch.setattr(planner, "plan", lambda *args, **more: whole.append(1) or plan(*args, **more))
        auto._in_calls_s = 1.0
        record.is_stale = True
        first = auto._planned(shape, "greedy")
        assert len(whole) == 1
        assert auto._planned(shape, "greedy") == first
        auto.profile = replace(chain(1e-3, 2e-2), threads=2)
        record.is_stale = True
        again = auto._planned(shape, "greedy")
        assert len(whole) == 1
        assert again.plain.rate == pytest.approx(first.plain.rate / 2, rel=0.01)
        assert (
            again.chosen.lookahead
            == plan(auto.profile, auto.answers("greedy"), shape, schedules=("lockstep",)).chosen.lookahead
        )
        auto._in_calls_s = record.whole_s
        record.is_stale = True
        auto._planned(shape, "greedy")
        assert len(whole) == 2


def calls_correct(monkeypatch, auto) -> None:
    """Let calls correct the given profile, which is not stored."""
    auto._key = "measured here"
    monkeypatch.setattr(auto, "_store", lambda: None)


def test_steps_with_fewer_threads_than_planned_correct_nothing(monkeypatch, target, one_core):
    """The user may allow fewer threads by now, and a fork has one."""
    with pipeline(monkeypatch, [always_wrong(target), target], chain(1.0, 3600.0, threads=1), table(0.0)) as pipe:
        auto = pipe._driver
        calls_correct(monkeypatch, auto)
        before = auto.profile
        with monkeypatch.context() as patched:
            patched.setattr(autos, "threads_set", lambda count: nullcontext())
            patched.setattr(autos.torch, "get_num_threads", lambda: 4)
            reports(pipe, 1)
        assert auto.profile == before
        reports(pipe, 1)
        assert auto.profile != before


def test_steps_of_a_rest_are_of_other_threads(monkeypatch, target, one_core):
    with pipeline(monkeypatch, [always_wrong(target), target], chain(1.0, 3600.0, threads=1), table(0.0)) as pipe:
        auto = pipe._driver
        calls_correct(monkeypatch, auto)
        before = auto.profile
        prepare = auto._prepare

        def rested(request):
            call = prepare(request)
            call.rested_at = 0.0
            return call

        monkeypatch.setattr(auto, "_prepare", rested)
        reports(pipe, 1)
        assert auto.profile == before


def test_no_processes_are_started_for_a_trial(monkeypatch, target, one_core):
    with pipeline(monkeypatch, [always_right(target), target], chain(1e-3, 1e-2), table(0.9)) as pipe:
        auto, record = pipe._driver, pipe._driver.record(1, "greedy")
        plan = planner.plan(auto.profile, auto.answers("greedy"))
        workers, lockstep = (next(c for c in plan.candidates if c.schedule == s) for s in ("workers", "lockstep"))
        both = (replace(lockstep, rate=workers.rate), workers, plan.plain)
        near = replace(plan, candidates=both, chosen=both[0])
        record.rate(lockstep.key).add(1.0)
        assert auto._choose(near, record).key == lockstep.key
        drivers = auto.pool.drivers
        monkeypatch.setitem(drivers, (workers.schedule, workers.drafts), drivers[lockstep.schedule, lockstep.drafts])
        assert auto._choose(near, record).key == workers.key


def test_processes_that_were_measured_with_count_as_gone(monkeypatch, target, tmp_path):
    """A trial would start the processes again, in the middle of a call."""
    monkeypatch.setenv("PIPESPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(autos.os, "sched_getaffinity", lambda pid: {0, 1})
    made = []

    class InOurProcess(LockstepDriver):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(factory, "WorkersDriver", InOurProcess)
    monkeypatch.setattr(measure, "measure_stages", lambda *a, **k: chain(9e-3, 1e-2))
    auto = AutoDriver([random_llama(4, layers=1), target])  # a useless draft
    assert len(made) == 1
    assert not auto.plan.speculates
    assert not [at for at in auto.pool.drivers if at[0] == "workers"]
    auto.close()


def test_sampled_and_greedy_are_told_apart(monkeypatch, target, one_core):
    with pipeline(monkeypatch, [always_right(target), target], chain(1e-3, 1e-2), table(0.9)) as pipe:
        reports(pipe, 1)
        greedy = pipe._driver.tables["greedy"]
        reports(pipe, 1, do_sample=True, seed=1, top_k=0, temperature=0.8)
        assert set(pipe._driver.tables) == {"greedy", "sampled"}
        assert pipe._driver.tables["greedy"] is greedy
        assert (pipe._driver.tables["sampled"] == 0).mean() > 0.95  # coupled noise


def test_a_candidate_that_measures_slow_is_dropped(monkeypatch, target, one_core):
    """A candidate that is predicted to win and measured to lose is not chosen again."""
    with pipeline(monkeypatch, [always_right(target), target], chain(1e-3, 1e-2), table(1.0)) as pipe:
        for candidate in 8 * pipe.plan.candidates:
            pipe._driver.record(1, "greedy").rate(candidate.key).add(0.1 if candidate.schedule != "plain" else 1.0)
        assert reports(pipe, 1)[0].schedule == "plain"


def test_what_was_measured_for_one_shape_says_nothing_of_others(monkeypatch, target, one_core):
    with pipeline(monkeypatch, [always_right(target), target], chain(1e-3, 1e-2), table(1.0)) as pipe:
        auto = pipe._driver
        for candidate in 8 * pipe.plan.candidates:
            auto.record(1, "greedy").rate(candidate.key).add(0.1 if candidate.schedule != "plain" else 1.0)
        assert not auto._planned(planner.CallShape(1), "greedy").speculates
        assert auto._planned(planner.CallShape(1), "sampled").speculates
        assert auto._planned(planner.CallShape(3), "greedy").speculates
        assert auto.record(3, "greedy") is auto.record(4, "greedy")


class Block:
    """Of a driver with one draft and some rows."""

    def __init__(self, *lengths: int) -> None:
        self.target, self.lengths, self.alive = 1, list(lengths), True

    def length(self, stage, row):
        return self.lengths[row]

    def is_alive(self, stage):
        return self.alive


def running_call(auto, candidate, block, record=None):
    driver = types.SimpleNamespace(
        block=block, remarks=(), steer=lambda config: None, config=SpeculationConfig(lookahead=(4,))
    )
    inputs = types.SimpleNamespace(prompts=[[] for _ in block.lengths])
    shape = planner.CallShape(len(block.lengths), 64, 128)
    return autos._RunningCall(
        inputs, "greedy", shape, auto.plan, candidate, driver, autos._ShapeRecord() if record is None else record
    )


def ended_call(auto, candidate, tokens, seconds, record=None, *, rows=1, alive=True):
    """A call whose rows have ``tokens``, the others half of them."""
    block = Block(*[0] * rows)
    call = running_call(auto, candidate, block, record)
    call.begin_part(0.0)
    block.lengths, block.alive = [tokens, *[tokens // 2] * (rows - 1)], alive
    call.end_part(seconds)
    return call


def alone(auto, agreement, candidate):
    """Tokens per second that are predicted for a text of this agreement."""
    return planner.predict_alone(auto.profile, agreement, candidate, planner.CallShape(1, 64, 128)).decoding_rate


@pytest.fixture
def measured_auto(monkeypatch, target, one_core):
    """An ``auto`` whose draft is right in 0.9 of the positions, by its table."""
    with pipeline(monkeypatch, [always_right(target), target], chain(1e-3, 1e-2), table(0.9)) as pipe:
        yield pipe._driver


@pytest.mark.parametrize("share", [0.2, 0.6, 1.0])
@pytest.mark.parametrize("speed", [0.5, 1.0, 2.0])
def test_a_rate_is_compared_with_the_prediction_for_its_text(measured_auto, share, speed):
    auto, chosen, agreement = measured_auto, measured_auto.plan.chosen, table(share)[:200]
    record = autos._ShapeRecord()
    for _ in range(12):
        call = ended_call(auto, chosen, 200, 200 / (speed * alone(auto, agreement, chosen)), record)
        auto._record_rate(call, agreement)
    assert record.factors() == {chosen.key: pytest.approx(speed, rel=0.03)}


def test_only_the_parts_with_drafts_are_replayed(measured_auto):
    """The draft is right in the first 100 positions and rests in the others, where it would be wrong."""
    auto, chosen = measured_auto, measured_auto.plan.chosen
    agreement = np.concatenate([table(1.0)[:100], 1 + table(1.0)])
    block = Block(0)
    call = running_call(auto, chosen, block)
    call.begin_part(0.0)
    block.lengths = [100]
    call.end_part(100 / alone(auto, agreement[:100], chosen))
    block.lengths = [300]
    for _ in range(12):
        auto._record_rate(call, agreement)
    assert call.record.factors() == {chosen.key: pytest.approx(1.0, rel=0.03)}
    assert call.of_parts(agreement[:99]) is None  # a table that ends before the text


def test_texts_that_give_less_than_predicted_count(measured_auto):
    """Calls on texts of unknown agreement move the estimate step by step, until another agreement is measured."""
    auto, chosen = measured_auto, measured_auto.plan.chosen
    record = auto.record(1, "greedy")
    seconds = 200 * chosen.step_s / chosen.tokens_per_step  # half of the predicted rate
    auto._record_rate(ended_call(auto, chosen, 100, seconds, record), None)
    assert record.factors()[chosen.key] == pytest.approx(0.75)
    for _ in range(40):
        auto._record_rate(ended_call(auto, chosen, 100, seconds, record), None)
    assert record.factors()[chosen.key] == pytest.approx(0.5, rel=0.01)
    assert record.speeds() == {}
    auto._forget_plans()  # graphs or processes are lost: the texts are the same
    assert chosen.key in record.factors()
    auto._agreement_moved("greedy")
    assert chosen.key not in record.factors()


def test_a_row_of_a_batch_says_nothing_of_the_others(measured_auto):
    auto, chosen = measured_auto, measured_auto.plan.chosen
    call = ended_call(auto, chosen, 100, 1.0, rows=3)
    assert call.rate() == 100.0  # of the row that has most
    auto._record_rate(call, table(1.0))
    assert call.record.factors()
    assert call.record.speeds() == {}


@pytest.mark.parametrize("call", [{"tokens": 8}, {"seconds": 0.0}, {"alive": False}], ids=str)
def test_what_is_not_measured(measured_auto, call):
    """A text that is too short, and one that went on without its draft."""
    call = ended_call(measured_auto, measured_auto.plan.chosen, **{"tokens": 100, "seconds": 1e-9} | call)
    measured_auto._record_rate(call, None)
    assert call.record.factors() == {}


def test_measurements_fade_while_calls_run_otherwise(measured_auto):
    auto, chosen, plain = measured_auto, measured_auto.plan.chosen, measured_auto.plan.plain
    record = autos._ShapeRecord()
    record.rate(chosen.key).add(0.2)
    auto._record_rate(ended_call(auto, chosen, 8, 1.0, record), None)  # of the candidate that ran
    assert record.rate(chosen.key).speed == 0.6
    for _ in range(400):
        auto._record_rate(ended_call(auto, plain, 100, 100 * plain.step_s / 0.7, record), None)
    assert record.factors()[plain.key] == pytest.approx(0.7, rel=0.02)
    assert record.factors()[chosen.key] == pytest.approx(0.7, rel=0.03)  # the machine is slower for all


def test_nothing_fades_towards_what_was_not_measured(measured_auto):
    auto, chosen = measured_auto, measured_auto.plan.chosen
    record, other = autos._ShapeRecord(), ("workers", (0,), 1)
    record.rate(other).add_overall(0.3)
    before = record.factors()[other]
    auto._record_rate(ended_call(auto, chosen, 8, 1.0, record), None)
    assert record.factors() == {other: before}


def test_a_call_measures_without_the_rests(monkeypatch, measured_auto):
    """The test's clock: a plain token takes one second, one with drafts a tenth."""
    now, block = [0.0], Block(0, 0)
    call = running_call(measured_auto, measured_auto.plan.chosen, block)
    monkeypatch.setattr(measured_auto, "clock", lambda: now[0])
    call.begin_part(now[0])
    for rests in (False, True, False):
        if rests or block.lengths[0]:
            measured_auto._let_rest(call, 1, rests)
        for _ in range(50):
            block.lengths[0] += 1
            block.lengths[1] = min(block.lengths[0], 30)
            now[0] += 1.0 if rests else 0.1
    call.end_part(now[0])
    assert [(first, last) for first, last, _ in call.parts] == [(0, 50), (100, 150)]
    assert call.rate() == pytest.approx(10.0)


def test_the_rate_of_a_call_comes_from_its_text(monkeypatch, measured_auto, target):
    """From the call to the measured rate: the agreement of the text, of the drafts that ran, in the parts that were measured."""
    seen = []
    predict = planner.predict_alone
    monkeypatch.setattr(planner, "predict_alone", lambda *a, **k: seen.append((a[1], a[2], a[3])) or predict(*a, **k))
    asked = []
    right = np.arange(100, dtype=np.uint8).reshape(50, 2) % 3
    monkeypatch.setattr(agreement, "agreement_on", lambda *a, **k: asked.append(1) or right[:, -1:])
    auto = measured_auto
    with torch.no_grad():
        request_of = random_prompts(1, seed=3)[0]
    call = ended_call(auto, auto.plan.chosen, 50, 1.0)
    call.inputs.prompts = [request_of.numpy()]
    call.inputs.sampling_params = SamplingParams()
    length = len(request_of) + 50
    call.driver.block = types.SimpleNamespace(
        target=1, length=lambda *a: length, tokens=lambda *a: [1] * 50, is_alive=lambda i: True
    )
    call.parts = [(10, 40, 1.0)]
    call.driver.remarks = ()
    auto._call, auto._has_new_call = call, True
    auto.learn()
    assert asked == [1]
    ((found, candidate, shape),) = seen
    assert np.array_equal(found, right[10:40, -1:])
    assert (candidate.key, candidate.factor, shape) == (call.candidate.key, 1.0, call.shape)
    monkeypatch.setattr(planner, "predict_alone", lambda *a, **k: 1 / 0)
    auto._has_new_call = True
    with pytest.warns(StageFailure, match="could not be compared with its prediction"):
        auto.learn()


def test_a_draft_that_fails_costs_no_text(monkeypatch, target, one_core):
    """The draft fails while it drafts, in the measurement of agreement, or in the measurement of a batch."""
    draft = Faulty.like(target)
    with pipeline(monkeypatch, [draft, target], chain(1e-3, 1e-2), table(0.9)) as pipe:
        assert pipe.plan.speculates
        draft.set(fail_at=1)
        for prompts in (random_prompts(1, seed=8), random_prompts(2, seed=9)):
            ids, mask = left_pad(prompts)
            wanted = target.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False, pad_token_id=0)
            with pytest.warns(StageFailure) as seen:
                got = pipe.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False, pad_token_id=0)
            check(target, prompts, wanted, got, ids.shape[1], "a draft that fails")
            told = "\n".join(str(w.message) for w in seen)
            assert "agreement with a text could not be measured (ArithmeticError: made to fail)" in told
        assert "batches of 2 could not be measured" in told


def test_a_near_candidate_is_tried_once(monkeypatch, target, one_core):
    with pipeline(monkeypatch, [always_right(target), target], chain(1e-3, 1e-2), table(0.9)) as pipe:
        auto, record = pipe._driver, pipe._driver.record(1, "greedy")
        plan = planner.plan(auto.profile, auto.answers("greedy"))
        first, second = [c for c in plan.candidates if c.schedule != "plain"][:2]
        drivers = auto.pool.drivers
        monkeypatch.setitem(drivers, (second.schedule, second.drafts), next(iter(drivers.values())))
        record.rate(first.key).add(1.0)
        near = replace(plan, candidates=(first, replace(second, rate=0.95 * first.rate), plan.plain))
        assert auto._choose(near, record).key == second.key
        record.rate(second.key).add(1.0)
        assert auto._choose(near, record).key == first.key
        far = replace(plan, candidates=(first, replace(second, rate=0.5 * first.rate), plan.plain))
        del record.measured[second.key]
        assert auto._choose(far, record).key == first.key


def test_where_no_process_can_be_started(monkeypatch, target, capsys):
    monkeypatch.setattr(autos.os, "sched_getaffinity", lambda pid: {0, 1})

    def refuse(*args):
        raise RuntimeError("no more processes")

    monkeypatch.setattr(factory, "WorkersDriver", refuse)
    with pipeline(monkeypatch, [always_right(target), target], chain(5e-3, 1e-2), table(0.9)) as pipe:
        assert "no more processes" in capsys.readouterr().err
        assert "workers" not in {c.schedule for c in pipe.plan.candidates}
        assert reports(pipe, 1)[0].schedule in ("plain", "lockstep")


def test_what_was_measured_without_processes_is_not_kept(monkeypatch, target, tmp_path, capsys, measured_briefly):
    """The profile lacks the slowdown of concurrent stages, and processes may start the next time."""
    monkeypatch.setenv("PIPESPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(autos.os, "sched_getaffinity", lambda pid: {0, 1})

    def refuse(*args):
        raise RuntimeError("no more processes")

    monkeypatch.setattr(factory, "WorkersDriver", refuse)
    AutoDriver([random_llama(4, layers=1), target]).close()
    assert "no more processes); the profile is not kept" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_batch_is_measured_when_it_comes(monkeypatch, target, one_core):
    ids, mask = left_pad(random_prompts(3, seed=1))
    with pipeline(monkeypatch, [always_right(target), target], chain(1e-3, 1e-2), table(0.9)) as pipe:
        pipe.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
        assert pipe._driver.profile.target.has(4)
        assert pipe.plan.call.rows == 4


def test_no_speculation_where_rope_depends_on_the_length(monkeypatch, one_core):
    target = model_of("longrope")
    looks = []
    monkeypatch.setattr(CallSteering, "after_step", lambda steering: looks.append(1))
    with pipeline(monkeypatch, [always_right(target), target], chain(1e-3, 1e-2), table(0.9)) as pipe:
        with pytest.warns(UserWarning, match="the drafts rest"):
            pipe.generate(prompt_of(LIMIT - 8), max_new_tokens=32, do_sample=False)
        assert pipe.report.schedule == "lockstep"
        assert 0 < len(looks) <= 8  # then there is nothing to compare
        pipe.generate(prompt_of(LIMIT), max_new_tokens=8, do_sample=False)
        assert pipe.report.schedule == "plain"
        assert any("dynamic RoPE" in decision for decision in pipe.report.decisions)


@pytest.mark.parametrize("arguments", [{"lookahead": 4}, {"min_draft_tokens": 0}, {"decode_meanwhile": True}])
def test_what_auto_chooses_cannot_be_given(target, arguments):
    with pytest.raises(ValueError, match="schedule='auto' chooses"):
        Pipeline(target, [always_right(target)], schedule="auto", **arguments)


def test_the_profile_is_stored_and_a_corrupt_one_measured_again(
    monkeypatch, target, tmp_path, one_core, measured_briefly
):
    """With a real measurement, on one core."""
    monkeypatch.setenv("PIPESPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(profile_store, "_warned", set())
    draft = random_llama(4, layers=1)
    measured = []
    monkeypatch.setattr(
        measure, "measure_stages", lambda *a, f=measure.measure_stages, **k: measured.append(1) or f(*a, **k)
    )
    AutoDriver([draft, target]).close()
    again = AutoDriver([draft, target])
    assert len(measured) == 1
    assert len(again.tables["greedy"]) >= 16
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text()[:200])
    with pytest.warns(ProfileWarning, match="measured again"):
        AutoDriver([draft, target]).close()
    assert len(measured) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AutoDriver([draft, target]).close()
    assert len(measured) == 2


# --- the text --------------------------------------------------------------------------------------------------------


class Chaos:
    """Changes the settings at random: drafts off or on, long or short lookahead, waits."""

    generator = random.Random(1)
    switches = 0

    def __init__(self, call):
        self.driver, self.decisions = call.driver, []

    def after_step(self):
        drafts, generator = len(self.driver.config.lookahead), self.generator
        pick = generator.random()
        if not drafts or pick >= 0.7:
            return
        lookahead = tuple(0 if pick < 0.3 else generator.choice((0, 1, 3, 8)) for _ in range(drafts))
        minimum = 0 if pick < 0.3 else generator.choice((0, 0, 2))
        self.driver.steer(replace(self.driver.config, lookahead=lookahead, min_draft_tokens=minimum))
        type(self).switches += 1


def _chaos(monkeypatch, family, profile, schedule, tables, **more):
    monkeypatch.setattr(Chaos, "generator", random.Random(7))
    monkeypatch.setattr(Chaos, "switches", 0)
    monkeypatch.setattr(AutoDriver, "_steering_of", lambda auto, call: Chaos(call))
    monkeypatch.setattr(AutoDriver, "_measure_agreement", lambda *a: None)  # the plan stays
    seen = set()
    ties: list[str] = []
    rows = 0
    target = family[-1]
    with pipeline(monkeypatch, family, profile, tables, **more) as pipe:
        assert pipe.plan.chosen.schedule == schedule
        for number, batch in enumerate((1, 3, 1, 2)):
            prompts = random_prompts(batch, seed=100 + number)
            ids, mask = left_pad(prompts)
            wanted = target.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False, pad_token_id=0)
            got = pipe.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False, pad_token_id=0)
            ties += check(target, prompts, wanted, got, ids.shape[1], f"{schedule} {number}")
            rows += batch
            seen.add(pipe.report.schedule)
        with Pipeline(target, schedule="plain") as plain:
            for seed in range(2):
                prompt = random_prompts(1, seed=200 + seed)[0][None]
                arguments = {"max_new_tokens": 24, "do_sample": True, "seed": seed, "temperature": 0.9, "top_k": 0}
                got = pipe.generate(prompt, **arguments)
                assert torch.equal(got, plain.generate(prompt, **arguments))
    assert len(ties) <= 1, ties
    assert schedule in seen
    assert Chaos.switches > 20


def test_lockstep_switched_at_random_gives_the_same_text(monkeypatch, target, one_core):
    models = [noisy(target, 0.2), noisy(target, 0.02), target]
    _chaos(monkeypatch, models, chain(1e-4, 1e-3, 1e-2), "lockstep", table(0.5, 0.9))


def test_workers_switched_at_random_give_the_same_text(monkeypatch, target):
    monkeypatch.setattr(autos.os, "sched_getaffinity", lambda pid: {0, 1, 2})
    models = [noisy(target, 0.2), noisy(target, 0.02), target]
    _chaos(monkeypatch, models, chain(2e-3, 4e-3, 1e-2), "workers", table(0.5, 0.9))


def test_measured_planned_and_run_for_real(monkeypatch, target, tmp_path, measured_briefly):
    """A whole run without made-up parts: processes, profile, plan, calls."""
    monkeypatch.setenv("PIPESPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(autos.os, "sched_getaffinity", lambda pid: {0, 1})
    with Pipeline(target, [random_llama(4, layers=1)], schedule="auto") as pipe:
        assert pipe._driver.profile.stages[0].contention >= 0.0
        assert {c.schedule for c in pipe.plan.candidates} == {"plain", "lockstep", "workers"}
        for prompt in random_prompts(3, seed=3):
            wanted = target.generate(prompt[None], max_new_tokens=24, do_sample=False)
            got = pipe.generate(prompt[None], max_new_tokens=24, do_sample=False)
            check(target, [prompt], wanted, got, len(prompt), "auto")
            assert pipe.report.decisions
    assert len(list(tmp_path.iterdir())) == 1


# --- captured steps, which on a CPU run uncaptured -------------------------------------------------------------------

EVERY = ("plain", "lockstep", "streams")
WAYS = {
    "plain": (chain(9e-3, 1e-2), (5e-3, 5e-3)),
    "lockstep": (chain(1e-3, 1e-2), (2e-4, 5e-3)),
    "streams": (chain(1e-3, 1e-2), (3e-3, 5e-3)),
}
"""By schedule, a made-up profile for which the planner chooses it, and the seconds of captured steps."""


def graphs_profile(schedule):
    profile, steps = WAYS[schedule]
    return captured(profile, *steps, devices=(0, 1) if schedule == "streams" else ())


def with_graphs(monkeypatch, target, schedule, draft=None, **more) -> Pipeline:
    models = [draft or always_right(target), target]
    return pipeline(monkeypatch, models, graphs_profile(schedule), table(0.9), captured=EVERY, **more)


@pytest.fixture
def own():
    """A copy, because models of an open pipeline with captured steps have another attention."""
    return random_llama(0)


@pytest.mark.parametrize("schedule", EVERY)
def test_captured_steps_are_chosen_and_give_the_same_text(monkeypatch, own, target, schedule, one_core):
    with with_graphs(monkeypatch, own, schedule) as pipe:
        assert pipe.plan.chosen.schedule == schedule
        assert pipe.plan.chosen.captured
        monkeypatch.setattr(
            AutoDriver, "learn", lambda auto: setattr(auto, "remarks", (auto.plan.why,))
        )  # the plan stays
        for prompt in random_prompts(3, seed=8):
            wanted = target.generate(prompt[None], max_new_tokens=60, do_sample=False)
            got = pipe.generate(prompt[None], max_new_tokens=60, do_sample=False)
            check(target, [prompt], wanted, got, len(prompt), schedule)
            report = pipe.report
            assert report.schedule == schedule
            assert report.decisions[0].startswith(pipe.plan.chosen.way + ":")
            assert [s.name for s in report.stages] == (["target"] if schedule == "plain" else ["draft 0", "target"])
        drivers = pipe._driver.pool.drivers
        assert {type(d) for d in drivers.values()} == {StreamsDriver if schedule == "streams" else RoundsDriver}
        with Pipeline(target, schedule="plain") as plain:
            arguments = {"max_new_tokens": 24, "do_sample": True, "seed": 3, "temperature": 0.9, "top_k": 0}
            assert torch.equal(pipe.generate(prompt[None], **arguments), plain.generate(prompt[None], **arguments))
    assert own.config._attn_implementation == "sdpa"


def test_streams_switched_at_random_give_the_same_text(monkeypatch, own):
    profile = captured(chain(1e-3, 1e-2), 2e-3, 5e-3, devices=(0, 1))
    _chaos(monkeypatch, [noisy(own, 0.02), own], profile, "streams", table(0.9), captured=EVERY)


def test_on_a_cpu_nothing_is_captured(monkeypatch, target, one_core):
    monkeypatch.setattr(measure, "measure_captured", None)
    with pipeline(monkeypatch, [always_right(target), target], graphs_profile("lockstep"), table(0.9)) as pipe:
        assert pipe._driver.captured == ()
        assert not any(c.captured for c in pipe.plan.candidates)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"suppress_tokens": [9]}, "run on the host, position by position: Suppress"),
        ({"no_repeat_ngram_size": 3}, "run on the host, position by position: NoRepeatNGram"),
    ],
)
def test_a_call_that_needs_the_host_is_planned_without_graphs(monkeypatch, own, target, arguments, why, one_core):
    prompt = random_prompts(1, seed=8)[0][None]
    options = {"max_new_tokens": 24, "do_sample": False}
    with with_graphs(monkeypatch, own, "lockstep") as pipe:
        monkeypatch.setattr(AutoDriver, "_measure_agreement", lambda *a: None)
        rounds = next(iter(pipe._driver.pool.drivers.values()))
        pipe.generate(prompt, **options)
        rooms = list(rounds.target.all_buffers())
        with pytest.warns(SpeedWarning, match=f"without CUDA graphs: .*{why}.*; leave"):
            got = pipe.generate(prompt, **options, **arguments)
        assert not pipe.plan.chosen.captured
        assert pipe.report.schedule in ("plain", "lockstep")
        assert any(d.startswith("without CUDA graphs: ") and why in d for d in pipe.report.decisions)
        assert rounds.remarks == ()
        wanted = target.generate(prompt, **options, **arguments)
        if not isinstance(got, torch.Tensor):
            got, wanted = got.sequences, wanted.sequences
        assert torch.equal(got, wanted)
        # The next call runs in the captured steps again.
        pipe.generate(prompt, **options)
        assert pipe.plan.chosen.captured
        assert not any("without" in d for d in pipe.report.decisions)
        assert all(a is b for a, b in zip(rooms, rounds.target.all_buffers(), strict=True))


@pytest.mark.filterwarnings("ignore::pipespec.drivers.base.SpeedWarning")
def test_a_batch_whose_captured_steps_cannot_be_measured(monkeypatch, own, one_core):
    """A batch that is too large for the memory gives one warning, and other sizes keep their graphs."""
    asked = []

    def out_of_memory(*args, rows, **more):
        asked.append(rows)
        raise torch.OutOfMemoryError("CUDA out of memory")

    with with_graphs(monkeypatch, own, "lockstep") as pipe:
        monkeypatch.setattr(measure, "measure_captured", out_of_memory)
        ids, mask = left_pad(random_prompts(4, seed=8))
        for _ in range(2):
            pipe.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
        assert asked == [4]
        reports(pipe, 1)
        assert pipe._driver.captured
        assert pipe.plan.chosen.captured


def test_what_stays_is_not_counted_as_free(monkeypatch, own, one_core):
    """The graphs keep their caches during a call that needs the host."""
    prompt = left_pad(random_prompts(1, seed=2))[0]
    seen = []
    with with_graphs(monkeypatch, own, "lockstep") as pipe:
        pipe.generate(prompt, max_new_tokens=8, do_sample=False)
        monkeypatch.setattr(
            pipelines, "check_memory", lambda *a, reusable_bytes, **more: seen.append(dict(reusable_bytes()))
        )
        pipe.generate(prompt, max_new_tokens=8, do_sample=False)
        pipe.generate(prompt, max_new_tokens=8, do_sample=False, no_repeat_ngram_size=3)
    assert seen[0].get("cpu", 0) > 0
    assert seen[1].get("cpu", 0) == 0


def test_a_call_whose_fixed_caches_do_not_fit(monkeypatch, own, one_core):
    checked = []

    def check_memory(*args, graphs, **more):
        checked.append(graphs)
        if graphs:
            raise DoesNotFit("no room")

    monkeypatch.setattr(pipelines, "check_memory", check_memory)
    with with_graphs(monkeypatch, own, "lockstep") as pipe:
        report = reports(pipe, 1)[0]
        assert checked == [True, False]
        assert any("do not fit the memory" in d for d in report.decisions)
        assert not pipe.plan.chosen.captured
        (rounds,) = (d for d in pipe._driver.pool.drivers.values() if isinstance(d, RoundsDriver))
        assert rounds.target.all_buffers() == []  # its memory is released


def refuse_capture(*args, **more):
    raise NotCapturable("target", "model.layers.0.mlp (Strange)", "RuntimeError: it looks at its numbers")


@pytest.mark.parametrize("stored", [True, False], ids=["profile", "measuring"])
def test_models_that_cannot_be_captured(monkeypatch, own, target, stored, one_core):
    """One warning; from then on auto plans without graphs."""
    monkeypatch.setattr(GraphedDriver, "__init__", refuse_capture)
    profile = graphs_profile("lockstep") if stored else chain(1e-3, 1e-2)
    models = [always_right(own), own]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pipeline(monkeypatch, models, profile, table(0.9), captured=EVERY) as pipe:
            assert pipe._driver.captured == ()
            assert pipe.plan.chosen.way == "lockstep"
            got = reports(pipe, 2)
    assert [str(w.message).partition(" cannot be")[0] for w in told if w.category is SpeedWarning] == [
        f"schedule='auto': {'target' if stored else 'draft 0'}"
    ]
    assert "without CUDA graphs" in str(told[0].message)
    assert {report.schedule for report in got} <= {"plain", "lockstep"}


def test_a_call_that_cannot_be_captured_is_the_last_one_tried(monkeypatch, own, target, one_core):
    """The same stages run the call uncaptured, its time does not count for captured steps, and no later call tries to capture."""
    with with_graphs(monkeypatch, own, "lockstep") as pipe:
        rounds = next(iter(pipe._driver.pool.drivers.values()))
        monkeypatch.setattr(rounds, "on_gpu", True)
        monkeypatch.setattr(rounds, "capture", refuse_capture)
        monkeypatch.setattr(rounds, "_drop_graphs", lambda: None)
        prompt = random_prompts(1, seed=8)[0][None]
        wanted = target.generate(prompt, max_new_tokens=24, do_sample=False)
        with pytest.warns(SpeedWarning, match="in lockstep, step by step: .*it looks at its numbers") as told:
            got = pipe.generate(prompt, max_new_tokens=24, do_sample=False, return_dict_in_generate=True)
        assert torch.equal(got.sequences, wanted)
        assert got.past_key_values is not None
        assert len(told) == 1
        assert any("step by step" in d for d in pipe.report.decisions)
        assert ("lockstep, graphs", (0,), 2) not in pipe._driver.record(1, "greedy").factors()
        assert own.config._attn_implementation == "sdpa"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert all("graphs" not in d for report in reports(pipe, 2) for d in report.decisions)


def test_captured_steps_are_measured_when_they_are_missing(monkeypatch, own, tmp_path, one_core, measured_briefly):
    """Captured steps that an older profile or a batch lacks are measured and stored."""
    monkeypatch.setenv("PIPESPEC_CACHE", str(tmp_path))
    asked = []
    capture = measure.measure_captured
    monkeypatch.setattr(
        measure, "measure_captured", lambda *a, rows: asked.append(rows) or capture(*a, rows=rows, widths=(1, 4))
    )
    models = [random_llama(4, layers=1), own]
    AutoDriver(models, ngram=NgramDraft()).close()
    assert asked == []
    AutoDriver(models, captured=EVERY, ngram=NgramDraft()).close()
    assert asked == [1]
    AutoDriver(models, captured=EVERY, ngram=NgramDraft()).close()
    assert asked == [1]
    AutoDriver(models, ngram=NgramDraft()).close()
    monkeypatch.setattr("pipespec.pipeline.AutoDriver", functools.partial(AutoDriver, captured=EVERY))
    ids, mask = left_pad(random_prompts(3, seed=1))
    for _ in range(2):
        with Pipeline(own, models[:1], schedule="auto") as pipe:
            pipe.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
            assert pipe._driver.profile.target.has(4, captured=True)
        assert asked == [1, 4]


def test_the_steps_of_a_round_are_measured(monkeypatch, own, one_core):
    """The test's clock: each new token takes a hundredth of a second."""
    auto = []

    def clock():
        call = auto[0]._call if auto else None
        return 0.01 * max(call.new_tokens()) if call is not None and call.driver.block is not None else 0.0

    with with_graphs(monkeypatch, own, "lockstep", clock=clock) as pipe:
        auto.append(pipe._driver)
        chosen = pipe.plan.chosen
        reports(pipe, 1, new=60)
        call = pipe._driver._call
        assert call.candidate == chosen
        ((first, last, seconds),) = call.parts
        assert 0 < first < 20  # those of the first step
        assert last == 60
        assert seconds == pytest.approx(0.01 * (last - first))
        assert call.record.factors()[chosen.key] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_everything_is_measured_and_the_text_is_the_same(own, monkeypatch, tmp_path):
    monkeypatch.setenv("PIPESPEC_CACHE", str(tmp_path))
    prompts = [p[None].cuda() for p in random_prompts(3, seed=3)]
    draft, target = noisy(own, 0.02).cuda(), own.cuda()
    wanted = [target.generate(p, max_new_tokens=64, do_sample=False) for p in prompts]
    with Pipeline(target, [draft], schedule="auto") as pipe:
        ways = {c.way for c in pipe.plan.candidates}
        assert {"plain", "lockstep", "plain, graphs", "lockstep, graphs", "streams"} <= ways
        assert all(s.has(1, captured=True) for s in pipe._driver.profile.stages)
        for prompt, text in zip(prompts, wanted, strict=True):
            assert torch.equal(pipe.generate(prompt, max_new_tokens=64, do_sample=False), text)
    assert target.config._attn_implementation == "sdpa"
