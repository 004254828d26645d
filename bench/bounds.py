"""Comparisons and bounds of speculative decoding in closed form: lockstep, break-even rates, the best minimum of draft tokens.

Symbols as in ``bench.closed_form``. These forms explain results in the docs page ``theory.md``.
"""

from __future__ import annotations

from collections.abc import Callable

from bench.closed_form import lockstep_rate, published_speedup, two_stage
from bench.validation import positive, probability

# --- lockstep ------------------------------------------------------------------------------------------------------


def lockstep_speedup(a: float, g: int, c: float) -> float:
    """Speed-up of lockstep over plain decoding: (1 - a^(g+1)) / ((1 - a) (g/c + 1)).

    Leviathan et al., arXiv 2211.17192, theorem 3.8. It assumes that a verification takes as long as a plain step.
    """
    return lockstep_rate(a, g, 1.0 / positive(c, "the ratio of step times"), 1.0)


def best_lockstep(a: float, c: float) -> tuple[int, float]:
    """Number of draft tokens, at least one, with the largest lockstep speed-up, and that speed-up.

    Raises:
        ValueError: ``a`` is 1, where more draft tokens are always better.
    """
    if probability(a, "the acceptance rate") == 1.0:
        raise ValueError("with an acceptance rate of 1 more drafts are always better")
    g, best = 1, lockstep_speedup(a, 1, c)
    while (more := lockstep_speedup(a, g + 1, c)) > best:  # unimodal: a concave over a linear function
        g, best = g + 1, more
    return g, best


def crossover_acceptance(c: float) -> float:
    """Acceptance rate a*(c) below which the best lockstep beats the published asynchronous form; 0 where it never does.

    The claim of arXiv 2505.01572 that asynchronous decoding is always faster holds for c <= 5 only. The loss is the plain step after
    each rejection. Waiting for a few draft tokens avoids it, see :func:`bench.closed_form.two_stage`.
    """

    return _always_ahead(lambda a: published_speedup(a, c) - best_lockstep(a, c)[1])


# --- policies ------------------------------------------------------------------------------------------------------


def best_min_draft_tokens(a: float, draft: float, verify: float, plain: float, most: int = 64) -> tuple[int, float]:
    """The ``min_draft_tokens`` (0 to ``most``) with the highest :func:`two_stage` rate, and that rate."""
    rates = [two_stage(a, draft, verify, plain, min_draft_tokens=w) for w in range(most + 1)]
    return rates.index(max(rates)), max(rates)


def break_even_acceptance(
    draft: float, verify: float, plain: float, *, min_draft_tokens: int = 0, handshake: float = 0.0
) -> float:
    """Acceptance rate above which :func:`two_stage` beats plain decoding; 1.0 where no rate does.

    Theorem 1 of arXiv 2505.01572, E[N(M)] > 1, is true of tokens per step and not of throughput. With verify = 3.5 plain and c = 10
    this rate is .73.
    """

    options = {"min_draft_tokens": min_draft_tokens, "handshake": handshake}
    if two_stage(1.0, draft, verify, plain, **options) * plain <= 1.0 + 1e-12:
        return 1.0
    return _always_ahead(lambda a: two_stage(a, draft, verify, plain, **options) * plain - 1.0 - 1e-12)


def _always_ahead(lead: Callable[[float], float]) -> float:
    """The acceptance rate above which ``lead`` is positive; 0 where it always is."""
    behind = [i / 400 for i in range(400) if lead(i / 400) <= 0]
    if not behind:
        return 0.0
    low, high = behind[-1], min(behind[-1] + 1 / 400, 1.0 - 1e-9)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if lead(middle) <= 0 else (low, middle)
    return (low + high) / 2
