"""Plans over made-up profiles: what is chosen, and why."""

from __future__ import annotations

import numpy as np
import pytest

from pipespec.planning import planner
from pipespec.planning.planner import Call, plan
from pipespec.planning.profile import Profile, StageProfile, StepTimes
from pipespec.planning.simulator import Answers


def stage(name: str, step_s: float, *, slope: float = 0.03, prefill_s: float = 0.0, threads=(1, 2)) -> StageProfile:
    widths = (1, 2, 4, 8, 16)
    times = tuple(StepTimes(n, 1, 64, widths, tuple(step_s * (1 + slope * (w - 1)) for w in widths)) for n in threads)
    return StageProfile(name, int(1e9 * step_s), times, prefill_s)


def chain(*steps: float, contention: float = 0.0, threads: int = 2, **more) -> Profile:
    names = [f"draft {i}" for i in range(len(steps) - 1)] + ["target"]
    stages = tuple(stage(n, s, **more) for n, s in zip(names, steps, strict=True))
    return Profile(stages, threads, {2: contention, 3: contention})


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


def test_one_core_has_no_workers():
    found = plan(chain(1e-3, 1e-2), Answers((0.85,)), cores=1)
    assert {c.schedule for c in found.candidates} == {"plain", "lockstep"}


def test_the_right_drafts_in_the_right_order():
    # Draft 0 knows nothing; draft 1 is good.
    table = np.array([[1, 0]] * 9 + [[1, 2]], dtype=np.uint8)
    found = plan(chain(1e-3, 1e-3, 1e-2, contention=0.3), Answers(table=table))
    assert found.chosen.drafts == (1,)
    assert {c.drafts for c in found.candidates} == {(), (0,), (1,), (0, 1)}
    # The user gave the larger first: the quicker drafts for the slower.
    assert (1, 0) in planner.subsets(chain(2e-3, 1e-3, 1e-2))


def test_of_many_drafts_not_all_subsets():
    found = planner.subsets(chain(1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 1e-2))
    assert tuple(range(5)) in found
    assert len(found) == 11
    assert len(set(found)) == len(found)


def test_subsets_of_independent_pairs_multiply():
    own = planner._subset(Answers((0.5, 0.8)), (0,), 3)
    assert own.acceptance == (0.4,)
    assert planner.neighbours(Answers((0.5, 0.8)), (0, 1), 3) == [0.5, 0.8]
    table = np.array([[1, 1], [1, 0], [0, 0], [0, 0]], dtype=np.uint8)
    assert planner.neighbours(Answers(table=table), (0, 1), 3) == [0.75, 0.75]


def test_plain_takes_the_better_number_of_threads():
    slow_with_two = StageProfile(
        "target", 1, (StepTimes(1, 1, 64, (1,), (1e-3,)), StepTimes(2, 1, 64, (1,), (5e-3,))), 0.0
    )
    found = plan(Profile((slow_with_two,), 2), Answers())
    assert found.chosen.threads == 1
    assert found.chosen.rate == pytest.approx(1000)


def test_a_long_prompt_counts():
    short = plan(chain(1e-3, 1e-2, prefill_s=1e-3), Answers((0.85,)), Call(1, 10, 100), cores=1)
    long = plan(chain(1e-3, 1e-2, prefill_s=1e-3), Answers((0.85,)), Call(1, 5000, 100), cores=1)
    assert short.speculates
    assert not long.speculates  # in turn, the draft's prompt costs as much as the target's


def test_batches():
    found = plan(chain(1e-3, 1e-2), Answers((0.85,)), Call(rows=4))
    assert found.plain.rate == pytest.approx(400)


def test_what_was_measured_corrects():
    first = plan(chain(1e-3, 1e-2), Answers((0.85,)))
    second = planner.decide(first, {first.chosen.key: 0.1})
    assert second.chosen.key != first.chosen.key
    lost = planner.decide(first, {c.key: 0.1 for c in first.candidates if c.schedule != "plain"})
    assert not lost.speculates


def test_it_explains_itself_in_one_table():
    found = plan(chain(1e-3, 2e-3, 1e-2), Answers((0.8, 0.9)))
    lines = str(found).splitlines()
    assert len(lines) == 1 + len(found.candidates) + 1
    assert sum(line.startswith("->") for line in lines) == 1
    assert lines[-1] == found.why
    assert "draft 0 > draft 1 > target" in str(found)
    assert found.to_dict()["chosen"]["schedule"] == found.chosen.schedule


def test_the_same_again():
    assert plan(chain(1e-3, 1e-2), Answers((0.7,))) == plan(chain(1e-3, 1e-2), Answers((0.7,)))


def test_the_ladder_climbs():
    profile, answers = chain(1e-3, 1e-2), Answers((0.7,))
    chosen = next(c for c in plan(profile, answers).candidates if c.schedule == "lockstep")
    rungs = planner.ladder(profile, answers, chosen, Call())
    assert [r.acceptance for r in rungs] == sorted(r.acceptance for r in rungs)
    assert rungs[0].windows[-1] < rungs[-1].windows[-1]
    assert rungs[0].rate < rungs[-1].rate
    assert planner.ladder(profile, answers, plan(profile, answers).plain, Call()) == ()


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
        name, parameters, prefill_s = "target", 1, 0.0

        def seconds(self, width, **more):
            return 0.0

    class Chain:
        stages, threads = (Zero(), Zero()), 1

        def overlap(self, stages):
            return 0.0

    with pytest.raises(ValueError, match="step time of target"):
        plan(Chain(), Answers((0.5,)))


def test_calls_that_cannot_be():
    with pytest.raises(ValueError, match="at least 1"):
        Call(rows=0)
