"""Helpers for the tests of row selection: edge-case data, strided views, and an oracle that reads every element."""

import math
import mmap

import torch
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = ["normal", "negative", "few values", "minus inf", "zeros", "nans", "any bits"]
# From the Random123 distribution, kat_vectors, "philox4x32 10": counter, key, result.
PHILOX_VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]  # fmt: skip


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make_logits(kind: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    def rand(*size: int) -> Tensor:
        return torch.rand(size, generator=generator)

    x = torch.randn(shape, generator=generator)
    if kind == "negative":
        x = -x.abs() - 0.25
    elif kind == "few values":
        few = torch.tensor([-math.inf, -2.0, -1.0, -0.0, 0.0, 1.0, 2.0])
        x = few[torch.randint(0, 7, shape, generator=generator)]
    elif kind == "minus inf":
        x = torch.full(shape, -math.inf)
    elif kind == "zeros":
        x = torch.where(rand(*shape) < 0.5, torch.tensor(-0.0), torch.tensor(0.0))
    elif kind == "nans":
        chance = rand(*shape)
        x = x.masked_fill(chance < 0.02, math.nan)
        x = torch.where((chance > 0.02) & (chance < 0.04), torch.tensor(-math.nan), x)
    elif kind in ("ranked", "sorted"):  # like a language model's: probabilities fall as a power of the rank
        exponent = {torch.float32: 1.2, torch.bfloat16: 2.0}.get(dtype, 4.0)
        x = (12 - exponent * torch.arange(1, shape[-1] + 1).log() + 0.3 * x).sort(-1, descending=True).values
        x = x[..., torch.randperm(shape[-1], generator=generator)] if kind == "ranked" else x
    elif kind == "flat":
        x = torch.full(shape, 1.5)
    elif kind == "two values":
        x = (x > 0).float()
    elif kind == "infinite":
        x[..., :: max(1, shape[-1] // 2)] = math.inf
    x = x.to(dtype)
    if kind == "any bits" and dtype is not torch.float64:
        lane = torch.int32 if dtype is torch.float32 else torch.int16
        info = torch.iinfo(lane)
        bits = torch.randint(info.min, info.max + 1, shape, generator=generator, dtype=torch.int64)
        x = bits.to(lane).view(dtype)
    return x


def argmax_by_hand(row: list[float]) -> int:
    best = 0
    for i, x in enumerate(row):
        if math.isnan(row[best]):
            break
        if math.isnan(x) or x > row[best]:
            best = i
    return best


def ragged_counts(batch: int, width: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    query_lens = torch.randint(0, width + 1, (batch,), generator=generator)
    num_draft_tokens = (torch.rand(batch, generator=generator) * query_lens).long()
    num_draft_tokens[query_lens == 0] = -1  # an idle row may have any count
    return query_lens.to(torch.int32), num_draft_tokens.to(torch.int32)


def far_apart(shape: tuple[int, int, int], strides: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Random bfloat16 logits with rows gigabytes apart, in memory that is reserved only where it is touched."""
    reach = 1 + sum((n - 1) * stride for n, stride in zip(shape, (*strides, 1), strict=True))
    no_reserve = 0x4000  # Linux's MAP_NORESERVE, which mmap has from Python 3.13 on
    memory = mmap.mmap(-1, 2 * reach, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    view = torch.frombuffer(memory, dtype=torch.bfloat16).as_strided(shape, (*strides, 1))
    return view.copy_(torch.randn(shape, generator=generator))
