"""Helpers of the kernels' CPU benchmarks: interleaved timing on cold data, the bandwidth of a plain read.

Our call, the sum of as many bytes by torch (a plain read) with as many threads, and the rivals take turns call by call, so that other load
affects them alike. Times are medians. Every call, of ours and of each rival, gets the copy of the inputs whose last use is longest ago: it is cold
where the copies exceed the caches (``copies`` in the result). A rival may be far slower: it gets half a second, or one call (``repeats`` in the result).
"""

from __future__ import annotations

import itertools
import time
from statistics import median
from typing import Any

import torch

from bench.harness import Maker, Shape
from bench.timing import seconds
from pipespec.bench.machine import last_level_cache_bytes

SECONDS_PER_CASE = 1.0


def cold_bytes() -> int:
    """One and a half times the last-level cache, between 256 MiB and 1 GiB."""
    return max(256 << 20, min(1 << 30, last_level_cache_bytes() * 3 // 2))


def copies_for(nbytes: int) -> int:
    """Number of copies of inputs of this size that are cold when used in turn, limited by time."""
    return max(2, min(64, -(-cold_bytes() // nbytes)))


def measure_one(make: Maker, shape: Shape, dtype: torch.dtype, copies: int, repeats: int) -> dict[str, Any]:
    """The times of a case and its rivals, beside those of a plain read. ``repeats``: at most."""
    case = make(shape, dtype, copies)
    pieces = torch.zeros(max(cold_bytes(), case.bytes_moved) // 4).split(-(-case.bytes_moved // 4))
    calls = {"ours": case.ours, **case.rivals}
    times: dict[str, list[float]] = {name: [] for name in (*calls, "read")}
    used = itertools.count()
    case.ours(0)  # starts the threads
    begin = time.perf_counter()
    for i in range(repeats):
        past = time.perf_counter() - begin
        if i >= 3 and past > SECONDS_PER_CASE:
            break
        for name, call in calls.items():
            if name == "ours" or not times[name] or sum(times[name]) < SECONDS_PER_CASE / 2:
                times[name].append(seconds(call, next(used) % copies))
        times["read"].append(seconds(pieces[i % (len(pieces) - 1 or 1)].sum))
    medians = {name: 1e6 * median(found) for name, found in times.items()}
    us = medians["ours"]
    return {
        "repeats": len(times["ours"]),
        "us": us,
        "best_us": min(times["ours"]) * 1e6,
        "bytes": case.bytes_moved,
        "gb_per_s": case.bytes_moved / us / 1e3,
        "read_gb_per_s": case.bytes_moved / medians["read"] / 1e3,
        "fraction_of_read": medians["read"] / us,
        "rivals": {
            name: {"us": medians[name], "repeats": len(times[name]), "times_ours": medians[name] / us}
            for name in case.rivals
        },
    }
