"""ops.argmax against torch.argmax and an element-by-element oracle, in every SIMD variant."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipespec_kernels import ops, reference
from tests.trials import trials
from tests.waiting import SECONDS

from .selection import DTYPES, KINDS, LAYOUTS, argmax_by_hand, make_logits, simd, simd_variants, strided

VARIANTS = simd_variants()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 7, 1000, 1024, 4097, 128256])
def test_equals_torch(vocab: int, dtype: torch.dtype, variant: str) -> None:
    generator = torch.Generator().manual_seed(vocab)
    shape = (2, 2, vocab) if vocab < 100000 else (1, 2, vocab)  # torch needs a millisecond for a long row
    with simd(variant):
        for kind in KINDS:
            logits = make_logits(kind, shape, dtype, generator)
            expected = torch.argmax(logits, dim=-1).to(torch.int32)
            for layout in LAYOUTS:
                view = strided(logits, layout)
                for threads in (1, 2, 3):
                    got = ops.argmax(view, threads=threads)
                    assert torch.equal(got, expected), (kind, threads, layout)


@settings(max_examples=trials(ci=75, nightly=300))
@given(
    shape=st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(1, 300)),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(KINDS),
    layout=st.sampled_from(LAYOUTS),
    variant=st.sampled_from(VARIANTS),
    seed=st.integers(0, 2**31),
)
def test_equals_a_look_at_every_element(shape, dtype, kind, layout, variant, seed) -> None:
    logits = make_logits(kind, shape, dtype, torch.Generator().manual_seed(seed))
    expected = [argmax_by_hand(row) for row in logits.reshape(-1, shape[2]).tolist()] if shape[0] * shape[1] else []
    with simd(variant):
        got = ops.argmax(strided(logits, layout))
    assert got.dtype is torch.int32
    assert got.shape == shape[:2]
    assert got.flatten().tolist() == expected
    if expected:
        assert torch.equal(got, reference.argmax(logits))


def test_out_and_float64_and_grad() -> None:
    logits = torch.randn(2, 3, 50, requires_grad=True)
    out = torch.empty(2, 3, dtype=torch.int32)
    assert ops.argmax(logits, out=out) is out
    assert torch.equal(out, reference.argmax(logits))
    assert torch.equal(ops.argmax(logits.double()), out)
    assert torch.equal(ops.argmax(logits.double(), out=torch.empty_like(out)), out)


def test_other_devices_are_checked_alike() -> None:
    with pytest.raises(ValueError, match="contiguous along the vocabulary"):
        ops.argmax(torch.empty(2, 3, 4, device="meta").transpose(1, 2))


@pytest.mark.parametrize(
    ("logits", "error", "message"),
    [
        (np.zeros((1, 1, 2), np.float32), TypeError, "must be a tensor"),
        (torch.zeros(2, 3), ValueError, r"\[B, Q, V\]"),
        (torch.zeros(1, 2, 0), ValueError, "vocabulary"),
        (torch.zeros(1, 2, 3, dtype=torch.int64), TypeError, "int64"),
        (torch.zeros(1, 2, 6)[..., ::2], ValueError, "contiguous"),
    ],
)
def test_bad_logits(logits, error, message) -> None:
    with pytest.raises(error, match=message):
        ops.argmax(logits)


def test_bad_threads() -> None:
    with pytest.raises(ValueError, match="threads"):
        ops.argmax(torch.zeros(1, 2, 3), threads=0)
    with pytest.raises(TypeError, match=r"threads must be an integer, got 1\.5"):
        ops.argmax(torch.zeros(1, 2, 3), threads=1.5)  # type: ignore[arg-type]


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
