// From 32 random bits to Gumbel noise, defined to the last bit in fp32: every multiplication and
// addition below rounds by itself (no fused multiply-add; host code is compiled with
// -ffp-contract=off), so that scalar code, every vector width, a GPU and the oracle in Python get
// the same number, and a token chosen with it is the same everywhere.
//
//   u = (r + 1/2) / 2^32, summed from two 16-bit halves that are exact: one rounding
//   E = -ln(1 - u):  u (1 + u/2) for u < 2^-10,  -ln2 lg2(max(1 - u, 2^-25)) above
//   G = -ln(E) = -ln2 lg2(E)
//
// Large noise, which decides the maximum, comes from small u, where fp32 is dense: the noise
// reaches 22.87 (r = 0). The usual form, -ln(-ln u) of a 24-bit u, would end at 16.6,
// and tokens more than that below the head could never be drawn.
//
// Against float64, |error of G| <= 1.4e-5 for -1 < G < 6, 3.2e-5 for 6 < G < 7 (there 1 - u rounds
// a small u), 2e-6 above. Below -1, among draws that lose, it grows to 0.02 where u is nearly 1.
#pragma once

#include <cstdint>
#include <cstring>

#include "hd.hpp"

namespace pipespec::noise {

constexpr float kPerHighHalf = 0x1p-16f, kPerUnit = 0x1p-32f;
constexpr float kSmallU = 0x1p-10f;
constexpr float kMinRest = 0x1p-25f;  // what 1 - u counts as where u rounds to 1
constexpr float kLn2 = 0x1.62e43p-1f;
// lg2(1 + t) = t P(t) for sqrt(1/2) <= 1 + t < sqrt(2): minimax in relative error (1.1e-6), so it
// stays exact in proportion where the logarithm itself is near zero.
constexpr float kP0 = 0x1.71548ep+0f, kP1 = -0x1.715692p-1f, kP2 = 0x1.ec296cp-2f,
                kP3 = -0x1.6fff1ep-2f, kP4 = 0x1.2ecbdap-2f, kP5 = -0x1.13c8aep-2f,
                kP6 = 0x1.5f7cb2p-3f;
constexpr std::int32_t kSqrtHalfBits = 0x3F3504F3;

// No noise is larger than this.
constexpr float kCeiling = 22.875f;

// An upper bound of the noise from few instructions: G <= -ln u, and the bits of a float, read as
// an integer, give a lower bound of its lg2. With f = float(r >> 1): G + 0.001 < kBoundOffset -
// kBoundSlope * float(bits of f), for each of the 2^32 values of r (all were tried). The bound is
// at most 0.11 too high where G > 2 and r > 64.
constexpr float kBoundSlope = 0x1.62e43p-1f / 0x1p23f;
constexpr float kBoundOffset = 109.519f;  // ln2 * (31 + 127), and 0.001 for roundings

namespace detail {

#if defined(__CUDA_ARCH__)
PIPESPEC_HD inline float mul(float a, float b) { return __fmul_rn(a, b); }
PIPESPEC_HD inline float add(float a, float b) { return __fadd_rn(a, b); }
#else
PIPESPEC_HD inline float mul(float a, float b) { return a * b; }
PIPESPEC_HD inline float add(float a, float b) { return a + b; }
#endif

PIPESPEC_HD inline float lg2(float x) {  // x: positive, normal
  std::int32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const std::int32_t exponent = (bits - kSqrtHalfBits) >> 23;
  bits -= exponent * (1 << 23);
  float mantissa;
  std::memcpy(&mantissa, &bits, sizeof(mantissa));
  const float t = add(mantissa, -1.0f);
  float p = add(mul(kP6, t), kP5);
  p = add(mul(p, t), kP4);
  p = add(mul(p, t), kP3);
  p = add(mul(p, t), kP2);
  p = add(mul(p, t), kP1);
  p = add(mul(p, t), kP0);
  return add(float(exponent), mul(t, p));
}

}  // namespace detail

PIPESPEC_HD inline float uniform(std::uint32_t r) {
  const float high = detail::mul(float(r >> 16), kPerHighHalf);
  return detail::add(high, detail::mul(detail::add(float(r & 0xFFFF), 0.5f), kPerUnit));
}

PIPESPEC_HD inline float gumbel(std::uint32_t r) {
  using detail::add, detail::mul;
  const float u = uniform(r);
  float e;
  if (u < kSmallU) {
    e = mul(u, add(1.0f, mul(u, 0.5f)));
  } else {
    const float rest = add(1.0f, -u);
    e = mul(-kLn2, detail::lg2(rest > kMinRest ? rest : kMinRest));
  }
  return mul(-kLn2, detail::lg2(e));
}

}  // namespace pipespec::noise
