"""Wrong kernels are caught: the comparison with the oracle detects each mutation. In the interpreter, where the functions of a kernel can be
replaced."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from pipespec_kernels import reference
from pipespec_kernels.noise import Noise, Streams
from pipespec_kernels.triton import Config, cutoff, logprobs, penalize, rejection_sample, verify
from pipespec_kernels.triton.philox import INTERPRETED, draw4, uniform
from pipespec_kernels.triton.philox import draw as right_draw
from pipespec_kernels.triton.selection import unpack_id

from .. import logprobs as logprob_cases
from .. import penalties
from ..selection import make_logits
from .test_philox import noise_kernel

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="functions are exchanged in the interpreter")


@triton.jit
def last_of_equals(score, best):
    return (best == best) & ~(score < best)


@triton.jit
def ignores_nan(score, best):
    return score > best


@triton.jit
def same_position(seed, position, stream, begin, BLOCK: tl.constexpr):
    return right_draw(seed, position * 0, stream, begin, BLOCK)


@triton.jit
def same_seed(seed, position, stream, begin, BLOCK: tl.constexpr):
    return right_draw(seed * 0, position, stream, begin, BLOCK)


@triton.jit
def other_stream(seed, position, stream, begin, BLOCK: tl.constexpr):
    return right_draw(seed, position, stream + 1, begin, BLOCK)


@triton.jit
def words_out_of_order(seed, position, stream, begin, BLOCK: tl.constexpr):
    w0, w1, w2, w3 = draw4(seed, position, stream, begin // 4 + tl.arange(0, BLOCK // 4))
    return tl.reshape(tl.join(tl.join(w0, w1), tl.join(w2, w3)), [BLOCK])


@triton.jit
def rough_uniform(r, FAST: tl.constexpr):
    return ((r >> 8).to(tl.float32) + 0.5) * (2.0**-24)


@triton.jit
def natural(x, scale, r, FAST: tl.constexpr):
    """Ignores the temperature."""
    return x + (-tl.log(-tl.log(1.0 - uniform(r, FAST))))


@triton.jit
def accepts_most_counts(fed, draft_tokens, width):
    return fed > width + 1000


@triton.jit
def all_of(lanes):
    """A tile that holds one allowed id is skipped."""
    return tl.min(lanes.to(tl.int32), axis=0) != 0


@triton.jit
def unordered(x, SHIFT: tl.constexpr):
    """Compares raw bits, whose order is reversed for negative numbers."""
    return x.to(tl.int32, bitcast=True) >> SHIFT


@triton.jit
def counts_once(table, ids, inside, generated):
    """Of several generated occurrences only one."""
    tl.atomic_max(table + ids, 1, mask=inside & generated)
    tl.atomic_or(table + ids, 1 << 30, mask=inside & ~generated)


@triton.jit
def always_allowed(mask, ids, inside, HAS_BITMASK: tl.constexpr):
    return inside


@triton.jit
def pairs_swapped(x, ids):
    """Of two equal neighbours the higher id comes first."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - (ids ^ 1)).to(tl.int64)


@triton.jit
def never_rescaled(total, before, after):
    """A sum relative to maxima that have passed."""
    return total


@triton.jit
def ignored_ratio(x, FAST: tl.constexpr):
    return x * 0.0


@triton.jit
def best_of_any_span(before, word, token, begin, end, vocab):
    """A draft token counts as rejected if a span that does not hold it chose another id."""
    return unpack_id(word) != token


ROWS = 4
N = torch.full((ROWS,), 2, dtype=torch.int32)
ONE = Config(128, 1, 1)


def example() -> tuple[torch.Tensor, torch.Tensor, Noise]:
    generator = torch.Generator().manual_seed(0)
    logits = make_logits("few values", (ROWS, 2, 70), torch.float32, generator) * 2
    seeds = torch.randint(-(2**63), 2**63 - 1, (ROWS,), generator=generator)
    noise = Noise(seeds, torch.arange(ROWS) + 2**33, torch.tensor([0.3, 0.5, 2.0, 1.0]))
    return logits, torch.randint(0, 70, (ROWS, 2), generator=generator), noise


