"""Analytical model of speculative pipelines: the published formulas of PipeSpec, a generalised two-stage form, lockstep, and bounds.

Symbols:
    a: Acceptance rate, the probability that a draft token equals the verifier's token.
    g: Draft tokens in one verification. A fraction stands for a mean.
    c: Time of a verifier's one-token step divided by the time of a draft's one-token step.
    draft, plain, verify: Times of a draft's and of a verifier's one-token step, and of a verifier's step with draft tokens, whatever their number.

In a chain, ``acceptance[i]`` is a between stages i and i + 1, and other lists have a number per verifying stage. All times share one unit, and rates are tokens per that unit. "Published" means PipeSpec, arXiv 2505.01572, sections 3.2 and 3.3.
Probabilities must lie in [0, 1], and times be positive. The docs page ``theory.md`` has the derivations and the error of each form against the perf
model. The formulas of SPD are in :mod:`pipespec_spd.law`.
"""

import math
from collections.abc import Callable, Sequence


def accepted_run(a: float, g: float) -> float:
    """Expected tokens of one verification of ``g`` draft tokens, the verifier's own token included.

    S(g) = 1 + a + ... + a^g = (1 - a^(g+1)) / (1 - a), Leviathan et al., arXiv 2211.17192, equation 1. It assumes that acceptance
    is independent between positions. S is concave in g, so the value is an upper bound for a g that varies.
    """
    if a == 1.0:
        return g + 1.0
    # expm1 and log1p stay exact where a is close to 1.
    return 1.0 if a == 0.0 else -math.expm1((g + 1) * math.log(a)) / (1.0 - a)


# --- PipeSpec as published -----------------------------------------------------------------------------------------


def verify_probability(a: float, g: float) -> float:
    """Steady-state probability that a step of the verifier verifies draft tokens: rho = a / (1 - a^(g+1) + a).

    The other steps decode one token. Published, section 3.2, and exact for the Markov chain of the docs page ``theory.md``.
    """
    return a / (1.0 - a ** (g + 1) + a)


def tokens_per_step(a: float, g: float) -> float:
    """Expected tokens per step of the verifier: E[N(M)] = (1 - rho) + rho (1 - a^(g+1)) / (1 - a).

    Published, section 3.2, with its assumptions, under which ``g = c - 1`` is the fixed point. Limits: 1 at g = 0, c at a = 1 and g = c - 1,
    and 1 / (1 - a^2) for g to infinity.
    """
    rho = verify_probability(a, g)
    return (1.0 - rho) + rho * accepted_run(a, g)


def published_speedup(a: float, c: float) -> float:
    """Speed-up of a two-stage chain over plain decoding: the published form at its fixed point g = c - 1."""
    return tokens_per_step(a, c - 1.0)


def published_chain_speedup(acceptance: Sequence[float], ratios: Sequence[float]) -> float:
    """Speed-up of K stages by the published recursion: g_k = c_k E[N(M_{k-1})] - 1, then E[N(M_k)] of the last pair.

    Published, section 3.3. The recursion ignores the rollbacks of middle stages and the variation of g. It is optimistic by up to
    3 % in the chains of the docs page ``theory.md``. ``ratios[i]`` is c between stages i and i + 1.
    """
    tokens = 1.0
    for a, c in zip(acceptance, ratios, strict=True):
        tokens = tokens_per_step(a, c * tokens - 1.0)
    return tokens


# --- the generalised form ------------------------------------------------------------------------------------------


