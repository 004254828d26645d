"""The perf model: invariants of any chain, the engine's own policy, speed, bad input."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pipespec.config import SpeculationConfig
from pipespec.planning.perf_model import Answers, SimulatedPolicy, StageModel, simulate, simulate_spd
from pipespec_kernels.confidence import confidence_of
from tests.waiting import SECONDS

SCHEDULES = ("workers", "lockstep", "reference", "reference-lockstep")
CHAIN = [StageModel(1.0), StageModel([4.0, 4.5]), StageModel([20.0, 21.0])]


def random_settings(count: int):
    rng = np.random.default_rng(5)
    for seed in range(count):
        stages = int(rng.integers(2, 5))
        steps = np.cumprod(rng.uniform(1.1, 6.0, stages))
        models = [StageModel([t, t * rng.uniform(1.0, 2.0)], start_s=float(rng.uniform(0, 5))) for t in steps]
        yield seed, models, tuple(rng.uniform(0, 1, stages - 1)), int(rng.integers(0, 6))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_holds_for_any_chain(schedule):
    tokens = 300
    for seed, stages, acceptance, min_draft_tokens in random_settings(25):
        result = simulate(
            schedule,
            stages,
            acceptance,
            tokens,
            policy=SimulatedPolicy(min_draft_tokens=min_draft_tokens, lookahead=12),
            seed=seed,
        )
        fastest = stages[0].times()[0]
        assert result.tokens == tokens
        assert result.seconds >= tokens * fastest / (1 + 12)
        target = result.stages[-1]
        assert target.steps <= tokens
        assert target.rollbacks == target.truncated == target.adopted == 0  # the target takes no corrections
        assert target.busy_s <= result.seconds + 1e-9
        for stage in result.stages:
            assert stage.accepted <= stage.drafted
            assert stage.histogram.sum() == stage.steps
        assert (
            target.histogram @ np.arange(len(target.histogram)) >= tokens - 1
        )  # the reference has one from its prompt
        again = simulate(
            schedule,
            stages,
            acceptance,
            tokens,
            policy=SimulatedPolicy(min_draft_tokens=min_draft_tokens, lookahead=12),
            seed=seed,
        )
        assert again.seconds == result.seconds
        assert [s.steps for s in again.stages] == [s.steps for s in result.stages]


def test_better_drafts_are_never_worse_on_average():
    # A lookahead counts the tokens under verification, too: 32 would slow this chain down.
    policy = SimulatedPolicy(lookahead=64)
    rates = [simulate("workers", CHAIN, (a, a), 20_000, policy=policy).rate for a in (0.0, 0.3, 0.6, 0.8, 0.9, 1.0)]
    assert rates == sorted(rates)
    assert rates[0] == pytest.approx(1 / 20)
    assert rates[-1] == pytest.approx(1.0, rel=0.01)  # the smallest draft's own speed


def test_a_draft_on_another_device_never_costs_with_equal_steps():
    """Without a wait, and if a verification costs as much as a plain step, even a useless draft keeps the speed of plain decoding."""
    for a in (0.0, 0.01, 0.1):
        result = simulate("workers", [StageModel(1.0), StageModel(7.0)], (a,), 2000)
        assert result.seconds <= 2000 * 7.0


def test_sharing_a_device_costs_what_contention_says():
    apart = [StageModel(1.0, device=0), StageModel(10.0, device=1)]
    shared = [StageModel(1.0, device=0), StageModel(10.0, device=0)]
    free = simulate("workers", apart, (0.8,), 5000).seconds
    assert simulate("workers", shared, (0.8,), 5000, contention=0.0).seconds == free
    half, full = (simulate("workers", shared, (0.8,), 5000, contention=k).seconds for k in (0.5, 1.0))
    assert free < half < full
    result = simulate("workers", shared, (0.8,), 5000, contention=1.0)
    assert result.stages[0].steps * 1.0 + result.stages[1].steps * 10.0 <= result.seconds * (1 + 1e-9)


def test_more_stages_than_cores_take_turns():
    """Without contention, as many stages as cores run at full speed. The work of all stages is at most that of the cores."""
    stages = [StageModel(s, device=0) for s in (1.0, 4.0, 10.0)]

    def run(contention, cores=None):
        return simulate("workers", stages, (0.8, 0.8), 3000, contention=contention, cores=cores)

    free = run(0.0)
    assert run(0.0, 3).seconds == free.seconds
    assert run(0.3, 8).seconds == run(0.3).seconds
    two, one = run(0.0, 2), run(0.0, 1)
    assert free.seconds < two.seconds < one.seconds
    for cores, result in ((2, two), (1, one)):
        work = sum(stage.steps * step for stage, step in zip(result.stages, (1.0, 4.0, 10.0), strict=True))
        assert work <= cores * result.seconds * (1 + 1e-9)
    assert work >= 0.9 * one.seconds  # one core is rarely idle
    # One shared core equals a device with contention 1.
    assert one.seconds == pytest.approx(run(1.0).seconds)


def test_the_target_keeps_its_core():
    """Three stages on two cores, drafts that are never right and never wait: the target runs as fast as alone, each draft at half its speed."""
    stages = [StageModel(s, device=0) for s in (1.0, 2.0, 10.0)]
    result = simulate(
        "workers", stages, (0.0, 0.0), 500, policy=SimulatedPolicy(lookahead=1000), contention=0.0, cores=2
    )
    assert result.seconds == 500 * 10.0
    for stage, step in zip(result.stages[:-1], (1.0, 2.0), strict=True):
        assert stage.steps * step == pytest.approx(result.seconds / 2, rel=0.01)


def test_a_wake_up_is_late_while_other_stages_occupy_all_cores():
    """Only with three stages on two cores do two drafts occupy all cores when the target wakes up."""
    policy = SimulatedPolicy(lookahead=4, min_draft_tokens=2, wake_s=0.25, late_s=4.0)
    prompt = SimulatedPolicy(lookahead=4, min_draft_tokens=2, wake_s=0.25)

    def seconds(chosen, stages, cores):
        models = [StageModel(s, device=0) for s in stages]
        answers = (0.8,) * (len(stages) - 1)
        return simulate("workers", models, answers, 1000, policy=chosen, contention=0.0, cores=cores).seconds

    assert seconds(policy, (1.0, 10.0), 2) == seconds(prompt, (1.0, 10.0), 2)
    assert seconds(policy, (1.0, 4.0, 10.0), 3) == seconds(prompt, (1.0, 4.0, 10.0), 3)
    assert seconds(policy, (1.0, 4.0, 10.0), 2) > 1.05 * seconds(prompt, (1.0, 4.0, 10.0), 2)
    assert seconds(policy, (1.0, 4.0, 10.0), None) == seconds(prompt, (1.0, 4.0, 10.0), None)


def test_sensitivity_to_other_stages():
    """Steps of 1 and 10, drafts that are never right and never wait. Beside the draft the target's steps take 1.5 times as long, or the same time at
    sensitivity 0."""

    def run(*sensitivity):
        stages = [StageModel(s, device=0, sensitivity=k) for s, k in zip((1.0, 10.0), sensitivity, strict=True)]
        return simulate("workers", stages, (0.0,), 2000, policy=SimulatedPolicy(lookahead=1000), contention=0.5)

    assert run(1.0, 0.0).seconds == run(0.0, 0.0).seconds == 20_000.0
    assert run(0.0, 1.0).seconds == pytest.approx(30_000.0, rel=0.01)
    assert run(0.0, 2.0).seconds == pytest.approx(40_000.0, rel=0.01)
    assert run(3.0, 0.0).stages[0].busy_s == pytest.approx(run(3.0, 0.0).stages[0].steps * 2.5, rel=0.01)


def test_the_first_steps_of_a_turn_are_cold():
    """Lockstep with three wrong drafts per round: 3 (1) + 10, plus the extra time of the draft's steps with cold caches."""
    stages = [StageModel(1.0, cold_s=0.8), StageModel(10.0, cold_s=0.0)]
    policy = SimulatedPolicy(lookahead=3)
    warm = simulate("lockstep", [StageModel(1.0), StageModel(10.0)], (0.0,), 500, policy=policy)
    cold = simulate("lockstep", stages, (0.0,), 500, policy=policy)
    assert cold.seconds - warm.seconds == pytest.approx(500 * (0.8 + 0.4 + 0.2), rel=0.01)
    assert cold.stages[0].busy_s - warm.stages[0].busy_s == pytest.approx(cold.seconds - warm.seconds)


