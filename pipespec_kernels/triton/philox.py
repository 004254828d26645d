"""The noise contract as functions for kernels: Philox words, uniforms, Gumbel noise.

Philox4x32-10 is of Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC'11). The key is the
64-bit seed, the counter ``(id >> 2, position low, position high, stream)``, and token ``id`` gets word ``id & 3``. A draw is a function of (seed,
position, stream, id), and never of a batch row, a tile or a step.

From a word ``r``: ``u = (r + 1/2) / 2^32`` from two exact halves, ``E = -ln(1 - u)``, ``G = -ln E``. Large noise comes
from small ``u``, where fp32 is dense, and reaches 22.87.

``FAST`` selects the logarithm. With it: ``lg2.approx``, one instruction, whose noise differs by up to 8e-5 (an H200). Without it: the polynomial of
``csrc/protocol/gumbel.hpp`` in the same order of roundings. This gives the bits of the host's code, because no product is fused with a sum
(:func:`times`).
"""

from __future__ import annotations

import triton
import triton.language as tl

# True: triton.jit makes interpreted functions in this process. Inline PTX does not exist there.
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
IS_INTERPRETED = tl.constexpr(INTERPRETED)  # for kernels

_MULTIPLIER0 = tl.constexpr(0xD2511F53)
_MULTIPLIER1 = tl.constexpr(0xCD9E8D57)
_WEYL0 = tl.constexpr(0x9E3779B9)
_WEYL1 = tl.constexpr(0xBB67AE85)
_LN2 = tl.constexpr(float.fromhex("0x1.62e43p-1"))
_SQRT_HALF_BITS = tl.constexpr(0x3F3504F3)
# lg2(1 + t) = t P(t), lowest degree first
_P0 = tl.constexpr(float.fromhex("0x1.71548ep+0"))
_P1 = tl.constexpr(float.fromhex("-0x1.715692p-1"))
_P2 = tl.constexpr(float.fromhex("0x1.ec296cp-2"))
_P3 = tl.constexpr(float.fromhex("-0x1.6fff1ep-2"))
_P4 = tl.constexpr(float.fromhex("0x1.2ecbdap-2"))
_P5 = tl.constexpr(float.fromhex("-0x1.13c8aep-2"))
_P6 = tl.constexpr(float.fromhex("0x1.5f7cb2p-3"))


@triton.jit
def _product(x, y: tl.constexpr):
    """Both halves, low and high, of the 64-bit products of uint32."""
    if not IS_INTERPRETED:
        # One instruction, where umulhi and * are two. A product of blocks of uint64 is one instruction as well, but triton then moves the random
        # words between threads through shared memory, with four barriers per tile.
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b64 p; mul.wide.u32 p, $2, $3; mov.b64 {$0, $1}, p; }",
            "=r,=r,r,r",
            [x, tl.full([], y, tl.uint32)],
            dtype=(tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )
        return low, high
    else:
        return x * y, tl.umulhi(x, tl.full([], y, tl.uint32))


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Four words for a counter ``c0 .. c3`` and a key ``k0, k1``; all uint32, blocks of one shape or scalars."""
    for _ in tl.static_range(10):
        a_low, a_high = _product(c0, _MULTIPLIER0)
        b_low, b_high = _product(c2, _MULTIPLIER1)
        c0 = b_high ^ c1 ^ k0
        c1 = b_low
        c2 = a_high ^ c3 ^ k1
        c3 = a_low
        k0 = k0 + _WEYL0
        k1 = k1 + _WEYL1
    return c0, c1, c2, c3


@triton.jit
def draw4(seed, position, stream, groups):
    """The words of the ids ``4 * groups .. 4 * groups + 3``. ``seed`` and ``position`` are int64 scalars."""
    c0 = groups.to(tl.uint32)
    zero = c0 ^ c0
    return philox(
        c0,
        zero + position.to(tl.uint32),
        zero + (position >> 32).to(tl.uint32),
        (zero + stream).to(tl.uint32),
        seed.to(tl.uint32),
        (seed >> 32).to(tl.uint32),
    )


@triton.jit
def draw(seed, position, stream, begin, BLOCK: tl.constexpr):
    """One word for each of the ids ``begin .. begin + BLOCK - 1``; ``begin`` and ``BLOCK`` are multiples of 4."""
    w0, w1, w2, w3 = draw4(seed, position, stream, begin // 4 + tl.arange(0, BLOCK // 4))
    # joined so that the four words of a counter lie side by side, in a thread as in memory
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCK])


@triton.jit
def times(x, y, FAST: tl.constexpr):
    """``x * y``; if not ``FAST``, a product that no compiler fuses with a sum."""
    if FAST or IS_INTERPRETED:
        return x * y
    else:
        # Compiling without fusion is not enough: for sm_100 products and sums come in pairs (mul.rn.f32x2), and ptxas
        # fuses those in spite of --fmad=false and of .rn.
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def uniform(r, FAST: tl.constexpr):
    """``(r + 1/2) / 2^32`` rounded once to fp32: in (0, 1], and never 0."""
    high = times((r >> 16).to(tl.float32), 2.0**-16, FAST)
    low = times((r & 0xFFFF).to(tl.float32), 2.0**-32, FAST) + (2.0**-33)
    return high + low


@triton.jit
def lg2(x, FAST: tl.constexpr):
    """The binary logarithm of a positive, normal fp32 number."""
    if FAST:
        # .ftz changes nothing for what comes here, and spares the instructions that rescale subnormal arguments.
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        bits = x.to(tl.int32, bitcast=True)
        exponent = (bits - _SQRT_HALF_BITS) >> 23
        t = (bits - exponent * (1 << 23)).to(tl.float32, bitcast=True) - 1.0
        p = times(t, _P6, FAST) + _P5
        p = times(p, t, FAST) + _P4
        p = times(p, t, FAST) + _P3
        p = times(p, t, FAST) + _P2
        p = times(p, t, FAST) + _P1
        p = times(p, t, FAST) + _P0
        return exponent.to(tl.float32) + times(t, p, FAST)


@triton.jit
def _lg2_of_exponential(r, FAST: tl.constexpr):
    u = uniform(r, FAST)
    small = times(u, times(u, 0.5, FAST) + 1.0, FAST)
    large = times(lg2(tl.maximum(1.0 - u, 2.0**-25), FAST), -_LN2, FAST)
    return lg2(tl.where(u < 2.0**-10, small, large), FAST)


@triton.jit
def gumbel(r, FAST: tl.constexpr):
    """Standard Gumbel noise from a random word."""
    return times(_lg2_of_exponential(r, FAST), -_LN2, FAST)


@triton.jit
def perturbed(x, scale, r, FAST: tl.constexpr):
    """``x * scale`` with the noise of ``r`` added."""
    if FAST:
        # This fixes which of the two products is fused with the sum. The compiler could choose another one in another kernel, so that a near-tie
        # would differ between draft and target. (The products above that precede a sum are exact, fused or not.)
        return tl.fma(_lg2_of_exponential(r, FAST), -_LN2, x * scale)
    else:
        return times(x, scale, FAST) + gumbel(r, FAST)
