"""Helpers for the tests of row selection: edge-case data, strided views, and an oracle that reads every element."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from pipespec_kernels import _native
from pipespec_kernels.noise import ALL_VALID, Noise

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = ["normal", "negative", "few values", "minus inf", "zeros", "nans", "any bits"]
# From the Random123 distribution, kat_vectors, "philox4x32 10": counter, key, result.
PHILOX_VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def simd_variants() -> list[str]:
    """The SIMD variants of this machine."""
    names = []
    for name in ("portable", "avx2", "avx512", "amx"):
        try:
            before = _native.set_simd(name)
        except ValueError:
            continue
        _native.set_simd(before)
        names.append(name)
    return names


@contextmanager
def simd(name: str) -> Iterator[None]:
    before = _native.set_simd(name)
    try:
        yield
    finally:
        _native.set_simd(before)


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
    x = x.to(dtype)
    if kind == "any bits":
        lane = torch.int32 if dtype is torch.float32 else torch.int16
        info = torch.iinfo(lane)
        bits = torch.randint(info.min, info.max + 1, shape, generator=generator, dtype=torch.int64)
        x = bits.to(lane).view(dtype)
    return x


def strided(x: Tensor, layout: str) -> Tensor:
    """The same values in other places: rows that begin unaligned, transposed, with gaps, reversed order of storage."""
    b, q, v = x.shape
    if layout == "transposed":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "gaps":
        wide = x.new_full((b, q + 1, v + 3), math.nan)  # NaNs outside of the view: they would win
        wide[:, 1:, 1 : v + 1] = x
        return wide[:, 1:, 1 : v + 1]
    if layout == "offset":
        flat = x.new_full((b * q * v + 1,), math.nan)
        flat[1:] = x.reshape(-1)
        return flat[1:].view(b, q, v)
    return x


LAYOUTS = ["plain", "transposed", "gaps", "offset"]


def argmax_by_hand(row: list[float]) -> int:
    best = 0
    for i, x in enumerate(row):
        if math.isnan(row[best]):
            break
        if math.isnan(x) or x > row[best]:
            best = i
    return best


def verify_by_hand(
    logits: Tensor, tokens: Tensor, query_lens: list[int], num_draft_tokens: list[int]
) -> tuple[Tensor, Tensor]:
    batch, width, _ = logits.shape
    selected = [[-1] * width for _ in range(batch)]
    accepted = [0] * batch
    for r in range(batch):
        own = query_lens[r] - num_draft_tokens[r]
        if query_lens[r] == 0:
            continue
        draft_tokens = tokens[r, own : query_lens[r]].tolist()
        for j in range(num_draft_tokens[r] + 1):
            selected[r][j] = argmax_by_hand(logits[r, own - 1 + j].tolist())
            if j == num_draft_tokens[r] or selected[r][j] != draft_tokens[j]:
                break
            accepted[r] += 1
    return torch.tensor(selected, dtype=torch.int32).view(batch, width), torch.tensor(accepted, dtype=torch.int32)


def drafted_tokens(logits: Tensor, agreement: float, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Tokens that agree, at the given rate, with the choice from the logits of the column before."""
    batch, width, vocab = logits.shape
    tokens = torch.randint(0, vocab, (batch, width), generator=generator)
    if batch * width:
        agreeing = torch.rand((batch, width), generator=generator) < agreement
        agreeing[:, 0] = False
        tokens = torch.where(agreeing, torch.argmax(logits, dim=-1).roll(1, dims=1), tokens)
    return tokens.to(dtype)


INVALID_POSITIONS = [ALL_VALID, 101, 7, 300, ALL_VALID, ALL_VALID]
"""The ``invalid_positions`` of :func:`invalid_case`."""


def invalid_case(dtype: torch.dtype) -> tuple[Tensor, Tensor, Noise, tuple[Tensor, Tensor]]:
    """Rows of three columns that choose 0 throughout, some from logits without a distribution.

    Returns:
        ``invalid_positions``, the logits, the noise, and the counts.
    """
    logits = torch.full((6, 3, 70), -50.0)
    logits[:, :, 0] = 50
    logits[0, 1] = -math.inf  # without draft tokens only the last column is read
    logits[1, 1:] = -math.inf  # the second token is the first that is not drawn
    logits[2, 0, 0] = math.nan  # an earlier call has noted an earlier position
    logits[3, 2, 0] = math.inf
    logits[4, 2] = math.nan  # the draft token before it is rejected
    logits[4, 1, 1] = 200
    logits[5] = math.nan  # the row idles
    invalid_positions = torch.tensor([ALL_VALID, ALL_VALID, 7, 10**6, ALL_VALID, ALL_VALID])
    positions = torch.tensor([50, 99, 199, 297, 399, 499], dtype=torch.int32)
    noise = Noise(torch.arange(6), positions, torch.ones(6), offset=1)
    query_lens = torch.tensor([3, 3, 3, 3, 3, 0], dtype=torch.int32)
    num_draft_tokens = torch.tensor([0, 2, 2, 2, 2, 0], dtype=torch.int32)
    return invalid_positions, logits.to(dtype), noise, (query_lens, num_draft_tokens)


def ragged_counts(batch: int, width: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    query_lens = torch.randint(0, width + 1, (batch,), generator=generator)
    num_draft_tokens = (torch.rand(batch, generator=generator) * query_lens).long()
    num_draft_tokens[query_lens == 0] = -1  # an idle row may have any count
    return query_lens.to(torch.int32), num_draft_tokens.to(torch.int32)


def any_strides(x: Tensor, strides: tuple[int, int], vocabulary: bool = True) -> Tensor:
    """A view of the shape of ``x`` with these strides, 0 and overlapping rows included, over its values repeated.

    Without ``vocabulary`` the two strides are all that ``x [B, Q]`` has.
    """
    shape = tuple(x.shape)
    if x.numel() == 0:
        return x
    whole = (*strides, 1) if vocabulary else strides
    reach = 1 + sum((n - 1) * stride for n, stride in zip(shape, whole, strict=True))
    flat = x.flatten().repeat(-(-reach // x.numel()))[:reach]
    return flat.as_strided(shape, whole)


def far_apart(shape: tuple[int, int, int], strides: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Random bfloat16 logits with rows gigabytes apart, in memory that is reserved only where it is touched."""
    reach = 1 + sum((n - 1) * stride for n, stride in zip(shape, (*strides, 1), strict=True))
    no_reserve = 0x4000  # Linux's MAP_NORESERVE, which mmap has from Python 3.13 on
    memory = mmap.mmap(-1, 2 * reach, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    view = torch.frombuffer(memory, dtype=torch.bfloat16).as_strided(shape, (*strides, 1))
    return view.copy_(torch.randn(shape, generator=generator))
