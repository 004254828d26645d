// The formats with blocks of 256 weights in groups of 16 or 32 with integer scales, times a scale
// in float16: the K formats, IQ4_XS, and the smaller IQ types in blocks of our own. A weight is
// scale * sub-scale * value, or scale * sub-scale * code - minimum * sub-minimum.
//
// A panel has for each block: scales, and minima or an empty half line, of 16 outputs; their
// sub-scales, 4 bytes of each output per line of 64; then the codes of each 32 weights
// (slice.hpp). In an unnamed namespace, see span_impl.hpp.
#pragma once

#include <stdint.h>
#include <string.h>

#include "codes.hpp"
#include "packed.hpp"
#include "slice.hpp"
#include "sub_scales.hpp"

namespace pipespec::cpu {
namespace {

template <class Codes_, class Subs_>
struct Blocks256 {
  using Codes = Codes_;
  using Subs = Subs_;
  static constexpr int64_t kBlock = 256, kChunkBlocks = 1;
  static constexpr int kBits = Codes::kBits;
  static constexpr bool kMinimum = Subs::kMinimum;

  static constexpr int64_t scale_bytes(int64_t) { return 64 + 16 * Subs::kBytes; }
  static constexpr int64_t chunk_bytes(int64_t blocks) {
    return blocks * (scale_bytes(1) + 8 * Slice<kBits>::kBytes);
  }

  struct Fields {
    uint16_t scale, minimum;
    uint8_t sub_scales[16];
  };

  static void put(const Fields& fields, int lane, int64_t, unsigned char* chunk) {
    memcpy(chunk + 2 * lane, &fields.scale, 2);
    memcpy(chunk + 32 + 2 * lane, &fields.minimum, 2);
    for (int i = 0; i < Subs::kBytes / 4; ++i)
      memcpy(chunk + 64 + 64 * i + 4 * lane, fields.sub_scales + 4 * i, 4);
  }
  static Fields get(const unsigned char* chunk, int lane, int64_t) {
    Fields fields{};
    memcpy(&fields.scale, chunk + 2 * lane, 2);
    memcpy(&fields.minimum, chunk + 32 + 2 * lane, 2);
    for (int i = 0; i < Subs::kBytes / 4; ++i)
      memcpy(fields.sub_scales + 4 * i, chunk + 64 + 64 * i + 4 * lane, 4);
    return fields;
  }

  template <class Half>
  static void values(const Fields& fields, const uint8_t* codes, float* to) {
    const float scale = Half::value(fields.scale) * Codes::kFactor;
    const float minimum = Half::value(fields.minimum);
    for (int i = 0; i < 256; ++i) {
      const int group = i / Subs::kGroup;
      const float y =
          scale * float(Subs::scale(fields.sub_scales, group)) * float(Codes::value(codes[i]));
      to[i] = kMinimum ? y - minimum * float(Subs::minimum(fields.sub_scales, group)) : y;
    }
  }