def test_wide_steps_cost_what_the_table_says():
    flat, steep = StageModel(10.0), StageModel([10.0 + w for w in range(64)])
    draft = StageModel(1.0)
    assert (
        simulate("workers", [draft, steep], (0.9,), 3000).rate < simulate("workers", [draft, flat], (0.9,), 3000).rate
    )
    # Without accepted draft tokens, only one-token steps remain.
    assert simulate("workers", [draft, steep], (0.0,), 3000).seconds == 30_000.0


def test_rows_of_a_batch_wait_for_each_other():
    one = simulate("workers", CHAIN, (0.8, 0.8), 3000)
    batch = simulate("workers", CHAIN, (0.8, 0.8), 3000, rows=8)
    assert batch.tokens == 8 * one.tokens
    assert one.seconds < batch.seconds < 2 * one.seconds


def test_replayed_bits_decide():
    bits = np.ones(1000, dtype=bool)
    bits[9::10] = False
    result = simulate("lockstep", CHAIN[::2], Answers.from_bits(bits), 1000, policy=SimulatedPolicy(lookahead=9))
    assert result.stages[-1].steps == 100
    assert result.stages[-1].accepted == 900


def test_correlated_stages_differ_from_independent_ones():
    """Two drafts with the same wrong tokens at the same places: the middle stage has nothing to correct."""
    rng = np.random.default_rng(0)
    bits = rng.random(4000) < 0.8
    together = simulate("workers", CHAIN, Answers.from_bits(bits, bits, same_mistake=np.ones(4000, dtype=bool)), 4000)
    assert together.stages[1].accepted == together.stages[1].drafted
    apart = simulate("workers", CHAIN, Answers.from_bits(bits, bits), 4000)
    assert apart.stages[1].accepted < apart.stages[1].drafted


