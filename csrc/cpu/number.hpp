// 16-bit logits as numbers, one at a time. For files without instructions of their own (span.hpp).
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

inline float float_of_float16(uint16_t half) {
  const int exponent = half >> 10 & 31, fraction = half & 1023;
  const float x = exponent == 31  ? (fraction != 0 ? std::numeric_limits<float>::quiet_NaN()
                                                   : std::numeric_limits<float>::infinity())
                  : exponent == 0 ? std::ldexp(float(fraction), -24)
                                  : std::ldexp(float(1024 + fraction), exponent - 25);
  return half >> 15 != 0 ? -x : x;
}

}  // namespace pipespec::cpu
