"""Plans from made-up profiles: the choice and its reason."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipespec.config import SpeculationConfig
from pipespec.drivers.graphed.rounds import round_steps
from pipespec.planning import planner
from pipespec.planning.planner import CallShape, plan
from pipespec.planning.profile import Profile, StageProfile, StepTimes
from pipespec.planning.simulator import Answers
from pipespec_kernels.scheduler import widths


def stage(
    name: str, step_s: float, *, slope: float = 0.03, prefill_s: float = 0.0, threads=(1, 2), **more
) -> StageProfile:
    widths = (1, 2, 4, 8, 16)
    seconds = tuple(step_s * (1 + slope * (w - 1)) for w in widths)
    times = tuple(StepTimes(n, 1, 64, widths, seconds, prefill_s) for n in threads)
    return StageProfile(name, int(1e9 * step_s), times, **more)


def chain(*steps: float, contention: float = 0.0, threads: int = 2, **more) -> Profile:
    names = [f"draft {i}" for i in range(len(steps) - 1)] + ["target"]
    shared = {"contention": contention, "burden": contention}
    stages = tuple(stage(n, s, **(shared | more)) for n, s in zip(names, steps, strict=True))
    return Profile(stages, threads)


def captured(profile: Profile, *steps: float, slope: float = 0.0, devices=()) -> Profile:
    """The profile with captured steps; ``devices``: of the stages. Default: one for all."""
    widths = (1, 2, 4, 8, 16, 32)
    times = [[StepTimes(2, 1, 64, widths, tuple(s * (1 + slope * w) for w in widths), captured=True)] for s in steps]
    found = profile.adding(times)
    placed = [replace(s, device=d) for s, d in zip(found.stages, devices or (0,) * len(steps), strict=True)]
    return replace(found, stages=tuple(placed))


@pytest.fixture(autouse=True)
def only_steps_take_time(monkeypatch):
    monkeypatch.setattr(planner, "BETWEEN_S", 0.0)
    monkeypatch.setattr(planner, "WAKE_S", 0.0)
    monkeypatch.setattr(planner, "LATE_S", 0.0)


def test_a_good_draft_speculates():
    found = plan(chain(1e-3, 1e-2), Answers((0.85,)))
    assert found.speculates
    assert found.chosen.rate > 1.5 * found.plain.rate
    assert found.chosen == found.candidates[0]
    assert found.chosen.drafts == (0,)


def test_a_useless_draft_does_not():
    found = plan(chain(1e-3, 1e-2), Answers((0.0,)))
    assert not found.speculates
    assert found.chosen == found.plain
    assert found.why.startswith("plain")


def test_a_slow_draft_does_not_either():
    found = plan(chain(9e-3, 1e-2, contention=1.0), Answers((0.8,)))
    assert not found.speculates


def test_a_small_gain_is_left_alone(monkeypatch):
    good = plan(chain(1e-3, 1e-2), Answers((0.85,)))
    gain = good.chosen.rate / good.plain.rate
    monkeypatch.setattr(planner, "MARGIN", gain * 1.01)
    found = plan(chain(1e-3, 1e-2), Answers((0.85,)))
    assert not found.speculates
    assert "margin" in found.why
    monkeypatch.setattr(planner, "MARGIN", gain * 0.99)
    assert plan(chain(1e-3, 1e-2), Answers((0.85,))).speculates


def test_stages_that_slow_each_other_down_take_turns():
    apart = plan(chain(1e-3, 1e-2), Answers((0.85,)))
    together = plan(chain(1e-3, 1e-2, contention=1.0), Answers((0.85,)))
    assert apart.chosen.schedule == "workers"
    assert together.chosen.schedule == "lockstep"
    workers = next(c for c in together.candidates if c.schedule == "workers")
    assert workers.ideal > workers.rate


def test_no_sleep_for_a_small_gain(monkeypatch):
    def waits(margin):
        monkeypatch.setattr(planner, "WAIT_MARGIN", margin)
        found = plan(chain(1e-3, 1e-2), Answers((0.85,)), schedules=("workers",))
        return found.chosen.min_draft_tokens if not found.chosen.decode_meanwhile else 0

    assert waits(1.0) > 0
    assert waits(10.0) == 0


def test_one_core_has_no_workers():
    found = plan(chain(1e-3, 1e-2), Answers((0.85,)), cores=1)
    assert {c.schedule for c in found.candidates} == {"plain", "lockstep"}


def test_the_right_drafts_in_the_right_order():
    # Draft 0 is always wrong; draft 1 is good.
    table = np.array([[1, 0]] * 9 + [[1, 2]], dtype=np.uint8)
    found = plan(chain(1e-3, 1e-3, 1e-2, contention=0.3), Answers(table=table))
    assert found.chosen.drafts == (1,)
    assert {c.drafts for c in found.candidates} == {(), (0,), (1,), (0, 1)}
    # The larger draft was given first. The faster one drafts for the slower one.
    assert (1, 0) in planner.subsets(chain(2e-3, 1e-3, 1e-2))


def test_of_many_drafts_not_all_subsets():
    found = planner.subsets(chain(1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 1e-2))
    assert tuple(range(5)) in found
    assert len(found) == 11
    assert len(set(found)) == len(found)


def test_subsets_of_independent_pairs_multiply():
    own = planner._subset(Answers((0.5, 0.8)), (0,), 3)
    assert own.acceptance == (0.4,)
    assert planner._subset(Answers((0.5, 0.8)), (0, 1), 3).acceptance == (0.5, 0.8)


def _target_with(one: float, two: float) -> Profile:
    times = StepTimes(1, 1, 64, (1,), (one,)), StepTimes(2, 1, 64, (1,), (two,))
    return Profile((StageProfile("target", 1, times),), 2)


def test_plain_takes_the_better_number_of_threads():
    found = plan(_target_with(1e-3, 5e-3), Answers())
    assert found.chosen.threads == 1
    assert found.chosen.rate == pytest.approx(1000)


def test_threads_are_the_users_where_it_matters_little():
    found = plan(_target_with(1e-3, 1.05e-3), Answers())
    assert found.chosen.threads == 2
    assert planner.decide(found, {found.chosen.key: 0.5}).chosen.threads == 2  # the machine is slow, for both
    assert planner.decide(found, {("plain", (), 1): 1.2, ("plain", (), 2): 1.0}).chosen.threads == 1


def test_a_gain_of_fewer_threads_is_not_a_gain_of_the_drafts():
    draft = stage("draft 0", 1e-3, slope=0.0)
    target = _target_with(1e-2, 1.08e-2).target
    found = plan(Profile((draft, target), 2), Answers(acceptance=(0.01,)), cores=2)
    workers = next(c for c in found.candidates if c.schedule == "workers")
    assert workers.rate > planner.MARGIN * found.plain.rate  # it has one thread
    assert found.chosen.key == found.plain.key == ("plain", (), 2)
    assert not found.speculates


def test_the_prompt_is_read_with_the_candidates_threads():
    times = tuple(StepTimes(n, 1, 64, (1,), (1e-3,), 4e-3 / n) for n in (1, 2))
    profile = Profile((StageProfile("target", 1, times),), 2)
    rates = [
        planner.predict(profile, Answers(), planner.Candidate("plain", (), (), 0, n, 0.0), CallShape(1, 100, 100)).rate
        for n in (1, 2)
    ]
    assert rates == pytest.approx([100 / 0.5, 100 / 0.3])


def test_ideally_only_steps_take_time(monkeypatch):
    candidate = planner.Candidate("workers", (0,), (8,), 0, 1, 0.0)
    wanted = planner.predict(chain(1e-3, 1e-2), Answers((0.8,)), candidate, CallShape()).rate
    monkeypatch.setattr(planner, "WAKE_S", 1e-3)
    monkeypatch.setattr(planner, "BETWEEN_S", 1e-3)
    shared = chain(1e-3, 1e-2, contention=0.5)
    assert planner.predict(shared, Answers((0.8,)), candidate, CallShape(), ideal=True, cores=1).rate == wanted
    assert planner.predict(shared, Answers((0.8,)), candidate, CallShape()).rate < 0.8 * wanted


def test_the_slowdown_of_a_draft_and_of_the_target():
    candidate = planner.Candidate("workers", (0,), (8,), 0, 1, 0.0)

    def rate(**more):
        return planner.predict(chain(1e-3, 1e-2, **more), Answers((0.9,)), candidate, CallShape()).rate

    # A slower draft costs less than a slower target. The target's own figures have no effect.
    assert rate(burden=0.5) < rate(contention=0.5, burden=0.0) < rate(contention=0.0)
    assert rate(burden=0.5, contention=0.5) < rate(burden=0.5)


def test_stages_in_turn_find_cold_caches():
    candidate = planner.Candidate("lockstep", (0,), (4,), 0, 1, 0.0)
    warm, cold = (
        planner.predict(chain(1e-3, 1e-2, cold_s=c), Answers((0.0,)), candidate, CallShape()).rate for c in (0.0, 1e-3)
    )
    # Four drafts per round: 1 + 1/2 + 1/4 + 1/8 ms more, and the target's own 1 ms.
    assert 1 / cold - 1 / warm == pytest.approx(1e-3 * (1 + 0.5 + 0.25 + 0.125 + 1), rel=0.01)


def test_a_long_table_is_replayed_as_a_whole():
    """The draft is perfect in the first quarter of the table and useless in the rest."""
    table = np.ones((2000, 1), dtype=np.uint8)
    table[:500] = 0
    candidate = planner.Candidate("workers", (0,), (8,), 0, 1, 0.0)
    found = planner.predict(chain(1e-3, 1e-2), Answers(table=table), candidate, CallShape())
    assert found.tokens_per_step < 1.4
    assert plan(chain(1e-3, 1e-2), Answers(table=table[::-1].copy())).speculates  # its end counts, too
    thin = planner._thinned(Answers(table=table)).table
    assert len(thin) == 512
    assert np.mean(thin == 0) == pytest.approx(0.25, abs=0.05)


def test_more_stages_than_cores_share_them():
    candidate = planner.Candidate("workers", (0, 1), (8, 8), 0, 1, 0.0)
    rates = [
        planner.predict(chain(1e-3, 4e-3, 1e-2), Answers((0.8, 0.8)), candidate, CallShape(), cores=n).rate
        for n in (2, 3, None)
    ]
    assert rates[0] < rates[1] == rates[2]


def test_a_long_prompt_counts():
    short = plan(chain(1e-3, 1e-2, prefill_s=1e-3), Answers((0.85,)), CallShape(1, 10, 100), cores=1)
    long = plan(chain(1e-3, 1e-2, prefill_s=1e-3), Answers((0.85,)), CallShape(1, 5000, 100), cores=1)
    assert short.speculates
    assert not long.speculates  # in lockstep, the draft's prompt costs as much as the target's


def test_batches():
    found = plan(chain(1e-3, 1e-2), Answers((0.85,)), CallShape(rows=4))
    assert found.plain.rate == pytest.approx(400)


def test_seconds_of_a_step():
    """Rows * tokens per step / seconds per step is the rate of decoding. If prompts take no time, it is the rate of the call."""
    for rows in (1, 4):
        for c in plan(chain(1e-3, 1e-2), Answers((0.85,)), CallShape(rows=rows)).candidates:
            assert rows * c.tokens_per_step / c.step_s == pytest.approx(c.rate, rel=0.02), c.way


def test_what_was_measured_corrects():
    first = plan(chain(1e-3, 1e-2), Answers((0.85,)))
    second = planner.decide(first, {first.chosen.key: 0.1, first.plain.key: 1.0})
    assert second.chosen.key != first.chosen.key
    slow = planner.decide(first, {first.chosen.key: 0.1})  # the machine, for all that is known
    assert slow.chosen.key == first.chosen.key
    assert slow.plain.rate == pytest.approx(0.1 * first.plain.rate)
    chains = {c.key: 0.1 for c in first.candidates if c.schedule != "plain"}
    lost = planner.decide(first, {**chains, first.plain.key: 1.0})
    assert not lost.speculates


def test_a_candidate_that_has_not_run_gets_what_the_others_have():
    made = plan(chain(1e-3, 2e-3, 1e-2), Answers((0.85, 0.9)))
    lockstep = [c for c in made.candidates if c.way == "lockstep"]
    workers = [c for c in made.candidates if c.way == "workers"]
    assert len(lockstep) > 1
    found = planner.decide(made, {made.plain.key: 0.5, lockstep[0].key: 1.0})

    def factor(candidate):
        now = next(c for c in found.candidates if c.key == candidate.key)
        assert now.rate == pytest.approx(now.factor * candidate.rate)
        assert now.decoding_rate == pytest.approx(now.factor * candidate.tokens_per_step / candidate.step_s)
        return now.factor

    assert factor(lockstep[0]) == 1.0
    assert factor(lockstep[1]) == 0.75
    assert [factor(c) for c in workers] == [0.5] * len(workers)
    # Without what single texts gave.
    found = planner.decide(made, {made.plain.key: 0.5, lockstep[0].key: 1.0}, {made.plain.key: 0.5})
    assert (factor(lockstep[0]), factor(lockstep[1])) == (1.0, 0.5)


def test_it_explains_itself_in_one_table():
    found = plan(chain(1e-3, 2e-3, 1e-2), Answers((0.8, 0.9)))
    lines = str(found).splitlines()
    assert len(lines) == 1 + len(found.candidates) + 1
    assert sum(line.startswith("->") for line in lines) == 1
    assert lines[-1] == found.why
    assert "draft 0 > draft 1 > target" in str(found)
    assert found.to_dict()["chosen"]["schedule"] == found.chosen.schedule


def test_why_names_the_plain_decoding_that_was_compared():
    made = plan(replace(chain(1e-3, 1e-2), threads=1), Answers((0.8,)), schedules=("lockstep",))
    assert made.why.startswith("lockstep: predicted ")
    assert "x of plain decoding with 1 thread, predicted " in made.why
    measured = {made.chosen.key: 1.0, made.plain.key: 0.5}
    gain = 2 * made.chosen.rate / made.plain.rate
    assert planner.decide(made, measured).why.startswith(f"lockstep: measured {gain:.2f}x of plain decoding with 1 thr")


def test_the_same_again():
    assert plan(chain(1e-3, 1e-2), Answers((0.7,))) == plan(chain(1e-3, 1e-2), Answers((0.7,)))


@pytest.mark.parametrize("acceptance", [-0.1, 1.1, float("nan")])
def test_impossible_probabilities(acceptance):
    with pytest.raises(ValueError, match="probability"):
        plan(chain(1e-3, 1e-2), Answers((acceptance,)))


def test_answers_of_other_chains():
    with pytest.raises(ValueError, match="pair of neighbours"):
        plan(chain(1e-3, 1e-2), Answers((0.5, 0.5)))
    with pytest.raises(ValueError, match="empty"):
        plan(chain(1e-3, 1e-2), Answers(table=np.zeros((0, 1), dtype=np.uint8)))


def test_zero_times():
    class Zero:
        name, parameters, contention, burden, cold_s, ngram = "target", 1, 0.0, 0.0, 0.0, False

        def prompt_s(self, tokens, **more):
            return 0.0

        def seconds(self, width, **more):
            return 0.0

        def step_times(self, widths, **more):
            return [0.0] * len(widths)

    class Chain:
        stages, threads, has_ngram = (Zero(), Zero()), 1, False

        def models(self, stages):
            return tuple(stages)

    with pytest.raises(ValueError, match="step time of target"):
        plan(Chain(), Answers((0.5,)))


def test_impossible_calls():
    with pytest.raises(ValueError, match="at least 1"):
        CallShape(rows=0)


# --- captured steps --------------------------------------------------------------------------------------------------

EVERY = ("plain", "lockstep", "streams")


def test_captured_steps_are_considered_when_asked():
    profile = captured(chain(1e-3, 1e-2), 2e-4, 5e-3)
    assert plan(profile, Answers((0.85,))) == plan(chain(1e-3, 1e-2), Answers((0.85,)))
    found = plan(profile, Answers((0.85,)), captured=EVERY)
    assert {c.way for c in found.candidates} == {
        "plain", "lockstep", "workers", "plain, graphs", "lockstep, graphs", "streams",
    }  # fmt: skip
    assert found.plain.way == "plain, graphs"
    assert found.plain.rate == pytest.approx(1 / 5e-3)
    assert found.chosen.way in ("lockstep, graphs", "streams")
    assert found.why.startswith(found.chosen.way)
    assert found.chosen.way in str(found)
    with pytest.raises(ValueError, match="no captured steps were measured"):
        plan(chain(1e-3, 1e-2), Answers((0.85,)), captured=EVERY)


def test_drafts_are_compared_with_plain_decoding_as_graphs():
    """The drafts are faster than eager plain decoding, and no faster than captured plain decoding."""
    profile = captured(chain(1e-3, 1e-2), 4e-3, 4e-3)
    found = plan(profile, Answers((0.5,)), captured=EVERY)
    assert found.chosen.way == "plain, graphs"
    assert not found.speculates
    assert found.why.startswith("plain, graphs: ")
    eager = planner.decide(planner.eager_only(found), {})
    assert eager.speculates
    assert not any(c.captured for c in eager.candidates)


def test_graphs_that_gain_nothing_are_left_alone():
    found = plan(captured(chain(1e-2, 1e-2), 1e-2, 0.99e-2), Answers((0.5,)), captured=EVERY)
    assert found.chosen.way == "plain"


def test_stages_on_one_gpu_share_it():
    one = captured(chain(1e-3, 1e-2), 1e-3, 1e-2)
    two = captured(chain(1e-3, 1e-2), 1e-3, 1e-2, devices=(0, 1))
    busy = planner.Candidate("streams", (0,), (8,), 0, 2, 0.0, captured=True)  # drafts all the time
    shared, alone = (planner.predict(profile, Answers((0.85,)), busy, CallShape()) for profile in (one, two))
    ideal = planner.predict(one, Answers((0.85,)), busy, CallShape(), ideal=True)
    assert shared.rate < 0.9 * alone.rate
    assert alone.rate == pytest.approx(ideal.rate)
    ways = [{c.way for c in plan(p, Answers((0.85,)), captured=EVERY).candidates} for p in (one, two)]
    assert ways[0] - ways[1] == {"lockstep, graphs"}  # a round is one graph, on one device


@pytest.mark.parametrize("lookahead", [(2,), (4,), (8,), (16,), (3, 8)])
def test_a_captured_step_is_charged_with_all_its_columns(lookahead):
    streams = planner.Candidate("streams", tuple(range(len(lookahead))), lookahead, 0, 1, 0.0, captured=True)
    policy = SpeculationConfig(lookahead=lookahead)
    most = 1 + max(lookahead)
    for place in range(len(lookahead) + 1):
        fed = {w: planner.columns(streams, place, w) for w in range(1, most + 1)}
        assert set(fed.values()) <= set(widths(most))
        assert all(w <= c < 2 * w for w, c in fed.items())
    rounds = replace(streams, schedule="lockstep")
    for part in round_steps(policy):  # room for a token of the stage's own, or some, and all draft tokens
        assert part.width >= planner.columns(rounds, part.stage, 1) >= 1 + policy.max_draft_tokens(part.stage)
    assert round_steps(policy)[-1].width == planner.columns(rounds, len(lookahead), 1)
    assert planner.columns(replace(rounds, captured=False), len(lookahead), 1) == 1


def test_wide_captured_steps_cost_what_they_are_padded_to(monkeypatch):
    """A step that is half full of draft tokens costs as much as a full one."""
    streams = planner.Candidate("streams", (0,), (6,), 0, 2, 0.0, captured=True)
    profile = captured(chain(1e-3, 1e-2), 0.7e-3, 5e-3, slope=0.1)
    padded = planner.predict(profile, Answers((0.8,)), streams, CallShape()).rate
    with monkeypatch.context() as without:
        without.setattr(planner, "columns", lambda candidate, place, width: width)
        assert padded < planner.predict(profile, Answers((0.8,)), streams, CallShape()).rate
    cheap, expensive = (
        plan(captured(chain(1e-3, 1e-2), 1e-3, 5e-3, slope=slope), Answers((0.6,)), captured=EVERY)
        for slope in (0.0, 0.5)
    )
    widest = {c.way: max(c.lookahead, default=0) for c in cheap.candidates}
    assert all(max(c.lookahead, default=0) <= widest[c.way] for c in expensive.candidates if c.captured)
    rate = {c.way: c.rate for c in expensive.candidates}
    assert rate["streams"] < max(c.rate for c in cheap.candidates if c.way == "streams")


def test_plain_decoding_of_a_candidate_has_its_kind_of_steps():
    found = plan(captured(chain(1e-3, 1e-2), 2e-4, 5e-3), Answers((0.85,)), captured=EVERY)
    for c in found.candidates:
        assert planner.plain_of(found, c).captured == c.captured
        assert planner.plain_of(found, c).schedule == "plain"
