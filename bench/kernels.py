"""The kernels' benchmarks, one or all: ``python -m bench.kernels [--device cuda] [--quick] [--json FILE]`` runs all of them.

Each benchmark is a file ``bench_<operation>.py`` with ``BENCHMARKS``, which also runs alone: ``python -m bench.bench_<operation>``.
Sampling kernels take logits ``[B, Q, V]``; attention and the KV kernels take ``S`` tokens of storage instead of ``V``, the rest of a layer its sizes. The rivals are
eager torch, on a GPU also ``torch.compile`` (not with ``--quick``), FlashInfer for rejection sampling where it is installed, and
FlexAttention for attention. ``bench/cpu.py`` and ``bench/gpu.py`` describe the timing. GB/s counts the bytes that must be moved once; the
bandwidth of a plain read with the same threads (CPU) or of a copy (GPU) stands beside it. Exit status 1: a shape failed.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import cpu, gpu
from bench.harness import Maker, Shape, save
from pipespec.bench.machine import provenance
from pipespec.bench.timing import copy_bytes_per_second

BATCHES, WIDTHS, VOCABS = (1, 4, 16, 64), (1, 5, 9, 17), (32000, 128256, 151936)
QUICK = [(1, 1, 128256), (1, 5, 128256), (4, 5, 128256), (8, 5, 128256), (16, 5, 128256), (64, 5, 32000)]
MODULES = (
    "bench_select",
    "bench_verify",
    "bench_rejection_sample",
    "bench_cutoff",
    "bench_logprobs",
    "bench_attention",
    "bench_kv",
    "bench_layers",
)


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
        make: Of a device and ``quick``: makes the cases.
        axes: Headings of a shape.
        shapes: Of a device and ``quick``: the shapes to measure.
        dtypes: Of a device and ``quick``: the dtypes to measure.
        input_bytes: Bytes of one copy of the inputs that a call touches.
    """

    name: str
    make: Callable[[str, bool], Maker]
    axes: tuple[str, str, str] = ("B", "Q", "V")
    shapes: Callable[[str, bool], list[Shape]] = logits_shapes
    dtypes: Callable[[str, bool], list[torch.dtype]] = logits_dtypes
    input_bytes: Callable[[Shape, torch.dtype], int] = logits_bytes


def rivals(device: str, quick: bool, eager: Callable[..., object]) -> dict[str, Callable[..., object]]:
    """Eager torch, and its compiled form where that is measured."""
    found = {"eager": eager}
    if device == "cuda" and not quick:
        found["compile"] = gpu.compiled(eager)
    return found


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
        make = benchmark.make(options.device, options.quick)
        shapes = benchmark.shapes(options.device, options.quick)
        for dtype in benchmark.dtypes(options.device, options.quick):
            what = shapes, dtype, benchmark.input_bytes, make
            if on_gpu:
                repeats = 15 if options.quick else 40
                part = gpu.measure(*what, repeats, info["copy_gb_per_s"], benchmark.axes)
            else:
                part = cpu.measure(*what, options.threads, info["cold_bytes"], benchmark.axes)
            for result in part:
                results.append({"benchmark": benchmark.name} | result)
                save(options.json, {"machine": info, "results": results})
    if options.json:
        print(f"written to {options.json}")
    return sum("error" in result for result in results)


def main(benchmarks: Sequence[Benchmark] | None = None, description: str = "All kernels' benchmarks.") -> None:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="few shapes, one dtype, nothing compiled by torch")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="the benchmarks of these names")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="on the CPU; default: %(default)s")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    if benchmarks is None:
        benchmarks = [b for name in MODULES for b in importlib.import_module(f"bench.{name}").BENCHMARKS]
    if options.only is not None:
        names = [b.name for b in benchmarks]
        if not set(options.only) <= set(names):
            parser.error(f"--only must be one of: {', '.join(names)}")
        benchmarks = [b for b in benchmarks if b.name in options.only]
    sys.exit(1 if run(benchmarks, options) else 0)


if __name__ == "__main__":
    main()
