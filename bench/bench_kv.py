"""How fast are the moves of keys and values? ``python -m bench.bench_kv [--device cuda] [--quick] [--json FILE]``

One layer with the heads of Llama-3-8B (8 of keys, 128 dimensions), storage of ``S`` tokens per row, lengths of their own:

* ``kv_append``: ``Q`` new columns per row; against an indexed assignment;
* ``kv_gather``: all rows to other places, nearly ``S`` tokens each; against ``index_select`` and a copy back;
* ``kv_compact``: ``Q`` tokens of each row to other places; against an indexed read and an indexed assignment.

The indices for torch are made beforehand. Storage is small where its size changes nothing: what is not touched is not
in a cache either, and must not make the rest look cold.

Bytes: what is moved, read once and written once. On a GPU (``bench/gpu.py`` says how times are taken) in bfloat16, on
a CPU in float32 with small shapes, called in turn, medians.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench import gpu
from bench.harness import machine, median_us, seconds, write
from pipespec_kernels import ops

KV_HEADS, DIM = 8, 128
OPS = ("kv_append", "kv_gather", "kv_compact")


def shapes(op: str, batches: tuple[int, ...], widths: tuple[int, ...], context: int) -> list[gpu.Shape]:
    if op == "kv_gather":
        return [(b, 1, context) for b in batches if b > 1]  # a single row has nowhere to go
    return [(b, q, 4 * q) for b in batches for q in widths]


class Layer(NamedTuple):
    """Storage ``[B, Hkv, S, D]``, and what is to be done with it."""

    keys: Tensor
    values: Tensor
    new: Tensor  # [B, Hkv, Q, D]
    lengths: Tensor
    columns: Tensor  # int64 [B, Q]: where the new ones belong
    rows: Tensor
    own: Tensor  # int64 [B, 1]: each row's number
    kept: Tensor  # int64 [B, Q]: a token each, beyond where it goes
    counts: Tensor


def lengths_of(shape: gpu.Shape) -> list[int]:
    batch, width, capacity = shape
    return [capacity - 2 * width - row % (width + 1) for row in range(batch)]


def layer(shape: gpu.Shape, dtype: torch.dtype, device: str) -> Layer:
    batch, width, capacity = shape
    keys = torch.randn(batch, KV_HEADS, capacity, DIM, dtype=dtype, device=device)
    rows = torch.arange(batch, dtype=torch.int32, device=device).roll(1)
    own = torch.arange(batch, device=device)[:, None]
    lengths = torch.tensor(lengths_of(shape), dtype=torch.int32, device=device)
    columns = lengths.long()[:, None] + torch.arange(width, device=device)
    counts = torch.full_like(lengths, width)
    new = torch.randn(batch, width, KV_HEADS, DIM, dtype=dtype, device=device).transpose(1, 2)
    return Layer(keys, torch.randn_like(keys), new, lengths, columns, rows, own, columns + width // 2, counts)


def ours(op: str, x: Layer) -> None:
    if op == "kv_append":
        ops.kv_append(x.new, x.new, x.keys, x.values, x.lengths, x.counts)
    elif op == "kv_gather":
        ops.kv_gather(x.keys, x.values, x.lengths, x.rows)
    else:
        ops.kv_compact(x.keys, x.values, x.kept, x.lengths, x.counts)


def eager(op: str, x: Layer) -> None:
    """Torch's own way."""
    for cache in (x.keys, x.values):
        if op == "kv_append":
            cache[x.own, :, x.columns] = x.new.transpose(1, 2)
        elif op == "kv_gather":
            cache.copy_(cache.index_select(0, x.rows))
        else:
            cache[x.own, :, x.columns] = cache[x.own, :, x.kept]


def bytes_moved(op: str, shape: gpu.Shape, dtype: torch.dtype) -> int:
    tokens = sum(lengths_of(shape)) if op == "kv_gather" else shape[0] * shape[1]
    return 4 * tokens * KV_HEADS * DIM * dtype.itemsize  # keys and values, read and written


def make(op: str, quick: bool) -> Callable[[gpu.Shape, torch.dtype, int], gpu.Case]:
    def case(shape: gpu.Shape, dtype: torch.dtype, copies: int) -> gpu.Case:
        layers = [layer(shape, dtype, "cuda") for _ in range(copies)]
        check(op, layers[0])
        rivals: dict[str, gpu.Call] = {"eager": lambda i: eager(op, layers[i])}
        if not quick:
            compiled = gpu.compiled(eager)
            rivals["compile"] = lambda i: compiled(op, layers[i])
        return gpu.Case(bytes_moved(op, shape, dtype), lambda i: ours(op, layers[i]), rivals)

    return case


def check(op: str, x: Layer) -> None:
    """Both do the same to what counts."""
    mine, theirs = (x._replace(keys=x.keys.clone(), values=x.values.clone()) for _ in range(2))
    ours(op, mine)
    eager(op, theirs)
    lengths = x.lengths if op != "kv_gather" else x.lengths[x.rows.long()]
    for row, n in enumerate(lengths.tolist()):
        assert torch.equal(mine.keys[row, :, :n], theirs.keys[row, :, :n])
        assert torch.equal(mine.values[row, :, :n], theirs.values[row, :, :n])


def measure_cpu(repeats: int) -> list[dict[str, Any]]:
    results = []
    print(f"{'':12}{'B':>4}{'Q':>4}{'S':>8}{'us':>10}{'GB/s':>8}{'eager':>8}   (times ours)")
    for op, shape in [(name, shape) for name in OPS for shape in shapes(name, (1, 4), (1, 5), 1024)]:
        x = layer(shape, torch.float32, "cpu")
        check(op, x)
        times: tuple[list[float], list[float]] = [], []
        for _ in range(repeats):
            times[0].append(seconds(ours, op, x))
            times[1].append(seconds(eager, op, x))
        us, eager_us = map(median_us, times)
        moved = bytes_moved(op, shape, torch.float32)
        rivals = {"eager": {"us": eager_us, "times_ours": eager_us / us}}
        results.append({"op": op, "shape": shape, "dtype": "float32", "us": us, "bytes": moved, "rivals": rivals})
        print(
            f"{op:12}{shape[0]:4}{shape[1]:4}{shape[2]:8}{us:10.1f}{moved / us / 1e3:8.1f}{eager_us / us:8.2f}",
            flush=True,
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of moving keys and values against torch.")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="on a CPU")
    gpu.add_options(parser)
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.device == "cuda":
        gpu.refuse_without_gpu("bench.bench_kv")
        info = gpu.gpu_machine() | {"copy_gb_per_s": gpu.copy_gb_per_s()}
        print(f"bench_kv: {info['gpu']}, torch {info['torch']}; a copy moves {info['copy_gb_per_s']:.0f} GB/s")
        widths = (5,) if options.quick else gpu.WIDTHS
        results = []
        for op in OPS:
            print(op)
            measured = gpu.measure(
                shapes(op, gpu.BATCHES, widths, 8192),
                torch.bfloat16,
                functools.partial(bytes_moved, op),
                make(op, options.quick),
                15 if options.quick else 40,
                info["copy_gb_per_s"],
                ("B", "Q", "S"),
            )
            results += [{"op": op} | r for r in measured]
        write(options.json, info, results)
        return
    torch.set_num_threads(options.threads)
    info = machine() | {"threads": options.threads}
    print(f"{info['cpu']}, {options.threads} threads, torch {info['torch']}, load {info['load_average'][0]:.1f}")
    write(options.json, info, measure_cpu(7 if options.quick else 31))


if __name__ == "__main__":
    main()
