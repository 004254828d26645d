"""The noise of the kernels: published vectors, and the oracle bit for bit."""

import math

import pytest
import torch
import triton
import triton.language as tl

from pipespec_kernels import reference
from pipespec_kernels.triton.philox import draw, draw4, gumbel, philox, uniform

from ..selection import PHILOX_VECTORS


@triton.jit
def philox_kernel(words, out, N: tl.constexpr):
    i = tl.arange(0, N)
    c0 = tl.load(words + 6 * i).to(tl.uint32)
    c1 = tl.load(words + 6 * i + 1).to(tl.uint32)
    c2 = tl.load(words + 6 * i + 2).to(tl.uint32)
    c3 = tl.load(words + 6 * i + 3).to(tl.uint32)
    k0 = tl.load(words + 6 * i + 4).to(tl.uint32)
    r0, r1, r2, r3 = philox(c0, c1, c2, c3, k0, tl.load(words + 6 * i + 5).to(tl.uint32))
    tl.store(out + 4 * i, r0.to(tl.int64))
    tl.store(out + 4 * i + 1, r1.to(tl.int64))
    tl.store(out + 4 * i + 2, r2.to(tl.int64))
    tl.store(out + 4 * i + 3, r3.to(tl.int64))


@triton.jit
def draw_kernel(seed, position, stream, begin, words, BLOCK: tl.constexpr):
    r = draw(tl.load(seed), tl.load(position), stream, begin, BLOCK)
    tl.store(words + tl.arange(0, BLOCK), r.to(tl.int64))


@triton.jit
def draw4_kernel(seed, position, stream, words, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    r0, r1, r2, r3 = draw4(tl.load(seed), tl.load(position), stream, i)
    tl.store(words + 4 * i, r0.to(tl.int64))
    tl.store(words + 4 * i + 1, r1.to(tl.int64))
    tl.store(words + 4 * i + 2, r2.to(tl.int64))
    tl.store(words + 4 * i + 3, r3.to(tl.int64))


@triton.jit
def noise_kernel(words, uniforms, noise, BLOCK: tl.constexpr, FAST: tl.constexpr):
    i = tl.arange(0, BLOCK)
    r = tl.load(words + i).to(tl.uint32)
    tl.store(uniforms + i, uniform(r, FAST))
    tl.store(noise + i, gumbel(r, FAST))


def edge_words(n: int) -> torch.Tensor:
    """Random words, and the words near which the definition changes its formula or its rounding."""
    generator = torch.Generator().manual_seed(0)
    edges = [0, 1, 2, 3, 1 << 16, (1 << 16) - 1, (1 << 22) - 1, 1 << 22, (1 << 22) + 1, 1 << 31, (1 << 32) - 1]
    edges += [(1 << 32) - 2, (1 << 32) - 64, (1 << 32) - 128, (1 << 32) - 129, (1 << 32) - 256]
    random = torch.randint(0, 1 << 32, (n - len(edges),), generator=generator)
    shifts = torch.randint(0, 32, (n - len(edges),), generator=generator)
    return torch.cat([torch.tensor(edges), random >> shifts])


def test_published_vectors(device: torch.device) -> None:
    words = torch.tensor([[*counter, *key] for counter, key, _ in PHILOX_VECTORS] + [[0] * 6], device=device)
    out = torch.zeros(4, 4, dtype=torch.int64, device=device)
    philox_kernel[(1,)](words, out, N=4)
    assert out[:3].tolist() == [list(result) for _, _, result in PHILOX_VECTORS]


@pytest.mark.parametrize("stream", [0, 1, 3, 0xFFFFFFFF])
@pytest.mark.parametrize(("seed", "position"), [(0, 0), (-1, 1), (2**62 + 12345, 2**40 + 7), (-(2**63), 2**32 - 1)])
def test_words_of_ids(seed: int, position: int, stream: int, device: torch.device) -> None:
    at = [torch.tensor([n], device=device) for n in (seed, position)]
    begin = 4 * 1001
    out = torch.zeros(64, dtype=torch.int64, device=device)
    draw_kernel[(1,)](*at, stream, begin, out, BLOCK=64)
    assert torch.equal(out.cpu(), reference.philox_draw(seed, position, stream, torch.arange(begin, begin + 64)))
    draw4_kernel[(1,)](*at, stream, out, BLOCK=16)
    assert torch.equal(out.cpu(), reference.philox_draw(seed, position, stream, torch.arange(64)))


def test_noise_is_the_oracles_bit_for_bit(device: torch.device) -> None:
    words = edge_words(1 << 14)
    u = torch.empty(1 << 14, device=device)
    g = torch.empty(1 << 14, device=device)
    noise_kernel[(1,)](words.to(device), u, g, BLOCK=1 << 14, FAST=False)
    exact = ((words >> 16).double() * 2.0**-16 + ((words & 0xFFFF).double() + 0.5) * 2.0**-32).float()
    assert torch.equal(u.cpu().view(torch.int32), exact.view(torch.int32))
    assert torch.equal(g.cpu().view(torch.int32), reference.gumbel(words).view(torch.int32))
    # A token 22 below the head can be drawn.
    assert g[0].item() == g.max().item() > 22.8
    assert torch.isfinite(g).all()


@pytest.mark.gpu
def test_fast_noise_is_close(device: torch.device) -> None:
    words = edge_words(1 << 14)
    u = torch.empty(1 << 14, device=device)
    g = torch.empty(1 << 14, device=device)
    noise_kernel[(1,)](words.to(device), u, g, BLOCK=1 << 14, FAST=True)
    expected = -torch.log(-torch.log1p(-(words.double() + 0.5) * 2.0**-32))
    error = (g.cpu().double() - expected).abs()
    # Just above u = 2^-10, where ln(1 - u) is taken of a number near 1: half a unit of its rounding, 2^-25 of 2^-10, and the 2^-22 that PTX allows
    # ``lg2.approx`` there, of 2^-10 log2 e. An H200 is off by 7.9e-5.
    assert error[expected > -1].max() < 2.0**-15 + 2.0**-12 / math.log2(math.e)
    assert math.isclose(g[0].item(), 22.87, abs_tol=0.01)
