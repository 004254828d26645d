"""How fast is a step of the native decoder? ``python -m bench.bench_decoder [--quick] [--json FILE]``

Steps of few columns with random weights in the shapes of the bundled models. Each step and a plain read of as many bytes as the packed
weights have, with the same threads, take turns, some in a row. Times are medians. GB/s counts the packed weights once, and neither keys nor values.
``of read`` is the time of the plain read divided by that of the step. GFLOP/s counts the matrices' multiplications and additions.
Weights that fit a cache stay in it from step to step, as they do in use. The last lines are a prefill, beside the products of torch.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from statistics import median
from typing import Any

import torch

import pipespec.demo
from bench.harness import save
from pipespec.bench.machine import provenance
from pipespec.bench.timing import seconds
from pipespec_kernels import _native
from pipespec_kernels.decoder import DecoderShape, LayerWeights, NativeDecoder

FAMILY = Path(pipespec.demo.__file__).parent / "family"
POSITIONS = 512
IN_A_ROW = 6


def shape_of(model: str) -> tuple[DecoderShape, int]:
    """Shape and number of layers of a bundled model."""
    config = json.loads((FAMILY / model / "config.json").read_text(encoding="utf-8"))
    shape = DecoderShape(
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        vocabulary=config["vocab_size"],
        eps=config["rms_norm_eps"],
        scale=config["head_dim"] ** -0.5,
    )
    return shape, config["num_hidden_layers"]


class Case:
    """A decoder with random weights, representable in bfloat16, and a cache of one row full of random numbers."""

    def __init__(self, shape: DecoderShape, layers: int) -> None:
        def random(*size: int) -> torch.Tensor:
            return (torch.randn(size) * size[-1] ** -0.5).bfloat16().float()

        h, i = shape.hidden, shape.intermediate
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        head, ones = random(shape.vocabulary, h), torch.ones(h)
        self.decoder = NativeDecoder(
            shape,
            [
                LayerWeights(
                    input_norm=ones,
                    q=random(q, h),
                    k=random(kv, h),
                    v=random(kv, h),
                    o=random(h, q),
                    post_norm=ones,
                    gate=random(i, h),
                    up=random(i, h),
                    down=random(h, i),
                )
                for _ in range(layers)
            ],
            embedding=head,
            norm=ones,
            head=head,
        )
        self.keys, self.values = torch.randn(2, layers, 1, shape.kv_heads, POSITIONS, shape.head_dim)
        angles = torch.randn(POSITIONS, shape.head_dim)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.tokens = torch.randint(0, shape.vocabulary, (1, POSITIONS))
        # Multiplications and additions of a column, with the panels' padding, which is small in these shapes.
        self.flop = self.decoder.nbytes * 8 // self.decoder.weight_bits * 2

    def step(self, columns: int, length: int, threads: int, keep: int) -> torch.Tensor:
        tokens = self.tokens[:, :columns]
        cache = self.keys, self.values, [length], self.cos, self.sin
        return self.decoder.step(tokens, *cache, keep=keep, threads=threads)


def measure(case: Case, columns: int, length: int, threads: int, repeats: int) -> dict[str, Any]:
    """Time one shape of a step."""
    size = case.decoder.nbytes
    memory = torch.zeros(size, dtype=torch.uint8)
    steps: list[float] = []
    reads: list[float] = []
    # Some of each one after the other. The first of them finds the other's bytes in the caches.
    for _ in range(repeats):
        steps += [seconds(case.step, columns, length, threads, columns) for _ in range(IN_A_ROW)][1:]
        reads += [seconds(_native.read_bandwidth_probe, memory.data_ptr(), size, threads) for _ in range(IN_A_ROW)][1:]
    us, read_us = 1e6 * median(steps), 1e6 * median(reads)
    return {
        "columns": columns,
        "length": length,
        "threads": threads,
        "us": us,
        "best_us": min(steps) * 1e6,
        "gb_per_s": size / us / 1e3,
        "read_gb_per_s": size / read_us / 1e3,
        "fraction_of_read": read_us / us,
        "gflop_per_s": case.flop * columns / us / 1e3,
    }


def prefill(case: Case, threads: int, repeats: int) -> dict[str, Any]:
    """Time a forward of 500 columns, and torch's product of as many columns with the matrices of gate and up."""
    columns = 500
    shape = case.decoder.shape
    x, w = torch.randn(columns, shape.hidden), torch.randn(2 * shape.intermediate, shape.hidden)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ours, theirs = [], []
        for _ in range(repeats):
            ours.append(seconds(case.step, columns, 0, threads, 1))
            theirs.append(seconds(torch.nn.functional.linear, x, w))
    finally:
        torch.set_num_threads(before)
    # The head works on one column.
    flop = (case.flop - 2 * shape.hidden * shape.vocabulary) * columns
    return {
        "columns": columns,
        "threads": threads,
        "us": 1e6 * median(ours),
        "gflop_per_s": flop / median(ours) / 1e9,
        "torch_product_gflop_per_s": 2 * x.numel() * len(w) / median(theirs) / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of the native decoder's steps against a plain read.")
    parser.add_argument("--models", nargs="+", default=["target", "medium", "small"], metavar="NAME")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], metavar="N")
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    torch.manual_seed(0)
    info = provenance(max(options.threads))
    print(f"{info['cpu']}, {info['cores']} cores, {info['simd']}, load {info['load_average'][0]:.1f}")
    results: list[dict[str, Any]] = []
    for model in options.models:
        case = Case(*shape_of(model))
        print(f"\n{model}: {case.decoder.nbytes / 1e6:.1f} MB, {case.decoder.weight_bits} bits per weight")
        print(
            f"{'threads':>7}{'Q':>4}{'length':>8}{'us':>9}{'best us':>9}{'GB/s':>7}{'of read':>9}{'GB/s read':>11}{'GFLOP/s':>9}"
        )
        for threads, length, columns in itertools.product(options.threads, (64, 400), (1, 2, 4, 8)):
            r = measure(case, columns, length, threads, 2 if options.quick else 10)
            results.append({"model": model} | r)
            print(
                f"{threads:7}{columns:4}{length:8}{r['us']:9.0f}{r['best_us']:9.0f}{r['gb_per_s']:7.1f}"
                f"{r['fraction_of_read']:9.2f}{r['read_gb_per_s']:11.1f}{r['gflop_per_s']:9.1f}",
                flush=True,
            )
            save(options.json, {"machine": info, "results": results})
        for threads in options.threads:
            r = prefill(case, threads, 2 if options.quick else 7)
            results.append({"model": model} | r)
            print(
                f"{threads:7}{r['columns']:4}{'prefill':>8}{r['us']:9.0f}  {r['gflop_per_s']:.1f} GFLOP/s; a product in torch "
                f"{r['torch_product_gflop_per_s']:.1f} GFLOP/s",
                flush=True,
            )
            save(options.json, {"machine": info, "results": results})


if __name__ == "__main__":
    main()