def test_a_wait_ends_at_its_deadline():
    late = [StageModel(1.0, start_s=1e9), StageModel(10.0)]
    # 1.5 times the expected time of four drafts, before every step but the last, which has no place for a draft.
    assert (
        simulate("workers", late, (0.5,), 10, policy=SimulatedPolicy(min_draft_tokens=4)).seconds
        == 10 * 10 + 9 * 1.5 * 4
    )
    assert (
        simulate("workers", late, (0.5,), 10, policy=SimulatedPolicy(min_draft_tokens=4, decode_meanwhile=True)).seconds
        == 100.0
    )


def test_decoding_meanwhile_pays_where_verification_is_expensive():
    stages = [StageModel(22.0), StageModel([120.0, 427.0])]

    def rate(**policy) -> float:
        return simulate("workers", stages, (0.95,), 20_000, policy=SimulatedPolicy(lookahead=64, **policy)).rate

    assert rate(min_draft_tokens=10, decode_meanwhile=True) > 1.02 * max(
        rate(min_draft_tokens=0), rate(min_draft_tokens=10)
    )


def test_the_reference_pays_for_its_handshake():
    """Small models, whose draft step is a large part of the verifier's step: the wait for its end is expensive."""
    stages = [StageModel(11.2), StageModel([21.4, 25.8])]
    theirs = [simulate("reference", stages, (0.94,), 20_000, lookahead=look) for look in (0, 3)]
    for result in theirs:  # the verifier idles for a large part of the time
        assert result.stages[-1].busy_s < 0.9 * result.seconds
    slower = simulate("reference", stages, (0.94,), 20_000, lookahead=0, handshake_s=2.0)
    assert slower.rate < theirs[0].rate


def test_the_reference_waits_for_its_lookahead():
    result = simulate("reference", [StageModel(1.0), StageModel(10.0)], (1.0,), 5000, lookahead=40)
    assert result.stages[-1].histogram[:40].sum() == 0


def test_waking_takes_its_time():
    policy = SimulatedPolicy(lookahead=1, wake_s=0.25)
    slow = simulate("workers", [StageModel(1.0), StageModel(10.0)], (1.0,), 1000, policy=policy)
    fast = simulate("workers", [StageModel(1.0), StageModel(10.0)], (1.0,), 1000, policy=SimulatedPolicy(lookahead=1))
    assert slow.seconds >= fast.seconds


def test_it_is_the_engines_policy():
    for lookahead in ((8, 4), (64, 40)):
        engine, model = (
            SpeculationConfig(lookahead=lookahead, min_draft_tokens=3),
            SimulatedPolicy(lookahead=lookahead, min_draft_tokens=3),
        )
        found = model.per_stage(3)
        assert [f[0] for f in found] == [engine.lookahead_of(i) for i in range(3)]
        assert [f[1] for f in found] == [engine.max_draft_tokens(i) for i in range(3)]
        assert [f[2] for f in found] == [0, 0, engine.min_draft_tokens]


def test_native_code_simulates_every_token():
    """Planning simulates millions of tokens, so a long simulation makes no more calls in Python than a short one."""

    def calls(tokens: int) -> int:
        events = []
        sys.setprofile(lambda frame, event, argument: events.append(event))
        try:
            simulate("workers", [StageModel(1.0), StageModel(5.0), StageModel(10.0)], (0.9, 0.9), tokens)
        finally:
            sys.setprofile(None)
        return len(events)

    calls(10)
    assert calls(100_000) == calls(100)


