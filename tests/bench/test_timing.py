"""How benchmarks take times: what is called, how often, and what counts. No time is asserted."""

import math

import pytest
import torch

from bench import harness as timing
from bench.machine import describe, provenance


def test_calls_that_warm_up_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that advances by one second with each reading: every call that counts takes one."""
    clock = iter(range(1000))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(clock)))
    calls: list[int] = []
    assert timing.repeated(lambda: calls.append(len(calls)), 3, warm_up=2) == [1.0, 1.0, 1.0]
    assert calls == [0, 1, 2, 3, 4]


def test_a_copy_reads_and_writes_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "repeated", lambda call, repeats, device, warm_up: [2.0] * repeats)
    assert timing.copy_bytes_per_second("cpu", nbytes=1000, repeats=3) == 1000.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_times_on_a_gpu() -> None:
    x = torch.zeros(1 << 20, device="cuda")
    times = timing.repeated(lambda: x.add_(1), 3, "cuda", warm_up=2)
    assert len(times) == 3
    assert all(0 < t < math.inf for t in times)
    assert x[0].item() == 5
    assert 0 < timing.copy_bytes_per_second("cuda", nbytes=1 << 24, repeats=3) < math.inf


def test_the_machine_names_its_gpus() -> None:
    machine = provenance()
    assert {"cuda", "triton", "gpus"} <= set(machine)
    gpu = {"name": "GPU X", "memory_bytes": 1, "capability": [9, 0], "multiprocessors": 1, "l2_bytes": 1}
    assert "2 x GPU X, torch" in describe(machine | {"gpus": [gpu, gpu]})
    assert "GPU" not in describe(machine | {"gpus": []}).removeprefix(machine["cpu"])