  // What the sums of 16 outputs are multiplied with.
  template <class V>
  static typename V::F scale(const unsigned char* scales) {
    const auto scale = V::half(scales);
    return Codes::kFactor == 1.0f ? scale : V::multiply(scale, V::broadcast(Codes::kFactor));
  }
};

// The inner loops of these go through neighbours, so that compilers make vectors of them: packing
// a file takes most of a first call otherwise.

// Two bits of each of 256 codes, the same ones of 32 neighbours in one byte each.
inline void read_two_bits(const unsigned char* from, uint8_t* codes) {
  for (int half = 0; half < 2; ++half, from += 32)
    for (int bit = 0; bit < 8; bit += 2, codes += 32)
      for (int i = 0; i < 32; ++i) codes[i] = uint8_t(from[i] >> bit & 3);
}

inline void add_bit(const unsigned char* from, int to, uint8_t* codes) {
  for (int bit = 0; bit < 8; ++bit, codes += 32)
    for (int i = 0; i < 32; ++i) codes[i] = uint8_t(codes[i] | (from[i] >> bit & 1) << to);
}

// Four bits, in groups of which the first half is in the low ones.
template <int kGroup>
void read_nibbles(const unsigned char* from, uint8_t* codes) {
  constexpr int kHalf = kGroup / 2;
  for (int group = 0; group < 256; group += kGroup, from += kHalf, codes += kGroup) {
    for (int i = 0; i < kHalf; ++i) codes[i] = uint8_t(from[i] & 15);
    for (int i = 0; i < kHalf; ++i) codes[kHalf + i] = uint8_t(from[i] >> 4);
  }
}

struct Q2_K : Blocks256<Plain<2, 0>, NibbleSubs> {
  static constexpr int64_t kBlockBytes = 84;
  static Fields read(const unsigned char* block, uint8_t* codes) {
    Fields fields{};
    memcpy(fields.sub_scales, block, 16);
    memcpy(&fields.scale, block + 80, 2);
    memcpy(&fields.minimum, block + 82, 2);
    read_two_bits(block + 16, codes);
    return fields;
  }
};

struct Q3_K : Blocks256<Plain<3, 4>, SignedSubs<16>> {
  static constexpr int64_t kBlockBytes = 110;
  static Fields read(const unsigned char* block, uint8_t* codes) {
    Fields fields{};
    const unsigned char *const low = block + 96, *const high = block + 104;
    for (int i = 0; i < 16; ++i)
      fields.sub_scales[i] =
          uint8_t(((low[i % 8] >> i / 8 * 4 & 15) | (high[i % 4] >> i / 4 * 2 & 3) << 4) - 32);
    memcpy(&fields.scale, block + 108, 2);
    read_two_bits(block + 32, codes);
    add_bit(block, 2, codes);
    return fields;
  }
};

struct Q4_K : Blocks256<Plain<4, 0>, SixBitSubs> {
  static constexpr int64_t kBlockBytes = 144;
  static Fields read(const unsigned char* block, uint8_t* codes) {
    Fields fields{};
    memcpy(&fields, block, 16);
    read_nibbles<64>(block + 16, codes);
    return fields;
  }
};

struct Q5_K : Blocks256<Plain<5, 0>, SixBitSubs> {
  static constexpr int64_t kBlockBytes = 176;
  static Fields read(const unsigned char* block, uint8_t* codes) {
    Fields fields{};
    memcpy(&fields, block, 16);
    read_nibbles<64>(block + 48, codes);
    add_bit(block + 16, 4, codes);
    return fields;
  }
};

struct Q6_K : Blocks256<Plain<6, 32>, SignedSubs<16>> {
  static constexpr int64_t kBlockBytes = 210;
  static Fields read(const unsigned char* block, uint8_t* codes) {
    Fields fields{};
    memcpy(fields.sub_scales, block + 192, 16);
    memcpy(&fields.scale, block + 208, 2);
    uint8_t high[256];
    read_nibbles<128>(block, codes);
    read_two_bits(block + 128, high);
    for (int i = 0; i < 256; ++i) codes[i] = uint8_t(codes[i] | high[i] << 4);
    return fields;
  }
};

struct IQ4_XS : Blocks256<Lookup<Iq4Values>, SignedSubs<32>> {
  static constexpr int64_t kBlockBytes = 136;
  static Fields read(const unsigned char* block, uint8_t* codes) {
    Fields fields{};
    memcpy(&fields.scale, block, 2);
    for (int i = 0; i < 8; ++i)
      fields.sub_scales[i] = uint8_t(
          ((block[4 + i / 2] >> i % 2 * 4 & 15) | (block[2 + i / 4] >> i % 4 * 2 & 3) << 4) - 32);
    read_nibbles<32>(block + 8, codes);
    return fields;
  }
};

// Blocks of our own: a scale in float16, 16 sub-scales, and 4 bits that name a value of the table.
template <class Table>
struct Table256 : Blocks256<Lookup<Table>, SignedSubs<16>> {
  static constexpr int64_t kBlockBytes = 146;
  using Fields = typename Blocks256<Lookup<Table>, SignedSubs<16>>::Fields;
  static Fields read(const unsigned char* block, uint8_t* codes) {
    Fields fields{};
    memcpy(&fields.scale, block, 2);
    memcpy(fields.sub_scales, block + 2, 16);
    read_nibbles<32>(block + 18, codes);
    return fields;
  }
};

using Table3s = Table256<Iq3sValues>;
using Table3xxs = Table256<Iq3xxsValues>;
using Table2 = Table256<Iq2Values>;

// Whether the inputs bring what the offset of the codes takes from each sum of 16. That of other
// offsets is subtracted once for all groups.
template <class B>
constexpr bool starts_from_offset() {
  return B::Codes::kOffset == 32 && B::Subs::kGroup == 16;
}

// Groups of 32 inputs: products of codes and inputs, times the sub-scales, into `sums`.
template <class V, class B, int kSub>
inline void sub_block(const SubScales<V, typename B::Subs>& scales, const unsigned char* codes,
                      const Inputs256* x, int64_t columns, typename V::I* sums) {
  constexpr bool kHalves = B::Subs::kGroup == 16;
  constexpr int kByteBits = B::Codes::kByteBits;
  // The first group counts the scales, too.
  V::template prefetch<Slice<B::kBits>::kBytes + (kSub == 0 ? B::scale_bytes(1) : 0)>(
      codes - (kSub == 0 ? B::scale_bytes(1) : 0));
  typename V::Bytes w[8];
  B::Codes::template unpack<V>(codes, w);
  const auto scale = scales.template get<kHalves ? 2 * kSub : kSub>();
  [[maybe_unused]] const auto second = scales.template get<kHalves ? 2 * kSub + 1 : kSub>();
  const auto zero = V::broadcast(int32_t{0});
  for (int64_t c = 0; c < columns; ++c) {
    const int8_t* const inputs = x[c].codes + 32 * kSub;
    if constexpr (kHalves) {
      const int32_t* const offsets = x[c].offsets + 2 * kSub;
      const auto dots = V::template dots<kByteBits, 4>(
          starts_from_offset<B>() ? V::broadcast(offsets[0]) : zero, w, inputs);
      const auto others = V::template dots<kByteBits, 4>(
          starts_from_offset<B>() ? V::broadcast(offsets[1]) : zero, w + 4, inputs + 16);
      sums[c] = V::add(sums[c], V::add(V::multiply(dots, scale), V::multiply(others, second)));
    } else {
      const auto dots = V::template dots<kByteBits, 8>(zero, w, inputs);
      sums[c] = V::add(sums[c], V::multiply(dots, scale));
    }
  }
}

// What minima, or sub-scales, give with the sums of a column's inputs.
template <class V, class Subs>
inline typename V::I pair_products(const SubScales<V, Subs>& scales, const Inputs256& x) {
  constexpr int kPairs = 2 * SubScales<V, Subs>::kWords;
  const int16_t* const sums = Subs::kGroup == 16 ? x.sums16 : x.sums32;
  auto products = V::broadcast(int32_t{0});
#pragma GCC unroll 8
  for (int i = 0; i < kPairs; ++i) products = V::dot16(products, scales.pairs[i], sums + 2 * i);
  return products;
}

template <class V, int kColumns, class Codes, class Subs>
inline void panel_product(Blocks256<Codes, Subs>, const unsigned char* panel, int64_t inputs,
                          const void* tile, int64_t any_columns,
                          typename V::F (*sums)[16 / V::kLanes]) {
  using B = Blocks256<Codes, Subs>;
  constexpr int kParts = 16 / V::kLanes, kOffset = Codes::kOffset;
  constexpr bool kHasOffset =
      kOffset != 0 && !(kOffset == 128 && V::kSignedBytes) && !starts_from_offset<B>();
  constexpr int64_t kStep = Slice<B::kBits>::kBytes;
  const int64_t columns = kColumns != 0 ? kColumns : any_columns;
  const Inputs256* x = static_cast<const Inputs256*>(tile);
  typename V::I products[kColumns != 0 ? kColumns : kTileColumns];
  for (int64_t c = 0; c < columns; ++c)
    for (int part = 0; part < kParts; ++part) sums[c][part] = V::broadcast(0.0f);
  for (int64_t b = 0; b < inputs / 256; ++b, panel += B::chunk_bytes(1), x += columns) {
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      const SubScales<V, Subs> scales(panel + 64 + part * 4 * V::kLanes);
      const unsigned char* const codes = panel + B::scale_bytes(1) + part * 4 * V::kLanes;
      for (int64_t c = 0; c < columns; ++c) {
        products[c] = V::broadcast(int32_t{0});
        if constexpr (kHasOffset)
          products[c] = V::subtract(products[c], V::template shift_left<__builtin_ctz(kOffset)>(
                                                     pair_products(scales, x[c])));
      }
      sub_block<V, B, 0>(scales, codes, x, columns, products);
      sub_block<V, B, 1>(scales, codes + kStep, x, columns, products);
      sub_block<V, B, 2>(scales, codes + 2 * kStep, x, columns, products);
      sub_block<V, B, 3>(scales, codes + 3 * kStep, x, columns, products);
      sub_block<V, B, 4>(scales, codes + 4 * kStep, x, columns, products);
      sub_block<V, B, 5>(scales, codes + 5 * kStep, x, columns, products);
      sub_block<V, B, 6>(scales, codes + 6 * kStep, x, columns, products);
      sub_block<V, B, 7>(scales, codes + 7 * kStep, x, columns, products);
      const auto scale = B::template scale<V>(panel + part * 2 * V::kLanes);
      [[maybe_unused]] const auto minimum = V::half(panel + 32 + part * 2 * V::kLanes);
      for (int64_t c = 0; c < columns; ++c) {
        const auto input_scale = V::broadcast(x[c].scale);
        auto sum = V::add(sums[c][part],
                          V::multiply(V::multiply(scale, input_scale), V::to_float(products[c])));
        if constexpr (B::kMinimum)
          sum = V::subtract(sum, V::multiply(V::multiply(minimum, input_scale),
                                             V::to_float(pair_products(scales, x[c]))));
        sums[c][part] = sum;
      }
    }
  }
}

}  // namespace
}  // namespace pipespec::cpu