def test_planning_needs_no_torch():
    code = (
        "import sys\nsys.modules['torch'] = None\n"
        "from pipespec.planning import closed_form, steps\n"
        "from pipespec.planning.perf_model import StageModel, simulate\n"
        "simulate('workers', [StageModel(1.0), StageModel(5.0)], (0.5,), 100)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr


# --- bad input -----------------------------------------------------------------------------------------------------


def two(step: float = 1.0) -> list[StageModel]:
    return [StageModel(step), StageModel(10.0)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"answers": (1.5,)}, "probability"),
        ({"answers": (-0.5,)}, "probability"),
        ({"answers": (math.nan,)}, "probability"),
        ({"answers": (0.5, 0.5)}, "acceptance"),
        ({"stages": two(0.0)}, "positive"),
        ({"stages": two(-1.0)}, "positive"),
        ({"stages": two(math.nan)}, "positive"),
        ({"stages": [StageModel([]), StageModel(1.0)]}, "at least one step time"),
        ({"stages": [StageModel(1.0, start_s=-1.0), StageModel(1.0)]}, "negative"),
        ({"tokens": 0}, "tokens"),
        ({"tokens": -5}, "tokens"),
        ({"rows": 0}, "rows"),
        ({"seed": -1}, "seed"),
        ({"lookahead": -1}, "lookahead"),
        ({"contention": -0.5}, "contention"),
        ({"cores": 0}, "cores"),
        ({"stages": [StageModel(1.0, sensitivity=-1.0), StageModel(1.0)]}, "sensitivity"),
        ({"stages": [StageModel(1.0, cold_s=math.nan), StageModel(1.0)]}, "cold_s"),
        ({"handshake_s": -0.5}, "handshake"),
        ({"policy": SimulatedPolicy(lookahead=0)}, "lookahead"),
        ({"policy": SimulatedPolicy(lookahead=(4, 4))}, "lookahead"),
        ({"policy": SimulatedPolicy(min_draft_tokens=-1)}, "min_draft_tokens"),
        ({"policy": SimulatedPolicy(min_draft_tokens=(1, 1))}, "min_draft_tokens"),
        ({"policy": SimulatedPolicy(width=1)}, "width"),
        ({"policy": SimulatedPolicy(patience=-1.0)}, "patience"),
        ({"policy": SimulatedPolicy(late_s=-1.0)}, "late_s"),
        ({"answers": Answers(table=np.zeros((0, 1), np.uint8))}, "empty"),
        ({"answers": Answers(table=np.zeros((5, 2), np.uint8))}, "table"),
        ({"answers": Answers(table=np.zeros((5, 1), np.int64))}, "uint8"),
        ({"answers": Answers((0.5,), np.zeros((5, 1), np.uint8))}, "either"),
    ],
)
def test_nonsense_is_refused(schedule, arguments, says):
    call = {"stages": two(), "answers": (0.5,), "tokens": 10} | arguments
    with pytest.raises(ValueError, match=says):
        simulate(schedule, **call)


def test_more_nonsense():
    with pytest.raises(ValueError, match="schedule"):
        simulate("warp", two(), (0.5,), 10)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="stages"):
        simulate("workers", [StageModel(1.0)] * 17, (0.5,) * 16, 10)
    with pytest.raises(ValueError, match="one row"):
        simulate("reference", two(), (0.5,), 10, rows=2)
    with pytest.raises(ValueError, match="bool vectors"):
        Answers.from_bits(np.ones(3, bool), np.ones(4, bool))
    with pytest.raises(ValueError, match="one bool vector per draft"):
        Answers.from_bits()
    stuck = SimulatedPolicy(lookahead=4, min_draft_tokens=(8,), patience=math.inf, width=64)
    # max_draft_tokens follows the lookahead, so a longer wait is cut to the draft tokens that can come.
    assert simulate("workers", two(), (0.5,), 50, policy=stuck).tokens == 50


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"answers": 1.5}, "probability"),
        ({"answers": np.zeros(0)}, "bit"),
        ({"stage_s": []}, "stages"),
        ({"stage_s": [1.0, 0.0]}, "positive"),
        ({"draft_s": -1.0}, "draft_s"),
        ({"cycle_s": math.inf}, "cycle_s"),
        ({"tokens": 0}, "tokens"),
        ({"rows": 0}, "rows"),
    ],
)
def test_nonsense_for_spd(arguments, says):
    call = {"stage_s": [1.0, 1.0], "answers": 0.5, "tokens": 10} | arguments
    with pytest.raises(ValueError, match=says):
        simulate_spd(**call)


