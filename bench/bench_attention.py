"""How fast is attention over a cache? ``python -m bench.bench_attention [--device cuda] [--quick] [--json FILE]``

``ops.verify_attention`` with the heads of Llama-3-8B (32, 8 of keys, 128 dimensions): ``Q`` columns over ``S`` keys, of which
the last ``Q`` are their own. Against

* ``sdpa``: torch's attention with the mask that rows of their own lengths need, and keys and values repeated for each
  query head: what transformers does for several columns;
* ``gqa``: the same without the repetition (``enable_gqa``);
* ``unmasked``: one column, no mask, which needs rows of equal length in storage that ends where they end;
* ``flex``: FlexAttention with a block mask made beforehand (not with ``--quick``: it compiles for each shape);
* ``invariant``: ours, with sums in an order that depends on nothing but the keys that a column sees.

On a GPU (``bench/gpu.py`` says how times are taken) in bfloat16; bytes: keys, values, queries and results once. Partial
sums are not counted. On a CPU in float32, small shapes, called in turn, medians.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import gpu
from bench.harness import machine, median_us, seconds, write
from pipespec_kernels import ops

HEADS, KV_HEADS, DIM = 32, 8, 128
CONTEXTS = (1024, 8192, 32768)
QUICK = [(1, 1, 8192), (1, 5, 1024), (1, 5, 8192), (1, 5, 32768), (16, 5, 8192), (64, 5, 8192)]
CPU_SHAPES = list(itertools.product((1, 4), (1, 5), (256, 1024)))


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    group = q.shape[1] // k.shape[1]
    return F.scaled_dot_product_attention(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), mask)


def grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def visible(lengths: Tensor, width: int, keys: int) -> Tensor:
    """The mask ``[B, 1, Q, S]``."""
    columns = torch.arange(width, device=lengths.device)
    return (torch.arange(keys, device=lengths.device) <= (lengths[:, None] + columns)[:, :, None])[:, None]


def flexible(lengths: Tensor, width: int, keys: int) -> Callable[[Tensor, Tensor, Tensor], Any] | None:
    """FlexAttention for these lengths; None where this torch has none, or it does not compile."""
    try:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return kv <= lengths[b] + q

        block_mask = create_block_mask(mask_mod, len(lengths), None, width, keys, device=str(lengths.device))
        compiled = gpu.compiled(flex_attention)
    except (ImportError, RuntimeError, TypeError) as error:
        print(f"no FlexAttention for {len(lengths)} x {width} x {keys}: {error}")
        return None
    return lambda q, k, v: compiled(q, k, v, block_mask=block_mask, enable_gqa=True)


def inputs(shape: gpu.Shape, dtype: torch.dtype, copies: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, width, keys = shape
    q = torch.randn(copies, batch, width, HEADS, DIM, dtype=dtype, device=device).transpose(2, 3)
    k = torch.randn(copies, batch, KV_HEADS, keys, DIM, dtype=dtype, device=device)
    lengths = torch.full((batch,), keys - width, dtype=torch.int32, device=device)
    return q, k, torch.randn_like(k), lengths


def bytes_moved(shape: gpu.Shape, dtype: torch.dtype) -> int:
    batch, width, keys = shape
    return 2 * batch * DIM * (KV_HEADS * keys + HEADS * width) * dtype.itemsize


def make(quick: bool) -> Callable[[gpu.Shape, torch.dtype, int], gpu.Case]:
    def case(shape: gpu.Shape, dtype: torch.dtype, copies: int) -> gpu.Case:
        _, width, keys = shape
        q, k, v, lengths = inputs(shape, dtype, copies, "cuda")
        mask = visible(lengths, width, keys)
        out = torch.empty_like(q[0])
        rivals: dict[str, gpu.Call] = {
            "sdpa": lambda i: masked(q[i], k[i], v[i], mask),
            "gqa": lambda i: grouped(q[i], k[i], v[i], mask),
            "invariant": lambda i: ops.verify_attention(q[i], k[i], v[i], lengths, invariant=True, out=out),
        }
        if width == 1:
            rivals["unmasked"] = lambda i: grouped(q[i], k[i], v[i], None)
        if not quick and (flex := flexible(lengths, width, keys)) is not None:
            try:
                flex(q[0], k[0], v[0])
            except Exception as error:  # whatever its compiler makes of the shape: the others are to be measured
                print(f"FlexAttention fails for {shape}: {type(error).__name__}")
            else:
                rivals["flex"] = lambda i: flex(q[i], k[i], v[i])
        if shape[0] * keys <= 1 << 17:  # torch's way takes a lot of memory
            theirs = grouped(q[0], k[0], v[0], mask)
            torch.testing.assert_close(ops.verify_attention(q[0], k[0], v[0], lengths), theirs, rtol=2e-2, atol=2e-2)
        return gpu.Case(
            bytes_moved(shape, dtype), lambda i: ops.verify_attention(q[i], k[i], v[i], lengths, out=out), rivals
        )

    return case


def measure_cpu(repeats: int) -> list[dict[str, Any]]:
    results = []
    print(f"{'B':>4}{'Q':>4}{'S':>8}{'us':>10}{'GB/s':>8}{'sdpa':>8}{'gqa':>8}{'invariant':>10}   (times ours)")
    for shape in CPU_SHAPES:
        q, k, v, lengths = inputs(shape, torch.float32, 1, "cpu")
        q, k, v = q[0], k[0], v[0]
        mask = visible(lengths, shape[1], shape[2])
        calls: dict[str, Callable[[], Tensor]] = {
            "ours": lambda q=q, k=k, v=v, n=lengths: ops.verify_attention(q, k, v, n),
            "sdpa": lambda q=q, k=k, v=v, m=mask: masked(q, k, v, m),
            "gqa": lambda q=q, k=k, v=v, m=mask: grouped(q, k, v, m),
            "invariant": lambda q=q, k=k, v=v, n=lengths: ops.verify_attention(q, k, v, n, invariant=True),
        }
        for call in calls.values():
            torch.testing.assert_close(call(), calls["ours"](), rtol=1e-4, atol=1e-5)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(repeats):
            for name, call in calls.items():
                times[name].append(seconds(call))
        us = {name: median_us(samples) for name, samples in times.items()}
        moved = bytes_moved(shape, torch.float32)
        rivals = {n: {"us": t, "times_ours": t / us["ours"]} for n, t in us.items() if n != "ours"}
        result = {"shape": shape, "dtype": "float32", "us": us["ours"], "bytes": moved}
        results.append(result | {"gb_per_s": moved / us["ours"] / 1e3, "rivals": rivals})
        others = [f"{r['times_ours']:.2f}" for r in rivals.values()]
        print(
            f"{shape[0]:4}{shape[1]:4}{shape[2]:8}{us['ours']:10.1f}{moved / us['ours'] / 1e3:8.1f}"
            f"{others[0]:>8}{others[1]:>8}{others[2]:>10}",
            flush=True,
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of attention over a cache against torch's.")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="on a CPU")
    gpu.add_options(parser)
    options = parser.parse_args()
    if options.device == "cuda":
        shapes = QUICK if options.quick else list(itertools.product(gpu.BATCHES, gpu.WIDTHS, CONTEXTS))
        gpu.run_shapes(options, "bench_attention", shapes, bytes_moved, make, (torch.bfloat16,), ("B", "Q", "S"))
        return
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    info = machine() | {"threads": options.threads}
    print(f"{info['cpu']}, {options.threads} threads, torch {info['torch']}, load {info['load_average'][0]:.1f}")
    write(options.json, info, measure_cpu(7 if options.quick else 31))


if __name__ == "__main__":
    main()
