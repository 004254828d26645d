// The codes of 16 outputs and 32 inputs, which all formats store alike: 4 bits of each code in
// bytes that hold two, further bits in bytes after them, 8 bits as they are. Rows of 64 bytes have
// 4 inputs of each output, as dot products of bytes take them. In an unnamed namespace, see
// span_impl.hpp.
#pragma once

#include <stdint.h>
#include <string.h>

namespace pipespec::cpu {
namespace {

template <int kBits>
struct Slice {
  static constexpr int64_t kBytes = kBits * 64;

  // The codes of one output; four of them are a word.
  static void put(const uint8_t* codes, int lane, unsigned char* to) {
    uint32_t words[8], high[4] = {};
    memcpy(words, codes, 32);
    if constexpr (kBits == 8) {
      for (int i = 0; i < 8; ++i) memcpy(to + 64 * i + 4 * lane, words + i, 4);
      return;
    }
    for (int i = 0; i < 4; ++i) {
      const uint32_t both = (words[i] & kLow) | (words[i + 4] & kLow) << 4;
      memcpy(to + 64 * i + 4 * lane, &both, 4);
    }
    for (int i = 0; i < 8; ++i) high[high_row(i) - 4] |= (words[i] >> 4 & kLow) << high_bit(i);
    for (int row = 4; row < kBits; ++row) memcpy(to + 64 * row + 4 * lane, high + row - 4, 4);
  }

  static void get(const unsigned char* from, int lane, uint8_t* codes) {
    uint32_t words[8];
    for (int i = 0; i < 8; ++i) {
      memcpy(words + i, from + 64 * (kBits == 8 ? i : i % 4) + 4 * lane, 4);
      if constexpr (kBits == 8) continue;
      words[i] = words[i] >> i / 4 * 4 & kLow;
      if constexpr (kBits == 4) continue;
      uint32_t high;
      memcpy(&high, from + 64 * high_row(i) + 4 * lane, 4);
      words[i] |= (high >> high_bit(i) & kHigh * 0x01010101u) << 4;
    }
    memcpy(codes, words, 32);
  }

  // The codes of V::kLanes outputs: vector i has inputs 4 i .. 4 i + 3.
  template <class V>
  static void unpack(const unsigned char* from, typename V::Bytes (&codes)[8]) {
    if constexpr (kBits == 8) {
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) codes[i] = V::load_bytes(from + 64 * i);
    } else {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const auto both = V::load_bytes(from + 64 * i);
        codes[i] = V::template bits<0, 15>(both);
        codes[i + 4] = V::template bits<4, 15>(both);
      }
      if constexpr (kBits > 4) {
        typename V::Bytes high[kBits - 4];
        for (int i = 0; i < kBits - 4; ++i) high[i] = V::load_bytes(from + 64 * (4 + i));
        add_high<V, 0>(codes, high), add_high<V, 1>(codes, high), add_high<V, 2>(codes, high);
        add_high<V, 3>(codes, high), add_high<V, 4>(codes, high), add_high<V, 5>(codes, high);
        add_high<V, 6>(codes, high), add_high<V, 7>(codes, high);
      }
    }
  }

 private:
  static constexpr uint32_t kLow = 0x0F0F0F0F;
  static constexpr int kHigh = kBits == 6 ? 3 : 1;  // mask of the bits above the lowest 4
  static constexpr int high_row(int i) { return kBits == 6 ? 4 + i / 4 : 4; }
  static constexpr int high_bit(int i) { return kBits == 6 ? i % 4 * 2 : i; }

  template <class V, int i>
  static void add_high(typename V::Bytes (&codes)[8], const typename V::Bytes (&high)[kBits - 4]) {
    codes[i] = V::template or_bits<high_bit(i) - 4, kHigh << 4>(codes[i], high[high_row(i) - 4]);
  }
};

}  // namespace
}  // namespace pipespec::cpu
