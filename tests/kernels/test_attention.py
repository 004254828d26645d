"""``verify_attention`` in native code: the reference's numbers, and the same bits whatever else a call computes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipespec_kernels import dispatch, ops, reference
from tests.trials import trials

from .selection import simd, simd_variants
from .storage import CACHE_LAYOUTS, make_storage, on_device

CPU = torch.device("cpu")
DTYPES = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
OTHERS = {torch.float64: 1e-12, torch.float16: 2e-3}
"""Those of the reference."""
VARIANTS = simd_variants()


def columns(shape: tuple[int, int, int, int], layout: str, dtype: torch.dtype) -> torch.Tensor:
    """``[B, H, Q, D]`` with NaN, in one of three layouts."""
    batch, heads, width, dim = shape
    if layout == "heads first":
        return torch.full(shape, math.nan, dtype=dtype)
    if layout == "columns first":
        return torch.full((batch, width, heads, dim), math.nan, dtype=dtype).transpose(1, 2)
    wide = torch.full((width, batch, heads + 2, dim + 3), math.nan, dtype=dtype)  # of one matrix of q|k|v
    return wide.permute(1, 2, 0, 3)[:, 1:-1, :, 2 : dim + 2]


LAYOUTS = ("heads first", "columns first", "gaps")


@settings(max_examples=trials(ci=40, nightly=400))
@given(
    st.sampled_from([*DTYPES, *OTHERS]),
    st.sampled_from(VARIANTS),
    st.sampled_from([1, 3, 8, 16, 20, 33]),
    st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS), st.sampled_from(CACHE_LAYOUTS)),
    st.data(),
)
def test_numbers_of_the_reference(dtype, variant, dim, layouts, data) -> None:
    batch, group = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 5))
    width = data.draw(st.sampled_from([0, 1, 2, 7, 8, 9, 17]))
    capacity = width + data.draw(st.integers(0, 70))
    fed = [data.draw(st.integers(0, width)) for _ in range(batch)]
    lengths = [data.draw(st.integers(0, capacity - n)) for n in fed]
    window, scale = data.draw(st.sampled_from([None, 1, 5, 16, 33, 1000])), data.draw(st.sampled_from([None, 0.3]))
    softcap, invariant = data.draw(st.sampled_from([None, 2.0])), data.draw(st.booleans())
    options = {"window": window, "scale": scale, "softcap": softcap, "invariant": invariant}
    k_cache, v_cache = make_storage(batch, 2, capacity, dim, dtype, layouts[2], CPU)
    for row, (n, count) in enumerate(zip(lengths, fed, strict=True)):
        first = 0 if window is None else max(0, n + 1 - window)
        for cache in (k_cache, v_cache):  # none of these may reach a result
            cache[row, :, n + count :] = math.nan
            cache[row, :, :first] = math.nan
    q = columns((batch, 2 * group, width, dim), layouts[0], dtype)
    for row, count in enumerate(fed):
        q[row, :, :count] = torch.randn(2 * group, count, dim).to(dtype)
    out = columns(tuple(q.shape), layouts[1], dtype)
    wide = data.draw(st.booleans())
    n, counts = (on_device(x, CPU, torch.int64 if wide else torch.int32) for x in (lengths, fed))
    with simd(variant):
        got = ops.verify_attention(q, k_cache, v_cache, n, counts, out=out, **options)
    assert got is out
    expected = reference.verify_attention(
        q.nan_to_num(), k_cache.nan_to_num(), v_cache.nan_to_num(), n, counts, scale, window, softcap
    )
    tolerance = (DTYPES | OTHERS)[dtype]
    torch.testing.assert_close(got.double(), expected.double(), rtol=tolerance, atol=tolerance)
    for row, count in enumerate(fed):
        assert not got[row, :, count:].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("window", [None, 37])
def test_one_column_alone_has_the_same_bits(dtype, variant, window) -> None:
    """Whatever the rows, the columns, the layout and the threads; with keys for several threads."""
    generator = torch.Generator().manual_seed(3)
    batch, heads, width, dim, capacity = 3, 6, 19, 32, 800
    q = torch.randn(batch, heads, width, dim, generator=generator).to(dtype)
    caches = make_storage(batch, 2, capacity, dim, dtype, "columns first", CPU)
    lengths = on_device([capacity - width, 0, 333], CPU)
    threads = torch.get_num_threads()
    found = []
    try:
        with simd(variant):
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                found.append(ops.verify_attention(q, *caches, lengths, window=window))
            found.append(ops.verify_attention(q, *caches, lengths, window=window, invariant=True))
            for row in range(batch):
                one = slice(row, row + 1)
                mine = [cache[one].contiguous() for cache in caches]
                for first, last in ((0, 1), (1, 3), (3, 11), (11, 19), (18, 19)):
                    part = ops.verify_attention(q[one, :, first:last], *mine, lengths[one] + first, window=window)
                    assert torch.equal(part[0], found[0][row, :, first:last])
                # The same, as one head of several.
                grouped = ops.verify_attention(q[one, 4:5], *(c[:, 1:] for c in mine), lengths[one], window=window)
                assert torch.equal(grouped[0, 0], found[0][row, 4])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(other, found[0]) for other in found[1:])


def test_float32_and_bfloat16_are_native(monkeypatch) -> None:
    """Other dtypes are the reference's."""
    calls, attention = [], reference.verify_attention
    monkeypatch.setattr(reference, "verify_attention", lambda *given: calls.append(given[0].dtype) or attention(*given))
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        caches = make_storage(1, 1, 4, 8, dtype, "plain", CPU)
        ops.verify_attention(torch.ones(1, 1, 1, 8, dtype=dtype), *caches, on_device([2], CPU))
        ops.verify_attention(torch.ones(1, 1, 1, 8, dtype=dtype), *caches, on_device([2], CPU), softcap=2.0)
    assert calls == [torch.float16] * 2 + [torch.float64] * 2


