"""Tests of the Triton kernels, which run in triton's interpreter on the CPU or compiled on a GPU.

The first import of triton decides between the two. A run of the whole suite compiles the kernels, so these tests then need a GPU, and
``tests/kernels/test_interpreted.py`` runs them a second time, interpreted, in a process of its own. By hand::

    TRITON_INTERPRET=1 python -m pytest tests/kernels/triton tests/kernels/test_matrix.py tests/kernels/test_edges.py
"""

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from tests.trials import PROFILE

from ..implementations import INTERPRETED, running

T = TypeVar("T")
if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


def some(cases: Sequence[T], begin: int, step: int) -> Sequence[T]:
    """All cases at night and on a GPU, which is fast enough; in the interpreter every ``step``-th from ``begin`` on."""
    return cases if PROFILE == "nightly" or not INTERPRETED else cases[begin::step]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent != Path(__file__).parent:
            continue
        if not INTERPRETED:
            item.add_marker(pytest.mark.gpu)
        # The interpreter uses numpy, which warns of every NaN and overflow. The kernels produce them on purpose.
        item.add_marker(pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning"))


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device of the tensors of these tests."""
    gpu_only = request.node.get_closest_marker("gpu") is not None
    if INTERPRETED:
        if gpu_only:
            pytest.skip("needs a CUDA device")
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(autouse=True)
def kernels(device: torch.device) -> Iterator[None]:
    """All calls of ``ops`` go to the kernels."""
    with running("triton" if device.type == "cpu" else "gpu"):
        yield
