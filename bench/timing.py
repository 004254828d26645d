"""How all benchmarks take times and bandwidths: a call by the host's clock, calls on a GPU between events, copies and reads of memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from pipespec.bench.machine import last_level_cache_bytes

COPIED_BYTES = 1 << 30
"""Of a copy that measures a GPU's bandwidth. It exceeds every cache."""


def seconds(call: Callable[..., object], *arguments: object) -> float:
    """Return the seconds of one call by the host's clock."""
    began = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - began


def repeated(
    call: Callable[[], object], repeats: int, device: torch.device | str = "cpu", warm_up: int = 1
) -> list[float]:
    """Return the seconds of each of ``repeats`` calls. On a GPU they count between events on the current stream.

    Args:
        call: What is timed.
        repeats: Calls that count.
        device: Where the work of a call runs.
        warm_up: Calls before them that do not count.
    """
    device = torch.device(device)
    for _ in range(warm_up):
        call()
    if device.type != "cuda":
        return [seconds(call) for _ in range(repeats)]
    times = []
    with torch.cuda.device(device):
        for _ in range(repeats):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
    return times


def copy_bytes_per_second(device: torch.device | str = "cuda", nbytes: int = COPIED_BYTES, repeats: int = 20) -> float:
    """Rate of a plain copy on ``device``, read and written bytes counted: the median of ``repeats``."""
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / statistics.median(repeated(lambda: target.copy_(source), repeats, device, warm_up=2))


def read_bytes_per_second(threads: int) -> float:
    """Rate of a plain read of uncached memory on the CPU: the median of nine."""
    size, before = max(256 << 20, 4 * last_level_cache_bytes()), torch.get_num_threads()
    buffer = torch.ones(size // 4)
    torch.set_num_threads(threads)
    try:
        return size / statistics.median(repeated(buffer.sum, 9))
    finally:
        torch.set_num_threads(before)
