"""Helpers for the tests of keys and values: storage in unusual layouts, and moves element by element."""

from __future__ import annotations

import torch
from torch import Tensor

CACHE_LAYOUTS = ["plain", "rows inside", "columns first", "gaps"]


def make_storage(
    batch: int, heads: int, capacity: int, dim: int, dtype: torch.dtype, layout: str, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Random keys and values ``[B, Hkv, S, D]`` in one of the layouts."""

    def one(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        if layout == "rows inside":  # [S, B, Hkv, D], as in some engines
            x = torch.randn(capacity, batch, heads, dim, generator=generator).permute(1, 2, 0, 3)
        elif layout == "columns first":  # [B, S, Hkv, D]
            x = torch.randn(batch, capacity, heads, dim, generator=generator).transpose(1, 2)
        elif layout == "gaps":
            x = torch.randn(batch, 2 * heads, capacity + 3, dim + 5, generator=generator)[:, ::2, 2:-1, 1 : dim + 1]
        else:
            x = torch.randn(batch, heads, capacity, dim, generator=generator)
        moved = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=device)
        return moved.copy_(x)

    return one(1), one(2)


def on_device(values: list, device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def appended(cache: Tensor, new: Tensor, lengths: list[int], counts: list[int]) -> Tensor:
    after = cache.clone()
    for row, (n, count) in enumerate(zip(lengths, counts, strict=True)):
        for j in range(count):
            after[row, :, n + j] = new[row, :, j]
    return after
