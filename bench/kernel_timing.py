"""Cases of the kernels' benchmarks, and how they are timed on cold data.

On a CPU our call, the sum of as many bytes by torch (a plain read) with as many threads, and the rivals take turns call by call, so that other load
affects them alike. Times are medians. Every call, of ours and of each rival, gets the copy of the inputs whose last use is longest ago: it is cold
where the copies exceed the caches (``copies`` in the result). A rival may be far slower: it gets half a second, or one call (``repeats`` in the result).

On a GPU a call is timed inside a graph that contains it many times, each time on another copy of its inputs. So neither Python nor a host launch is part of
the time, and the inputs are cold where the copies together exceed twice the L2 cache. A call that cannot be captured is timed alone and marked. Times are
medians over replays, between events.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median, pstdev
from typing import Any

import torch

from bench.harness import repeated, seconds
from bench.machine import last_level_cache_bytes

Call = Callable[[int], object]  # with the number of the copy of the inputs to work on
Shape = tuple[int, int, int]  # rows, columns, and what they are of: logits or tokens


@dataclass
class KernelCase:
    """One shape of a kernel's benchmark: our call, the bytes that it moves, and other implementations of the operation."""

    bytes_moved: int
    ours: Call
    rivals: dict[str, Call] = field(default_factory=dict)


Maker = Callable[[Shape, torch.dtype, int], KernelCase]  # of a shape, a dtype and a number of copies


BATCHES, WIDTHS, VOCABS = (1, 4, 16, 64), (1, 5, 9, 17), (32000, 128256, 151936)
QUICK = [(1, 1, 128256), (1, 5, 128256), (4, 5, 128256), (8, 5, 128256), (16, 5, 128256), (64, 5, 32000)]


def logits_shapes(device: str, quick: bool) -> list[Shape]:
    return QUICK if quick else list(itertools.product(BATCHES, WIDTHS, VOCABS))


def logits_dtypes(device: str, quick: bool) -> list[torch.dtype]:
    # On the CPU one dtype, since the others differ only by their bytes.
    return [torch.bfloat16] if quick or device == "cpu" else [torch.bfloat16, torch.float32]


def logits_bytes(shape: Shape, dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


@dataclass(frozen=True)
class Benchmark:
    """An operation.

    Attributes:
        name: In the results.
        make: Of a device, a shape, a dtype and a number of copies: a case.
        axes: Headings of a shape.
        shapes: Of a device and ``quick``: the shapes to measure.
        dtypes: Of a device and ``quick``: the dtypes to measure.
        input_bytes: Bytes of one copy of the inputs that a call touches.
    """

    name: str
    make: Callable[[str, Shape, torch.dtype, int], KernelCase]
    axes: tuple[str, str, str] = ("B", "Q", "V")
    shapes: Callable[[str, bool], list[Shape]] = logits_shapes
    dtypes: Callable[[str, bool], list[torch.dtype]] = logits_dtypes
    input_bytes: Callable[[Shape, torch.dtype], int] = logits_bytes


def normal(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Normal random numbers. On the CPU a tile of some millions repeats, since drawing all would take longer than measuring."""
    out = torch.empty(shape, dtype=dtype, device=device)
    if device != "cpu":
        return out.normal_()
    tile = torch.randn(min(out.numel(), (1 << 22) + 1)).to(dtype)
    for piece in out.view(-1).split(tile.numel()):
        piece.copy_(tile[: piece.numel()])
    return out


# ---- on a CPU

SECONDS_PER_CASE = 1.0


def cold_bytes() -> int:
    """One and a half times the last-level cache, between 256 MiB and 1 GiB."""
    return max(256 << 20, min(1 << 30, last_level_cache_bytes() * 3 // 2))


def cpu_copies(nbytes: int) -> int:
    """Number of copies of inputs of this size that are cold when used in turn, limited by time."""
    return max(2, min(64, -(-cold_bytes() // nbytes)))


def measure_on_cpu(make: Maker, shape: Shape, dtype: torch.dtype, copies: int, repeats: int) -> dict[str, Any]:
    """The times of a case and its rivals, next to those of a plain read. ``repeats``: at most."""
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
    deviations = {name: 1e6 * pstdev(found) for name, found in times.items()}
    us = medians["ours"]
    return {
        "repeats": len(times["ours"]),
        "us": us,
        "deviation_us": deviations["ours"],
        "best_us": min(times["ours"]) * 1e6,
        "bytes": case.bytes_moved,
        "gb_per_s": case.bytes_moved / us / 1e3,
        "read_gb_per_s": case.bytes_moved / medians["read"] / 1e3,
        "fraction_of_read": medians["read"] / us,
        "rivals": {
            name: {
                "us": medians[name],
                "deviation_us": deviations[name],
                "repeats": len(times[name]),
                "times_ours": medians[name] / us,
            }
            for name in case.rivals
        },
    }


# ---- on a GPU

MAX_BYTES = 8 << 30
"""Memory for the copies of one case."""


def gpu_copies(nbytes: int) -> int:
    """Number of copies of inputs of this size that are cold when used in turn, limited by memory; 0 where two do not fit."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    if 2 * nbytes > max(MAX_BYTES, properties.total_memory // 4):
        return 0
    return max(2, min(256, -(-2 * properties.L2_cache_size // nbytes) + 1, MAX_BYTES // nbytes))


def time_call(call: Call, copies: int, repeats: int) -> dict[str, Any]:
    """Return the median microseconds of a call, their standard deviation, and whether it was captured."""
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
    us = [1e6 * found / copies for found in repeated(run, repeats, "cuda", warm_up=2)]
    return {"us": median(us), "deviation_us": pstdev(us), "captured": captured}


def measure_on_gpu(make: Maker, shape: Shape, dtype: torch.dtype, copies: int, repeats: int) -> dict[str, Any]:
    """The times of a case and of its rivals, each of which may fail: out of memory, launch."""
    case = make(shape, dtype, copies)
    ours = time_call(case.ours, copies, repeats)
    rivals: dict[str, dict[str, Any]] = {}
    for name, rival in case.rivals.items():
        try:
            timed = time_call(rival, copies, max(5, repeats // 4))
        except Exception as error:
            rivals[name] = {"error": f"{type(error).__name__}: {error}"}
            torch.cuda.empty_cache()
            continue
        rivals[name] = timed | {"times_ours": timed["us"] / ours["us"]}
    moved = case.bytes_moved
    return ours | {"bytes": moved, "gb_per_s": moved / ours["us"] / 1e3, "rivals": rivals}
