"""What the benchmarks on a GPU share: timing in CUDA graphs on cold data, a copy's bandwidth, a table.

A call is timed inside a graph that holds it many times over, each time on another copy of its inputs, so that neither
Python nor a launch from the host is in the time, and, where the copies together exceed twice the L2 cache, the inputs
are cold (``cold`` in the result says whether they do). What cannot be captured is timed call by call, and says so.
Medians over replays, between events.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.harness import machine

Call = Callable[[int], object]  # with the number of the copy to work on
Shape = tuple[int, int, int]

BATCHES, WIDTHS, VOCABS = (1, 4, 16, 64), (1, 5, 9, 17), (32000, 128256, 151936)
QUICK = [(1, 1, 128256), (1, 5, 128256), (4, 5, 128256), (16, 5, 128256), (64, 5, 32000)]
MOST_BYTES = 8 << 30  # for the copies of one case


@dataclass
class Case:
    """One shape: our call, the bytes that it moves, and the same thing done otherwise."""

    bytes_moved: int
    ours: Call
    rivals: dict[str, Call] = field(default_factory=dict)


def refuse_without_gpu(program: str) -> None:
    """Ends the program with status 2 and a sentence where there is no GPU to measure."""
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        print(f"{program}: no GPU is visible to torch {torch.__version__} ({built}); nothing was run.", file=sys.stderr)
        sys.exit(2)


def gpu_machine() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    import triton

    return machine() | {
        "gpu": properties.name,
        "capability": [properties.major, properties.minor],
        "multiprocessors": properties.multi_processor_count,
        "gpu_memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
    }


def copies_for(nbytes: int) -> int:
    """How many copies of inputs of this size are cold when they are used in turn; as many as memory allows."""
    l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(2, min(256, -(-2 * l2 // nbytes) + 1, MOST_BYTES // nbytes))


def elapsed_us(run: Callable[[], object], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return times


def time_call(call: Call, copies: int, repeats: int) -> tuple[float, bool]:
    """Median microseconds of a call, and whether it was captured."""
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
    elapsed_us(run, 2)
    return statistics.median(elapsed_us(run, repeats)) / copies, captured


def copy_gb_per_s(repeats: int = 20) -> float:
    """Bytes read and written per second by a plain copy of a gigabyte, the yardstick."""
    nbytes = 1 << 30
    source = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    elapsed_us(lambda: target.copy_(source), 2)
    return 2 * nbytes / statistics.median(elapsed_us(lambda: target.copy_(source), repeats)) / 1e3


def measure(
    shapes: Iterable[Shape],
    dtype: torch.dtype,
    input_bytes: Callable[[Shape, torch.dtype], int],
    make: Callable[[Shape, torch.dtype, int], Case],
    repeats: int,
    copy: float,
    axes: tuple[str, str, str] = ("B", "Q", "V"),
) -> list[dict[str, Any]]:
    """Times a case for each shape and prints the table as it grows; ``make`` gets shape, dtype and number of copies.

    A shape of which there is no room for two copies is left out, and so is the time of a rival that needs more memory than there is.
    """
    results: list[dict[str, Any]] = []
    l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    for shape in shapes:
        nbytes = input_bytes(shape, dtype)
        if 2 * nbytes > max(MOST_BYTES, torch.cuda.mem_get_info()[1] // 4):
            continue
        copies = copies_for(nbytes)
        try:
            case = make(shape, dtype, copies)
            us, captured = time_call(case.ours, copies, repeats)
        except torch.OutOfMemoryError:
            print(f"{shape}: does not fit into memory")
            torch.cuda.empty_cache()
            continue
        result: dict[str, Any] = {
            "shape": shape,
            "dtype": str(dtype).removeprefix("torch."),
            "copies": copies,
            "cold": copies * nbytes >= 2 * l2,
            "us": us,
            "captured": captured,
            "bytes": case.bytes_moved,
            "gb_per_s": case.bytes_moved / us / 1e3,
            "fraction_of_copy": case.bytes_moved / us / 1e3 / copy,
            "rivals": {},
        }
        for name, rival in case.rivals.items():
            try:
                rival_us, rival_captured = time_call(rival, copies, max(5, repeats // 4))
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                continue
            result["rivals"][name] = {"us": rival_us, "captured": rival_captured, "times_ours": rival_us / us}
        if not results:
            names = "".join(f"{name:>12}" for name in case.rivals)
            print(
                f"{axes[0]:>4}{axes[1]:>4}{axes[2]:>8}  {'dtype':10}{'':6}{'us':>9}{'GB/s':>9}{'of copy':>9}{names}   (times ours)"
            )
        results.append(result)
        measured = [result["rivals"].get(name) for name in case.rivals]
        others = "".join(
            f"{r['times_ours']:11.1f}{' ' if r['captured'] else '*'}" if r else f"{'-':>12}" for r in measured
        )
        print(
            f"{shape[0]:4}{shape[1]:4}{shape[2]:8}  {result['dtype']:10}{'cold' if result['cold'] else 'warm':6}"
            f"{us:9.2f}{result['gb_per_s']:9.0f}{result['fraction_of_copy']:9.2f}{others}",
            flush=True,
        )
        del case
        torch.cuda.empty_cache()
    return results


def compiled(function: Callable[..., object]) -> Callable[..., object]:
    """``torch.compile``'s version, compiled for each shape anew rather than once for all."""
    return torch.compile(function, dynamic=False)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="few shapes, bfloat16, eager torch as the only rival")
    parser.add_argument("--json", type=Path, help="write the results here")


def run_benchmark(
    options: argparse.Namespace,
    name: str,
    rows_read: int,
    make: Callable[[bool], Callable[[Shape, torch.dtype, int], Case]],
) -> None:
    """All shapes of one benchmark: ``make(quick)`` makes cases; ``rows_read``: rows that are read per row of logits."""

    def input_bytes(shape: Shape, dtype: torch.dtype) -> int:
        return torch.Size(shape).numel() * rows_read * dtype.itemsize

    shapes = QUICK if options.quick else list(itertools.product(BATCHES, WIDTHS, VOCABS))
    run_shapes(options, name, shapes, input_bytes, make)


def run_shapes(
    options: argparse.Namespace,
    name: str,
    shapes: list[Shape],
    input_bytes: Callable[[Shape, torch.dtype], int],
    make: Callable[[bool], Callable[[Shape, torch.dtype, int], Case]],
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32),
    axes: tuple[str, str, str] = ("B", "Q", "V"),
) -> None:
    """These shapes, in the first of the dtypes if it is to be quick, else in all. ``input_bytes``: of one copy."""
    refuse_without_gpu(f"bench.{name}")
    torch.manual_seed(0)
    info = gpu_machine() | {"copy_gb_per_s": copy_gb_per_s()}
    print(
        f"{name}: {info['gpu']}, torch {info['torch']}, triton {info['triton']}; a copy moves {info['copy_gb_per_s']:.0f} GB/s; "
        "* not in a graph"
    )
    results = []
    for dtype in dtypes[:1] if options.quick else dtypes:
        results += measure(
            shapes,
            dtype,
            input_bytes,
            make(options.quick),
            15 if options.quick else 40,
            info["copy_gb_per_s"],
            axes,
        )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": info, "results": results}, indent=1) + "\n")
        print(f"written to {options.json}")
