"""The kernels' benchmarks: ``python -m bench.kernels [--device cuda] [--quick] [--only NAME] [--json FILE]``

``bench/selection_cases.py``, ``bench/layer_cases.py`` and ``bench/packed_cases.py`` are the table of cases. The rivals are eager torch, on a GPU also ``torch.compile`` (not with
``--quick``), FlashInfer for rejection sampling where it is installed, and FlexAttention for attention. ``bench/cpu.py`` and ``bench/gpu.py`` describe the
timing. GB/s counts the bytes that must be moved once; the bandwidth of a plain read with the same threads (CPU) or of a copy (GPU) stands beside it. Exit
status 1: a shape failed.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench import cpu, gpu, layer_cases, packed_cases, selection_cases
from bench.harness import Benchmark, save
from bench.timing import copy_bytes_per_second
from pipespec.bench.machine import provenance

BENCHMARKS = [*selection_cases.BENCHMARKS, *layer_cases.BENCHMARKS, *packed_cases.BENCHMARKS]


def run(benchmarks: Sequence[Benchmark], options: argparse.Namespace) -> int:
    """Run the benchmarks, print a table each, and write the JSON file after each shape; returns the number of failed shapes."""
    on_gpu = options.device == "cuda"
    torch.manual_seed(0)
    if on_gpu:
        gpu.refuse_without_gpu("bench.kernels")
        info = provenance() | {"copy_gb_per_s": copy_bytes_per_second() / 1e9}
        print(
            f"{info['gpus'][0]['name']}, torch {info['torch']}, triton {info['triton']}; a copy moves {info['copy_gb_per_s']:.0f} GB/s"
        )
    else:
        torch.set_num_threads(options.threads)
        info = provenance(options.threads) | {"cold_bytes": cpu.cold_bytes()}
        print(
            f"{info['cpu']}, {info['cores']} cores, {info['simd']}, {options.threads} threads, torch {info['torch']}, "
            f"load {info['load_average'][0]:.1f}"
        )
    results: list[dict[str, Any]] = []
    for benchmark in benchmarks:
        print(f"\n{benchmark.name}")
        make = functools.partial(benchmark.make, options.device, options.quick)
        shapes = benchmark.shapes(options.device, options.quick)
        for dtype in benchmark.dtypes(options.device, options.quick):
            what = shapes, dtype, benchmark.input_bytes, make
            if on_gpu:
                repeats = 15 if options.quick else 40
                part = gpu.measure(*what, repeats, info["copy_gb_per_s"], benchmark.axes)
            else:
                part = cpu.measure(*what, info["cold_bytes"], benchmark.axes)
            for result in part:
                results.append({"benchmark": benchmark.name} | result)
                save(options.json, {"machine": info, "results": results})
    if options.json:
        print(f"written to {options.json}")
    return sum("error" in result for result in results)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="few shapes, one dtype, nothing compiled by torch")
    names = [b.name for b in BENCHMARKS]
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=names, help=f"some of: {', '.join(names)}")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="on the CPU; default: %(default)s")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    chosen = [b for b in BENCHMARKS if b.name in (options.only or names)]
    sys.exit(1 if run(chosen, options) else 0)


if __name__ == "__main__":
    main()
