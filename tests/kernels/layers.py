"""Helpers for the tests of a layer's operations: random arguments, and tolerances."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipespec_kernels import ops

from .storage import make_storage, on_device

EPS = 1e-5
# Elements from one number to the next, as a share of the number: float32 sums are in another order, 16-bit numbers may be rounded to a neighbour.
STEP = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def close(got: Tensor, expected: Tensor, near_zero: float = 0.0) -> None:
    """Equal, or neighbours, up to what a sum of numbers of about 1 loses."""
    assert got.dtype == expected.dtype
    step = STEP[expected.dtype]
    torch.testing.assert_close(got.cpu().double(), expected.double(), rtol=step, atol=max(step / 64, near_zero))


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def exact_rows(seed: int, count: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``x`` and ``residual`` of small integers: their sums of squares are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    x, residual = (torch.randint(-8, 9, (count, hidden), generator=generator).to(dtype) for _ in range(2))
    return x, residual


def rope_case(
    seed: int,
    batch: int,
    heads: tuple[int, int],
    width: int,
    capacity: int,
    dim: int,
    rotary: int,
    dtype: torch.dtype,
    *,
    layout: str = "plain",
    tables: torch.dtype | None = None,
    norms: bool = False,
    positions: bool = False,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """Arguments of ``rope_append``: queries, keys and values of one product, ragged rows."""
    generator = torch.Generator().manual_seed(seed)
    where = torch.device(device)
    heads_q, heads_kv = heads
    product = normal(seed, batch, width, heads_q + 2 * heads_kv, dim, dtype=dtype, device=device).transpose(1, 2)
    q, keys, values = product.split([heads_q, heads_kv, heads_kv], 1)
    angles = torch.rand((capacity + 3, rotary // 2), generator=generator) * 6
    tables = tables or dtype
    lengths = [int(torch.randint(0, capacity + 1, (), generator=generator)) for _ in range(batch)]
    counts = [int(torch.randint(0, min(width, capacity - n) + 1, (), generator=generator)) for n in lengths]
    k_cache, v_cache = make_storage(batch, heads_kv, capacity, dim, dtype, layout, where)
    case: dict[str, Any] = {
        "q": q,
        "keys": keys,
        "values": values,
        # The two halves differ, so that an error in their order shows.
        "cos": torch.cat((angles.cos(), angles.cos() * 0.5), 1).to(tables).to(device),
        "sin": torch.cat((angles.sin(), angles.sin() * 0.5), 1).to(tables).to(device),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "lengths": on_device(lengths, where, torch.int64),
        "n_new": on_device(counts, where),
    }
    if norms:
        case |= {f"{name}_norm": normal(i, dim, dtype=dtype, device=device) for i, name in enumerate("qk")} | {
            "eps": EPS
        }
    if positions:
        there = torch.randint(0, capacity + 3, (width, batch), generator=generator).t().to(device)
        there[on_device(counts, where)[:, None] <= torch.arange(width, device=device)] = -(
            10**9
        )  # of padding: not read
        case["positions"] = there
    return case


def check_rows_are_independent(dtype: torch.dtype, hidden: int, device: torch.device) -> None:
    """A row has the same bits in any order of the batch, and alone."""
    x, residual, weight = normal(1, 11, hidden, dtype=dtype, device=device).split([5, 5, 1])
    weight = weight[0]
    order = torch.tensor([3, 0, 4, 1, 2], device=device)
    results = [*ops.add_rms_norm(x, residual, weight, EPS), ops.silu_mul(x)]
    for rows in (order, *order.split(1)):
        again = [*ops.add_rms_norm(x[rows], residual[rows], weight, EPS), ops.silu_mul(x[rows])]
        assert all(torch.equal(got, result[rows]) for got, result in zip(again, results, strict=True))


def check_views_of_rows(device: torch.device) -> None:
    """The last column of each row, and a part of a wider tensor: strides, no copies, and nothing else is written."""
    wide, weight = normal(1, 4, 5, 60, device=device), normal(2, 20, device=device)
    inside = torch.full((4, 5, 60), -9.0, device=device)
    for view in (wide[:, -1:, 20:40], wide[..., 3:23], wide[2, 1, :20], wide[:1, :1, :20].expand(4, 5, 20)):
        whole = view.contiguous()
        expected = [*ops.add_rms_norm(whole, whole, weight, EPS), ops.silu_mul(whole)]
        got = [*ops.add_rms_norm(view, view, weight, EPS), ops.silu_mul(view)]
        assert got[0].is_contiguous()
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        out = inside[: view.shape[0], : view.shape[1], 7:27] if view.dim() == 3 else inside[0, 0, 7:27]
        ops.add_rms_norm(view, view, weight, EPS, out=out)
        assert torch.equal(out, expected[0])
        out.fill_(-9)
        ops.silu_mul(view, out=out[..., :10])
        assert torch.equal(out[..., :10], expected[2])
        out.fill_(-9)
        assert (inside == -9).all()
