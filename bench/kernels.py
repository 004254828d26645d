"""The kernels' benchmarks: ``python -m bench.kernels [--device cuda] [--quick] [--only NAME] [--json FILE] [--csv FILE]``

``bench/selection_cases.py`` and ``bench/layer_cases.py`` are the table of cases, whose rivals are torch, and other libraries where they are installed (``bench/rivals.py``). ``bench/kernel_timing.py`` describes the timing. GB/s counts the bytes that must be moved once; the share of a plain read with the same threads (CPU) or of a copy (GPU) stands next to it. A star: the
call was not in a graph. A shape that does not fit the memory is left out. The CSV file has a row for ours and each rival: median, standard deviation, and the command that measures it. Exit status 1: a shape failed.
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import kernel_timing, layer_cases, rivals, selection_cases
from bench.harness import copy_bytes_per_second, refuse_without_gpu, save
from bench.kernel_timing import Benchmark
from bench.machine import provenance

BENCHMARKS = [*selection_cases.BENCHMARKS, *layer_cases.BENCHMARKS]


def run(benchmarks: Sequence[Benchmark], options: argparse.Namespace) -> int:
    """Run the benchmarks, print a table each, and write the JSON file after each shape; returns the number of failed shapes."""
    on_gpu = options.device == "cuda"
    torch.manual_seed(0)
    if on_gpu:
        refuse_without_gpu("bench.kernels")
        info = provenance() | {"copy_gb_per_s": copy_bytes_per_second() / 1e9}
        print(
            f"{info['gpus'][0]['name']}, torch {info['torch']}, triton {info['triton']}; a copy moves {info['copy_gb_per_s']:.0f} GB/s"
        )
    else:
        torch.set_num_threads(options.threads)
        info = provenance(options.threads) | {"cold_bytes": kernel_timing.cold_bytes()}
        print(
            f"{info['cpu']}, {info['cores']} cores, {info['simd']}, {options.threads} threads, torch {info['torch']}, "
            f"load {info['load_average'][0]:.1f}"
        )
    results: list[dict[str, Any]] = []
    for benchmark in benchmarks:
        for result in measure(benchmark, options.device, options.quick, info.get("copy_gb_per_s")):
            results.append({"benchmark": benchmark.name} | result)
            save(options.json, {"machine": info, "results": results})
            if options.csv:
                write_csv(options.csv, results, options.device)
    if options.json:
        print(f"written to {options.json}")
    return sum("error" in result for result in results)


def measure(benchmark: Benchmark, device: str, quick: bool, copy: float | None) -> Iterator[dict[str, Any]]:
    """Time a case for each dtype and shape; prints a line of the table and yields the result, which has an ``error`` where the case fails.

    ``copy``: GB/s of a copy on a GPU, which the result relates to.
    """
    copies_for = kernel_timing.gpu_copies if device == "cuda" else kernel_timing.cpu_copies
    measure_one = kernel_timing.measure_on_gpu if device == "cuda" else kernel_timing.measure_on_cpu
    make = functools.partial(benchmark.make, device)
    print(f"\n{benchmark.name}")
    heads = (*benchmark.axes, "dtype", "us", "GB/s", "of copy" if copy else "of read")
    print("{:>6}{:>7}{:>8}  {:10}{:>10} {:>9}{:>9}   times ours".format(*heads))
    for dtype, shape in itertools.product(benchmark.dtypes(device, quick), benchmark.shapes(device, quick)):
        copies = copies_for(benchmark.input_bytes(shape, dtype))
        if not copies:
            continue
        result = {"shape": shape, "dtype": str(dtype).removeprefix("torch."), "copies": copies}
        line = "{:6}{:7}{:8}  {:10}".format(*shape, result["dtype"])
        try:
            result |= measure_one(make, shape, dtype, copies, 15 if quick and copy else 40)
        except Exception as error:
            result["error"] = f"{type(error).__name__}: {error}"
            print(f"{line}FAILED: {result['error'].splitlines()[0][:120]}", flush=True)
        else:
            if copy:
                result["fraction_of_copy"] = result["gb_per_s"] / copy
            figures = f"{result['us']:10.2f}{mark(result)}{result['gb_per_s']:9.1f}"
            share = result["fraction_of_copy" if copy else "fraction_of_read"]
            others = [
                f"{name} {'failed' if 'error' in rival else '{:.1f}'.format(rival['times_ours']) + mark(rival).strip()}"
                for name, rival in result["rivals"].items()
            ]
            print(f"{line}{figures}{share:9.2f}   {'  '.join(others)}", flush=True)
        yield result
        if device == "cuda":
            torch.cuda.empty_cache()  # raises if an error has destroyed the context


def write_csv(path: Path, results: Sequence[dict[str, Any]], device: str) -> None:
    """Write what has been measured, a row for each contender."""
    rows: list[tuple[Any, ...]] = []
    for result in results:
        command = f"python -m bench.kernels --device {device} --only {json.dumps(result['benchmark'])}{' --compiled' * rivals.compiled}"
        shape = "x".join(map(str, result["shape"]))
        for name, timed in {"pipespec": result, **result.get("rivals", {})}.items():
            if "error" not in timed:
                rate = result["bytes"] / timed["us"] / 1e3
                figures = (f"{number:.3f}" for number in (timed["us"], timed["deviation_us"], rate))
                rows.append((result["benchmark"], shape, result["dtype"], name, *figures, command))
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(("kernel", "shape", "dtype", "contender", "median_us", "deviation_us", "gb_per_s", "command"))
        table.writerows(rows)


def mark(timed: dict[str, Any]) -> str:
    return " " if timed.get("captured", True) else "*"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="few shapes, one dtype")
    parser.add_argument(
        "--compiled", action="store_true", help="torch.compile's products as rivals, half a minute each"
    )
    names = [b.name for b in BENCHMARKS]
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=names, help=f"some of: {', '.join(names)}")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="on the CPU; default: %(default)s")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--csv", type=Path, help="and here, a row for each contender")
    options = parser.parse_args()
    rivals.compiled = options.compiled
    chosen = [b for b in BENCHMARKS if b.name in (options.only or names)]
    sys.exit(1 if run(chosen, options) else 0)


if __name__ == "__main__":
    main()
