// The codes of 16 outputs and 32 inputs, which all formats store alike: 4 bits of each code in
// bytes that hold two (2 bits in bytes that hold four), further bits in bytes after them, 8 bits as
// they are. Rows of 64 bytes have 4 inputs of each output, as dot products of bytes take them. In
// an unnamed namespace, see span_impl.hpp.
#pragma once

#include <stdint.h>
#include <string.h>

// Always inline: a call passes eight vectors through memory, which takes longer than to make them.
// Without vectors they are loops, and gcc takes minutes for all of them in one function.
#ifdef __AVX2__
#define PIPESPEC_UNPACK [[gnu::always_inline]]
#else
#define PIPESPEC_UNPACK
#endif

namespace pipespec::cpu {
namespace {

template <int kBits>
struct Slice {
  static constexpr int64_t kBytes = kBits * 64;

  // The codes of one output; four of them are a word.
  static void put(const uint8_t* codes, int lane, unsigned char* to) {
    uint32_t words[8], rows[kBits] = {};
    memcpy(words, codes, 32);
    for (int i = 0; i < 8; ++i) {
      rows[low_row(i)] |= (words[i] & kLowMask * kEach) << low_bit(i);
      if constexpr (kHighBits > 0)
        rows[high_row(i)] |= (words[i] >> kLowBits & kHighMask * kEach) << high_bit(i);
    }
    for (int row = 0; row < kBits; ++row) memcpy(to + 64 * row + 4 * lane, rows + row, 4);
  }

  static void get(const unsigned char* from, int lane, uint8_t* codes) {
    uint32_t words[8], rows[kBits];
    for (int row = 0; row < kBits; ++row) memcpy(rows + row, from + 64 * row + 4 * lane, 4);
    for (int i = 0; i < 8; ++i) {
      words[i] = rows[low_row(i)] >> low_bit(i) & kLowMask * kEach;
      if constexpr (kHighBits > 0)
        words[i] |= (rows[high_row(i)] >> high_bit(i) & kHighMask * kEach) << kLowBits;
    }
    memcpy(codes, words, 32);
  }

  // The codes of V::kLanes outputs: vector i has inputs 4 i .. 4 i + 3.
  template <class V>
  PIPESPEC_UNPACK static void unpack(const unsigned char* from, typename V::Bytes (&codes)[8]) {
    typename V::Bytes rows[kBits];
#pragma GCC unroll 8
    for (int row = 0; row < kBits; ++row) rows[row] = V::load_bytes(from + 64 * row);
    codes[0] = vector<V, 0>(rows), codes[1] = vector<V, 1>(rows), codes[2] = vector<V, 2>(rows);
    codes[3] = vector<V, 3>(rows), codes[4] = vector<V, 4>(rows), codes[5] = vector<V, 5>(rows);
    codes[6] = vector<V, 6>(rows), codes[7] = vector<V, 7>(rows);
  }

 private:
  static constexpr int kLowBits = kBits == 8 ? 8 : kBits >= 4 ? 4 : 2;
  static constexpr int kHighBits = kBits - kLowBits;
  static constexpr int kLowMask = (1 << kLowBits) - 1, kHighMask = (1 << kHighBits) - 1;
  static constexpr uint32_t kEach = 0x01010101;
  static constexpr int low_row(int i) { return i % kLowBits; }
  static constexpr int low_bit(int i) { return i / kLowBits * kLowBits; }
  static constexpr int high_row(int i) { return kLowBits + (kHighBits == 2 ? i / 4 : 0); }
  static constexpr int high_bit(int i) { return kHighBits == 2 ? i % 4 * 2 : i; }

  template <class V, int i>
  static typename V::Bytes vector(const typename V::Bytes (&rows)[kBits]) {
    if constexpr (kBits == 8) return rows[i];
    const auto low = V::template bits<low_bit(i), kLowMask>(rows[low_row(i)]);
    if constexpr (kHighBits == 0)
      return low;
    else
      return V::template or_bits<high_bit(i) - kLowBits, kHighMask << kLowBits>(low,
                                                                                rows[high_row(i)]);
  }
};

}  // namespace
}  // namespace pipespec::cpu
