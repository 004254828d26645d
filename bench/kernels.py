"""The kernels' benchmarks, one or all: ``python -m bench.kernels [--device cuda] [--quick] [--json FILE]`` runs all of them.

Each is a file ``bench_<operation>.py`` with ``BENCHMARKS``; alone: ``python -m bench.bench_<operation>`` with the same options.
Every operation is measured over shapes ``[B, Q, V]``, against the same thing in eager torch, on a GPU also under
``torch.compile`` (not with ``--quick``) and, for the ratio test, FlashInfer where it is installed. How times are taken:
``bench/cpu.py``, ``bench/gpu.py``. GB/s are of bytes that must be moved once, beside the bandwidth of a plain read with the
same threads (CPU) or of a copy in the same run (GPU). Exit status 1: some shape failed.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench import cpu, gpu
from bench.harness import Case, machine

BATCHES, WIDTHS, VOCABS = (1, 4, 16, 64), (1, 5, 9, 17), (32000, 128256, 151936)
QUICK = [(1, 1, 128256), (1, 5, 128256), (4, 5, 128256), (8, 5, 128256), (16, 5, 128256), (64, 5, 32000)]
MODULES = ("bench_select", "bench_verify", "bench_verify_ratio", "bench_cutoff")


@dataclass(frozen=True)
class Benchmark:
    """An operation. ``make(device, quick)`` makes the cases of a device; ``rows_read``: rows of inputs per row of logits;
    ``most_logits``: on the CPU larger shapes are left out."""

    name: str
    make: Callable[[str, bool], Callable[[tuple[int, int, int], torch.dtype, int], Case]]
    rows_read: int = 1
    most_logits: int = 1 << 40


def rivals(device: str, quick: bool, eager: Callable[..., object]) -> dict[str, Callable[..., object]]:
    """Eager torch, and the same compiled where that is measured."""
    found = {"eager": eager}
    if device == "cuda" and not quick:
        found["compile"] = gpu.compiled(eager)
    return found


def run(benchmarks: Sequence[Benchmark], options: argparse.Namespace) -> int:
    """Runs them on a device, prints a table each, writes one JSON; returns how many shapes failed."""
    on_gpu = options.device == "cuda"
    torch.manual_seed(0)
    if on_gpu:
        gpu.refuse_without_gpu("bench.kernels")
        info = gpu.gpu_machine() | {"copy_gb_per_s": gpu.copy_gb_per_s()}
        print(
            f"{info['gpu']}, torch {info['torch']}, triton {info['triton']}; a copy moves {info['copy_gb_per_s']:.0f} GB/s"
        )
    else:
        torch.set_num_threads(options.threads)
        info = machine() | {"threads": options.threads, "cold_bytes": cpu.cold_bytes()}
        print(
            f"{info['cpu']}, {info['cores']} cores, {info['simd']}, {options.threads} threads, torch {info['torch']}, "
            f"load {info['load_average'][0]:.1f}"
        )
    shapes = QUICK if options.quick else list(itertools.product(BATCHES, WIDTHS, VOCABS))
    # On the CPU one dtype: the others differ by their bytes, and the table takes long enough.
    dtypes = [torch.bfloat16] if options.quick or not on_gpu else [torch.bfloat16, torch.float32]
    results = []
    for benchmark in benchmarks:
        print(f"\n{benchmark.name}")
        make = benchmark.make(options.device, options.quick)
        for dtype in dtypes:
            nbytes = benchmark.rows_read * dtype.itemsize
            if on_gpu:
                repeats = 15 if options.quick else 40
                part = gpu.measure(shapes, dtype, nbytes, make, repeats, info["copy_gb_per_s"])
            else:
                here = [shape for shape in shapes if torch.Size(shape).numel() <= benchmark.most_logits]
                part = cpu.measure(here, dtype, nbytes, make, options.threads, info["cold_bytes"])
            results += [{"benchmark": benchmark.name} | result for result in part]
    info["load_average_after"] = machine()["load_average"]
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": info, "results": results}, indent=1) + "\n")
        print(f"written to {options.json}")
    return sum("error" in result for result in results)


def main(benchmarks: Sequence[Benchmark] | None = None, description: str = "All kernels' benchmarks.") -> None:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="six shapes, bfloat16, eager torch as the only rival")
    parser.add_argument("--only", help="the one benchmark of this name")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="on the CPU; default: %(default)s")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    if benchmarks is None:
        benchmarks = [b for name in MODULES for b in importlib.import_module(f"bench.{name}").BENCHMARKS]
    if options.only is not None:
        names = [b.name for b in benchmarks]
        if options.only not in names:
            parser.error(f"--only must be one of: {', '.join(names)}")
        benchmarks = [b for b in benchmarks if b.name == options.only]
    sys.exit(1 if run(benchmarks, options) else 0)


if __name__ == "__main__":
    main()
