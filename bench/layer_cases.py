"""Kernel cases of a layer: attention over a cache, moves of keys and values, and the rest of a layer.

The sizes are those of Llama-3-8B: 32 heads of queries, 8 of keys, 128 dimensions. ``Q`` is the number of columns of each of ``B`` rows, ``S`` the tokens of
storage. On a GPU in bfloat16; on the CPU in float32 with small shapes.

Rivals of attention, whose last ``Q`` keys are the columns' own: ``sdpa``, torch's with the mask that rows of their own lengths need, and keys and values
repeated for each query head, as in transformers; ``gqa``, the same without the repetition; ``unmasked``, one column, which needs rows of equal length;
``other sums``, ours as steps of more than 16 columns take it, or, where the case has so many, as those of fewer do: in an order that depends on the visible keys alone. Bytes: keys, values, queries and results once.

Products are those of the models' layers and heads, ``M`` rows with ``[N, K]`` weights: ours as a step launches them, without what lies around them; ``eager`` is torch's,
which is cuBLAS on a GPU. Others are in ``bench/rivals.py``. Bytes: weights, rows and results once.

Rivals of the moves are indexed reads and assignments whose indices are made beforehand; bytes: what is moved, read once and written once. Rivals of the rest
are transformers' modules in torch; bytes: each input read once and each result written once, without weights and tables.
"""

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import rivals
from bench.kernel_timing import BATCHES, WIDTHS, Benchmark, Call, KernelCase, Shape, normal
from pipespec_kernels import ops, reference
from pipespec_kernels.kv import attention_tickets
from pipespec_kernels.products import MAX_ROWS

HEADS, KV_HEADS, DIM = 32, 8, 128
HIDDEN, INTERMEDIATE, EPS = 4096, 14336, 1e-5


def dtypes(device: str, quick: bool) -> list[torch.dtype]:
    return [torch.bfloat16 if device == "cuda" else torch.float32]


def rows_and_widths(device: str, quick: bool) -> list[tuple[int, int]]:
    batches = BATCHES if device == "cuda" else (1, 4)
    return list(itertools.product(batches, (5,) if quick else WIDTHS if device == "cuda" else (1, 5)))


# ---- attention

CONTEXTS = (1024, 8192, 32768)
QUICK = [(1, 1, 8192), (1, 5, 1024), (1, 5, 8192), (1, 5, 32768), (16, 5, 8192), (64, 5, 8192)]
CPU_SHAPES = list(itertools.product((1, 4), (1, 5), (256, 1024)))
MAX_CHECKED = 1 << 17  # keys in all rows: torch's form takes a lot of memory


def attention_shapes(device: str, quick: bool) -> list[Shape]:
    if device == "cpu":
        return CPU_SHAPES[::3] if quick else CPU_SHAPES
    return QUICK if quick else list(itertools.product(BATCHES, WIDTHS, CONTEXTS))


def attention_bytes(shape: Shape, dtype: torch.dtype) -> int:
    batch, width, keys = shape
    return 2 * batch * DIM * (KV_HEADS * keys + HEADS * width) * dtype.itemsize


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    group = q.shape[1] // k.shape[1]
    return F.scaled_dot_product_attention(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), mask)


def grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def visible(lengths: Tensor, width: int, keys: int) -> Tensor:
    """The mask ``[B, 1, Q, S]``."""
    columns = torch.arange(width, device=lengths.device)
    return (torch.arange(keys, device=lengths.device) <= (lengths[:, None] + columns)[:, :, None])[:, None]


def make_attention(device: str, shape: Shape, dtype: torch.dtype, copies: int) -> KernelCase:
    batch, width, keys = shape
    q = normal((copies, batch, width, HEADS, DIM), dtype, device).transpose(2, 3)
    k, v = (normal((copies, batch, KV_HEADS, keys, DIM), dtype, device) for _ in range(2))
    lengths = torch.full((batch,), keys - width, dtype=torch.int32, device=device)
    mask = visible(lengths, width, keys)
    out = torch.empty_like(q[0])
    tickets = attention_tickets(batch, width, HEADS, KV_HEADS, keys)
    workspace = torch.zeros(tickets, dtype=torch.int32, device=device)  # as a captured step has it
    narrow = batch * width <= MAX_ROWS

    def ours(i: int, invariant: bool = narrow) -> Tensor:
        return ops.verify_attention(q[i], k[i], v[i], lengths, invariant=invariant, out=out, workspace=workspace)

    others: dict[str, Call] = {
        "sdpa": lambda i: masked(q[i], k[i], v[i], mask),
        "gqa": lambda i: grouped(q[i], k[i], v[i], mask),
        "other sums": lambda i: ours(i, invariant=not narrow),
    }
    if width == 1:
        others["unmasked"] = lambda i: grouped(q[i], k[i], v[i], None)
    if device == "cuda":
        others |= rivals.attentions(q, k, v)
    if batch * keys <= MAX_CHECKED:
        tolerance = 1e-4 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(ours(0), masked(q[0], k[0], v[0], mask), rtol=tolerance, atol=tolerance)
    return KernelCase(attention_bytes(shape, dtype), ours, others)


# ---- keys and values, and the rest of a layer

Operation = Callable[[bool], tuple[Tensor, ...]]
"""Ours or the rival's; returns its results."""