def check_equal(got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


def check_greedy() -> None:
    logits, _, _ = example()
    logits[3, 0, [5, 60]] = math.nan
    tokens = reference.argmax(logits).roll(1, 1)
    check_equal(verify(logits, tokens, N, N - 1, config=Config(16, 1, 1)), reference.verify(logits, tokens, N, N - 1))


def check_spans() -> None:
    """All draft tokens are right, and lie in the last span. The interpreter runs the programs of the first span first."""
    logits, _, _ = example()
    logits[:, 0, 60] = 99.0
    tokens = reference.argmax(logits).roll(1, 1)
    check_equal(verify(logits, tokens, N, N - 1, config=Config(16, 1, 5)), reference.verify(logits, tokens, N, N - 1))


def check_coupled() -> None:
    logits, tokens, noise = example()
    arguments = logits, tokens, N, N * 0
    check_equal(verify(*arguments, noise=noise, config=ONE), reference.verify(*arguments, noise))


def check_filtered() -> None:
    logits, tokens, noise = example()
    cut = reference.cutoff(logits, torch.ones(ROWS), torch.full((ROWS,), 3), torch.ones(ROWS), torch.zeros(ROWS))
    noise = replace(noise, cutoff=cut)
    arguments = logits, tokens, N, N * 0
    check_equal(verify(*arguments, noise=noise, config=Config(8, 1, 1)), reference.verify(*arguments, noise))


def check_rejection() -> None:
    _, tokens, noise = example()
    logits = make_logits("normal", (ROWS, 2, 70), torch.float32, torch.Generator().manual_seed(1))
    arguments = logits, tokens, N, N - 1, logits * 0.5, noise
    streams = Streams(1, 2, 3)
    got = rejection_sample(*arguments, streams=streams, config=ONE)
    check_equal(got, reference.rejection_sample(*arguments, streams=streams))


def check_counts() -> None:
    logits, tokens, _ = example()
    bad = torch.tensor([2, 3, -1, 0], dtype=torch.int32)
    _, accepted = verify(logits, tokens, bad, N * 0, config=ONE)
    assert accepted.tolist() == [0, -1, -1, 0]


def check_noise() -> None:
    words = torch.arange(16)  # the largest noise there is
    u, g = torch.empty(16), torch.empty(16)
    noise_kernel[(1,)](words, u, g, BLOCK=16, FAST=False)
    assert torch.equal(g, reference.gumbel(words))


def check_cutoff() -> None:
    logits = -example()[0].abs() - 1
    n = torch.ones(ROWS)
    assert torch.equal(cutoff(logits, top_k=5), reference.cutoff(logits, n, n.long() * 5, n, n * 0))


def check_penalties() -> None:
    given = penalties.case(4)
    expected = penalties.by_processors(given)
    p = tuple(getattr(given["penalties"], name) for name in type(given["penalties"]).__slots__)
    fed = [given[name] for name in ("logits", "tokens", "history", "lengths")]
    counts = [given[name] for name in ("query_lens", "num_draft_tokens", "bitmask")]
    penalize(*fed, p, *counts, torch.zeros(given["logits"].numel(), dtype=torch.int32))
    assert penalties.same_bits(given["logits"], expected)


def check_logprobs() -> None:
    given = logprob_cases.case(2, kind="few values", vocab=4100, batch=4, width=2)
    given["cutoff"] = None
    logprob_cases.check_close(logprobs(**given), logprob_cases.oracle(given))


CHECKS = [
    check_logprobs,
    check_penalties,
    check_greedy,
    check_spans,
    check_coupled,
    check_filtered,
    check_rejection,
    check_counts,
    check_noise,
    check_cutoff,
]
MUTATIONS = {
    "better: the last of equals": (check_greedy, "verify", "better", last_of_equals),
    "better: no NaN": (check_greedy, "verify", "better", ignores_nan),
    "notes: right draft tokens": (check_spans, "verify", "beaten", best_of_any_span),
    "draw: one position": (check_coupled, "verify", "draw", same_position),
    "draw: one seed": (check_coupled, "verify", "draw", same_seed),
    "draw: another stream": (check_coupled, "verify", "draw", other_stream),
    "draw: words out of order": (check_coupled, "verify", "draw", words_out_of_order),
    "noise: no temperature": (check_coupled, "verify", "perturbed", natural),
    "tiles: skipped unless all can be chosen": (check_filtered, "verify", "any_of", all_of),
    "noise: 24 bits": (check_noise, "philox", "uniform", rough_uniform),
    "ratio: another stream": (check_rejection, "rejection_sample", "draw", other_stream),
    "ratio: no residual": (check_rejection, "rejection_sample", "lg2", ignored_ratio),
    "penalties: one occurrence": (check_penalties, "penalize", "count", counts_once),
    "penalties: no bitmask": (check_penalties, "penalize", "allowed", always_allowed),
    "logprobs: order of equals": (check_logprobs, "logprobs", "key_of", pairs_swapped),
    "logprobs: maximum": (check_logprobs, "logprobs", "grown", never_rescaled),
    "counts: trusted": (check_counts, "verify", "invalid", accepts_most_counts),
    "cutoff: order of bits": (check_cutoff, "cutoff", "_key", unordered),
}


@pytest.mark.parametrize("check", CHECKS)
def test_the_right_kernels_pass(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check, module, function, wrong = MUTATIONS[name]
    # The package's attributes of these names are the functions, not the modules.
    patched = importlib.import_module(f"pipespec_kernels.triton.{module}")
    assert hasattr(patched, function)
    monkeypatch.setattr(patched, function, wrong)
    with pytest.raises((AssertionError, IndexError)):
        check()
