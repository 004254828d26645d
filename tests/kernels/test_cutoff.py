"""ops.cutoff against its oracle and against the warpers of transformers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from pipespec_kernels import ops, reference
from pipespec_kernels.noise import Noise
from tests.trials import trials

from .selection import DTYPES, KINDS, LAYOUTS, make_logits, ragged_counts, strided

SETTINGS = list(itertools.product((0, 1, 5, 50, 700), (1.0, 0.9, 0.3, 0.0), (0.0, 0.05, 1.0), (0.6, 1.7)))


def kept_by_huggingface(logits: Tensor, top_k: int, top_p: float, min_p: float, temperature: float) -> Tensor:
    scores = logits.flatten(0, 1).float()
    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k > 0 else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p > 0 else []
    for warper in warpers:
        scores = warper(None, scores)
    return (scores > -math.inf).view(logits.shape)


@pytest.mark.parametrize("vocab", [1, 2, 7, 100, 1000, 20000])
def test_keeps_what_huggingface_keeps(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    for k, p, least, temperature in SETTINGS:
        logits = torch.randn(2, 2, vocab, generator=generator) * 4
        cutoff = ops.cutoff(logits, inv_temperature=1 / temperature, top_k=k, top_p=p, min_p=least)
        kept = kept_by_huggingface(logits, k, p, least, temperature)
        assert torch.equal(logits >= cutoff[..., None], kept), (k, p, least, temperature)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_with_ties_keeps_the_equals_of_the_last(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    for k, p, least, temperature in SETTINGS:
        logits = (torch.randn(2, 2, 3000, generator=generator) * 4).to(dtype)
        cutoff = ops.cutoff(logits, inv_temperature=1 / temperature, top_k=k, top_p=p, min_p=least)[..., None]
        kept = kept_by_huggingface(logits, k, p, least, temperature)
        ours = logits >= cutoff
        # HuggingFace's top-p may drop some equals of the last kept logit, which changes the probabilities for min-p. Nothing else may differ.
        assert (ours | ~kept).all(), (k, p, least, temperature)
        assert torch.equal(ours & (logits != cutoff), kept & (logits != cutoff)), (k, p, least, temperature)


@settings(max_examples=trials(ci=60, nightly=250))
@given(
    shape=st.tuples(
        st.integers(0, 3), st.integers(0, 3), st.one_of(st.integers(1, 200), st.sampled_from([1000, 5000]))
    ),
    dtype=st.sampled_from([*DTYPES, torch.float64]),
    kind=st.sampled_from(KINDS),
    layout=st.sampled_from(LAYOUTS),
    top_k=st.sampled_from([0, 1, 2, 3, 17, 150, 10**6]),
    top_p=st.sampled_from([0.0, 0.1, 0.75, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.03, 1.0]),
    ragged=st.booleans(),
    threads=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 2**31),
)
def test_equals_the_oracle(shape, dtype, kind, layout, top_k, top_p, min_p, ragged, threads, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.float64:
        logits = make_logits(kind, shape, torch.float32, generator).double()
    else:
        logits = make_logits(kind, shape, dtype, generator)
    batch, width, _ = shape
    scales = torch.rand(batch, generator=generator) + 0.5
    ks = torch.where(torch.rand(batch, generator=generator) < 0.8, top_k, 0)
    ps = torch.where(torch.rand(batch, generator=generator) < 0.8, top_p, 1.0).double()
    leasts = torch.where(torch.rand(batch, generator=generator) < 0.8, min_p, 0.0).double()
    counts = ragged_counts(batch, width, generator) if ragged else (None, None)
    got = ops.cutoff(
        strided(logits, layout),
        inv_temperature=scales,
        top_k=ks,
        top_p=ps,
        min_p=leasts,
        query_lens=counts[0],
        num_draft_tokens=counts[1],
        threads=threads,
    )
    assert got.dtype is torch.float32
    expected = reference.cutoff(logits.float(), scales, ks, ps, leasts, *counts)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_rows_and_threads(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    logits = (torch.randn(2, 2, 128256, generator=generator) * 2).to(dtype)
    for k, p, least in [(50, 1.0, 0.0), (50, 0.9, 0.0), (0, 0.9, 0.0), (5000, 0.95, 0.01), (0, 1.0, 0.05)]:
        n = torch.ones(2, dtype=torch.float64)
        expected = reference.cutoff(logits, n.float(), n.long() * k, n * p, n * least)
        for threads in (1, 2, 4):
            assert torch.equal(ops.cutoff(logits, top_k=k, top_p=p, min_p=least, threads=threads), expected)


def test_by_hand() -> None:
    row = torch.log(torch.tensor([[[0.1, 0.4, 0.05, 0.2, 0.25]]]))

    def kept(**filters: float) -> list[int]:
        return torch.nonzero(row[0, 0] >= ops.cutoff(row, **filters).item()).flatten().tolist()  # type: ignore[arg-type]

    assert ops.cutoff(row).item() == -math.inf
    assert kept(top_k=2) == [1, 4]
    assert kept(top_p=0.5) == [1, 4]
    assert kept(top_p=0.66) == [1, 3, 4]
    assert kept(top_p=0.0) == [1]
    assert kept(min_p=0.2) == [0, 1, 3, 4]
    assert kept(top_k=3, top_p=0.7) == [1, 4]  # of .4 .25 .2, that is of .85
    # Top-k keeps all tied logits, and probabilities are those after top-k.
    tied = torch.tensor([[[1.0, 2.0, 2.0, 0.0]]])
    assert ops.cutoff(tied, top_k=1).item() == 2.0
    assert ops.cutoff(tied, top_k=1, top_p=0.4).item() == 2.0
    assert ops.cutoff(torch.tensor([[[-0.0, 0.0, -1.0]]]), top_k=1).view(torch.int32).item() == 0  # +0.0
    assert ops.cutoff(torch.tensor([[[math.nan, 0.0]]]), top_k=1).item() == -math.inf
    assert ops.cutoff(torch.full((1, 1, 300), -math.inf), top_k=1, top_p=0.5, min_p=0.5).item() == -math.inf
    assert ops.cutoff(torch.tensor([[[math.inf, 5.0, math.inf]]]), top_p=0.9).item() == math.inf
    # A value between two float32 numbers is rounded down, so that its logit stays.
    assert 0 <= 0.3 - ops.cutoff(torch.tensor([[[0.3, 0.1]]], dtype=torch.float64), top_k=1).item() < 1e-7


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [5, 600])
def test_infinite_logits(vocab: int, dtype: torch.dtype) -> None:
    """Infinite logits share all of the probability."""
    logits = torch.randn(4, 1, vocab, generator=torch.Generator().manual_seed(7)).to(dtype)
    logits[1:3, 0, 2] = math.inf
    logits[2, 0, 4] = math.inf
    logits[3] = math.inf
    one = torch.ones(4, dtype=torch.float64)
    for k, p, least in ((0, 0.9, 0.0), (1, 1.0, 0.0), (2, 1.0, 0.0), (2, 0.5, 0.1), (0, 1.0, 0.01), (3, 0.999, 1.0)):
        expected = reference.cutoff(logits, one.float(), one.long() * k, one * p, one * least)
        assert torch.equal(ops.cutoff(logits, top_k=k, top_p=p, min_p=least), expected)
        assert expected[3].item() == math.inf


@pytest.mark.parametrize("scalar", [np.float32, np.float64, torch.tensor])
def test_scalars_of_numpy_and_torch_are_numbers(scalar) -> None:
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(6))
    expected = ops.cutoff(logits, inv_temperature=0.5, top_k=7, top_p=0.75, min_p=0.25)
    filters = {"inv_temperature": scalar(0.5), "top_p": scalar(0.75), "min_p": scalar(0.25)}
    assert torch.equal(ops.cutoff(logits, top_k=np.int64(7), **filters), expected)
    assert torch.equal(ops.cutoff(logits, top_k=torch.tensor(7), **filters), expected)


def test_only_columns_that_verification_may_read() -> None:
    logits = torch.tensor([0.0, 1.0]).expand(3, 4, 2)
    query_lens, num_draft_tokens = np.array([4, 2, 0], np.int32), np.array([1, 0, -1], np.int32)
    got = ops.cutoff(logits, top_k=1, query_lens=query_lens, num_draft_tokens=num_draft_tokens)  # type: ignore[arg-type]
    o = -math.inf
    assert got.tolist() == [[o, o, 1, 1], [o, 1, o, o], [o, o, o, o]]


def test_sampling_with_a_cutoff_draws_nothing_else() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(1, 1, 2000, generator=generator) * 3).bfloat16().expand(3000, 1, 2000)
    cutoff = ops.cutoff(logits[:1], top_k=40, top_p=0.8)
    noise = Noise(torch.arange(3000), torch.zeros(3000, dtype=torch.int64), torch.ones(3000), cutoff.repeat(3000, 1))
    kept = torch.nonzero(logits[0, 0].float() >= cutoff.item()).flatten()
    assert set(ops.sample(logits, noise).flatten().tolist()) <= set(kept.tolist())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"top_k": -1}, ValueError, "row 0"),
        ({"top_k": 1.5}, TypeError, "integer"),
        ({"top_p": torch.tensor([0.5, 1.5])}, ValueError, "row 1"),
        ({"top_p": torch.tensor([0.5])}, ValueError, r"top_p must be a number or \[2\]"),
        ({"min_p": -0.1}, ValueError, "row 0"),
        ({"inv_temperature": math.inf}, ValueError, "row 0"),
        ({"query_lens": torch.tensor([1, 1], dtype=torch.int32)}, ValueError, "together"),
        ({"out": torch.zeros(2, 3, dtype=torch.int32)}, TypeError, "out must be a float32"),
    ],
)
def test_errors_touch_nothing(change, error, message) -> None:
    for dtype in (torch.float32, torch.float64):
        out = torch.full((2, 3), -7.0)
        with pytest.raises(error, match=message):
            ops.cutoff(torch.zeros(2, 3, 4, dtype=dtype), **({"top_k": 1, "out": out} | change))
        assert out.eq(-7).all()