def append_call(shape: Shape, dtype: torch.dtype, device: str) -> Operation:
    batch, width, capacity = shape
    storage = [normal((batch, KV_HEADS, capacity, DIM), dtype, device) for _ in range(2)]
    new = [normal((batch, width, KV_HEADS, DIM), dtype, device).transpose(1, 2) for _ in range(2)]
    lengths = torch.tensor([capacity - 2 * width - row % (width + 1) for row in range(batch)], device=device).int()
    counts = torch.full_like(lengths, width)
    columns = lengths.long()[:, None] + torch.arange(width, device=device)
    own = torch.arange(batch, device=device)[:, None]

    def call(ours: bool) -> tuple[Tensor, ...]:
        if ours:
            ops.kv_append(*new, *storage, lengths, counts)
        else:
            for cache, fresh in zip(storage, new, strict=True):
                cache[own, :, columns] = fresh.transpose(1, 2)
        return tuple(storage)

    return call


def norm_call(shape: Shape, dtype: torch.dtype, device: str) -> Operation:
    x, residual = (normal(shape, dtype, device) for _ in range(2))
    weight = normal(shape[-1:], dtype, device)
    return lambda ours: (ops if ours else reference).add_rms_norm(x, residual, weight, EPS)


def activation_call(shape: Shape, dtype: torch.dtype, device: str) -> Operation:
    gate_up = normal((*shape[:2], 2 * shape[2]), dtype, device)
    return lambda ours: ((ops if ours else reference).silu_mul(gate_up),)


def rope_call(shape: Shape, dtype: torch.dtype, device: str) -> Operation:
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


SIZES = {
    "kv_append": (append_call, "S", None, 4 * KV_HEADS * DIM),
    "add_rms_norm": (norm_call, "H", HIDDEN, 4 * HIDDEN),
    "silu_mul": (activation_call, "I", INTERMEDIATE, 3 * INTERMEDIATE),
    "rope_append": (rope_call, "S", 64, (2 * HEADS + 4 * KV_HEADS) * DIM),
}
"""By operation: what makes it, the axis and its size (None: four times the width, as untouched storage must not push the rest out of the caches), the numbers
of a column that are read or written."""


def check_operation(call: Operation) -> None:
    """Check that both give the same. In 16 bits, a number may be rounded to its neighbour."""
    mine = [x.clone() for x in call(True)]
    for ours, expected in zip(mine, call(False), strict=True):
        tolerance = 1e-5 if expected.dtype is torch.float32 else 2e-2
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


def operation(op: str) -> Benchmark:
    make_call, axis, size, numbers = SIZES[op]

    def bytes_moved(shape: Shape, dtype: torch.dtype) -> int:
        return shape[0] * shape[1] * numbers * dtype.itemsize

    def make(device: str, shape: Shape, dtype: torch.dtype, copies: int) -> KernelCase:
        calls = [make_call(shape, dtype, device) for _ in range(copies)]
        check_operation(calls[0])
        return KernelCase(bytes_moved(shape, dtype), lambda i: calls[i](True), {"eager": lambda i: calls[i](False)})

    def shapes(device: str, quick: bool) -> list[Shape]:
        return [(b, q, size or 4 * q) for b, q in rows_and_widths(device, quick)]

    return Benchmark(op, make, ("B", "Q", axis), shapes, dtypes, bytes_moved)


# ---- products of few rows

MODELS = {"8B": (4096, 6144, 4096, 14336), "3B": (3072, 5120, 3072, 8192), "1B": (2048, 3072, 2048, 8192)}
"""Of Llama 3: hidden size, rows of queries, keys and values, columns of the output's matrix, intermediate size."""

VOCABULARY = 128256


def product_shapes(device: str, quick: bool) -> list[Shape]:
    if device == "cpu":
        return [(1, 96, 64), (5, 96, 64)]
    matrices = [
        pair
        for hidden, qkv, heads, intermediate in list(MODELS.values())[: 1 if quick else None]
        for pair in (
            (qkv, hidden),
            (hidden, heads),
            (2 * intermediate, hidden),
            (hidden, intermediate),
            (VOCABULARY, hidden),
        )
    ]
    return [(m, *pair) for pair in matrices for m in ((1, 5) if quick else (1, 2, 4, 5, 8, 16))]


def product_bytes(shape: Shape, dtype: torch.dtype) -> int:
    m, n, k = shape
    return (n * k + m * (n + k)) * dtype.itemsize


def make_product(device: str, shape: Shape, dtype: torch.dtype, copies: int) -> KernelCase:
    m, n, k = shape
    x, out = normal((m, k), dtype, device), torch.empty((m, n), dtype=dtype, device=device)
    weights = normal((copies, n, k), dtype, device)
    tolerance = 1e-4 if dtype is torch.float32 else 2e-2
    expected = F.linear(x, weights[0])
    torch.testing.assert_close(
        ops.linear_small(x, weights[0]), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())
    )
    eager: Call = lambda i: F.linear(x, weights[i])  # noqa: E731
    return KernelCase(
        product_bytes(shape, dtype),
        lambda i: ops.linear_small(x, weights[i], out=out),
        {"eager": eager, **rivals.products(x, weights)},
    )


PRODUCTS = Benchmark("linear_small", make_product, ("M", "N", "K"), product_shapes, dtypes, product_bytes)

BENCHMARKS = [Benchmark("attention", make_attention, ("B", "Q", "S"), attention_shapes, dtypes, attention_bytes), *map(operation, SIZES), PRODUCTS]  # fmt: skip
