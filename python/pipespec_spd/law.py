"""The law of speculative pipeline decoding (arXiv 2605.30852): tokens per cycle, accepted length, speed-up."""

from __future__ import annotations


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
    if not 0.0 <= a <= 1.0:  # also refuses NaN
        raise ValueError(f"the acceptance rate is a probability, 0 to 1, not {a}")
    if n < 1:
        raise ValueError(f"the number of stages must be at least 1, not {n}")
    return 1.0 / (n * (1.0 - a) + a)


def spd_accepted_length(a: float, n: int) -> float:
    """Equivalent accepted length of SPD, n r = n / (n - (n - 1) a): the speed-up if a cycle costs 1/n of a step.

    Arguments and errors as for :func:`spd_tokens_per_cycle`.
    """
    return n * spd_tokens_per_cycle(a, n)


def spd_speedup(a: float, n: int, step: float, cycle_cost: float = 0.0) -> float:
    """Wall-clock speed-up of SPD: T / ((n (1 - a) + a) (T/n + cycle_cost)).

    It follows from :func:`spd_tokens_per_cycle`. It assumes equal stages on devices of their own, and a draft module that finishes
    within their step.

    Args:
        a: Acceptance rate.
        n: Number of stages.
        step: T, the time of a step of the whole target.
        cycle_cost: Fixed time per cycle for control, transfers and verification.

    Raises:
        ValueError: A time is negative, or ``step`` is 0.
    """
    if not (0 < step < float("inf") and 0 <= cycle_cost < float("inf")):
        raise ValueError(
            f"step must be a positive number and cycle_cost must not be negative, not {step} and {cycle_cost}"
        )
    return step * spd_tokens_per_cycle(a, n) / (step / n + cycle_cost)
