// 16-bit numbers, one at a time. For files without instructions of their own (span.hpp).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace pipespec::cpu {

inline float float_of_bfloat16(uint16_t half) {
  const uint32_t bits = uint32_t(half) << 16;
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

// To the nearest, ties to even; a NaN stays one.
inline uint16_t bfloat16_of(float x) {
  const uint32_t bits = bits_of(x);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline float float_of_float16(uint16_t half) {
  const int exponent = half >> 10 & 31, fraction = half & 1023;
  const float x = exponent == 31  ? (fraction != 0 ? std::numeric_limits<float>::quiet_NaN()
                                                   : std::numeric_limits<float>::infinity())
                  : exponent == 0 ? std::ldexp(float(fraction), -24)
                                  : std::ldexp(float(1024 + fraction), exponent - 25);
  return half >> 15 != 0 ? -x : x;
}

}  // namespace pipespec::cpu
