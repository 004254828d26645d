"""What the native code has of its own: SIMD variants by environment, threads, and which calls it takes from the reference."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from pipespec_kernels import dispatch, ops, reference
from tests.waiting import SECONDS

from .cases import placed
from .implementations import VARIANTS, simd
from .selection import int32

# --- the variant by environment, and the threads ---------------------------------------------------------------------

# Without torch: these start an interpreter each.
PRELUDE = """
import array
from pipespec_kernels import _native
V = 200001
row = array.array("f", bytes(4 * V))
row[123456] = 1
out = array.array("i", [-7])
def argmax(threads, vocab=V):
    _native.argmax(row.buffer_info()[0], _native.FLOAT32, 1, 1, vocab, vocab, vocab, out.buffer_info()[0], threads)
    return out[0]
"""


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + program],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_variant_by_environment(variant: str) -> None:
    done = run("print(argmax(2), _native.simd(), _native.pool_threads())", PIPESPEC_SIMD=variant)
    assert done.stdout == f"123456 {variant} 1\n", done.stderr
    assert done.returncode == 0  # the helper thread does not keep the interpreter from exiting


def test_unknown_variant_is_an_error() -> None:
    done = run("argmax(1)", PIPESPEC_SIMD="avx1024")
    assert done.returncode == 1
    assert "ValueError" in done.stderr
    assert "avx1024" in done.stderr
    assert "portable" in done.stderr


def test_small_work_starts_no_thread() -> None:
    assert run("argmax(8, vocab=2048); print(_native.pool_threads())").stdout == "0\n"


# ---- attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("window", [None, 37])
def test_one_column_alone_has_the_same_bits(dtype, variant, window) -> None:
    """Whatever the rows, the columns, the layout and the threads; with keys for several threads."""
    generator = torch.Generator().manual_seed(3)
    batch, heads, width, dim, capacity = 3, 6, 19, 32, 800
    q = torch.randn(batch, heads, width, dim, generator=generator).to(dtype)
    caches = [placed(x.to(dtype), "transposed") for x in torch.randn(2, batch, 2, capacity, dim, generator=generator)]
    lengths = int32(capacity - width, 0, 333)
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
        caches = torch.ones(2, 1, 1, 4, 8, dtype=dtype)
        ops.verify_attention(torch.ones(1, 1, 1, 8, dtype=dtype), *caches, int32(2))
        ops.verify_attention(torch.ones(1, 1, 1, 8, dtype=dtype), *caches, int32(2), softcap=2.0)
    assert calls == [torch.float16] * 2 + [torch.float64] * 2


def test_the_reference_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 9, 16, generator=generator) for h in (6, 2, 2))
    q, lengths, fed = q[:, :, :4], int32(3, 5), int32(4, 3)
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
