"""Comparisons and bounds of speculative decoding in closed form: lockstep, break-even rates, optimal policies, one device.

Symbols as in ``bench.closed_form``. These forms explain results in the docs page ``theory.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bench.closed_form import accepted_run, lockstep_rate, published_speedup, two_stage
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

    def lead(a: float) -> float:
        return published_speedup(a, c) - best_lockstep(a, c)[1]

    grid = [i / 400 for i in range(1, 400)]
    behind = [a for a in grid if lead(a) < 0]
    if not behind:
        return 0.0
    return _bisect(lead, behind[-1], min(behind[-1] + 1 / 400, 1.0 - 1e-9))


# --- policies ------------------------------------------------------------------------------------------------------


def best_min_draft_tokens(
    a: float, draft: float, verify: float, plain: float, *, handshake: float = 0.0, most: int = 64
) -> tuple[int, float]:
    """The ``min_draft_tokens`` (0 to ``most``) with the highest :func:`two_stage` rate, and that rate."""
    rates = [two_stage(a, draft, verify, plain, min_draft_tokens=w, handshake=handshake).rate for w in range(most + 1)]
    w = max(range(len(rates)), key=rates.__getitem__)
    return w, rates[w]


def break_even_acceptance(
    draft: float, verify: float, plain: float, *, min_draft_tokens: int = 0, handshake: float = 0.0
) -> float:
    """Acceptance rate above which :func:`two_stage` beats plain decoding; 1.0 where no rate does.

    Theorem 1 of arXiv 2505.01572, E[N(M)] > 1, is true of tokens per step and not of throughput. With verify = 3.5 plain and c = 10
    this rate is .73.
    """

    def lead(a: float) -> float:
        cycle = two_stage(a, draft, verify, plain, min_draft_tokens=min_draft_tokens, handshake=handshake)
        return cycle.rate * plain - 1.0

    grid = [i / 400 for i in range(401)]
    behind = [a for a in grid if lead(a) <= 1e-12]
    if not behind:
        return 0.0
    return 1.0 if behind[-1] == 1.0 else _bisect(lead, behind[-1], behind[-1] + 1 / 400)


@dataclass(frozen=True)
class BestPolicy:
    """``rate``; ``actions[h]``: the best action with h draft tokens, ``"wait"`` for one more, ``"decode"`` one token and leave the
    draft tokens alone, or ``"verify"`` all of them."""

    rate: float
    actions: tuple[str, ...]

    @property
    def threshold(self) -> int:
        """Smallest number of draft tokens that is verified."""
        return self.actions.index("verify")


def best_policy(a: float, draft: float, verify: float, plain: float, *, max_draft_tokens: int = 64) -> BestPolicy:
    """The highest rate of any rule that decides by the number of available draft tokens.

    A Markov decision process over h = 0 .. ``max_draft_tokens``, solved by bisection over the rate and value iteration (Howard,
    Dynamic Programming and Markov Processes, 1960). A correction leads back to h = 0. Fractions of draft tokens that pile up during
    a step are interpolated. It assumes independent acceptance and a draft that is corrected at once, so the rate is an upper bound up to
    that interpolation. Arguments as for :func:`bench.closed_form.two_stage`.
    """
    a = probability(a, "the acceptance rate")
    draft, verify, plain = positive(draft, "draft"), positive(verify, "verify"), positive(plain, "plain")
    if a == 1.0:
        raise ValueError("with an acceptance rate of 1 nothing is ever rejected: the rate is the draft's")
    if draft > min(verify, plain):
        raise ValueError(f"a draft step of {draft:g} is longer than the verifier's own ({min(verify, plain):g})")
    if max_draft_tokens < 1:
        raise ValueError(f"max_draft_tokens must be at least 1, not {max_draft_tokens}")
    h = np.arange(max_draft_tokens + 1)
    run = np.array([accepted_run(a, int(n)) for n in h])
    all_hold = a ** (h + 1.0)
    # Draft tokens after a step: those left, and those drafted meanwhile, one of which is the step's own token.
    after_decode = np.clip(h - 1 + plain / draft, 0, max_draft_tokens)
    after_decode[0] = min(plain / draft - 1, max_draft_tokens)
    after_verify = min(verify / draft - 1, max_draft_tokens)
    names = ("wait", "decode", "verify")
    values = np.zeros((3, max_draft_tokens + 1))
    low, high = 0.0, 1.0 / draft
    for _ in range(36):
        rate = (low + high) / 2
        gain = np.zeros(max_draft_tokens + 1)  # of tokens over rate * time until the next correction
        for _ in range(20 * max_draft_tokens):
            values[0, :-1], values[0, -1] = gain[1:] - rate * draft, -np.inf
            values[1] = 1 - rate * plain + a * np.interp(after_decode, h, gain)
            values[2] = run - rate * verify + all_hold * np.interp(after_verify, h, gain)
            values[2, 0] = -np.inf
            better = values.max(axis=0)
            has_converged = np.abs(better - gain).max() < 1e-7
            gain = better
            if has_converged:
                break
        low, high = (rate, high) if gain[0] > 0 else (low, rate)
    return BestPolicy(low, tuple(names[i] for i in values.argmax(axis=0)))


def with_foresight(
    right: np.ndarray, tokens: int, draft: float, verify: float, plain: float, *, max_draft_tokens: int = 32
) -> float:
    """The fewest seconds in which two stages generate ``tokens`` tokens if the target knew in advance which draft tokens hold.

    Exact dynamic programming from the last token backwards over (position, half draft steps of lead), rounded down. In each state the
    target waits for half a draft step, decodes one token, or verifies. A draft that was wrong starts again when the target corrects it.
    No policy is faster, up to the rounding.

    Args:
        right: bool [positions], whether the draft token at this position is right. Positions past the end start again.
        tokens: Tokens to generate.
        draft: Seconds of the draft's step.
        verify: Seconds of the target's step with draft tokens.
        plain: Seconds of the target's one-token step.
        max_draft_tokens: Most draft tokens of one verification.
    """
    right = np.resize(np.asarray(right, dtype=bool), tokens + 1)
    lead = np.arange(4 * max_draft_tokens + 1)  # in half steps of the draft
    half = draft / 2

    def later(passed: float, used: np.ndarray | int) -> np.ndarray:
        return np.clip(lead + passed / half - 2 * used, 0, lead[-1]).astype(np.int64)

    run = np.zeros(tokens + 2, dtype=np.int64)
    for p in range(tokens, -1, -1):
        run[p] = run[p + 1] + 1 if right[p] else 0
    left = np.zeros((tokens + 1, len(lead)))  # seconds from there to the end
    for p in range(tokens - 1, -1, -1):
        after = left[p + 1]
        best = plain + (after[later(plain, 1)] if right[p] else after[0])
        best = np.broadcast_to(best, lead.shape).copy()
        draft_tokens = np.minimum(np.minimum(lead // 2, max_draft_tokens), tokens - p - 1)
        kept = np.minimum(draft_tokens, run[p])
        all_hold = (kept == draft_tokens) & right[np.minimum(p + kept, tokens)]
        then = np.where(all_hold, later(verify, draft_tokens + 1), 0)
        verified = verify + left[p + kept + 1, then]
        best = np.where(draft_tokens > 0, np.minimum(best, verified), best)
        # Waiting for any time: the best of all larger leads, and the time until then.
        left[p] = np.minimum.accumulate((best + half * lead)[::-1])[::-1] - half * lead
    return float(left[0, 0])


def _bisect(f: Callable[[float], float], low: float, high: float) -> float:
    """Where ``f`` changes its sign between ``low`` (not above 0) and ``high``."""
    for _ in range(60):
        middle = (low + high) / 2
        if f(middle) <= 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2
