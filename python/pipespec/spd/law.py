"""The law of speculative pipeline decoding (arXiv 2605.30852): tokens per cycle, accepted length, speed-up and number of stages."""

from __future__ import annotations

import math

from pipespec.planning.validation import non_negative, positive, probability


def spd_tokens_per_cycle(a: float, n: int) -> float:
    """Tokens per cycle of SPD with ``n`` stages: r = 1 / (n (1 - a) + a).

    k accepted draft tokens and one correction are k + 1 tokens in n + k cycles, since a correction empties the pipeline (SPD's state
    machine, arXiv 2605.30852). It assumes independent acceptance and one draft token per cycle. Limits: 1 at a = 1, where SPD is n times
    as fast as plain decoding because a cycle takes 1/n of a step, and 1/n at a = 0.

    Args:
        a: Acceptance rate.
        n: Number of stages.

    Raises:
        ValueError: ``a`` is no probability, or ``n`` is below 1.
    """
    a = probability(a, "the acceptance rate")
    return 1.0 / (_stages(n) * (1.0 - a) + a)


def spd_accepted_length(a: float, n: int) -> float:
    """Equivalent accepted length of SPD, n r = n / (n - (n - 1) a): the speed-up if a cycle costs 1/n of a step.

    Arguments and errors as for :func:`spd_tokens_per_cycle`.
    """
    return n * spd_tokens_per_cycle(a, n)


def spd_acceptance(length: float, n: int) -> float:
    """Acceptance rate of an accepted length, the inverse of :func:`spd_accepted_length`: a = (n - n/length) / (n - 1).

    Raises:
        ValueError: ``n`` is below 2, or ``length`` lies outside [1, n].
    """
    if n < 2:
        raise ValueError("with one stage nothing is drafted ahead: no acceptance rate follows")
    if not 1.0 <= length <= n:
        raise ValueError(f"the accepted length lies between 1 and the number of stages, {n}, not {length}")
    return (n - n / length) / (n - 1)


def spd_speedup(a: float, n: int, step: float, cycle_cost: float = 0.0) -> float:
    """Wall-clock speed-up of SPD: T / ((n (1 - a) + a) (T/n + cycle_cost)).

    It follows from :func:`spd_tokens_per_cycle`. It assumes equal stages on devices of their own, and a draft module that finishes
    within their step.

    Args:
        a: Acceptance rate.
        n: Number of stages.
        step: T, the time of a step of the whole target.
        cycle_cost: Fixed time per cycle for control, transfers and verification.
    """
    step = positive(step, "step")
    return step * spd_tokens_per_cycle(a, n) / (step / n + non_negative(cycle_cost, "cycle_cost"))


def spd_best_stages(a: float, step: float, cycle_cost: float) -> float:
    """Number of stages, as a real number, at which :func:`spd_speedup` is largest: sqrt(a T / ((1 - a) cycle_cost)).

    The zero of the derivative of :func:`spd_speedup` by n. Infinite at a = 1 or cycle_cost = 0.
    """
    a = probability(a, "the acceptance rate")
    step, cost = positive(step, "step"), non_negative(cycle_cost, "cycle_cost")
    if a == 1.0 or cost == 0.0:
        return math.inf
    return math.sqrt(a * step / ((1.0 - a) * cost))


def _stages(n: int) -> int:
    if n < 1:
        raise ValueError(f"the number of stages must be at least 1, not {n}")
    return n
