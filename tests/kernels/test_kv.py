"""The operations on keys and values as the package offers them, on the CPU: results, and arguments that are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pipespec_kernels import dispatch, ops, reference
from tests.trials import trials

from .storage import CACHE_LAYOUTS, appended, make_storage, on_device

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
EXAMPLES = settings(max_examples=trials(ci=30, nightly=120))


@EXAMPLES
@given(st.integers(1, 4), st.integers(1, 12), st.sampled_from(DTYPES), st.sampled_from(CACHE_LAYOUTS), st.data())
def test_append(batch, capacity, dtype, layout, data) -> None:
    width = data.draw(st.integers(0, capacity))
    lengths = [data.draw(st.integers(0, capacity)) for _ in range(batch)]
    counts = [data.draw(st.integers(0, min(width, capacity - n))) for n in lengths]
    caches = make_storage(batch, 2, capacity, 5, dtype, layout, CPU)
    new = torch.randn(2, batch, 2, width, 5).to(dtype)
    n, count = on_device(lengths, CPU, torch.int64), on_device(counts, CPU)

    expected = [appended(c, x, lengths, counts) for c, x in zip(caches, new, strict=True)]
    ops.kv_append(new[0], new[1], *caches, n, count)
    assert all(torch.equal(a, b) for a, b in zip(caches, expected, strict=True))
    assert n.tolist() == lengths


def test_the_oracle_is_attention_with_a_causal_mask() -> None:
    """Compares with torch's attention, an independent implementation, in two cases of equal meaning: a whole prompt, and one column."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 9, 16, generator=generator, dtype=torch.float64) for h in (6, 2, 2))
    zeros = torch.zeros(2, dtype=torch.int32)
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(reference.verify_attention(q, k, v, zeros), whole)
    last = reference.verify_attention(q[:, :, 8:], k, v, zeros + 8)
    torch.testing.assert_close(last, whole[:, :, 8:])
    at = torch.arange(9)
    near = (at <= at[:, None]) & (at[:, None] - at < 3)
    windowed = F.scaled_dot_product_attention(q, k, v, near, enable_gqa=True)
    torch.testing.assert_close(reference.verify_attention(q, k, v, zeros, window=3), windowed)
    halved = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=0.125)
    torch.testing.assert_close(reference.verify_attention(q, k, v, zeros, scale=0.125), halved)


def test_the_reference_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 9, 16, generator=generator) for h in (6, 2, 2))
    q, lengths, fed = q[:, :, :4], on_device([3, 5], CPU), on_device([4, 3], CPU)
    expected = reference.verify_attention(q, k, v, lengths, fed, 0.3).float()
    calls = []

    def counted(q: torch.Tensor, *arguments: Any) -> torch.Tensor:
        calls.append(q.shape[2])
        return original(q, *arguments)

    original = reference.verify_attention
    monkeypatch.setattr(reference, "verify_attention", counted)
    monkeypatch.setattr(dispatch, "forced", "")
    ops.verify_attention(q, k, v, lengths, fed)
    assert calls == []
    monkeypatch.setattr(dispatch, "forced", "reference")
    torch.testing.assert_close(ops.verify_attention(q, k, v, lengths, fed, scale=0.3), expected)
    assert calls == [4, 3]
    # Invariant: one column at a time, whatever else the call feeds.
    torch.testing.assert_close(ops.verify_attention(q, k, v, lengths, fed, scale=0.3, invariant=True), expected)
    assert calls == [4, 3, 1, 1, 1, 1, 1, 1, 1]


STORAGE = torch.zeros(2, 2, 8, 16)
COUNTS = torch.tensor([3, 3], dtype=torch.int32)
NEW = torch.ones(2, 2, 4, 16)
BAD_STORAGE = [
    (TypeError, "k_cache must be a tensor, got list", {"k_cache": [1]}),
    (ValueError, "v_cache must have shape", {"v_cache": STORAGE[:, :1]}),
    (ValueError, "contiguous in its last", {"k_cache": torch.zeros(2, 2, 16, 8).transpose(2, 3)}),
]
EXPANDED = (ValueError, "must not be expanded", {"v_cache": torch.zeros(1, 2, 8, 16).expand(2, 2, 8, 16)})
BAD = {
    "kv_append": [
        *BAD_STORAGE,
        EXPANDED,
        (TypeError, "lengths must be int32 or int64", {"lengths": COUNTS.float()}),
        (ValueError, "n_new must be on cpu", {"n_new": COUNTS.to("meta")}),
        (ValueError, "row 1: need 0 <= n_new <= 4, is 5", {"n_new": COUNTS + torch.tensor([0, 2])}),
        (ValueError, "row 1: lengths is 6, and 3 more", {"lengths": COUNTS + torch.tensor([0, 3])}),
        (ValueError, "row 0: lengths is 5, and 4 more", {"lengths": COUNTS + 2, "n_new": None}),
    ],
    "verify_attention": [
        *BAD_STORAGE,
        (ValueError, "3 query heads cannot share 2", {"q": torch.ones(2, 3, 4, 16)}),
        (ValueError, "scale must be finite", {"scale": math.nan}),
        (ValueError, "window must be at least 1, is 0", {"window": 0}),
        (ValueError, "out must have shape", {"out": NEW[:1]}),
        (ValueError, "out is written to", {"out": torch.zeros(1, 2, 4, 16).expand(2, 2, 4, 16)}),
        (TypeError, "workspace must be a tensor", {"workspace": 8}),
        (ValueError, r"workspace must have shape \(8,\), got \(7,\)", {"workspace": torch.zeros(7).int()}),
    ],
}
GOOD = {
    "kv_append": {"keys": NEW, "values": NEW, "lengths": COUNTS, "n_new": COUNTS},
    "verify_attention": {"q": NEW, "lengths": COUNTS, "query_lens": COUNTS},
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_touch_nothing(name: str) -> None:
    for error, message, changed in BAD[name]:
        k_cache, v_cache = torch.arange(1024.0).view(2, 2, 4, 64)[..., :32].reshape(2, 2, 8, 16), STORAGE.clone()
        before = k_cache.clone(), v_cache.clone()
        out = torch.full((2, 2, 4, 16), -9.0)
        arguments = {"k_cache": k_cache, "v_cache": v_cache, **GOOD[name]}
        if name == "verify_attention":
            arguments["out"] = out
        with pytest.raises(error, match=message):
            getattr(ops, name)(**(arguments | changed))
        assert torch.equal(k_cache, before[0])
        assert torch.equal(v_cache, before[1])
        assert (out == -9).all()
    getattr(ops, name)(**{"k_cache": k_cache, "v_cache": v_cache, **GOOD[name]})


@pytest.mark.parametrize("name", GOOD)
def test_there_is_no_backward_pass(name: str) -> None:
    for changed in ("k_cache", "q" if name == "verify_attention" else "v_cache"):
        arguments = {"k_cache": torch.zeros(2, 2, 8, 16), "v_cache": torch.zeros(2, 2, 8, 16), **GOOD[name]}
        arguments[changed] = arguments[changed].clone().requires_grad_()
        with pytest.raises(RuntimeError, match=f"{name} has no backward pass"):
            getattr(ops, name)(**arguments)
        with torch.no_grad():
            getattr(ops, name)(**arguments)
