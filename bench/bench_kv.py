"""How fast are the moves of keys and values? ``python -m bench.bench_kv [--device cuda] [--quick] [--only kv_append] [--json FILE]``

One layer with the heads of Llama-3-8B (8 of keys, 128 dimensions), storage of ``S`` tokens per row, lengths of their own:

* ``kv_append``: ``Q`` new columns per row; against an indexed assignment;
* ``kv_gather``: all rows to other places, nearly ``S`` tokens each; against ``index_select`` and a copy back;
* ``kv_compact``: ``Q`` tokens of each row to other places; against an indexed read and an indexed assignment.

The indices for torch are made beforehand. Storage is small where its size has no effect: untouched storage must not push the rest out of the caches.

On a GPU in bfloat16; on the CPU in float32 with small shapes. Bytes: what is moved,
read once and written once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from bench.bench_attention import DIM, KV_HEADS, dtypes
from bench.harness import KernelCase, Shape, normal
from bench.kernels import BATCHES, WIDTHS, Benchmark, main, rivals
from pipespec_kernels import ops


class Layer(NamedTuple):
    """Storage ``[B, Hkv, S, D]``, and the arguments of the moves."""

    keys: Tensor
    values: Tensor
    new_keys: Tensor  # [B, Hkv, Q, D]
    new_values: Tensor
    lengths: Tensor
    columns: Tensor  # int64 [B, Q]: where the new ones belong
    rows: Tensor
    own: Tensor  # int64 [B, 1]: each row's number
    kept: Tensor  # int64 [B, Q]: a token each, beyond where it goes
    counts: Tensor


def lengths_of(shape: Shape) -> list[int]:
    batch, width, capacity = shape
    return [capacity - 2 * width - row % (width + 1) for row in range(batch)]


def layer(shape: Shape, dtype: torch.dtype, device: str) -> Layer:
    batch, width, capacity = shape
    keys, values = (normal((batch, KV_HEADS, capacity, DIM), dtype, device) for _ in range(2))
    new_keys, new_values = (normal((batch, width, KV_HEADS, DIM), dtype, device).transpose(1, 2) for _ in range(2))
    rows = torch.arange(batch, dtype=torch.int32, device=device).roll(1)
    own = torch.arange(batch, device=device)[:, None]
    lengths = torch.tensor(lengths_of(shape), dtype=torch.int32, device=device)
    columns = lengths.long()[:, None] + torch.arange(width, device=device)
    counts = torch.full_like(lengths, width)
    return Layer(keys, values, new_keys, new_values, lengths, columns, rows, own, columns + width // 2, counts)


def ours(op: str, x: Layer) -> None:
    if op == "kv_append":
        ops.kv_append(x.new_keys, x.new_values, x.keys, x.values, x.lengths, x.counts)
    elif op == "kv_gather":
        ops.kv_gather(x.keys, x.values, x.lengths, x.rows)
    else:
        ops.kv_compact(x.keys, x.values, x.kept, x.lengths, x.counts)


def eager(op: str, x: Layer) -> None:
    """The same in plain torch."""
    for cache, new in ((x.keys, x.new_keys), (x.values, x.new_values)):
        if op == "kv_append":
            cache[x.own, :, x.columns] = new.transpose(1, 2)
        elif op == "kv_gather":
            cache.copy_(cache.index_select(0, x.rows))
        else:
            cache[x.own, :, x.columns] = cache[x.own, :, x.kept]


def check(op: str, x: Layer) -> None:
    """Check that both change the rows' tokens in the same way."""
    mine, theirs = (x._replace(keys=x.keys.clone(), values=x.values.clone()) for _ in range(2))
    ours(op, mine)
    eager(op, theirs)
    lengths = x.lengths[x.rows.long()] if op == "kv_gather" else x.lengths + x.counts
    for row, n in enumerate(lengths.tolist()):
        assert torch.equal(mine.keys[row, :, :n], theirs.keys[row, :, :n])
        assert torch.equal(mine.values[row, :, :n], theirs.values[row, :, :n])


def shapes(op: str, device: str, quick: bool) -> list[Shape]:
    batches = BATCHES if device == "cuda" else (1, 4)
    if op == "kv_gather":  # a single row has nowhere to go
        return [(b, 1, 8192 if device == "cuda" else 1024) for b in batches if b > 1]
    widths = (5,) if quick else WIDTHS if device == "cuda" else (1, 5)
    return [(b, q, 4 * q) for b in batches for q in widths]


def bytes_moved(op: str, shape: Shape, dtype: torch.dtype) -> int:
    tokens = sum(lengths_of(shape)) if op == "kv_gather" else shape[0] * shape[1]
    return 4 * tokens * KV_HEADS * DIM * dtype.itemsize  # keys and values, read and written


def maker(op: str):
    def make(device: str, quick: bool):
        others = rivals(device, quick, functools.partial(eager, op))

        def case(shape: Shape, dtype: torch.dtype, copies: int) -> KernelCase:
            layers = [layer(shape, dtype, device) for _ in range(copies)]
            check(op, layers[0])
            return KernelCase(
                bytes_moved(op, shape, dtype),
                lambda i: ours(op, layers[i]),
                {name: lambda i, rival=rival: rival(layers[i]) for name, rival in others.items()},
            )

        return case

    return make


def benchmark(op: str) -> Benchmark:
    sizes: Callable[[str, bool], list[Shape]] = functools.partial(shapes, op)
    return Benchmark(op, maker(op), ("B", "Q", "S"), sizes, dtypes, functools.partial(bytes_moved, op))


BENCHMARKS = [benchmark(op) for op in ("kv_append", "kv_gather", "kv_compact")]

if __name__ == "__main__":
    main(BENCHMARKS, "Speed of moving keys and values against torch.")
