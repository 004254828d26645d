// The integer scales of the parts of a block of 256, and their minima: how a panel holds them, as
// integers and as vectors of 16 outputs. In an unnamed namespace, see span_impl.hpp.
#pragma once

#include <stdint.h>

namespace pipespec::cpu {
namespace {

// Vectors of sub-scales: four in the bytes of each word; and what meets the sums of the inputs, in
// pairs of 16 bits in the order of Inputs256::sums: minima, or the sub-scales themselves where
// codes have an offset.
template <class V, class Subs>
struct SubScales {
  static constexpr int kWords = 64 / Subs::kGroup;
  typename V::I bytes[kWords], pairs[2 * kWords];

  explicit SubScales(const unsigned char* from) { Subs::template load<V>(from, bytes, pairs); }

  // Sub-scale number i.
  template <int i>
  typename V::I get() const {
    if constexpr (Subs::kSigned)
      return V::template shift_right_signed<24>(
          V::template shift_left<24 - i % 4 * 8>(bytes[i / 4]));
    else
      return V::bit_and(V::template shift_right<i % 4 * 8>(bytes[i / 4]), V::broadcast(255));
  }
};

// Bytes with signs, for groups of kGroup weights.
template <int kGroup_>
struct SignedSubs {
  static constexpr int kGroup = kGroup_;
  static constexpr int64_t kBytes = 256 / kGroup;
  static constexpr bool kMinimum = false, kSigned = true;

  static int scale(const uint8_t* stored, int i) { return int8_t(stored[i]); }
  static int minimum(const uint8_t*, int) { return 0; }
  template <class V>
  static void load(const unsigned char* from, typename V::I* bytes, typename V::I* pairs) {
#pragma GCC unroll 4
    for (int i = 0; i < kBytes / 4; ++i) {
      bytes[i] = V::load_words(from + 64 * i);
      pairs[2 * i] = V::even_bytes(bytes[i]), pairs[2 * i + 1] = V::odd_bytes(bytes[i]);
    }
  }
};

// 4 bits, with minima of 4 bits above them: Q2_K.
struct NibbleSubs {
  static constexpr int kGroup = 16;
  static constexpr int64_t kBytes = 16;
  static constexpr bool kMinimum = true, kSigned = false;

  static int scale(const uint8_t* stored, int i) { return stored[i] & 15; }
  static int minimum(const uint8_t* stored, int i) { return stored[i] >> 4; }
  template <class V>
  static void load(const unsigned char* from, typename V::I* bytes, typename V::I* pairs) {
    const auto four = V::broadcast(0x0F0F0F0F);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const auto both = V::load_words(from + 64 * i);
      bytes[i] = V::bit_and(both, four);
      const auto minima = V::bit_and(V::template shift_right<4>(both), four);
      pairs[2 * i] = V::even_bytes(minima), pairs[2 * i + 1] = V::odd_bytes(minima);
    }
  }
};

// 6 bits, with minima of 6 bits: 8 of each in 12 bytes. Q4_K, Q5_K.
struct SixBitSubs {
  static constexpr int kGroup = 32;
  static constexpr int64_t kBytes = 12;
  static constexpr bool kMinimum = true, kSigned = false;

  static int scale(const uint8_t* s, int i) {
    return i < 4 ? s[i] & 63 : (s[4 + i] & 15) | s[i - 4] >> 6 << 4;
  }
  static int minimum(const uint8_t* s, int i) {
    return i < 4 ? s[4 + i] & 63 : s[4 + i] >> 4 | s[i] >> 6 << 4;
  }
  template <class V>
  static void load(const unsigned char* from, typename V::I* bytes, typename V::I* pairs) {
    const auto a = V::load_words(from), b = V::load_words(from + 64);
    const auto c = V::load_words(from + 128);
    const auto six = V::broadcast(0x3F3F3F3F), four = V::broadcast(0x0F0F0F0F);
    const auto two = V::broadcast(0x30303030);
    bytes[0] = V::bit_and(a, six);
    bytes[1] = V::bit_or(V::bit_and(c, four), V::bit_and(V::template shift_right<2>(a), two));
    const auto low = V::bit_and(b, six);
    const auto high = V::bit_or(V::bit_and(V::template shift_right<4>(c), four),
                                V::bit_and(V::template shift_right<2>(b), two));
    pairs[0] = V::even_bytes(low), pairs[1] = V::odd_bytes(low);
    pairs[2] = V::even_bytes(high), pairs[3] = V::odd_bytes(high);
  }
};

}  // namespace
}  // namespace pipespec::cpu
