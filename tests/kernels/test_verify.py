"""ops.verify against a literal implementation of the definition in docs/architecture.md."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipespec_kernels import ops, reference
from tests.trials import trials

from .selection import (
    DTYPES,
    KINDS,
    LAYOUTS,
    drafted_tokens,
    int32,
    make_logits,
    ragged_counts,
    simd,
    simd_variants,
    strided,
    verify_by_hand,
)

VARIANTS = simd_variants()


@settings(max_examples=trials(ci=100, nightly=400))
@given(
    shape=st.tuples(st.integers(0, 5), st.integers(0, 6), st.sampled_from([1, 2, 3, 7, 33, 100])),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(KINDS),
    layout=st.sampled_from(LAYOUTS),
    token_dtype=st.sampled_from([torch.int32, torch.int64]),
    agreement=st.sampled_from([0.0, 0.8, 1.0]),
    variant=st.sampled_from(VARIANTS),
    seed=st.integers(0, 2**31),
)
def test_equals_the_definition(shape, dtype, kind, layout, token_dtype, agreement, variant, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = make_logits(kind, shape, dtype, generator)
    tokens = drafted_tokens(logits, agreement, generator, token_dtype)
    query_lens, num_draft_tokens = ragged_counts(shape[0], shape[1], generator)
    selected, accepted = verify_by_hand(logits, tokens, query_lens.tolist(), num_draft_tokens.tolist())
    if layout == "transposed":
        tokens = tokens.t().contiguous().t()
    with simd(variant):
        got = ops.verify(strided(logits, layout), tokens, query_lens, num_draft_tokens)
    assert [t.dtype for t in got] == [torch.int32, torch.int32]
    assert torch.equal(got[0], selected)
    assert torch.equal(got[1], accepted)
    slow = reference.verify(logits, tokens, query_lens, num_draft_tokens)
    assert torch.equal(slow[0], selected)
    assert torch.equal(slow[1], accepted)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 7, 1000, 1024, 4097, 128256])
def test_sizes_and_threads(vocab: int, dtype: torch.dtype, variant: str) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = make_logits("nans" if vocab == 1000 else "normal", (4, 5, vocab), dtype, generator)
    tokens = drafted_tokens(logits, 0.8, generator, torch.int64)
    query_lens, num_draft_tokens = int32(5, 0, 3, 4), int32(4, 0, 0, 2)
    expected = reference.verify(logits, tokens, query_lens, num_draft_tokens)
    with simd(variant):
        for layout in LAYOUTS:
            view = strided(logits, layout)
            for threads in (1, 2, 3):
                got = ops.verify(view, tokens, query_lens, num_draft_tokens, threads=threads)
                assert torch.equal(got[0], expected[0]), (threads, layout)
                assert torch.equal(got[1], expected[1]), (threads, layout)


def test_one_by_hand() -> None:
    logits = torch.nn.functional.one_hot(torch.tensor([[3, 1, 4, 1]]), 6).float()
    fed = torch.tensor([[7, 3, 1, 5]])
    selected, accepted = ops.verify(logits, fed, int32(4), int32(3))
    assert selected.tolist() == [[3, 1, 4, -1]]
    assert accepted.tolist() == [2]
    # The same with fewer and with more own tokens before the draft tokens.
    selected, accepted = ops.verify(logits[:, 1:], fed[:, 1:], int32(3), int32(2))
    assert (selected.tolist(), accepted.tolist()) == ([[1, 4, -1]], [1])
    selected, accepted = ops.verify(logits, fed, int32(4), int32(2))
    assert (selected.tolist(), accepted.tolist()) == ([[1, 4, -1, -1]], [1])
    selected, accepted = ops.verify(logits, fed, int32(4), int32(0))
    assert (selected.tolist(), accepted.tolist()) == ([[1, -1, -1, -1]], [0])


def test_ids_are_compared_whole() -> None:
    logits = torch.zeros(1, 2, 4)
    tokens = torch.tensor([[0, 1 << 32]])  # its low half is the id 0 that would be selected
    assert ops.verify(logits, tokens, int32(2), int32(1))[1].item() == 0


def test_idle_rows_and_empty_sizes() -> None:
    nan = torch.full((2, 3, 4), math.nan)
    selected, accepted = ops.verify(nan, torch.zeros(2, 3, dtype=torch.int64), int32(0, 0), int32(-1, 9))
    assert (selected.tolist(), accepted.tolist()) == ([[-1] * 3] * 2, [0, 0])
    selected, accepted = ops.verify(torch.zeros(0, 3, 4), torch.zeros(0, 3, dtype=torch.int64), int32(), int32())
    assert (selected.shape, accepted.shape) == ((0, 3), (0,))
    none = torch.zeros(2, 0, dtype=torch.int64)
    selected, accepted = ops.verify(torch.zeros(2, 0, 4), none, int32(0, 0), int32(0, 0))
    assert (selected.shape, accepted.tolist()) == ((2, 0), [0, 0])


def case(vocabulary: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = make_logits("normal", (4, 5, vocabulary), dtype, generator)
    return logits, drafted_tokens(logits, 0.8, generator, torch.int64), int32(5, 1, 0, 3), int32(4, 0, 0, 1)


def test_numpy_counts_strided_counts_out_and_float64() -> None:
    logits, tokens, query_lens, num_draft_tokens = case(30, torch.float32)
    expected = ops.verify(logits, tokens, query_lens, num_draft_tokens)
    pairs = torch.stack([query_lens, num_draft_tokens], dim=1)
    out = (torch.empty(4, 5, dtype=torch.int32), torch.empty(4, dtype=torch.int32))
    for got in (
        ops.verify(logits, tokens, query_lens.numpy(), num_draft_tokens.numpy()),
        ops.verify(logits, tokens, np.asarray(pairs)[:, 0], np.asarray(pairs)[:, 1]),
        ops.verify(logits, tokens, pairs[:, 0], pairs[:, 1]),
        ops.verify(logits.double(), tokens, query_lens, num_draft_tokens),
        ops.verify(logits, tokens, query_lens, num_draft_tokens, out=out),
    ):
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])
    assert ops.verify(logits, tokens, query_lens, num_draft_tokens, out=out)[0] is out[0]


GOOD = {
    "logits": torch.zeros(2, 3, 4),
    "tokens": torch.zeros(2, 3, dtype=torch.int64),
    "query_lens": int32(3, 2),
    "num_draft_tokens": int32(2, 0),
}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": torch.zeros(2, 3, 4, dtype=torch.int32)}, TypeError, "int32"),
        ({"logits": torch.zeros(2, 4, 3).transpose(1, 2)}, ValueError, "contiguous along the vocabulary"),
        ({"tokens": torch.zeros(2, 3)}, TypeError, "tokens must be int64"),
        ({"tokens": torch.zeros(2, 3, dtype=torch.int64, device="meta")}, ValueError, "tokens are on meta"),
        ({"query_lens": torch.tensor([3, 2])}, TypeError, "query_lens must be int32"),
        ({"num_draft_tokens": int32(1, 0).to("meta")}, ValueError, "on the CPU"),
        ({"query_lens": int32(4, 2)}, ValueError, "row 0.*query_lens=4"),
        ({"num_draft_tokens": int32(2, 2)}, ValueError, "row 1.*num_draft_tokens=2"),
    ],
)
def test_errors_touch_nothing(change, error, message) -> None:
    native = GOOD | change
    oracle = {"logits": GOOD["logits"].double()} | {k: v for k, v in native.items() if k != "logits"}
    for arguments in [native] if "logits" in change else [native, oracle]:
        out = (torch.full((2, 3), -7, dtype=torch.int32), torch.full((2,), -7, dtype=torch.int32))
        with pytest.raises(error, match=message):
            ops.verify(**arguments, out=out)
        assert out[0].eq(-7).all()
        assert out[1].eq(-7).all()


def test_bad_out() -> None:
    good = torch.empty(2, 3, dtype=torch.int32)
    for out in ((good, torch.empty(3, dtype=torch.int32)), (good.t(), int32(0, 0)), (good, torch.zeros(2))):
        with pytest.raises((TypeError, ValueError), match=r"out\[[01]\] must be"):
            ops.verify(**GOOD, out=out)
