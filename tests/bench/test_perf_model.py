"""The perf model: invariants of any chain, the engine's own policy, speed."""

import math
import subprocess
import sys

import numpy as np
import pytest

from bench.perf_model import Answers, SimulatedPolicy, StageModel, simulate, simulate_spd
from pipespec.config import SpeculationConfig
from tests.waiting import SECONDS

SCHEDULES = ("asynchronous", "reference", "reference-lockstep")
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
        policy = SimulatedPolicy(min_draft_tokens=min_draft_tokens, lookahead=12)
        result, again = (simulate(schedule, stages, acceptance, tokens, policy=policy, seed=seed) for _ in range(2))
        fastest = stages[0].times()[0]
        assert result.tokens == tokens
        assert result.seconds >= tokens * fastest / (1 + 12)
        target = result.stages[-1]
        assert target.steps <= tokens
        assert target.rollbacks == 0  # the target takes no corrections
        for stage in result.stages:
            assert stage.accepted <= stage.drafted
            assert stage.histogram.sum() == stage.steps
        assert (
            target.histogram @ np.arange(len(target.histogram)) >= tokens - 1
        )  # the reference has one from its prompt
        assert again.seconds == result.seconds
        assert [s.steps for s in again.stages] == [s.steps for s in result.stages]


def test_better_drafts_are_never_worse_on_average():
    # A lookahead counts the tokens under verification, too: 32 would slow this chain down.
    policy = SimulatedPolicy(lookahead=64)
    rates = [
        simulate("asynchronous", CHAIN, (a, a), 20_000, policy=policy).rate for a in (0.0, 0.3, 0.6, 0.8, 0.9, 1.0)
    ]
    assert rates == sorted(rates)
    assert rates[0] == pytest.approx(1 / 20)
    assert rates[-1] == pytest.approx(1.0, rel=0.01)  # the smallest draft's own speed


def test_a_chain_of_one_is_plain_decoding():
    result = simulate("asynchronous", [StageModel(0.5, start_s=3.0)], (), 100)
    assert (result.seconds, result.stages[0].steps) == (53.0, 100)


def test_a_draft_on_another_device_never_costs_with_equal_steps():
    """Without a wait, and if a verification costs as much as a plain step, even a useless draft keeps the speed of plain decoding."""
    for a in (0.0, 0.01, 0.1):
        result = simulate("asynchronous", [StageModel(1.0), StageModel(7.0)], (a,), 2000)
        assert result.seconds <= 2000 * 7.0


def test_wide_steps_cost_what_the_table_says():
    flat, steep = StageModel(10.0), StageModel([10.0 + w for w in range(64)])
    draft = StageModel(1.0)
    assert (
        simulate("asynchronous", [draft, steep], (0.9,), 3000).rate
        < simulate("asynchronous", [draft, flat], (0.9,), 3000).rate
    )
    # Without accepted draft tokens, only one-token steps remain.
    assert simulate("asynchronous", [draft, steep], (0.0,), 3000).seconds == 30_000.0


def test_replayed_bits_decide():
    bits = np.ones(1000, dtype=bool)
    bits[9::10] = False
    result = simulate("reference-lockstep", CHAIN[::2], Answers.from_bits(bits), 1000, lookahead=20)
    # Its first token comes from its own prefill.
    assert result.stages[-1].accepted == 899


def test_correlated_stages_differ_from_independent_ones():
    """Two drafts with the same wrong tokens at the same places: the middle stage has nothing to correct."""
    rng = np.random.default_rng(0)
    bits = rng.random(4000) < 0.8
    together = simulate(
        "asynchronous", CHAIN, Answers.from_bits(bits, bits, same_mistake=np.ones(4000, dtype=bool)), 4000
    )
    assert together.stages[1].accepted == together.stages[1].drafted
    apart = simulate("asynchronous", CHAIN, Answers.from_bits(bits, bits), 4000)
    assert apart.stages[1].accepted < apart.stages[1].drafted


def test_a_wait_ends_at_its_deadline():
    late = [StageModel(1.0, start_s=1e9), StageModel(10.0)]
    # 1.5 times the expected time of four drafts, before every step but the last, which has no place for a draft.
    assert (
        simulate("asynchronous", late, (0.5,), 10, policy=SimulatedPolicy(min_draft_tokens=4)).seconds
        == 10 * 10 + 9 * 1.5 * 4
    )
    assert (
        simulate(
            "asynchronous", late, (0.5,), 10, policy=SimulatedPolicy(min_draft_tokens=4, decode_meanwhile=True)
        ).seconds
        == 100.0
    )


def test_decoding_meanwhile_pays_where_verification_is_expensive():
    stages = [StageModel(22.0), StageModel([120.0, 427.0])]

    def rate(**policy) -> float:
        return simulate("asynchronous", stages, (0.95,), 20_000, policy=SimulatedPolicy(lookahead=64, **policy)).rate

    assert rate(min_draft_tokens=10, decode_meanwhile=True) > 1.02 * max(
        rate(min_draft_tokens=0), rate(min_draft_tokens=10)
    )


def test_the_reference_pays_for_its_handshake():
    """Small models, whose draft step is a large part of the verifier's step: the wait for its end is expensive."""
    stages = [StageModel(11.2), StageModel([21.4, 25.8])]
    theirs = [simulate("reference", stages, (0.94,), 20_000, lookahead=look) for look in (0, 3)]
    for result in theirs:  # the verifier idles for a large part of the time
        assert result.stages[-1].steps * 25.8 < 0.9 * result.seconds
    slower = simulate("reference", stages, (0.94,), 20_000, lookahead=0, handshake_s=2.0)
    assert slower.rate < theirs[0].rate


def test_the_reference_waits_for_its_lookahead():
    result = simulate("reference", [StageModel(1.0), StageModel(10.0)], (1.0,), 5000, lookahead=40)
    assert result.stages[-1].histogram[:40].sum() == 0


def test_it_is_the_engines_policy():
    for lookahead in ((8, 4), (64, 40)):
        engine, found = SpeculationConfig(lookahead=lookahead), SimulatedPolicy(lookahead=lookahead).per_stage(3)
        assert [f[0] for f in found] == [engine.lookahead_of(i) for i in range(3)]
        assert [f[1] for f in found] == [engine.max_draft_tokens(i) for i in range(3)]


def test_predictions_need_no_torch():
    code = (
        "import sys\nsys.modules['torch'] = None\n"
        "from bench import closed_form\n"
        "from bench.perf_model import StageModel, simulate\n"
        "simulate('asynchronous', [StageModel(1.0), StageModel(5.0)], (0.5,), 100)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr


def test_a_wait_for_more_than_can_come_is_cut():
    stuck = SimulatedPolicy(lookahead=4, min_draft_tokens=(8,), patience=math.inf, width=64)
    assert simulate("asynchronous", [StageModel(1.0), StageModel(10.0)], (0.5,), 50, policy=stuck).tokens == 50


def test_spd_of_one_stage_is_plain_decoding_and_of_one_device_no_faster():
    assert simulate_spd([2.0], 0.5, 100).seconds == 200.0
    assert simulate_spd([0.5] * 4, 1.0, 1000, shared=True).rate <= 0.5
    bits = np.ones(100, dtype=bool)
    bits[50] = False
    assert simulate_spd([0.5] * 4, bits, 100).flushes == 1
