"""ops.argmax against torch.argmax and an element-by-element oracle, in every SIMD variant."""

from __future__ import annotations

import math
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


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lowest_id_wins_ties(dtype: torch.dtype, variant: str) -> None:
    with simd(variant):
        for first, second in [(0, 1), (5, 6), (0, 9999), (31, 32), (4095, 4096), (4096, 8200), (9998, 9999)]:
            logits = torch.zeros(1, 1, 10000, dtype=dtype)
            logits[..., [first, second]] = 3.0
            assert ops.argmax(logits).item() == first
            assert ops.argmax(-3 + logits).item() == first  # the tie at zero, the rest negative
            assert ops.argmax(-4 + logits).item() == first  # all negative


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_first_nan_wins(dtype: torch.dtype, variant: str) -> None:
    with simd(variant):
        for first in (0, 3, 64, 5000, 9998):
            for sign in (1.0, -1.0):
                logits = torch.full((1, 1, 10000), math.inf, dtype=dtype)
                logits[..., first] = math.copysign(math.nan, sign)
                logits[..., -1] = math.copysign(math.nan, -sign)
                assert ops.argmax(logits).item() == first


def test_zeros_of_either_sign_are_equal_and_minus_inf_is_a_value() -> None:
    for dtype in DTYPES:
        rows = torch.full((3, 1, 5000), -1.0, dtype=dtype)
        rows[0, 0, [100, 4500]] = torch.tensor([-0.0, 0.0], dtype=dtype)
        rows[1, 0, [100, 4500]] = torch.tensor([0.0, -0.0], dtype=dtype)
        rows[2] = -math.inf
        assert ops.argmax(rows).flatten().tolist() == [100, 100, 0]


def test_a_batch_is_its_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = make_logits("few values", (16, 3, 20011), torch.bfloat16, generator)
    order = torch.randperm(16, generator=generator)
    together = ops.argmax(logits, threads=2)
    assert torch.equal(ops.argmax(logits[order], threads=2), together[order])
    assert torch.equal(torch.cat([ops.argmax(row[None], threads=1) for row in logits]), together)
    assert torch.equal(ops.argmax(logits.narrow(0, 0, 1).expand(4, 3, 20011)), together[:1].expand(4, 3))


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda() -> None:
    logits = make_logits("few values", (3, 2, 4097), torch.bfloat16, torch.Generator().manual_seed(0))
    got = ops.argmax(logits.cuda())
    assert got.is_cuda
    assert torch.equal(got.cpu(), ops.argmax(logits))


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


@pytest.mark.parametrize(
    ("out", "error"),
    [
        (torch.zeros(1, 2), TypeError),
        (torch.zeros(2, 1, dtype=torch.int32), ValueError),
        (torch.zeros(1, 4, dtype=torch.int32)[:, ::2], ValueError),
        ([0, 0], TypeError),
    ],
)
def test_bad_out(out, error) -> None:
    with pytest.raises(error, match="out must be"):
        ops.argmax(torch.zeros(1, 2, 3), out=out)


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


def test_a_forked_child_works_and_ends() -> None:
    program = """
import os, signal
assert argmax(2) == 123456
assert _native.pool_threads() == 1
child = os.fork()
if child == 0:
    signal.alarm(60)
    assert _native.pool_threads() == 0
    assert argmax(2) == 123456
    assert _native.pool_threads() == 1
    raise SystemExit(7)  # through the interpreter's whole exit
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert argmax(3) == 123456
print("fine")
"""
    done = run(program)
    assert done.stdout == "fine\n", done.stderr
    assert done.returncode == 0


def test_small_work_starts_no_thread() -> None:
    assert run("argmax(8, vocab=2048); print(_native.pool_threads())").stdout == "0\n"
