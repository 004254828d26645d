"""Analytical model of speculative pipelines: the published formulas of PipeSpec, and a generalised two-stage form.

Symbols:
    a: Acceptance rate, the probability that a draft token equals the verifier's token.
    g: Draft tokens in one verification. A fraction stands for a mean.
    c: Time of a verifier's one-token step divided by the time of a draft's one-token step.
    draft, plain, verify: Times of a draft's and of a verifier's one-token step, and of a verifier's step with draft tokens, whatever their number.

In a chain, ``acceptance[i]`` is a between stages i and i + 1, and other lists have a number per verifying stage. All times share one unit, and rates are tokens per that unit. "Published" means PipeSpec, arXiv 2505.01572, sections 3.2 and 3.3.
All functions raise ``ValueError`` for probabilities outside [0, 1] and for times that are not positive. The docs page ``theory.md`` has the
derivations and the error of each form against the perf model. The formulas of SPD are in :mod:`pipespec.spd.law`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from bench.validation import non_negative, positive, probability, same_length


def accepted_run(a: float, g: float) -> float:
    """Expected tokens of one verification of ``g`` draft tokens, the verifier's own token included.

    S(g) = 1 + a + ... + a^g = (1 - a^(g+1)) / (1 - a), Leviathan et al., arXiv 2211.17192, equation 1. It assumes that acceptance
    is independent between positions. S is concave in g, so the value is an upper bound for a g that varies.
    """
    a = probability(a, "the acceptance rate")
    g = non_negative(g, "the number of drafts")
    if a == 1.0:
        return g + 1.0
    # expm1 and log1p stay exact where a is close to 1.
    return 1.0 if a == 0.0 else -math.expm1((g + 1) * math.log(a)) / (1.0 - a)


def lockstep_rate(a: float, g: int, draft: float, verify: float) -> float:
    """Tokens per unit of time of lockstep with two stages: S(g) / (g draft + verify).

    Leviathan et al., theorem 3.8, with separate costs of drafting and verifying.
    """
    return accepted_run(a, g) / (g * positive(draft, "draft") + positive(verify, "verify"))


# --- PipeSpec as published -----------------------------------------------------------------------------------------


def verify_probability(a: float, g: float) -> float:
    """Steady-state probability that a step of the verifier verifies draft tokens: rho = a / (1 - a^(g+1) + a).

    The other steps decode one token. Published, section 3.2. The formula is exact for this Markov chain: a verification follows a
    verification when all g draft tokens and the bonus token agree, and it follows a one-token step when that token agrees.
    Limits: 0 at a = 0 and 1 at a = 1.
    """
    a = probability(a, "the acceptance rate")
    g = non_negative(g, "the number of drafts")
    return a / (1.0 - a ** (g + 1) + a)


def tokens_per_step(a: float, g: float) -> float:
    """Expected tokens per step of the verifier: E[N(M)] = (1 - rho) + rho (1 - a^(g+1)) / (1 - a).

    Published, section 3.2. It assumes independent acceptance, one plain step after every rejection or missed bonus token, a draft
    that is corrected at once and drafts on meanwhile, equal time for plain and verifying steps, and a free handshake. Under these
    assumptions ``g = c - 1`` is the fixed point. Limits: 1 at g = 0, c at a = 1 and g = c - 1, and 1 / (1 - a^2) for g to infinity.
    """
    rho = verify_probability(a, g)
    return (1.0 - rho) + rho * accepted_run(a, g)


def published_speedup(a: float, c: float) -> float:
    """Speed-up of a two-stage chain over plain decoding: the published form at its fixed point g = c - 1."""
    if positive(c, "the ratio of step times") < 1.0:
        raise ValueError(f"the draft must not be slower than the verifier: ratio {c} is below 1")
    return tokens_per_step(a, c - 1.0)


def published_chain_speedup(acceptance: Sequence[float], ratios: Sequence[float]) -> float:
    """Speed-up of K stages by the published recursion: g_k = c_k E[N(M_{k-1})] - 1, then E[N(M_k)] of the last pair.

    Published, section 3.3. The recursion ignores the rollbacks of middle stages and the variation of g. It is optimistic by up to
    3 % in the chains of the docs page ``theory.md``. ``ratios[i]`` is c between stages i and i + 1.
    """
    same_length("ratios", ratios, len(acceptance), "pair of neighbours")
    if not acceptance:
        raise ValueError("a chain needs at least one pair of stages")
    tokens = 1.0
    for a, c in zip(acceptance, ratios, strict=True):
        gamma = positive(c, "the ratio of step times") * tokens - 1.0
        if gamma < 0:
            raise ValueError(f"a draft must not be slower than its verifier: it makes {gamma + 1:.3g} tokens per step")
        tokens = tokens_per_step(a, gamma)
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

    A cycle goes from a rejection to the next. With b = verify/draft - 1 the draft tokens that pile up during a verification, w the minimum number of draft tokens, and q the
    mean number of further verifications::

        w > 0:     q = a^(w+1) / (1 - a^(b+1))
                   tokens = S(w) + q S(b)
                   time = handshake + lag + w draft + verify + q (verify + handshake)
        w = 0:     b0 = (plain - lag)/draft - 1,  q = a a^(b0+1) / (1 - a^(b+1))
                   tokens = 1 + a S(b0) + q S(b)
                   time = handshake + plain + a (verify + handshake) + q (verify + handshake)

    The derivation is in the docs page ``theory.md``. The form assumes independent acceptance and w <= b. Otherwise b is raised to w,
    and the time grows with it. It is exact for lag = 0 and whole ratios of step times. With w = 0, verify = plain and
    handshake = lag = 0 it equals the published form.

    Args:
        min_draft_tokens: Draft tokens that the verifier waits for after a rejection. 0: it decodes one token at once.
        handshake: Time after each step of the verifier in which both stages stand still.
        lag: Time from a correction until the draft has received it. It is draft/2 on average where a running step is not
            interrupted, as in the engine.

    Raises:
        ValueError: The draft's step is longer than the verifier's steps, so that no draft tokens pile up.
    """
    a = probability(a, "the acceptance rate")
    draft, verify, plain = positive(draft, "draft"), positive(verify, "verify"), positive(plain, "plain")
    s, lag = non_negative(handshake, "handshake"), non_negative(lag, "lag")
    if min_draft_tokens < 0:
        raise ValueError(f"min_draft_tokens must not be negative, not {min_draft_tokens}")
    if draft > min(verify, plain):
        raise ValueError(f"a draft step of {draft:g} is longer than the verifier's own ({min(verify, plain):g})")
    b = verify / draft - 1.0
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
    pairs = len(acceptance)
    if pairs == 0:
        raise ValueError("a chain needs at least one pair of stages")
    minimum = [0] * pairs if min_draft_tokens is None else min_draft_tokens
    for name, values in (("verify", verify), ("plain", plain), ("min_draft_tokens", minimum)):
        same_length(name, values, pairs, "verifying stage")
    rate = 1.0 / positive(draft, "draft")
    for a, v, p, w in zip(acceptance, verify, plain, minimum, strict=True):
        rate = two_stage(a, min(1.0 / rate, v, p), v, p, min_draft_tokens=w)
    return rate
