"""Helpers of the kernels' CPU benchmarks: interleaved timing on cold data, the bandwidth of a plain read.

Our call, the sum of as many bytes by torch (a plain read) with as many threads, and the rivals take turns call by call, so that other load
affects them alike. Times are medians. Every call, of ours and of each rival, gets the copy of the inputs whose last use is longest ago: it is cold
where the copies exceed the caches (``copies`` in the result). A rival may be far slower: it gets half a second, or one call (``repeats`` in the result).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
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


def measure(
    shapes: Iterable[Shape],
    dtype: torch.dtype,
    input_bytes: Callable[[Shape, torch.dtype], int],
    make: Maker,
    cold: int,
    axes: tuple[str, str, str] = ("B", "Q", "V"),
) -> Iterator[dict[str, Any]]:
    """Time a case for each shape; prints a line of the table and yields the result."""
    print(f"{axes[0]:>4}{axes[1]:>4}{axes[2]:>8}  {'dtype':10}{'us':>11}{'GB/s':>8}{'of read':>9}   times ours")
    for shape in shapes:
        copies = max(2, min(64, -(-cold // input_bytes(shape, dtype))))
        case = make(shape, dtype, copies)
        pieces = torch.zeros(max(cold, case.bytes_moved) // 4).split(-(-case.bytes_moved // 4))

        def read(i: int) -> None:
            pieces[i % (len(pieces) - 1 or 1)].sum()  # noqa: B023

        calls = {"ours": case.ours, **case.rivals}
        times: dict[str, list[float]] = {name: [] for name in (*calls, "read")}
        used = itertools.count()
        case.ours(0)  # starts the threads
        begin = time.perf_counter()
        for i in range(50):
            past = time.perf_counter() - begin
            if i >= 3 and past > SECONDS_PER_CASE:
                break
            for name, call in calls.items():
                if name == "ours" or not times[name] or sum(times[name]) < SECONDS_PER_CASE / 2:
                    times[name].append(seconds(call, next(used) % copies))
            times["read"].append(seconds(read, i))
        us, read_us = (1e6 * median(times[name]) for name in ("ours", "read"))
        result: dict[str, Any] = {
            "shape": shape,
            "dtype": str(dtype).removeprefix("torch."),
            "copies": copies,
            "repeats": len(times["ours"]),
            "us": us,
            "best_us": min(times["ours"]) * 1e6,
            "bytes": case.bytes_moved,
            "gb_per_s": case.bytes_moved / us / 1e3,
            "read_gb_per_s": case.bytes_moved / read_us / 1e3,
            "fraction_of_read": read_us / us,
            "rivals": {},
        }
        others = ""
        for name in case.rivals:
            rival_us = 1e6 * median(times[name])
            result["rivals"][name] = {"us": rival_us, "repeats": len(times[name]), "times_ours": rival_us / us}
            others += f"  {name} {rival_us / us:.1f}"
        print(
            f"{shape[0]:4}{shape[1]:4}{shape[2]:8}  {result['dtype']:10}{us:11.1f}{result['gb_per_s']:8.1f}"
            f"{result['fraction_of_read']:9.2f} {others}",
            flush=True,
        )
        yield result
