// Vectors of products with packed weights for NEON, with the dot products of bytes where the file
// may use them. In an unnamed namespace, see span_impl.hpp.
#pragma once

#include <stdint.h>

#include "../lanes_neon.hpp"

namespace pipespec::cpu {
namespace {

struct PackedNeon : Neon {
  using Bytes = uint8x16_t;
  using Neon::add;
  using Neon::multiply;
  static constexpr bool kSignedBytes = true;

  // The hardware follows the one stream of a panel, across pages too.
  template <int64_t kBytes>
  static void prefetch(const unsigned char*) {}
  static Bytes load_bytes(const unsigned char* p) { return vld1q_u8(p); }
  static I load_words(const unsigned char* p) { return I(load_bytes(p)); }
  static F half(const unsigned char* p) { return F(vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p)))); }
  template <int kBy, int kMask>
  static Bytes bits(Bytes x) {
    if constexpr (kBy > 0) x = vshrq_n_u8(x, kBy);
    return kMask == 255 >> kBy ? x : vandq_u8(x, vdupq_n_u8(kMask));
  }
  template <int kBy, int kMask>
  static Bytes or_bits(Bytes y, Bytes x) {
    if constexpr (kBy > 0) x = vshrq_n_u8(x, kBy);
    if constexpr (kBy < 0) x = vshlq_n_u8(x, -kBy);
    return vorrq_u8(y, vandq_u8(x, vdupq_n_u8(kMask)));
  }
  static Bytes load_table(const uint8_t* table) { return load_bytes(table); }
  static Bytes lookup(Bytes table, Bytes places) { return vqtbl1q_u8(table, places); }
  static I bytes_as_words(const unsigned char* p) { return I{p[0], p[1], p[2], p[3]}; }
  // Bytes with signs at even, or odd places, in 16 bits.
  static I even_bytes(I x) { return I(Words(x) << 8 >> 8); }
  static I odd_bytes(I x) { return I(Words(x) >> 8); }
  static I larger(I a, I b) { return a > b ? a : b; }
  static I bit_or(I a, I b) { return a | b; }
  static I add(I a, I b) { return a + b; }
  static I multiply(I a, I b) { return a * b; }
  // Adds to each lane the products of kCount vectors of codes with 4 kCount inputs. Codes of 8 bits
  // are taken with their sign.
  template <int kBits, int kCount>
  static I dots(I sum, const Bytes* codes, const int8_t* x) {
    int32x4_t total = sum;
#ifdef __ARM_FEATURE_DOTPROD
#pragma GCC unroll 2
    for (int i = 0; i < kCount; i += 4) {
      const int8x16_t inputs = vld1q_s8(x + 4 * i);
      total = vdotq_laneq_s32(total, with_sign<kBits>(codes[i]), inputs, 0);
      total = vdotq_laneq_s32(total, with_sign<kBits>(codes[i + 1]), inputs, 1);
      total = vdotq_laneq_s32(total, with_sign<kBits>(codes[i + 2]), inputs, 2);
      total = vdotq_laneq_s32(total, with_sign<kBits>(codes[i + 3]), inputs, 3);
    }
#else
    // Products, and pairs of them, are added up in 16 bits as long as they fit: inputs are
    // -127 .. 127, codes are less than 2^kBits.
    constexpr int kFit = kBits <= 4 ? 8 : kBits == 5 ? 4 : kBits == 6 ? 2 : 1;
    constexpr int kGroup = kFit < kCount ? kFit : kCount;
    static_assert(kGroup * 2 * 127 * ((1 << kBits) - 1) <= 32767 || kBits == 8);
#pragma GCC unroll 8
    for (int i = 0; i < kCount; i += kGroup) {
      int16x8_t low = vdupq_n_s16(0), high = low;
#pragma GCC unroll 8
      for (int j = i; j < i + kGroup; ++j) {
        int32_t four;
        __builtin_memcpy(&four, x + 4 * j, 4);
        const int8x16_t inputs = vreinterpretq_s8_s32(vdupq_n_s32(four));
        const int8x16_t weights = with_sign<kBits>(codes[j]);
        low = vmlal_s8(low, vget_low_s8(weights), vget_low_s8(inputs));
        high = vmlal_high_s8(high, weights, inputs);
      }
      total = vpadalq_s16(total, vpaddq_s16(low, high));
    }
#endif
    return I(total);
  }
  // Adds to each lane 2 words times 2 inputs.
  static I dot16(I sum, I words, const int16_t* x) {
    return sum + (words << 16 >> 16) * int32_t{x[0]} + (words >> 16) * int32_t{x[1]};
  }

 private:
  typedef int16_t Words __attribute__((vector_size(16)));

  template <int kBits>
  static int8x16_t with_sign(Bytes codes) {
    return vreinterpretq_s8_u8(kBits == 8 ? veorq_u8(codes, vdupq_n_u8(128)) : codes);
  }
};

}  // namespace
}  // namespace pipespec::cpu
