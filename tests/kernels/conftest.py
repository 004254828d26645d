"""Where the tests of the operations run: the CPU, a GPU, and in a process of its own the CPU by Triton's interpreter."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from .implementations import INTERPRETED, VARIANTS, running

GPU = pytest.mark.gpu

if INTERPRETED:
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    builtins: dict[Any, list[str]] = {}

    def patch_builtins(package: Any, *rest: Any) -> None:
        """As ``interpreter._patch_builtin``, which looks for them in every call of a device function: a third of its time."""
        if package not in builtins:
            builtins[package] = [name for name, member in inspect.getmembers(package) if is_builtin(member)]
        for name in builtins[package]:
            if is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, *rest)

    interpreter._patch_builtin = patch_builtins


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
