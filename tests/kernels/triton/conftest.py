"""Tests of the Triton kernels that run on either: in triton's interpreter on the CPU, or compiled on a GPU.

Which of the two is settled when triton is first imported. In a run of the whole suite nothing is interpreted, so
that here as elsewhere kernels are compiled: these tests then need a GPU, and ``tests/kernels/test_interpreted.py`` runs
them a second time, interpreted, in a process of its own. By hand::

    TRITON_INTERPRET=1 python -m pytest tests/kernels/triton
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent != Path(__file__).parent:
            continue
        if not INTERPRETED:
            item.add_marker(pytest.mark.gpu)
        # numpy, which interprets, mentions every NaN and overflow; the kernels mean them.
        item.add_marker(pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning"))


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the tensors of these tests live."""
    gpu_only = request.node.get_closest_marker("gpu") is not None
    if INTERPRETED:
        if gpu_only:
            pytest.skip("needs a CUDA device")
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda", torch.cuda.current_device())
