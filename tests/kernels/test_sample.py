"""Coupled sampling: ops.sample and ops.verify with noise: the oracle to the last bit, the right distribution, and the
acceptance that theory promises."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipespec_kernels import ops, reference
from pipespec_kernels.noise import TARGET, Noise
from tests.trials import trials

from .selection import (
    DTYPES,
    INVALID_POSITIONS,
    KINDS,
    LAYOUTS,
    int32,
    invalid_case,
    make_logits,
    ragged_counts,
    simd,
    simd_variants,
    strided,
)

VARIANTS = simd_variants()


def make_noise(batch: int, generator: torch.Generator, cutoff: Tensor | None = None, stream: int = TARGET) -> Noise:
    return Noise(
        torch.randint(-(2**63), 2**63 - 1, (batch,), generator=generator),
        torch.randint(0, 2**62, (batch,), generator=generator) >> torch.randint(0, 60, (batch,), generator=generator),
        torch.rand(batch, generator=generator) * 2 + 0.1,
        cutoff,
        stream,
    )


def make_cutoff(logits: Tensor, generator: torch.Generator) -> Tensor:
    """The cutoff at a random logit of each row; sometimes at none, or above all."""
    batch, width, vocab = logits.shape
    ids = torch.randint(0, vocab, (batch, width, 1), generator=generator)
    cutoff = logits.gather(2, ids)[..., 0].float()
    chance = torch.rand((batch, width), generator=generator)
    return cutoff.masked_fill(chance < 0.1, -math.inf).masked_fill(chance > 0.95, math.inf)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 7, 1000, 1024, 4097, 32000, 128256])
def test_equals_the_oracle(vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    kinds, shape = (KINDS, (3, 2, vocab)) if vocab < 10000 else (["normal", "few values"], (1, 2, vocab))
    for kind in kinds:
        logits = make_logits(kind, shape, dtype, generator)
        for cutoff in (None, make_cutoff(logits, generator)):
            noise = make_noise(shape[0], generator, cutoff)
            expected = reference.sample(logits, noise)
            for layout in LAYOUTS:
                view = strided(logits, layout)
                for variant in VARIANTS:
                    with simd(variant):
                        for threads in (1, 2, 4):
                            got = ops.sample(view, noise, threads=threads)
                            assert torch.equal(got, expected), (kind, layout, variant, threads)


def vocabularies() -> st.SearchStrategy[int]:
    return st.one_of(st.integers(1, 300), st.sampled_from([511, 512, 513, 3000]))


@settings(max_examples=trials(ci=40, nightly=150))
@given(
    shape=st.tuples(st.integers(0, 4), st.integers(0, 4), vocabularies()),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(KINDS),
    layout=st.sampled_from(LAYOUTS),
    filtered=st.booleans(),
    stream=st.integers(0, 3),
    variant=st.sampled_from(VARIANTS),
    seed=st.integers(0, 2**31),
)
def test_any_shape_equals_the_oracle(shape, dtype, kind, layout, filtered, stream, variant, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = make_logits(kind, shape, dtype, generator)
    noise = make_noise(shape[0], generator, make_cutoff(logits, generator) if filtered else None, stream)
    with simd(variant):
        got = ops.sample(strided(logits, layout), noise)
    assert got.dtype is torch.int32
    assert got.shape == shape[:2]
    assert torch.equal(got, reference.sample(logits, noise))


@settings(max_examples=trials(ci=50, nightly=200))
@given(
    shape=st.tuples(st.integers(0, 5), st.integers(0, 6), st.sampled_from([1, 2, 3, 7, 33, 100, 4097])),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(["normal", "few values", "nans"]),
    layout=st.sampled_from(LAYOUTS),
    filtered=st.booleans(),
    threads=st.sampled_from([1, 2, 4]),
    variant=st.sampled_from(VARIANTS),
    seed=st.integers(0, 2**31),
)
def test_verify_walks_over_what_sample_draws(shape, dtype, kind, layout, filtered, threads, variant, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch, width, vocab = shape
    logits = make_logits(kind, shape, dtype, generator)
    noise = make_noise(batch, generator, make_cutoff(logits, generator) if filtered else None)
    drawn = ops.sample(logits, noise)
    agrees = torch.rand((batch, width), generator=generator) < 0.8
    tokens = torch.where(agrees, drawn.roll(1, 1), torch.randint(0, vocab, (batch, width), generator=generator)).long()
    query_lens, num_draft_tokens = ragged_counts(batch, width, generator)
    with simd(variant):
        selected, accepted = ops.verify(
            strided(logits, layout), tokens, query_lens, num_draft_tokens, noise=noise, threads=threads
        )
    slow = reference.verify(logits, tokens, query_lens, num_draft_tokens, noise)
    assert torch.equal(selected, slow[0])
    assert torch.equal(accepted, slow[1])
    for row in range(batch):
        first = int(query_lens[row]) - 1 - int(num_draft_tokens[row])
        count = int(accepted[row]) + 1 if query_lens[row] else 0
        assert torch.equal(selected[row, :count], drawn[row, first : first + count])
        assert selected[row, count:].eq(-1).all()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ties_nans_and_infinities(dtype: torch.dtype, variant: str) -> None:
    vocab, inf, nan = 10000, math.inf, math.nan
    noise = Noise(torch.tensor([3]), torch.tensor([4]), torch.tensor([1.0]))
    small = torch.full((1, 1, vocab), -inf, dtype=dtype)

    def draw(cutoff: float | None = None, **values: float) -> int:
        logits = small.clone()
        for name, value in values.items():
            logits[0, 0, int(name[1:])] = value
        noise.cutoff = None if cutoff is None else torch.tensor([[cutoff]])
        return int(ops.sample(logits, noise))

    with simd(variant):
        for first, second in [(0, 1), (5, 6), (31, 32), (4095, 4096), (4096, 8200), (9998, 9999)]:
            assert draw(**{f"v{first}": inf, f"v{second}": inf}) == first
            assert draw(**{f"v{first}": nan, f"v{second}": -nan, "v7777": inf}) == first
            assert draw(**{f"v{first}": -nan, f"v{second}": nan}, cutoff=inf) == first
            assert draw(**{f"v{second}": -1e4}) == second  # the only one that can be
            assert draw(**{f"v{first}": 1.0, f"v{second}": 2.0}, cutoff=1.5) == second
        # Noise vanishes in such a large sum, which leaves equal sums.
        noise.inv_temperature = torch.tensor([1e30])
        assert draw(v17=3.0, v18=3.0, v9000=3.0) == 17
        noise.inv_temperature = torch.tensor([1.0])
        # Nothing can be chosen.
        assert draw() == 0
        assert draw(v500=1.0, v600=2.0, cutoff=2.5) == 0


def test_float64_other_arguments_and_out() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(4, 3, 50, dtype=torch.float64, generator=generator).requires_grad_()
    noise = make_noise(4, generator, make_cutoff(logits.detach(), generator))
    assert noise.cutoff is not None
    ids = torch.arange(50)
    expected = []
    for b in range(4):
        for q in range(3):
            bits = reference.philox_draw(int(noise.seeds[b]), int(noise.positions[b]) + q, TARGET, ids)
            y = logits[b, q] * noise.inv_temperature[b].double() + reference.gumbel(bits).double()
            expected.append(int(y.masked_fill(logits[b, q] < noise.cutoff[b, q].double(), -math.inf).argmax()))
    assert ops.sample(logits, noise).flatten().tolist() == expected

    logits = logits.detach().float()
    noise.cutoff = None
    out = torch.empty(4, 3, dtype=torch.int32)
    assert ops.sample(logits, noise, out=out) is out
    columns = torch.stack([noise.seeds, noise.positions], dim=1)
    scales = torch.stack([noise.inv_temperature] * 2, dim=1).numpy()
    for other in (
        Noise(noise.seeds, noise.positions.numpy(), noise.inv_temperature.numpy()),
        Noise(columns[:, 0], np.asarray(columns)[:, 1], scales[:, 0]),
        Noise(noise.seeds, noise.positions, noise.inv_temperature, torch.full((3, 4), -math.inf).t()),
    ):
        assert torch.equal(ops.sample(logits, other), out)
    assert ops.sample(torch.zeros(0, 3, 4), make_noise(0, generator)).shape == (0, 3)
    assert ops.sample(torch.zeros(2, 0, 4), make_noise(2, generator)).shape == (2, 0)


# --- the distribution ------------------------------------------------------------------------------------------------

DRAWS = 200_000
BINS = 16
POSITIONS = torch.arange(DRAWS)


def target_logits() -> Tensor:
    return torch.randn(BINS, generator=torch.Generator().manual_seed(11)) * 1.5


def draw(logits: Tensor, positions: Tensor = POSITIONS, seed: int = 1, stream: int = TARGET) -> Tensor:
    """A token per position from the softmax of one row of logits."""
    n = len(positions)
    noise = Noise(torch.full((n,), seed), positions, torch.ones(n), None, stream)
    return ops.sample(logits.expand(n, 1, -1), noise)[:, 0].long()


def check_distribution(tokens: Tensor, logits: Tensor) -> None:
    expected = torch.softmax(logits.double(), -1) * len(tokens)
    assert expected.min() > 5
    chi2 = ((torch.bincount(tokens, minlength=len(logits)) - expected) ** 2 / expected).sum().item()
    df = len(logits) - 1
    assert chi2 < df + 10 * math.sqrt(2 * df)


def coupled_agreement(p: Tensor, q: Tensor) -> float:
    """Daliri, Musco, Suresh 2024, arXiv 2408.07978: how often two draws with the same noise are equal."""
    p, q = p.double(), q.double()
    ratio = torch.maximum(p[None] / p[:, None], q[None] / q[:, None])
    return (1 / ratio.sum(1)).sum().item()


def check_acceptance(target: Tensor, draft: Tensor, drafted: Tensor, seed: int = 1) -> None:
    """A draft's tokens as the draft tokens of a verification: the target's choices, accepted as often as theory says."""
    n = len(drafted)
    tokens = torch.stack([torch.zeros_like(drafted), drafted], dim=1)
    noise = Noise(torch.full((n,), seed), POSITIONS[:n], torch.ones(n))
    logits = target.expand(n, 2, -1)
    two, one = torch.full((n,), 2, dtype=torch.int32), torch.ones(n, dtype=torch.int32)
    selected, accepted = ops.verify(logits, tokens, two, one, noise=noise)
    assert torch.equal(selected[:, 0].long(), draw(target, POSITIONS[:n], seed))  # whatever the draft proposed
    check_distribution(selected[:, 0].long(), target)
    p = coupled_agreement(torch.softmax(target, -1), torch.softmax(draft, -1))
    assert abs(accepted.double().mean().item() - p) < 5 * math.sqrt(p * (1 - p) / n)


@pytest.mark.parametrize("variant", VARIANTS)
def test_draws_follow_the_softmax(variant: str) -> None:
    with simd(variant):
        check_distribution(draw(target_logits()), target_logits())
    assert torch.equal(draw(target_logits()), draw(target_logits()))


def test_draws_follow_temperature_and_cutoff() -> None:
    logits = target_logits()
    noise = Noise(torch.full((DRAWS,), 5), POSITIONS, torch.full((DRAWS,), 0.5), torch.full((DRAWS, 1), -0.5))
    tokens = ops.sample(logits.expand(DRAWS, 1, -1), noise)[:, 0].long()
    kept = logits >= -0.5
    assert kept[tokens].all()
    check_distribution(kept.cumsum(0)[tokens] - 1, 0.5 * logits[kept])


def test_many_seeds_at_one_position() -> None:
    noise = Noise(torch.arange(DRAWS), torch.full((DRAWS,), 9), torch.ones(DRAWS))
    check_distribution(ops.sample(target_logits().expand(DRAWS, 1, -1), noise)[:, 0].long(), target_logits())


def test_an_adversarial_draft_changes_nothing() -> None:
    target = target_logits()
    check_acceptance(target, -target, draw(-target))


def test_a_close_draft_is_accepted_as_often_as_theory_says() -> None:
    target = target_logits()
    draft = target + 0.3 * torch.randn(BINS, generator=torch.Generator().manual_seed(12))
    check_acceptance(target, draft, draw(draft))
    assert coupled_agreement(torch.softmax(target, -1), torch.softmax(draft, -1)) > 0.75


# --- errors ----------------------------------------------------------------------------------------------------------

GOOD = {"seeds": torch.tensor([1, 2]), "positions": torch.tensor([3, 4]), "inv_temperature": torch.tensor([1.0, 2.0])}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"seeds": 1}, TypeError, "noise.seeds must be a tensor or numpy array of int64"),
        ({"positions": torch.tensor([3, -4])}, ValueError, "row 1: positions must not be negative, is -4"),
        ({"inv_temperature": torch.tensor([1.0, math.inf])}, ValueError, "row 1: inv_temperature"),
        ({"inv_temperature": torch.tensor([math.nan, 1.0])}, ValueError, "row 0: inv_temperature"),
        ({"cutoff": torch.zeros(2, 4)}, ValueError, r"noise.cutoff must be \[2, 3\]"),
        ({"stream": -1}, ValueError, "noise.stream must be a number of 32 bits"),
        ({"stream": None}, TypeError, "noise.stream must be an integer"),
    ],
)
def test_errors_touch_nothing(change, error, message) -> None:
    noise = Noise(**(GOOD | change))
    tokens, query_lens, num_draft_tokens = torch.zeros(2, 3, dtype=torch.int64), int32(3, 2), int32(2, 0)
    for logits in (torch.zeros(2, 3, 4), torch.zeros(2, 3, 4, dtype=torch.float64)):
        out = (torch.full((2, 3), -7, dtype=torch.int32), torch.full((2,), -7, dtype=torch.int32))
        with pytest.raises(error, match=message):
            ops.sample(logits, noise, out=out[0])
        with pytest.raises(error, match=message):
            ops.verify(logits, tokens, query_lens, num_draft_tokens, noise=noise, out=out)
        assert out[0].eq(-7).all()
        assert out[1].eq(-7).all()


def test_an_idle_rows_noise_is_ignored_and_a_dict_is_not_a_noise() -> None:
    noise = Noise(torch.tensor([1, 2]), torch.tensor([3, -4]), torch.tensor([1.0, math.nan]))
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    for dtype in (torch.float32, torch.float64):
        logits = torch.zeros(2, 3, 4, dtype=dtype)
        assert ops.verify(logits, tokens, int32(3, 0), int32(2, 0), noise=noise)[0][1].eq(-1).all()
    with pytest.raises(TypeError, match="noise must be a Noise"):
        ops.sample(torch.zeros(2, 3, 4), GOOD)  # type: ignore[arg-type]


def test_positions_of_the_first_fed_tokens() -> None:
    """Lengths of storage serve as positions, in int32, with an offset of 1."""
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(9))
    tokens, query_lens = torch.zeros(2, 3, dtype=torch.int64), int32(3, 2)
    lengths = Noise(**(GOOD | {"positions": int32(6, 700), "offset": 1}))
    expected = Noise(**(GOOD | {"positions": torch.tensor([7, 701])}))
    certain = (None, lengths), (None, expected)
    for dtype in (torch.float32, torch.float64):
        x = logits.to(dtype)
        assert torch.equal(ops.sample(x, lengths), ops.sample(x, expected))
        fed = x, tokens, query_lens, query_lens - 1
        for a, b in (
            (ops.verify(*fed, noise=lengths), ops.verify(*fed, noise=expected)),
            tuple(ops.rejection_sample(*fed, *more) for more in certain),
        ):
            assert torch.equal(a[0], b[0])
            assert torch.equal(a[1], b[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_tokens_that_no_distribution_gave(dtype: torch.dtype) -> None:
    """``invalid_positions`` has the first position of each row whose chosen logit is not finite, and stays as it is elsewhere."""
    invalid_positions, logits, noise, counts = invalid_case(dtype)
    ops.verify(logits, torch.zeros(6, 3, dtype=torch.int64), *counts, noise=noise, invalid_positions=invalid_positions)
    assert invalid_positions.tolist() == INVALID_POSITIONS
