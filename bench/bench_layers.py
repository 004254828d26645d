"""How fast is the rest of a layer? ``python -m bench.bench_layers [--device cuda] [--quick] [--only add_rms_norm] [--json FILE]``

One layer of Llama-3-8B, ``Q`` columns for each of ``B`` rows:

* ``add_rms_norm``: the residual stream and its norm, ``H`` numbers per column;
* ``silu_mul``: gate and up as one tensor, ``I`` numbers of each per column;
* ``rope_append``: 32 heads of queries and 8 of keys and values from one tensor, rotated and written into storage of ``S`` tokens per row.

The rival is the code of transformers' modules, in torch. Both allocate their results: memory that was freed a moment ago, and is warm. On a GPU in bfloat16; on the CPU in float32 with small shapes. Bytes: each input read once and each result written once, without weights and tables.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from bench.bench_attention import DIM, KV_HEADS, dtypes
from bench.harness import KernelCase, Shape, normal
from bench.kernels import BATCHES, WIDTHS, Benchmark, main, rivals
from pipespec_kernels import ops, reference

HEADS, HIDDEN, INTERMEDIATE, EPS = 32, 4096, 14336, 1e-5
SIZES = {"add_rms_norm": HIDDEN, "silu_mul": INTERMEDIATE, "rope_append": 64}
AXES = {"add_rms_norm": "H", "silu_mul": "I", "rope_append": "S"}
Call = Callable[[bool], tuple[Tensor, ...]]  # ours or the rival's; returns its results


def norm_call(shape: Shape, dtype: torch.dtype, device: str) -> Call:
    x, residual = (normal(shape, dtype, device) for _ in range(2))
    weight = normal(shape[-1:], dtype, device)

    def call(ours: bool) -> tuple[Tensor, ...]:
        return (ops if ours else reference).add_rms_norm(x, residual, weight, EPS)

    return call


def activation_call(shape: Shape, dtype: torch.dtype, device: str) -> Call:
    gate_up = normal((*shape[:2], 2 * shape[2]), dtype, device)

    def call(ours: bool) -> tuple[Tensor, ...]:
        return ((ops if ours else reference).silu_mul(gate_up),)

    return call


def rope_call(shape: Shape, dtype: torch.dtype, device: str) -> Call:
    batch, width, capacity = shape
    product = normal((batch, width, HEADS + 2 * KV_HEADS, DIM), dtype, device).transpose(1, 2)
    q, keys, values = product.split([HEADS, KV_HEADS, KV_HEADS], 1)
    angles = torch.arange(capacity, device=device)[:, None] * 10000.0 ** -(torch.arange(DIM, device=device) % 64 / 64)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    storage = [normal((batch, KV_HEADS, capacity, DIM), dtype, device) for _ in range(2)]
    lengths = torch.arange(batch, device=device) % (capacity - width)
    columns = lengths[:, None] + torch.arange(width, device=device)
    own = torch.arange(batch, device=device)[:, None]

    def turned(x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        return x * cos[columns][:, None] + torch.cat((-high, low), -1) * sin[columns][:, None]

    def call(ours: bool) -> tuple[Tensor, ...]:
        if ours:
            return ops.rope_append(q, keys, values, cos, sin, *storage, lengths), *storage
        storage[0][own, :, columns] = turned(keys).transpose(1, 2)
        storage[1][own, :, columns] = values.transpose(1, 2)
        return turned(q), *storage

    return call


CALLS = {"add_rms_norm": norm_call, "silu_mul": activation_call, "rope_append": rope_call}


def check(call: Call) -> None:
    """Check that both give the same. In 16 bits, a number may be rounded to its neighbour."""
    mine = [x.clone() for x in call(True)]
    for ours, theirs in zip(mine, call(False), strict=True):
        tolerance = 1e-5 if theirs.dtype is torch.float32 else 2e-2
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def shapes(op: str, device: str, quick: bool) -> list[Shape]:
    batches = BATCHES if device == "cuda" else (1, 4)
    widths = (5,) if quick else WIDTHS if device == "cuda" else (1, 5)
    return [(b, q, SIZES[op]) for b in batches for q in widths]


def bytes_moved(op: str, shape: Shape, dtype: torch.dtype) -> int:
    batch, width, size = shape
    numbers = {"add_rms_norm": 4 * size, "silu_mul": 3 * size, "rope_append": (2 * HEADS + 4 * KV_HEADS) * DIM}
    return batch * width * numbers[op] * dtype.itemsize


def maker(op: str):
    def make(device: str, quick: bool):
        others = rivals(device, quick, lambda call: call(False))

        def case(shape: Shape, dtype: torch.dtype, copies: int) -> KernelCase:
            calls = [CALLS[op](shape, dtype, device) for _ in range(copies)]
            check(calls[0])
            return KernelCase(
                bytes_moved(op, shape, dtype),
                lambda i: calls[i](True),
                {name: lambda i, rival=rival: rival(calls[i]) for name, rival in others.items()},
            )

        return case

    return make


def benchmark(op: str) -> Benchmark:
    sizes: Callable[[str, bool], list[Shape]] = functools.partial(shapes, op)
    return Benchmark(op, maker(op), ("B", "Q", AXES[op]), sizes, dtypes, functools.partial(bytes_moved, op))


BENCHMARKS = [benchmark(op) for op in CALLS]

if __name__ == "__main__":
    main(BENCHMARKS, "Speed of the rest of a layer against torch.")
