"""Speculative decoding in closed form: the published formulas, with what they assume, and forms that assume less.

Words. ``a``: acceptance rate, the probability that a draft token equals the verifier's choice. ``g``: drafts in one
verification. ``c``: time of a verifier's one-token step over that of a draft's. Times are in any one unit; rates are tokens
per that unit. "Published" means PipeSpec, arXiv 2505.01572 (sections 3.2 and 3.3), "SPD" arXiv 2605.30852.

All functions raise ``ValueError`` for probabilities outside [0, 1] and for times that are not positive. docs/theory.md has the
derivations and how far each form is from the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pipespec.planning._checks import non_negative, positive, probability, same_length


def accepted_run(a: float, g: float) -> float:
    """S(g) = 1 + a + ... + a^g = (1 - a^(g+1)) / (1 - a): expected tokens of one verification of ``g`` drafts, the verifier's
    own included (Leviathan et al., arXiv 2211.17192, eq. 1).

    Assumes: acceptance independent between positions. ``g`` may be a fraction (a mean); S is concave in g, so for a g that
    varies this is an upper bound.
    """
    a = probability(a, "the acceptance rate")
    g = non_negative(g, "the number of drafts")
    if a == 1.0:
        return g + 1.0
    # expm1/log1p: exact where a is close to 1.
    return 1.0 if a == 0.0 else -math.expm1((g + 1) * math.log(a)) / (1.0 - a)


# --- the published forms -------------------------------------------------------------------------------------------


def verify_probability(a: float, g: float) -> float:
    """Published steady-state probability rho = a / (1 - a^(g+1) + a) that a step of the verifier verifies drafts.

    The other steps decode one token. The chain behind it: V stays V when all g drafts and the bonus token agree, a^(g+1); a
    plain step leads to V when its token is the draft's next one, a. Exact for that chain. Limits: 0 at a = 0, 1 at a = 1.
    """
    a = probability(a, "the acceptance rate")
    g = non_negative(g, "the number of drafts")
    return a / (1.0 - a ** (g + 1) + a)


def tokens_per_step(a: float, g: float) -> float:
    """Published E[N(M)] = (1 - rho) + rho * (1 - a^(g+1)) / (1 - a): tokens per *step* of the verifier.

    Assumes: independent acceptance; one plain step after every rejection or missed bonus; a draft that is corrected at once and
    drafts on meanwhile; equal time for plain and verifying steps; a free handshake. Under these ``g = c - 1`` is not free but
    the fixed point. Limits: 1 at g = 0; c at a = 1, g = c - 1 (the draft's own speed); 1 / (1 - a^2) for g to infinity,
    against 1 / (1 - a) of an ideal lock step.
    """
    rho = verify_probability(a, g)
    return (1.0 - rho) + rho * accepted_run(a, g)


def published_speedup(a: float, c: float) -> float:
    """The published form at its fixed point g = c - 1: speed of the two-stage chain over plain decoding."""
    if positive(c, "the ratio of step times") < 1.0:
        raise ValueError(f"the draft must not be slower than the verifier: ratio {c} is below 1")
    return tokens_per_step(a, c - 1.0)


def published_chain_speedup(acceptance: Sequence[float], ratios: Sequence[float]) -> float:
    """The published recursion for K stages: gamma_k = c_k E[N(M_{k-1})] - 1, then E[N(M_k)] of the last pair.

    ``acceptance[i]``, ``ratios[i]``: between stages i and i + 1. Optimistic: it ignores that middle stages are rolled back and
    that gamma varies (by up to 3 % in the chains of docs/theory.md).
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


def theorem_1_holds(a: float, g: float) -> bool:
    """Theorem 1: E[N(M)] > 1 for 0 < a < 1, g > 0. True, but of tokens per step, not of throughput: it beats plain decoding
    only where a verification costs little more than a plain step. ``break_even_acceptance`` says where."""
    return tokens_per_step(a, g) > 1.0


# --- lock step -----------------------------------------------------------------------------------------------------


def lockstep_rate(a: float, g: int, draft: float, verify: float) -> float:
    """Tokens per time of rounds of ``g`` drafts and one verification: S(g) / (g * draft + verify)."""
    return accepted_run(a, g) / (g * positive(draft, "the draft's step time") + positive(verify, "the verify time"))


def lockstep_speedup(a: float, g: int, c: float) -> float:
    """Published synchronous rate over plain decoding: (1 - a^(g+1)) / ((1 - a)(g/c + 1)). Assumes verify = plain step."""
    return accepted_run(a, g) / (g / positive(c, "the ratio of step times") + 1.0)


def best_lockstep(a: float, c: float) -> tuple[int, float]:
    """The number of drafts that lets lock-step speculation win most, and the speed-up. At least one draft; a < 1."""
    if probability(a, "the acceptance rate") == 1.0:
        raise ValueError("with an acceptance rate of 1 more drafts are always better")
    g, best = 1, lockstep_speedup(a, 1, c)
    while (more := lockstep_speedup(a, g + 1, c)) > best:  # unimodal: a concave over a linear function
        g, best = g + 1, more
    return g, best


def crossover_acceptance(c: float) -> float:
    """a*(c): below it the best lock step beats the published asynchronous form at g = c - 1. 0 where it never does.

    The published claim is that asynchronous is always better; it holds for c <= 5 only. What is lost is the plain step after
    each rejection; to wait for some drafts first repairs it (``two_stage``).
    """

    def lead(a: float) -> float:
        return published_speedup(a, c) - best_lockstep(a, c)[1]

    grid = [i / 400 for i in range(1, 400)]
    behind = [a for a in grid if lead(a) < 0]
    if not behind:
        return 0.0
    return _bisect(lead, behind[-1], min(behind[-1] + 1 / 400, 1.0 - 1e-9))


# --- the generalised form ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TwoStage:
    """One cycle, from a rejection to the next. ``rate`` = tokens / time."""

    tokens: float
    time: float
    verifications: float

    @property
    def rate(self) -> float:
        return self.tokens / self.time


def two_stage(
    a: float,
    draft: float,
    verify: float,
    plain: float,
    *,
    wait: int = 0,
    handshake: float = 0.0,
    lag: float = 0.0,
) -> TwoStage:
    """A draft that runs ahead of a verifier, with separate costs of a wide and of a one-token step.

    ``draft``, ``plain``: one-token steps of the draft and of the verifier; ``verify``: a step with hints, whatever their
    number; ``wait``: hints awaited after a rejection (0: a plain step at once); ``handshake``: time after each step of the
    verifier in which both stand still; ``lag``: from a correction until the draft has heard of it, draft/2 on average where,
    as in the engine, a running step is not interrupted.

    With b = verify/draft - 1 the drafts that pile up during a verification, and q the mean number of further verifications::

        wait > 0:     q = a^(wait+1) / (1 - a^(b+1))
                      tokens = S(wait) + q S(b)
                      time = handshake + lag + wait draft + verify + q (verify + handshake)
        wait = 0:     b0 = (plain - lag)/draft - 1,  q = a a^(b0+1) / (1 - a^(b+1))
                      tokens = 1 + a S(b0) + q S(b)
                      time = handshake + plain + a (verify + handshake) + q (verify + handshake)

    Assumes: independent acceptance; wait <= b (else b is raised to wait, and the time with it). Exact for lag = 0 and whole
    ratios of step times. wait = 0, verify = plain, handshake = lag = 0 is the published form. docs/theory.md has the errors.
    A draft slower than the verifier's steps is refused: nothing piles up.
    """
    a = probability(a, "the acceptance rate")
    draft, verify, plain = positive(draft, "draft"), positive(verify, "verify"), positive(plain, "plain")
    s, lag = non_negative(handshake, "handshake"), non_negative(lag, "lag")
    if wait < 0:
        raise ValueError(f"wait must not be negative, not {wait}")
    if draft > min(verify, plain):
        raise ValueError(f"a draft step of {draft:g} is longer than the verifier's own ({min(verify, plain):g})")
    b = verify / draft - 1.0
    waited = 0.0
    if wait > b:  # each further verification, too, waits until it has its hints
        b, waited = float(wait), (wait + 1.0) * draft - verify
    if a == 1.0:  # never rejected
        return TwoStage(b + 1.0, verify + waited + s, 1.0)
    further = 1.0 - a ** (b + 1)
    if wait > 0:
        q = a ** (wait + 1) / further
        return TwoStage(
            accepted_run(a, wait) + q * accepted_run(a, b),
            s + lag + wait * draft + verify + q * (verify + waited + s),
            1.0 + q,
        )
    b0 = max((plain - lag) / draft - 1.0, 0.0)
    q = a * a ** (b0 + 1) / further
    return TwoStage(
        1.0 + a * accepted_run(a, b0) + q * accepted_run(a, b),
        s + plain + a * (verify + s) + q * (verify + s),
        a + q,
    )


def best_wait(
    a: float, draft: float, verify: float, plain: float, *, handshake: float = 0.0, most: int = 64
) -> tuple[int, float]:
    """The ``wait`` of ``two_stage`` (0 to ``most``) with the highest rate, and the rate."""
    rates = [two_stage(a, draft, verify, plain, wait=w, handshake=handshake).rate for w in range(most + 1)]
    w = max(range(len(rates)), key=rates.__getitem__)
    return w, rates[w]


@dataclass(frozen=True)
class BestPolicy:
    """``rate``; ``actions[h]``: what to do with h hints at hand: ``wait`` for one more, ``decode`` one token and leave the
    hints alone, ``verify`` them all."""

    rate: float
    actions: tuple[str, ...]

    @property
    def threshold(self) -> int:
        """Hints from which on they are verified."""
        return self.actions.index("verify")


def best_policy(a: float, draft: float, verify: float, plain: float, *, most_hints: int = 64) -> BestPolicy:
    """The highest rate that any rule can reach which chooses by the number of hints at hand: the ceiling of all wait policies.

    A Markov decision process over h = 0 .. ``most_hints``, solved by bisection over the rate and value iteration. A correction
    leads back to h = 0. Costs as in ``two_stage``; fractions of hints that pile up during a step are interpolated. Assumes
    independent acceptance and a draft that is corrected at once: an upper bound, up to that interpolation.
    """
    a = probability(a, "the acceptance rate")
    draft, verify, plain = positive(draft, "draft"), positive(verify, "verify"), positive(plain, "plain")
    if a == 1.0:
        raise ValueError("with an acceptance rate of 1 nothing is ever rejected: the rate is the draft's")
    if draft > min(verify, plain):
        raise ValueError(f"a draft step of {draft:g} is longer than the verifier's own ({min(verify, plain):g})")
    if most_hints < 1:
        raise ValueError(f"most_hints must be at least 1, not {most_hints}")
    h = np.arange(most_hints + 1)
    run = np.array([accepted_run(a, int(n)) for n in h])
    all_hold = a ** (h + 1.0)
    # Hints after a step: those left, and those drafted meanwhile, one of which is the step's own token.
    after_decode = np.clip(h - 1 + plain / draft, 0, most_hints)
    after_decode[0] = min(plain / draft - 1, most_hints)
    after_verify = min(verify / draft - 1, most_hints)
    names = ("wait", "decode", "verify")
    values = np.zeros((3, most_hints + 1))
    low, high = 0.0, 1.0 / draft
    for _ in range(36):
        rate = (low + high) / 2
        gain = np.zeros(most_hints + 1)  # of tokens over rate * time until the next correction
        for _ in range(20 * most_hints):
            values[0, :-1], values[0, -1] = gain[1:] - rate * draft, -np.inf
            values[1] = 1 - rate * plain + a * np.interp(after_decode, h, gain)
            values[2] = run - rate * verify + all_hold * np.interp(after_verify, h, gain)
            values[2, 0] = -np.inf
            better = values.max(axis=0)
            settled = np.abs(better - gain).max() < 1e-7
            gain = better
            if settled:
                break
        low, high = (rate, high) if gain[0] > 0 else (low, rate)
    return BestPolicy(low, tuple(names[i] for i in values.argmax(axis=0)))


def chain_rate(
    acceptance: Sequence[float],
    draft: float,
    verify: Sequence[float],
    plain: Sequence[float],
    *,
    waits: Sequence[int] | None = None,
    handshake: float = 0.0,
) -> float:
    """K stages: each pair by ``two_stage``, the upstream part of the chain standing in for its draft.

    ``acceptance[i]``: between stages i and i + 1; ``draft``: step of stage 0; ``verify[i]``, ``plain[i]``, ``waits[i]``: of
    stage i + 1. Optimistic as the published recursion is, for the same reasons: middle stages are rolled back, and their
    output comes in bursts; by 5 to 12 % with waits in the chains of docs/theory.md. Use the simulator where that matters.
    """
    pairs = len(acceptance)
    if pairs == 0:
        raise ValueError("a chain needs at least one pair of stages")
    waits = [0] * pairs if waits is None else waits
    for name, values in (("verify", verify), ("plain", plain), ("waits", waits)):
        same_length(name, values, pairs, "verifying stage")
    rate = 1.0 / positive(draft, "draft")
    for a, v, p, w in zip(acceptance, verify, plain, waits, strict=True):
        rate = two_stage(a, min(1.0 / rate, v, p), v, p, wait=w, handshake=handshake).rate
    return rate


def break_even_acceptance(draft: float, verify: float, plain: float, *, wait: int = 0, handshake: float = 0.0) -> float:
    """The acceptance rate above which ``two_stage`` beats plain decoding. 1.0 where no rate does.

    What Theorem 1 leaves open: with verify = 3.5 plain and c = 10 it is .73.
    """

    def lead(a: float) -> float:
        return two_stage(a, draft, verify, plain, wait=wait, handshake=handshake).rate * plain - 1.0

    grid = [i / 400 for i in range(401)]
    behind = [a for a in grid if lead(a) <= 1e-12]
    if not behind:
        return 0.0
    return 1.0 if behind[-1] == 1.0 else _bisect(lead, behind[-1], behind[-1] + 1 / 400)


# --- SPD -----------------------------------------------------------------------------------------------------------


def _stages(n: int) -> int:
    if n < 1:
        raise ValueError(f"the number of stages must be at least 1, not {n}")
    return n


def spd_tokens_per_cycle(a: float, n: int) -> float:
    """SPD: tokens per cycle of a target cut into ``n`` stages, r = 1 / (n (1 - a) + a).

    k kept drafts and one correction are k + 1 tokens in n + k cycles: a correction empties the pipe. Assumes independent
    acceptance and one draft per cycle. Limits: 1 at a = 1 (n times plain decoding, a cycle being 1/n of a step), 1/n at a = 0.
    """
    return 1.0 / (_stages(n) * (1.0 - probability(a, "the acceptance rate")) + a)


def spd_accepted_length(a: float, n: int) -> float:
    """SPD's equivalent accepted length n r = n / (n - (n - 1) a): the speed-up if cycles cost nothing more than 1/n step."""
    return n * spd_tokens_per_cycle(a, n)


def spd_acceptance(length: float, n: int) -> float:
    """Inverse of ``spd_accepted_length``: a = (n - n/length) / (n - 1), for n > 1 and 1 <= length <= n."""
    if _stages(n) < 2:
        raise ValueError("with one stage nothing is drafted ahead: no acceptance rate follows")
    if not 1.0 <= length <= n:
        raise ValueError(f"the accepted length lies between 1 and the number of stages, {n}, not {length}")
    return (n - n / length) / (n - 1)


def spd_speedup(a: float, n: int, step: float, cycle_cost: float = 0.0) -> float:
    """SPD's wall-clock speed-up T / ((n (1 - a) + a)(T/n + c)): ``step`` T of the whole target, ``cycle_cost`` c per cycle
    (control, transfers, verification). Assumes equal stages, each on its own device, and drafting hidden behind them."""
    step = positive(step, "step")
    return step * spd_tokens_per_cycle(a, n) / (step / n + non_negative(cycle_cost, "cycle_cost"))


def spd_best_stages(a: float, step: float, cycle_cost: float) -> float:
    """n* = sqrt(a T / ((1 - a) c)): where ``spd_speedup`` is largest, n taken as a real number. Infinite at a = 1 or c = 0."""
    a = probability(a, "the acceptance rate")
    step, cost = positive(step, "step"), non_negative(cycle_cost, "cycle_cost")
    if a == 1.0 or cost == 0.0:
        return math.inf
    return math.sqrt(a * step / ((1.0 - a) * cost))


# --- one device ----------------------------------------------------------------------------------------------------


def roofline_rate(bytes_per_step: Sequence[float], steps_per_token: Sequence[float], bandwidth: float) -> float:
    """Tokens per second of a chain on one device, at most: every step of every stage reads its weights through one memory.

    rate = bandwidth / sum_i bytes_i steps_i, with ``steps_per_token[i]`` the steps of stage i per token of the target (at most
    1 for the target itself; plain decoding: bytes of the target, one step). Assumes small batches, where reading weights is
    the cost, and neglects the KV cache. Running stages at once gains nothing here; only fewer target steps do.
    """
    same_length("steps_per_token", steps_per_token, len(bytes_per_step), "stage")
    if not bytes_per_step:
        raise ValueError("no stages")
    read = sum(
        positive(size, "the bytes of a stage") * non_negative(steps, "the steps of a stage")
        for size, steps in zip(bytes_per_step, steps_per_token, strict=True)
    )
    return positive(bandwidth, "bandwidth") / positive(read, "the bytes read per token")


def roofline_speedup(bytes_per_step: Sequence[float], steps_per_token: Sequence[float]) -> float:
    """``roofline_rate`` over that of plain decoding with the last stage: at most B_target / sum_i B_i steps_i. SPD on one device
    reads all its stages in every cycle, so it cannot gain there."""
    together = roofline_rate(bytes_per_step, steps_per_token, 1.0)
    return together / roofline_rate(bytes_per_step[-1:], [1.0], 1.0)


def _bisect(f: Callable[[float], float], low: float, high: float) -> float:
    """Where ``f`` changes its sign between ``low`` (not above 0) and ``high``."""
    for _ in range(60):
        middle = (low + high) / 2
        if f(middle) <= 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2
