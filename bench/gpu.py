"""Helpers of the GPU benchmarks: timing in CUDA graphs on cold data.

A call is timed inside a graph that contains it many times, each time on another copy of its inputs. So neither Python nor a
host launch is part of the time, and the inputs are cold where the copies together exceed twice the L2 cache. A call that cannot be captured is timed
alone and marked. Times are medians over replays, between events.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

from bench.harness import Call, Maker, Shape
from bench.timing import repeated

MOST_BYTES = 8 << 30
"""Memory for the copies of one case."""


def refuse_without_gpu(program: str) -> None:
    """End the program with status 2 and a message where torch sees no GPU."""
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        print(f"{program}: no GPU is visible to torch {torch.__version__} ({built}); nothing was run.", file=sys.stderr)
        sys.exit(2)


def copies_for(nbytes: int) -> int:
    """Number of copies of inputs of this size that are cold when used in turn, limited by memory; 0 where two do not fit."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    if 2 * nbytes > max(MOST_BYTES, properties.total_memory // 4):
        return 0
    return max(2, min(256, -(-2 * properties.L2_cache_size // nbytes) + 1, MOST_BYTES // nbytes))


def time_call(call: Call, copies: int, repeats: int) -> tuple[float, bool]:
    """Return the median microseconds of a call, and whether it was captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles, and fills caches, on a stream that may be captured afterwards
        for i in range(min(3, copies)):
            call(i)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()

    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for i in range(copies):
                call(i)
    except RuntimeError:
        torch.cuda.synchronize()

        def run() -> None:
            for i in range(copies):
                call(i)

        captured = False
    else:
        run, captured = graph.replay, True
    return statistics.median(repeated(run, repeats, "cuda", warm_up=2)) * 1e6 / copies, captured


def measure_one(make: Maker, shape: Shape, dtype: torch.dtype, copies: int, repeats: int) -> dict[str, Any]:
    """The times of a case and of its rivals, each of which may fail: out of memory, compilation, launch."""
    case = make(shape, dtype, copies)
    us, captured = time_call(case.ours, copies, repeats)
    rivals: dict[str, dict[str, Any]] = {}
    for name, rival in case.rivals.items():
        try:
            rival_us, rival_captured = time_call(rival, copies, max(5, repeats // 4))
        except Exception as error:
            rivals[name] = {"error": f"{type(error).__name__}: {error}"}
            torch.cuda.empty_cache()
            continue
        rivals[name] = {"us": rival_us, "captured": rival_captured, "times_ours": rival_us / us}
    moved = case.bytes_moved
    return {"us": us, "captured": captured, "bytes": moved, "gb_per_s": moved / us / 1e3, "rivals": rivals}


@functools.cache
def compiled(function: Callable[..., object]) -> Callable[..., object]:
    """``torch.compile`` of a function, compiled for each shape separately."""
    torch._dynamo.config.recompile_limit = 1000
    return torch.compile(function, dynamic=False)
