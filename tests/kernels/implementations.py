"""The implementations of the operations, and how a test runs each of them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from pipespec_kernels import _native, arguments, dispatch

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
"""Triton's kernels run in its interpreter. The first import of triton decides, so the process has no other kernels then, see ``test_interpreted.py``."""


def simd_variants() -> list[str]:
    """The SIMD variants of this machine."""
    names = []
    for name in ("portable", "avx2", "avx512", "amx", "neon", "dotprod"):
        try:
            before = _native.set_simd(name)
        except ValueError:
            continue
        _native.set_simd(before)
        names.append(name)
    return names


VARIANTS = simd_variants()


@contextmanager
def simd(name: str) -> Iterator[None]:
    before = _native.set_simd(name)
    try:
        yield
    finally:
        _native.set_simd(before)


def implementations(device: torch.device) -> list[str]:
    """Those that take tensors on this device."""
    if device.type == "cuda":
        return ["gpu"]
    return ["triton"] if INTERPRETED else ["reference", *VARIANTS]


@contextmanager
def running(name: str) -> Iterator[None]:
    """All calls of :mod:`pipespec_kernels.ops` go to this implementation."""
    if name in VARIANTS:
        with simd(name):
            yield
        return
    with pytest.MonkeyPatch.context() as patch:
        if name != "gpu":
            patch.setattr(dispatch, "forced", name)
            patch.setattr(arguments, "_CODES", dict.fromkeys(arguments._CODES))
        yield


def matmul_in_order(a: np.ndarray, b: np.ndarray, dtype: object = None) -> np.ndarray:
    """Each element a sum over k in order. A BLAS sums the rows at the edge of its tiles in another order, on some processors."""
    a, b = a.astype(dtype), b.astype(dtype)  # type: ignore[call-overload]
    out = np.zeros((*a.shape[:-1], b.shape[-1]), dtype)  # type: ignore[call-overload]
    for k in range(a.shape[-1]):
        out += a[..., :, k : k + 1] * b[..., k : k + 1, :]
    return out
