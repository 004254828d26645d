"""Where the tests of the operations run: the CPU, a GPU, and in a process of its own the CPU by Triton's interpreter."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from .implementations import INTERPRETED, VARIANTS, matmul_in_order, running

GPU = pytest.mark.gpu

if INTERPRETED:
    import tests.support.quick_interpreter  # noqa: F401


def place(kind: str) -> torch.device:
    if kind in ("cuda", "gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda", 0) if kind in ("cuda", "gpu") else torch.device("cpu")


@pytest.fixture(params=["cpu"] if INTERPRETED else ["cpu", pytest.param("cuda", marks=GPU)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Of the tensors of a test that runs all implementations of a device."""
    return place(request.param)


@pytest.fixture(params=["triton"] if INTERPRETED else ["reference", *VARIANTS, pytest.param("gpu", marks=GPU)])
def everywhere(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The device of the tensors of a test that runs once per implementation, and all calls of :mod:`pipespec_kernels.ops` go to that one."""
    found = place(request.param)
    with running(request.param):
        yield found


@pytest.fixture
def sums_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's products add as a GPU's do: alike whatever else they compute."""
    if INTERPRETED:
        monkeypatch.setattr(np, "matmul", matmul_in_order)