def two_stage(
    a: float,
    draft: float,
    verify: float,
    plain: float,
    *,
    min_draft_tokens: int = 0,
    handshake: float = 0.0,
    lag: float = 0.0,
) -> float:
    """Tokens per unit of time of a draft that runs ahead of a verifier, with separate costs of a wide and of a one-token step.

    The docs page ``theory.md`` has the formula, which describes a cycle from a rejection to the next. It assumes independent acceptance and w <= b.
    Otherwise b is raised to w, and the time grows with it.

    Args:
        min_draft_tokens: Draft tokens that the verifier waits for after a rejection. 0: it decodes one token at once.
        handshake: Time after each step of the verifier in which both stages stand still.
        lag: Time from a correction until the draft has received it. It is draft/2 on average where a running step is not
            interrupted, as in the engine.
    """
    s, b = handshake, verify / draft - 1.0
    waited = 0.0
    if min_draft_tokens > b:  # further verifications wait for their draft tokens, too
        b, waited = float(min_draft_tokens), (min_draft_tokens + 1.0) * draft - verify
    if a == 1.0:  # no token is ever rejected
        return (b + 1.0) / (verify + waited + s)
    further = 1.0 - a ** (b + 1)
    if min_draft_tokens > 0:
        q = a ** (min_draft_tokens + 1) / further
        tokens = accepted_run(a, min_draft_tokens) + q * accepted_run(a, b)
        return tokens / (s + lag + min_draft_tokens * draft + verify + q * (verify + waited + s))
    b0 = max((plain - lag) / draft - 1.0, 0.0)
    q = a * a ** (b0 + 1) / further
    tokens = 1.0 + a * accepted_run(a, b0) + q * accepted_run(a, b)
    return tokens / (s + plain + a * (verify + s) + q * (verify + s))


def chain_rate(
    acceptance: Sequence[float],
    draft: float,
    verify: Sequence[float],
    plain: Sequence[float],
    *,
    min_draft_tokens: Sequence[int] | None = None,
) -> float:
    """Tokens per unit of time of K stages: each pair by :func:`two_stage`, with the upstream part of the chain as its draft.

    The recursion is the published one (section 3.3) over the generalised pair. It is optimistic for the same reasons, by 5 to 12 % in
    the chains of the docs page ``theory.md`` that wait for draft tokens. The perf model is exact where that matters.
    """
    minimum = [0] * len(acceptance) if min_draft_tokens is None else min_draft_tokens
    rate = 1.0 / draft
    for a, v, p, w in zip(acceptance, verify, plain, minimum, strict=True):
        rate = two_stage(a, min(1.0 / rate, v, p), v, p, min_draft_tokens=w)
    return rate


# --- lockstep ------------------------------------------------------------------------------------------------------


def best_lockstep(a: float, c: float) -> tuple[int, float]:
    """Number of draft tokens, at least one, with the largest lockstep speed-up, and that speed-up, for ``a`` below 1.

    The speed-up is S(g) / (g/c + 1): Leviathan et al., arXiv 2211.17192, theorem 3.8, where a verification takes as long as a plain step.
    """
    g, best = 0, 0.0
    while (more := accepted_run(a, g + 1) / ((g + 1) / c + 1.0)) > best:  # unimodal: a concave over a linear function
        g, best = g + 1, more
    return g, best


def crossover_acceptance(c: float) -> float:
    """Acceptance rate a*(c) below which the best lockstep beats the published asynchronous form; 0 where it never does.

    The claim of arXiv 2505.01572 that asynchronous decoding is always faster holds for c <= 5 only. The loss is the plain step after
    each rejection. Waiting for a few draft tokens avoids it, see :func:`two_stage`.
    """
    return _always_ahead(lambda a: published_speedup(a, c) - best_lockstep(a, c)[1])


# --- bounds ------------------------------------------------------------------------------------------------------


def best_min_draft_tokens(a: float, draft: float, verify: float, plain: float, limit: int = 64) -> tuple[int, float]:
    """The ``min_draft_tokens`` (0 to ``limit``) with the highest :func:`two_stage` rate, and that rate."""
    rates = [two_stage(a, draft, verify, plain, min_draft_tokens=w) for w in range(limit + 1)]
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
    losing = [i / 400 for i in range(400) if lead(i / 400) <= 0]
    if not losing:
        return 0.0
    low, high = losing[-1], min(losing[-1] + 1 / 400, 1.0 - 1e-9)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if lead(middle) <= 0 else (low, middle)
    return (low + high) / 2
