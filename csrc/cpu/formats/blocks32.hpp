// The formats with blocks of 32 weights, each with a scale: Q8_0, Q4_0, Q5_0, with a minimum Q4_1
// and Q5_1, with a table IQ4_NL, MXFP4, and NVFP4 with two scales. A weight is scale * value, or
// scale * code + minimum.
//
// A panel has chunks of up to 4 blocks, the last one fewer: scales (and minima) of 16 outputs for
// each block, to whole lines of 64 bytes, then the codes of each block (slice.hpp). In an unnamed
// namespace, see span_impl.hpp.
#pragma once

#include <stdint.h>
#include <string.h>

#include "codes.hpp"
#include "packed.hpp"
#include "slice.hpp"

namespace pipespec::cpu {
namespace {

// Scales: in float16, powers of two in a byte (E8M0), halved, or in float32.
struct HalfScale {
  static constexpr int64_t kBytes = 2;
  template <class V>
  static typename V::F load(const unsigned char* scales) {
    return V::half(scales);
  }
  template <class Half>
  static float value(const unsigned char* stored) {
    uint16_t half;
    memcpy(&half, stored, 2);
    return Half::value(half);
  }
};

struct PowerScale {
  static constexpr int64_t kBytes = 1;
  template <class V>
  static typename V::F load(const unsigned char* scales) {
    // The exponent less one, or the bit of a subnormal number.
    const auto power = V::bytes_as_words(scales), one = V::broadcast(int32_t{1});
    return V::float_of(V::larger(V::template shift_left<23>(V::subtract(power, one)),
                                 V::template shift_left<21>(V::add(power, one))));
  }
  template <class>
  static float value(const unsigned char* stored) {
    const uint32_t power = *stored, bits = power < 2 ? (power + 1) << 21 : (power - 1) << 23;
    float value;
    memcpy(&value, &bits, 4);
    return value;
  }
};

struct FloatScale {
  static constexpr int64_t kBytes = 4;
  template <class V>
  static typename V::F load(const unsigned char* scales) {
    return V::float_of(V::load_words(scales));
  }
  template <class>
  static float value(const unsigned char* stored) {
    float value;
    memcpy(&value, stored, 4);
    return value;
  }
};

// What comes before the codes: a scale, a scale and a minimum, or a scale for each half.
enum class Head { kScale, kMinimum, kHalves };

// Eight bits as the fifth ones of as many codes, all at once.
inline void add_bits(uint8_t bits, uint8_t* codes) {
  constexpr uint64_t kOnes = 0x0101010101010101;
  // Byte i has bit i of `bits` alone, in its place.
  const uint64_t places = bits * kOnes & 0x8040201008040201;
  uint64_t words;
  memcpy(&words, codes, 8);
  words |= ((places + 0x7f * kOnes) >> 7 & kOnes) << 4;
  memcpy(codes, &words, 8);
}

template <class Codes_, Head kHead, class Scale_ = HalfScale>
struct Blocks32 {
  using Codes = Codes_;
  using Scale = Scale_;
  static constexpr bool kMinimum = kHead == Head::kMinimum, kHalves = kHead == Head::kHalves;
  static constexpr int kBits = Codes::kBits;
  static constexpr int kNumbers = kMinimum || kHalves ? 2 : 1;
  static constexpr int64_t kScaleBytes = 16 * kNumbers * Scale::kBytes;
  static constexpr int64_t kBlock = 32, kChunkBlocks = kScaleBytes < 64 ? 64 / kScaleBytes : 1;
  static constexpr int64_t kBlockBytes = kNumbers * Scale::kBytes + 4 * kBits;
  static_assert(Codes::kFactor == 1.0f);

  static constexpr int64_t scale_bytes(int64_t blocks) {
    return (blocks * kScaleBytes + 63) / 64 * 64;
  }
  static constexpr int64_t chunk_bytes(int64_t blocks) {
    return scale_bytes(blocks) + blocks * Slice<kBits>::kBytes;
  }

  struct Fields {
    unsigned char numbers[2][Scale::kBytes];
  };

  static Fields read(const unsigned char* block, uint8_t* codes) {
    Fields fields{};
    memcpy(&fields, block, kNumbers * Scale::kBytes);
    block += kNumbers * Scale::kBytes;
    const unsigned char* const high = block;
    if constexpr (kBits == 5) block += 4;
    if constexpr (kBits == 8) {
      for (int i = 0; i < 32; ++i) codes[i] = uint8_t(block[i] + Codes::kOffset);
    } else {
      for (int i = 0; i < 16; ++i) codes[i] = block[i] & 15, codes[i + 16] = block[i] >> 4;
    }
    if constexpr (kBits == 5)
      for (int i = 0; i < 4; ++i) add_bits(high[i], codes + 8 * i);
    return fields;
  }

