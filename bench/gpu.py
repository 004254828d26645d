"""Helpers of the GPU benchmarks: timing in CUDA graphs on cold data, a table.

A call is timed inside a graph that contains it many times, each time on another copy of its inputs. So neither Python nor a
host launch is part of the time, and the inputs are cold where the copies together exceed twice the L2 cache (``cold`` in the
result). A call that cannot be captured is timed alone and marked. Times are medians over replays, between events.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
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
    """Number of copies of inputs of this size that are cold when used in turn, limited by memory."""
    l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(2, min(256, -(-2 * l2 // nbytes) + 1, MOST_BYTES // nbytes))


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


def measure(
    shapes: Iterable[Shape],
    dtype: torch.dtype,
    input_bytes: Callable[[Shape, torch.dtype], int],
    make: Maker,
    repeats: int,
    copy: float,
    axes: tuple[str, str, str] = ("B", "Q", "V"),
) -> Iterator[dict[str, Any]]:
    """Time a case for each shape; prints a line of the table and yields the result.

    A shape is left out where two copies would take more than ``MOST_BYTES`` and a quarter of the memory. A case that fails has an
    ``error`` in its result.
    """
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    print(
        f"{axes[0]:>4}{axes[1]:>4}{axes[2]:>8}  {'dtype':10}{'':6}{'us':>9}{'GB/s':>9}{'of copy':>9}   "
        "times ours (* not in a graph)"
    )
    for shape in shapes:
        nbytes = input_bytes(shape, dtype)
        if 2 * nbytes > max(MOST_BYTES, properties.total_memory // 4):
            continue
        copies = copies_for(nbytes)
        result = {"shape": shape, "dtype": str(dtype).removeprefix("torch."), "copies": copies}
        result |= measure_one(make, shape, dtype, copies, repeats)
        line = f"{shape[0]:4}{shape[1]:4}{shape[2]:8}  {result['dtype']:10}"
        if "error" in result:
            print(f"{line}FAILED: {result['error'].splitlines()[0][:120]}", flush=True)
            yield result
            torch.cuda.empty_cache()  # raises if the error has destroyed the context
            continue
        result["cold"] = copies * nbytes >= 2 * properties.L2_cache_size
        result["fraction_of_copy"] = result["gb_per_s"] / copy
        others = ""
        for name, rival in result["rivals"].items():
            ratio = "failed" if "error" in rival else f"{rival['times_ours']:.1f}{'' if rival['captured'] else '*'}"
            others += f"  {name} {ratio}"
        print(
            f"{line}{'cold' if result['cold'] else 'warm':6}{result['us']:9.2f}{'' if result['captured'] else '*'}"
            f"{result['gb_per_s']:9.0f}{result['fraction_of_copy']:9.2f} {others}",
            flush=True,
        )
        yield result
        torch.cuda.empty_cache()


def measure_one(make: Maker, shape: Shape, dtype: torch.dtype, copies: int, repeats: int) -> dict[str, Any]:
    """The times of a case and its rivals, or the error: out of memory, compilation, launch."""
    try:
        case = make(shape, dtype, copies)
        us, captured = time_call(case.ours, copies, repeats)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
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