@pytest.mark.parametrize("softcap", [1e-30, 1e-3, 0.5, 30.0, 1e4, 1e6, 1e8, 1e30])
def test_caps_of_any_size(softcap: float) -> None:
    """A large cap changes nothing, a small one makes all scores equal; 1 - e^(-2 x) cancels where x is small."""
    torch.manual_seed(1)
    q, caches = torch.randn(1, 2, 3, 64) * 3, [torch.randn(1, 2, 40, 64) for _ in range(2)]
    got = ops.verify_attention(q, *caches, on_device([30], CPU), softcap=softcap)
    q64, k64, v64 = q.double(), *(c.double() for c in caches)
    wanted = reference.verify_attention(q64, k64, v64, on_device([30], CPU), softcap=softcap).float()
    torch.testing.assert_close(got, wanted, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("softcap", [0.0, -1.0, 1e-50, 1e39, float("inf"), float("nan")])
def test_caps_that_float32_cannot_hold(softcap: float) -> None:
    with pytest.raises(ValueError, match=r"softcap must be 1e-30 \.\. 1e30"):
        ops.verify_attention(
            torch.ones(1, 1, 1, 8), *[torch.ones(1, 1, 4, 8)] * 2, on_device([2], CPU), softcap=softcap
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("lengths", "fed", "message"),
    [
        ([0, 5], [2, 4], "row 1: lengths is 5, and 4 more tokens must lie within the capacity 8"),
        ([0, -1], [2, 2], "row 1: lengths is -1"),
        ([0, 1], [5, 1], "row 0: need 0 <= query_lens <= 4, is 5"),
        ([0, 1], [4, -1], "row 1: need 0 <= query_lens <= 4, is -1"),
        ([2, 2**62], [4, 4], "row 1: lengths is"),
        ([2, 5], None, "row 1: lengths is 5, and 4 more"),
    ],
)
@pytest.mark.parametrize("check", [False, True])
def test_refused_numbers_leave_out_as_it_is(dtype, lengths, fed, message, check) -> None:
    caches = make_storage(2, 1, 8, 16, dtype, "plain", CPU)
    out = torch.full((2, 1, 4, 16), -9.0, dtype=dtype)
    counts = None if fed is None else on_device(fed, CPU, torch.int64)
    with pytest.raises(ValueError, match=message):
        ops.verify_attention(
            torch.ones(2, 1, 4, 16, dtype=dtype), *caches, on_device(lengths, CPU, torch.int64), counts,
            out=out, check_counts=check,
        )  # fmt: skip
    assert (out == -9).all()


def test_scores_that_overflow_and_vanish() -> None:
    """As torch's softmax: the largest score takes all; equal ones share; a NaN in a seen key is in the result."""
    assert dispatch.forced == ""
    for variant in VARIANTS:
        with simd(variant):
            keys = torch.zeros(1, 1, 40, 16)
            keys[0, 0, 3], keys[0, 0, 35] = 1e18, -1e18
            values = torch.arange(40.0)[:, None].repeat(1, 1, 1, 16)
            q = torch.full((1, 1, 1, 16), 1e18)
            assert (ops.verify_attention(q, keys, values, on_device([39], CPU)) == 3).all()
            even = ops.verify_attention(q * 0, keys, values, on_device([39], CPU))
            torch.testing.assert_close(even, torch.full_like(even, 19.5))
            keys[0, 0, 7] = math.nan
            assert ops.verify_attention(q, keys, values, on_device([39], CPU)).isnan().all()
            assert not ops.verify_attention(q * 0, keys, values, on_device([6], CPU)).isnan().any()