def test_spd_of_one_stage_is_plain_decoding_and_of_one_device_no_faster():
    assert simulate_spd([2.0], 0.5, 100).seconds == 200.0
    assert simulate_spd([0.5] * 4, 1.0, 1000, shared=True).rate <= 0.5
    bits = np.ones(100, dtype=bool)
    bits[50] = False
    assert simulate_spd([0.5] * 4, bits, 100).flushes == 1
    batch = simulate_spd([0.5] * 4, 0.8, 1000, rows=4)
    assert batch.tokens == 4000
    assert batch.seconds > simulate_spd([0.5] * 4, 0.8, 1000).seconds * 0.9


def with_confidence(spread: float, positions: int = 4000, rate: float = 0.9, seed: int = 3) -> Answers:
    """A draft that is right at ``rate`` of the positions, and surer of these by ``spread`` in log-odds."""
    numbers = np.random.default_rng(seed)
    right = numbers.random(positions) < rate
    logit = np.where(right, 1.0, -1.0) * spread / 2 + numbers.normal(0, 1, positions) + 2.0
    found = confidence_of(1 / (1 + np.exp(-logit)))[:, None]
    return replace(Answers.from_bits(right), confidence=found)


def test_confidence_pays_where_verification_is_expensive():
    """With the step times of the published 70B target, a count of draft tokens says less than their confidence."""
    stages = [StageModel(0.0115), StageModel([0.120, 0.427])]

    def rate(answers: Answers, **policy: Any) -> float:
        return simulate("workers", stages, answers, 4000, policy=SimulatedPolicy(lookahead=64, **policy)).rate

    informed = with_confidence(4.0)
    by_count = max(rate(informed, min_draft_tokens=w, decode_meanwhile=w > 0) for w in (0, 8, 12, 16, 20))
    assert rate(informed, confidence=True) > 1.05 * by_count
    assert rate(informed, confidence=True) > rate(with_confidence(1.0), confidence=True)


def test_confidence_in_lockstep_leaves_out_what_does_not_pay():
    stages = [StageModel(1.0), StageModel([5.0] + [5.0 + 0.3 * i for i in range(1, 32)])]
    informed = with_confidence(4.0, rate=0.8)

    def run(**policy: Any) -> Any:
        return simulate("lockstep", stages, informed, 4000, policy=SimulatedPolicy(**policy))

    by_count = max((run(lookahead=n) for n in range(1, 12)), key=lambda found: found.rate)
    by_confidence = run(lookahead=16, confidence=True)
    assert by_confidence.rate > 1.05 * by_count.rate
    target = by_confidence.stages[-1]
    assert target.accepted / target.drafted > by_count.stages[-1].accepted / by_count.stages[-1].drafted
    assert 0 < target.outcomes <= target.drafted
    assert target.squared_error / target.outcomes < 0.8 * 0.2  # of a chance that is always the mean


@pytest.mark.parametrize("schedule", ["workers", "lockstep"])
def test_confidence_changes_speed_and_nothing_else(schedule):
    """Whatever it says, all tokens come, and equal arguments give equal results."""
    numbers = np.random.default_rng(1)
    right = numbers.random((500, 2)) < 0.7
    answers = Answers.from_bits(*right.T)
    stages = [StageModel(1.0, device=0), StageModel(3.0, device=0), StageModel([9.0, 12.0], device=0)]
    for values in (0, 1, 255, None):
        shape = answers.table.shape
        found = numbers.integers(0, 256, shape) if values is None else np.full(shape, values)
        said = replace(answers, confidence=found.astype(np.uint8))
        policy = SimulatedPolicy(lookahead=8, confidence=True)
        runs = [simulate(schedule, stages, said, 400, policy=policy, rows=2) for _ in range(2)]
        assert runs[0].seconds == runs[1].seconds
        assert runs[0].tokens == 800 == (runs[0].stages[-1].histogram * np.arange(65)).sum()


def test_confidence_that_does_not_fit_is_refused():
    answers = Answers.from_bits(np.ones(8, dtype=bool))
    for wrong in (np.zeros((7, 1), dtype=np.uint8), np.zeros((8, 1))):
        with pytest.raises(ValueError, match="table of confidences must be uint8"):
            simulate("lockstep", [StageModel(1.0)] * 2, replace(answers, confidence=wrong), 10)
    with pytest.raises(ValueError, match="confidences belong to a table"):
        simulate("lockstep", [StageModel(1.0)] * 2, Answers((0.5,), confidence=np.zeros((8, 1), dtype=np.uint8)), 10)
