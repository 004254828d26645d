// The codes of 16 outputs and 32 inputs, which all formats store alike: 4 bits of each code in
// bytes that hold two, further bits in bytes behind them, 8 bits as they are. Rows of 64 bytes have
// 4 inputs of each output, as dot products of bytes take them. In an unnamed namespace, see
// span_impl.hpp.
#pragma once

#include <stdint.h>

namespace pipespec::cpu {
namespace {

template <int kBits>
struct Slice {
  static constexpr int64_t kBytes = kBits * 64;

  static void put(const uint8_t* codes, int lane, unsigned char* to) {
    to += 4 * lane;
    for (int j = 0; j < 4; ++j) {
      if constexpr (kBits == 8) {
        for (int i = 0; i < 8; ++i) to[64 * i + j] = codes[4 * i + j];
        continue;
      }
      for (int i = 0; i < 4; ++i)
        to[64 * i + j] = (unsigned char)((codes[4 * i + j] & 15) | codes[16 + 4 * i + j] << 4);
      for (int row = 4; row < kBits; ++row) to[64 * row + j] = 0;
      for (int i = 0; i < 8 && kBits > 4; ++i)
        to[64 * high_row(i) + j] |= (unsigned char)(codes[4 * i + j] >> 4 << high_bit(i));
    }
  }

  static void get(const unsigned char* from, int lane, uint8_t* codes) {
    from += 4 * lane;
    for (int j = 0; j < 4; ++j) {
      for (int i = 0; i < 8; ++i) {
        uint8_t& code = codes[4 * i + j];
        if constexpr (kBits == 8) {
          code = from[64 * i + j];
          continue;
        }
        code = uint8_t(from[64 * (i % 4) + j] >> (i / 4 * 4) & 15);
        if constexpr (kBits > 4)
          code |= uint8_t((from[64 * high_row(i) + j] >> high_bit(i) & kHigh) << 4);
      }
    }
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