  static void put(const Fields& fields, int lane, int64_t block, unsigned char* chunk) {
    for (int i = 0; i < kNumbers; ++i)
      memcpy(chunk + block * kScaleBytes + (16 * i + lane) * Scale::kBytes, fields.numbers[i],
             Scale::kBytes);
  }
  static Fields get(const unsigned char* chunk, int lane, int64_t block) {
    Fields fields{};
    for (int i = 0; i < kNumbers; ++i)
      memcpy(fields.numbers[i], chunk + block * kScaleBytes + (16 * i + lane) * Scale::kBytes,
             Scale::kBytes);
    return fields;
  }

  template <class Half>
  static void values(const Fields& fields, const uint8_t* codes, float* to) {
    const float scale = Scale::template value<Half>(fields.numbers[0]);
    const float second = Scale::template value<Half>(fields.numbers[1]);
    for (int i = 0; i < 32; ++i) {
      const float y = (kHalves && i >= 16 ? second : scale) * float(Codes::value(codes[i]));
      to[i] = kMinimum ? y + second : y;
    }
  }
};

using Q8_0 = Blocks32<Plain<8, 128>, Head::kScale>;
using Q4_0 = Blocks32<Plain<4, 8>, Head::kScale>;
using Q4_1 = Blocks32<Plain<4, 0>, Head::kMinimum>;
using Q5_0 = Blocks32<Plain<5, 16>, Head::kScale>;
using Q5_1 = Blocks32<Plain<5, 0>, Head::kMinimum>;
using IQ4_NL = Blocks32<Lookup<Iq4Values>, Head::kScale>;
using MXFP4 = Blocks32<Lookup<E2m1Values>, Head::kScale, PowerScale>;
// Its scales in the files are E4M3, times one of the matrix.
using NVFP4 = Blocks32<Lookup<E2m1Values>, Head::kHalves, FloatScale>;

// One panel; `sums` is [columns][16 / V::kLanes]. kColumns: their number, or 0 for any.
template <class V, int kColumns, class Codes, Head kHead, class Scale>
inline void panel_product(Blocks32<Codes, kHead, Scale>, const unsigned char* panel, int64_t inputs,
                          const void* tile, int64_t any_columns,
                          typename V::F (*sums)[16 / V::kLanes]) {
  using B = Blocks32<Codes, kHead, Scale>;
  constexpr int kParts = 16 / V::kLanes, kOffset = Codes::kOffset, kByteBits = Codes::kByteBits;
  constexpr bool kHasOffset = kOffset != 0 && !(kOffset == 128 && V::kSignedBytes);
  constexpr int kWhich = kOffset == 8 ? 0 : kOffset == 16 ? 1 : 2;
  static_assert(!B::kHalves || kOffset == 16);
  const int64_t columns = kColumns != 0 ? kColumns : any_columns;
  const Inputs32* x = static_cast<const Inputs32*>(tile);
  for (int64_t c = 0; c < columns; ++c)
    for (int part = 0; part < kParts; ++part) sums[c][part] = V::broadcast(0.0f);
  for (int64_t rest = inputs / 32; rest > 0; rest -= B::kChunkBlocks) {
    const int64_t blocks = rest < B::kChunkBlocks ? rest : B::kChunkBlocks;
    const unsigned char* scales = panel;
    const unsigned char* codes = panel + B::scale_bytes(blocks);
    for (int64_t b = 0; b < blocks; ++b) {
      V::template prefetch<Slice<B::kBits>::kBytes>(codes);
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        typename V::Bytes w[8];
        Codes::template unpack<V>(codes + part * 4 * V::kLanes, w);
        const unsigned char* const numbers = scales + part * V::kLanes * Scale::kBytes;
        const auto scale = Scale::template load<V>(numbers);
        const auto second =
            B::kNumbers == 2 ? Scale::template load<V>(numbers + 16 * Scale::kBytes) : scale;
        for (int64_t c = 0; c < columns; ++c) {
          const auto input_scale = V::broadcast(x[c].scale);
          const auto add = [&](auto sum, auto scale, auto dots) {
            return V::add(sum, V::multiply(V::multiply(scale, input_scale), V::to_float(dots)));
          };
          auto sum = sums[c][part];
          if constexpr (B::kHalves) {
            const int32_t* const start = x[c].half_offsets;
            sum = add(sum, scale,
                      V::template dots<kByteBits, 4>(V::broadcast(start[0]), w, x[c].codes));
            sum =
                add(sum, second,
                    V::template dots<kByteBits, 4>(V::broadcast(start[1]), w + 4, x[c].codes + 16));
          } else {
            const int32_t start = kHasOffset ? x[c].offsets[kWhich] : 0;
            sum =
                add(sum, scale, V::template dots<kByteBits, 8>(V::broadcast(start), w, x[c].codes));
          }
          if constexpr (B::kMinimum)
            sum = V::add(sum, V::multiply(second, V::broadcast(x[c].scaled_sum)));
          sums[c][part] = sum;
        }
      }
      scales += B::kScaleBytes, codes += Slice<B::kBits>::kBytes, x += columns;
    }
    panel = codes;
  }
}

}  // namespace
}  // namespace pipespec::cpu
