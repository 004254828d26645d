"""Formulas: known values, limits, identities, and comparison with simulations."""

import math

import numpy as np
import pytest

from bench import closed_form as cf
from bench import theory
from bench.perf_model import simulate_spd
from pipespec_spd import law
from tests.trials import trials

ACCEPTANCE = (0.0, 0.2, 0.5, 0.8, 0.95, 0.999)


# --- known values and identities -----------------------------------------------------------------------------------


@pytest.mark.parametrize("a", ACCEPTANCE)
@pytest.mark.parametrize("g", [0, 1, 4, 20])
def test_accepted_run_is_the_sum_it_abbreviates(a, g):
    assert cf.accepted_run(a, g) == pytest.approx(sum(a**t for t in range(g + 1)), rel=1e-9)


def test_limits_of_the_published_form():
    assert cf.tokens_per_step(0.7, 0) == pytest.approx(1.0)
    assert cf.tokens_per_step(0.0, 7) == 1.0
    assert cf.published_speedup(1.0, 12.0) == pytest.approx(12.0)
    assert cf.tokens_per_step(0.8, 1e6) == pytest.approx(1 / (1 - 0.8**2))
    assert cf.verify_probability(0.0, 5) == 0.0
    assert cf.verify_probability(1.0, 5) == 1.0


@pytest.mark.parametrize("a", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("g", [0.5, 1, 10])
def test_theorem_1(a, g):
    assert cf.tokens_per_step(a, g) > 1.0
    assert cf.tokens_per_step(0.0, g) == 1.0


@pytest.mark.parametrize("a", ACCEPTANCE)
@pytest.mark.parametrize("c", [2, 5, 20])
def test_the_generalised_form_contains_the_published_one(a, c):
    assert cf.two_stage(a, 1.0, c, c) * c == pytest.approx(cf.published_speedup(a, c), rel=1e-9)
    assert cf.chain_rate([a], 1.0, [c], [c]) * c == pytest.approx(cf.published_speedup(a, c), rel=1e-9)
    assert cf.published_chain_speedup([a], [c]) == pytest.approx(cf.published_speedup(a, c))


def test_values_worked_out_elsewhere():
    """a = .8, c = 20: without a wait, with the best one, and the best lockstep."""
    assert cf.two_stage(0.8, 1, 20, 20) * 20 == pytest.approx(2.76, abs=0.005)
    min_draft_tokens, rate = cf.best_min_draft_tokens(0.8, 1, 20, 20)
    assert (min_draft_tokens, rate * 20) == (6, pytest.approx(3.31, abs=0.005))
    assert cf.best_lockstep(0.8, 20) == (8, pytest.approx(3.09, abs=0.005))
    assert [cf.crossover_acceptance(c) for c in (3, 5)] == [0.0, 0.0]
    found = [cf.crossover_acceptance(c) for c in (6, 8, 10, 15, 20, 40)]
    assert found == pytest.approx([0.43, 0.65, 0.73, 0.83, 0.875, 0.94], abs=0.006)
    even = [cf.break_even_acceptance(1, 10 * r, 10) for r in (1.2, 1.5, 2, 3.5)]
    assert even == pytest.approx([0.17, 0.33, 0.50, 0.73], abs=0.006)
    even = [cf.break_even_acceptance(1, c, c, handshake=0.5) for c in (2, 5, 10)]
    assert even == pytest.approx([0.56, 0.30, 0.22], abs=0.006)


def test_break_even_is_where_plain_decoding_is_met():
    a = cf.break_even_acceptance(1, 25, 10, min_draft_tokens=2)
    assert cf.two_stage(a, 1, 25, 10, min_draft_tokens=2) == pytest.approx(1 / 10)
    assert (
        cf.break_even_acceptance(1.0, 1000.0, 1.0) == 1.0
    )  # never, with a draft as slow as the target and expensive verification


@pytest.mark.parametrize("n", [1, 2, 4, 16])
@pytest.mark.parametrize("a", [0.0, 0.5, 0.9, 1.0])
def test_spd_forms_belong_together(a, n):
    length = law.spd_accepted_length(a, n)
    assert length == pytest.approx(law.spd_speedup(a, n, 20.0))
    if n == 1:
        assert length == 1.0


# --- against simulation --------------------------------------------------------------------------------------------


def test_published_form_within_the_sampling_error():
    rows = theory.published_grid(6000)
    assert len(rows) == 24
    for row in rows:
        # Six standard errors, estimated from eight runs, plus the cost of the first and last tokens.
        assert abs(row.error) < 6 * row.noise + 0.002, row
    assert abs(np.mean([row.error for row in rows])) < 0.003


def test_generalised_form_within_two_percent():
    rows = theory.generalised_grid(trials(ci=3000, nightly=6000), acceptance=(0.3, 0.8))
    assert len(rows) > 150
    for row in rows:
        assert abs(row.error) < 0.02 + 2 * row.noise, row
        assert abs(row.error) < 6 * row.noise + 0.003, row
    errors = np.array([row.error for row in rows])
    assert abs(errors.mean()) < 0.002
    assert np.sqrt((errors**2).mean()) < 0.01


def test_generalised_form_with_its_lag_describes_our_protocol():
    errors = np.array([row.error for row in theory.protocol_grid(12000, acceptance=(0.7,))])
    assert np.sqrt((errors**2).mean()) < 0.012
    assert np.abs(errors).max() < 0.03


def test_recursions_for_three_stages_are_optimistic_but_not_by_much():
    for published, generalised in theory.chain_grid(8000):
        assert -0.01 < published.error < 0.05, published
        assert 0.0 < generalised.error < 0.15, generalised


def test_spd_law_within_the_sampling_error():
    for row in theory.spd_grid(20000):
        assert abs(row.error) < 5 * row.noise + 0.002, row


def test_spd_wall_clock():
    a, n, step, cost = 0.8, 8, 28.4, 2.0
    simulated = simulate_spd([step / n] * n, a, 200_000, cycle_s=cost, seed=1)
    assert step * simulated.rate == pytest.approx(law.spd_speedup(a, n, step, cost), rel=0.01)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: law.spd_tokens_per_cycle(1.1, 4), "probability"),
        (lambda: law.spd_tokens_per_cycle(math.nan, 4), "probability"),
        (lambda: law.spd_tokens_per_cycle(0.5, 0), "stages"),
        (lambda: law.spd_speedup(0.5, 4, 0.0), "positive"),
        (lambda: law.spd_speedup(0.5, 4, math.inf), "positive"),
    ],
)
def test_the_law_refuses_what_cannot_be(call, says):
    with pytest.raises(ValueError, match=says):
        call()
