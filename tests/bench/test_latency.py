"""The simulation of links with delay agrees with the simulator without delay, and with what follows from the protocols."""

from __future__ import annotations

import pytest

from bench import latency
from pipespec.planning.perf_model import SimulatedPolicy, StageModel, simulate, simulate_spd


def choices(tokens: int, acceptance: float, seed: int = 0):
    return latency._Choices(tokens, acceptance, seed)


@pytest.mark.parametrize("acceptance", [0.0, 0.8, 1.0])
def test_ranks_without_delay_are_workers(acceptance):
    tokens = 300
    mine = [latency.ranks_seconds((0.1, 1.0), (8,), 0.0, choices(tokens, acceptance, seed))[0] for seed in range(4)]
    policy = SimulatedPolicy(lookahead=8)
    other = simulate("workers", [StageModel(0.1), StageModel(1.0)], [acceptance], 4 * tokens, policy=policy)
    assert (tokens - 1) / (sum(mine) / 4) == pytest.approx(other.rate, rel=0.1)


def test_spd_without_delay():
    text = choices(300, 0.8)
    seconds, cycles = latency.spd_seconds([0.25] * 4, 0.1, 0.0, text)
    assert seconds == pytest.approx(0.25 * cycles)
    others = [simulate_spd([0.25] * 4, 0.8, 1000, draft_s=0.1, seed=seed).rate for seed in range(4)]
    assert 298 / seconds == pytest.approx(sum(others) / 4, rel=0.1)


def test_the_target_of_a_chain_waits_for_no_link():
    """With any delay a token takes at most a step, and with a long one exactly that."""
    text = choices(60, 0.9)
    for delay in (0.5, 3.0, 200.0):
        seconds, steps = latency.ranks_seconds((0.1, 0.2, 1.0), (4, 8), delay, text)
        assert steps <= 59
        assert seconds == pytest.approx(steps)
    assert steps == 59


def test_a_full_circle_takes_its_stages_and_links():
    """Without rejections n tokens are in flight: each comes round in n stages and n + 1 links."""
    n, delay = 4, 0.3
    seconds, _ = latency.spd_seconds([0.25] * n, 0.01, delay, choices(402, 1.0), reads=False)
    assert seconds / 400 == pytest.approx((1 + (n + 1) * delay) / n, rel=0.02)


def test_the_picture_has_every_curve():
    found = {"ranks": [2.0, 1.0], "SPD": [3.0, 0.5]}
    drawn = latency.picture(found, (0.0, 1.0))
    assert drawn.startswith("<svg")
    assert all(name in drawn for name in found)
