"""How fast is attention over a cache? ``python -m bench.bench_attention [--device cuda] [--quick] [--json FILE]``

``ops.verify_attention`` with the heads of Llama-3-8B (32, 8 of keys, 128 dimensions): ``Q`` columns over ``S`` keys, of which
the last ``Q`` are their own. Against

* ``sdpa``: torch's attention with the mask that rows of their own lengths need, and keys and values repeated for each
  query head: what transformers does for several columns;
* ``gqa``: the same without the repetition (``enable_gqa``);
* ``unmasked``: one column, no mask, which needs rows of equal length in storage that ends where they end;
* ``flex``: FlexAttention with a block mask made beforehand (on a GPU, not with ``--quick``: it compiles for each shape);
* ``invariant``: ours, with sums in an order that depends on nothing but the keys that a column sees.

On a GPU in bfloat16; on the CPU in float32 with small shapes, torch's attention behind both. Bytes: keys, values, queries and
results once; partial sums are not counted.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import gpu
from bench.harness import Call, KernelCase, Shape, normal
from bench.kernels import BATCHES, WIDTHS, Benchmark, main
from pipespec_kernels import ops

HEADS, KV_HEADS, DIM = 32, 8, 128
CONTEXTS = (1024, 8192, 32768)
QUICK = [(1, 1, 8192), (1, 5, 1024), (1, 5, 8192), (1, 5, 32768), (16, 5, 8192), (64, 5, 8192)]
CPU_SHAPES = list(itertools.product((1, 4), (1, 5), (256, 1024)))
MOST_CHECKED = 1 << 17  # keys in all rows: torch's form takes a lot of memory


def shapes(device: str, quick: bool) -> list[Shape]:
    if device == "cpu":
        return CPU_SHAPES[::3] if quick else CPU_SHAPES
    return QUICK if quick else list(itertools.product(BATCHES, WIDTHS, CONTEXTS))


def dtypes(device: str, quick: bool) -> list[torch.dtype]:
    return [torch.bfloat16] if device == "cuda" else [torch.float32]


def bytes_moved(shape: Shape, dtype: torch.dtype) -> int:
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


def flexible(lengths: Tensor, width: int, keys: int) -> Callable[[Tensor, Tensor, Tensor], Any]:
    """FlexAttention for these lengths, made by its first call. If this torch cannot run it, the rival fails."""

    @functools.cache
    def made() -> tuple[Callable[..., Any], Any]:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return kv <= lengths[b] + q

        mask = create_block_mask(mask_mod, len(lengths), None, width, keys, device=str(lengths.device))
        return gpu.compiled(flex_attention), mask

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Any:
        compiled, mask = made()
        return compiled(q, k, v, block_mask=mask, enable_gqa=True)

    return attention


def make(device: str, quick: bool):
    def case(shape: Shape, dtype: torch.dtype, copies: int) -> KernelCase:
        batch, width, keys = shape
        q = normal((copies, batch, width, HEADS, DIM), dtype, device).transpose(2, 3)
        k, v = (normal((copies, batch, KV_HEADS, keys, DIM), dtype, device) for _ in range(2))
        lengths = torch.full((batch,), keys - width, dtype=torch.int32, device=device)
        mask = visible(lengths, width, keys)
        out = torch.empty_like(q[0])

        def ours(i: int, invariant: bool = False) -> Tensor:
            return ops.verify_attention(q[i], k[i], v[i], lengths, invariant=invariant, out=out)

        rivals: dict[str, Call] = {
            "sdpa": lambda i: masked(q[i], k[i], v[i], mask),
            "gqa": lambda i: grouped(q[i], k[i], v[i], mask),
            "invariant": lambda i: ours(i, invariant=True),
        }
        if width == 1:
            rivals["unmasked"] = lambda i: grouped(q[i], k[i], v[i], None)
        if device == "cuda" and not quick:
            flex = flexible(lengths, width, keys)
            rivals["flex"] = lambda i: flex(q[i], k[i], v[i])
        if batch * keys <= MOST_CHECKED:
            tolerance = 1e-4 if dtype is torch.float32 else 2e-2
            torch.testing.assert_close(ours(0), masked(q[0], k[0], v[0], mask), rtol=tolerance, atol=tolerance)
        return KernelCase(bytes_moved(shape, dtype), ours, rivals)

    return case


BENCHMARKS = [Benchmark("attention", make, axes=("B", "Q", "S"), shapes=shapes, dtypes=dtypes, input_bytes=bytes_moved)]

if __name__ == "__main__":
    main(BENCHMARKS, "Speed of attention over a cache against torch's.")
