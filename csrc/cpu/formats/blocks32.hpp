// The formats with blocks of 32 weights, each with a scale in float16: Q8_0, Q4_0, Q5_0, and with a
// minimum Q4_1, Q5_1. A weight is scale * (code - offset), or scale * code + minimum.
//
// A panel has chunks of 8 blocks, the last one fewer: scales (and minima) of 16 outputs for each
// block, to whole lines of 64 bytes, then the codes of each block (slice.hpp). In an unnamed
// namespace, see span_impl.hpp.
#pragma once

#include <stdint.h>
#include <string.h>

#include "packed.hpp"
#include "slice.hpp"

namespace pipespec::cpu {
namespace {

template <int kBits_, int kOffset_, bool kMinimum_>
struct Blocks32 {
  static constexpr int64_t kBlock = 32, kChunkBlocks = kMinimum_ ? 1 : 2;
  static constexpr int64_t kBlockBytes = 2 + 2 * kMinimum_ + 4 * kBits_;
  static constexpr int kBits = kBits_, kOffset = kOffset_;
  static constexpr bool kMinimum = kMinimum_;
  static constexpr int64_t kScaleBytes = kMinimum ? 64 : 32;

  static constexpr int64_t scale_bytes(int64_t blocks) {
    return (blocks * kScaleBytes + 63) / 64 * 64;
  }
  static constexpr int64_t chunk_bytes(int64_t blocks) {
    return scale_bytes(blocks) + blocks * Slice<kBits>::kBytes;
  }

  struct Fields {
    uint16_t scale, minimum;
  };

  static Fields read(const unsigned char* block, uint8_t* codes) {
    Fields fields{0, 0};
    memcpy(&fields, block, kMinimum ? 4 : 2);
    block += kMinimum ? 4 : 2;
    uint32_t high = 0;
    if constexpr (kBits == 5) {
      memcpy(&high, block, 4);
      block += 4;
    }
    if constexpr (kBits == 8) {
      for (int i = 0; i < 32; ++i) codes[i] = uint8_t(block[i] + kOffset);
    } else {
      for (int i = 0; i < 16; ++i) codes[i] = block[i] & 15, codes[i + 16] = block[i] >> 4;
    }
    if constexpr (kBits == 5)
      for (int i = 0; i < 32; ++i) codes[i] = uint8_t(codes[i] | (high >> i & 1) << 4);
    return fields;
  }

  static void put(const Fields& fields, int lane, int64_t block, unsigned char* chunk) {
    memcpy(chunk + block * kScaleBytes + 2 * lane, &fields.scale, 2);
    if (kMinimum) memcpy(chunk + block * kScaleBytes + 32 + 2 * lane, &fields.minimum, 2);
  }
  static Fields get(const unsigned char* chunk, int lane, int64_t block) {
    Fields fields{0, 0};
    memcpy(&fields.scale, chunk + block * kScaleBytes + 2 * lane, 2);
    if (kMinimum) memcpy(&fields.minimum, chunk + block * kScaleBytes + 32 + 2 * lane, 2);
    return fields;
  }

  template <class Half>
  static void values(const Fields& fields, const uint8_t* codes, float* to) {
    const float scale = Half::value(fields.scale), minimum = Half::value(fields.minimum);
    for (int i = 0; i < 32; ++i) {
      const float y = scale * float(int(codes[i]) - kOffset);
      to[i] = kMinimum ? y + minimum : y;
    }
  }
};

using Q8_0 = Blocks32<8, 128, false>;
using Q4_0 = Blocks32<4, 8, false>;
using Q4_1 = Blocks32<4, 0, true>;
using Q5_0 = Blocks32<5, 16, false>;
using Q5_1 = Blocks32<5, 0, true>;

// One panel; `sums` is [columns][16 / V::kLanes]. kColumns: their number, or 0 for any.
template <class V, int kColumns, int kBits, int kOffset, bool kMinimum>
inline void panel_product(Blocks32<kBits, kOffset, kMinimum>, const unsigned char* panel,
                          int64_t inputs, const void* tile, int64_t any_columns,
                          typename V::F (*sums)[16 / V::kLanes]) {
  using B = Blocks32<kBits, kOffset, kMinimum>;
  constexpr int kParts = 16 / V::kLanes;
  constexpr bool kHasOffset = kOffset != 0 && !(kOffset == 128 && V::kSignedBytes);
  constexpr int kWhich = kOffset == 8 ? 0 : kOffset == 16 ? 1 : 2;
  const int64_t columns = kColumns != 0 ? kColumns : any_columns;
  const Inputs32* x = static_cast<const Inputs32*>(tile);
  for (int64_t c = 0; c < columns; ++c)
    for (int part = 0; part < kParts; ++part) sums[c][part] = V::broadcast(0.0f);
  for (int64_t rest = inputs / 32; rest > 0; rest -= B::kChunkBlocks) {
    const int64_t blocks = rest < B::kChunkBlocks ? rest : B::kChunkBlocks;
    const unsigned char* scales = panel;
    const unsigned char* codes = panel + B::scale_bytes(blocks);
    for (int64_t b = 0; b < blocks; ++b) {
      V::template prefetch<Slice<kBits>::kBytes>(codes);
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        typename V::Bytes w[8];
        Slice<kBits>::template unpack<V>(codes + part * 4 * V::kLanes, w);
        const auto scale = V::half(scales + part * 2 * V::kLanes);
        const auto minimum = kMinimum ? V::half(scales + 32 + part * 2 * V::kLanes) : scale;
        for (int64_t c = 0; c < columns; ++c) {
          const auto dots = V::template dots<kBits, 8>(
              V::broadcast(kHasOffset ? x[c].offsets[kWhich] : 0), w, x[c].codes);
          auto sum = V::add(sums[c][part], V::multiply(V::multiply(scale, V::broadcast(x[c].scale)),
                                                       V::to_float(dots)));
          if constexpr (kMinimum)
            sum = V::add(sum, V::multiply(minimum, V::broadcast(x[c].scaled_sum)));
          sums[c][part] = sum;
        }
      }
      scales += B::kScaleBytes, codes += Slice<kBits>::kBytes, x += columns;
    }
    panel = codes;
  }
}

}  // namespace
}  // namespace pipespec::cpu
