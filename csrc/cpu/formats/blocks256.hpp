// The K formats: blocks of 256 weights in sub-blocks with integer scales, times a scale in float16.
// Q4_K, Q5_K: 8 sub-blocks with scales and minima of 6 bits and one more factor for the minima, a
// weight is scale * sub-scale * code - minimum * sub-minimum. Q6_K: 16 sub-blocks with scales of 8
// bits, a weight is scale * sub-scale * (code - 32).
//
// A panel has for each block: scales, and minima or an empty half line, of 16 outputs; their
// sub-scales, 4 bytes of each output per line of 64; then the codes of each sub-block of 32
// (slice.hpp). In an unnamed namespace, see span_impl.hpp.
#pragma once

#include <stdint.h>
#include <string.h>

#include "packed.hpp"
#include "slice.hpp"

namespace pipespec::cpu {
namespace {

template <int kBits_>
struct Blocks256 {
  static constexpr int64_t kBlock = 256, kChunkBlocks = 1;
  static constexpr int kBits = kBits_;
  static constexpr bool kMinimum = kBits != 6;
  static constexpr int64_t kSubScales = kMinimum ? 12 : 16;  // bytes
  static constexpr int64_t kBlockBytes = (kMinimum ? 4 : 2) + kSubScales + 32 * kBits;

  static constexpr int64_t scale_bytes(int64_t) { return 64 + 16 * kSubScales; }
  static constexpr int64_t chunk_bytes(int64_t blocks) {
    return blocks * (scale_bytes(1) + 8 * Slice<kBits>::kBytes);
  }

  struct Fields {
    uint16_t scale, minimum;
    uint8_t sub_scales[16];
  };

  static Fields read(const unsigned char* block, uint8_t* codes) {
    Fields fields{};
    if constexpr (kBits == 6) {
      memcpy(fields.sub_scales, block + 192, 16);
      memcpy(&fields.scale, block + 208, 2);
      for (int half = 0; half < 2; ++half, codes += 128) {
        const unsigned char *const low = block + 64 * half, *const high = block + 128 + 32 * half;
        for (int l = 0; l < 64; ++l) codes[l] = low[l] & 15, codes[l + 64] = low[l] >> 4;
        for (int quarter = 0; quarter < 4; ++quarter)
          for (int l = 0; l < 32; ++l)
            codes[32 * quarter + l] =
                uint8_t(codes[32 * quarter + l] | (high[l] >> 2 * quarter & 3) << 4);
      }
      return fields;
    }
    memcpy(&fields, block, 4);
    memcpy(fields.sub_scales, block + 4, 12);
    const unsigned char* const low = block + (kBits == 5 ? 48 : 16);
    for (int pair = 0; pair < 4; ++pair)
      for (int l = 0; l < 32; ++l) {
        codes[64 * pair + l] = low[32 * pair + l] & 15;
        codes[64 * pair + 32 + l] = low[32 * pair + l] >> 4;
      }
    if constexpr (kBits == 5)
      for (int sub = 0; sub < 8; ++sub)
        for (int l = 0; l < 32; ++l)
          codes[32 * sub + l] = uint8_t(codes[32 * sub + l] | (block[16 + l] >> sub & 1) << 4);
    return fields;
  }

  static void put(const Fields& fields, int lane, int64_t, unsigned char* chunk) {
    memcpy(chunk + 2 * lane, &fields.scale, 2);
    memcpy(chunk + 32 + 2 * lane, &fields.minimum, 2);
    for (int i = 0; i < kSubScales / 4; ++i)
      memcpy(chunk + 64 + 64 * i + 4 * lane, fields.sub_scales + 4 * i, 4);
  }
  static Fields get(const unsigned char* chunk, int lane, int64_t) {
    Fields fields{};
    memcpy(&fields.scale, chunk + 2 * lane, 2);
    memcpy(&fields.minimum, chunk + 32 + 2 * lane, 2);
    for (int i = 0; i < kSubScales / 4; ++i)
      memcpy(fields.sub_scales + 4 * i, chunk + 64 + 64 * i + 4 * lane, 4);
    return fields;
  }

  template <class Half>
  static void values(const Fields& fields, const uint8_t* codes, float* to) {
    const float scale = Half::value(fields.scale), minimum = Half::value(fields.minimum);
    const uint8_t* const s = fields.sub_scales;
    for (int i = 0; i < 256; ++i) {
      if constexpr (kBits == 6) {
        to[i] = scale * float(int8_t(s[i / 16])) * float(int(codes[i]) - 32);
      } else {
        const int j = i / 32, k = j % 4;
        const int sub = j < 4 ? s[k] & 63 : (s[8 + k] & 15) | s[k] >> 6 << 4;
        const int offset = j < 4 ? s[4 + k] & 63 : s[8 + k] >> 4 | s[4 + k] >> 6 << 4;
        to[i] = scale * float(sub) * float(codes[i]) - minimum * float(offset);
      }
    }
  }
};

using Q4_K = Blocks256<4>;
using Q5_K = Blocks256<5>;
using Q6_K = Blocks256<6>;

// The sub-scales of a sub-block of 32: one, or two with signs; and the minima in pairs of 16 bits,
// in the order of Inputs256::sums.
template <class V, int kBits>
struct SubScales {
  using I = typename V::I;
  I bytes[kBits == 6 ? 4 : 2], minima[4];

  explicit SubScales(const unsigned char* from) {
    if constexpr (kBits == 6) {
      for (int i = 0; i < 4; ++i) bytes[i] = V::load_words(from + 64 * i);
    } else {
      const I a = V::load_words(from), b = V::load_words(from + 64), c = V::load_words(from + 128);
      const I six = V::broadcast(0x3F3F3F3F), four = V::broadcast(0x0F0F0F0F);
      const I two = V::broadcast(0x30303030), even = V::broadcast(0x00FF00FF);
      bytes[0] = V::bit_and(a, six);
      bytes[1] = V::bit_or(V::bit_and(c, four), V::bit_and(V::template shift_right<2>(a), two));
      const I low = V::bit_and(b, six);
      const I high = V::bit_or(V::bit_and(V::template shift_right<4>(c), four),
                               V::bit_and(V::template shift_right<2>(b), two));
      minima[0] = V::bit_and(low, even),
      minima[1] = V::bit_and(V::template shift_right<8>(low), even);
      minima[2] = V::bit_and(high, even);
      minima[3] = V::bit_and(V::template shift_right<8>(high), even);
    }
  }

  // Sub-scale number i.
  template <int i>
  I get() const {
    if constexpr (kBits == 6)
      return V::template shift_right_signed<24>(
          V::template shift_left<24 - i % 4 * 8>(bytes[i / 4]));
    else
      return V::bit_and(V::template shift_right<i % 4 * 8>(bytes[i / 4]), V::broadcast(255));
  }
};

// Sub-block kSub of 32 inputs: products of codes and inputs, times the sub-scales, into `sums`.
template <class V, int kColumns, int kBits, int kSub>
inline void sub_block(const SubScales<V, kBits>& scales, const unsigned char* codes,
                      const Inputs256* x, int64_t columns, typename V::I* sums) {
  // The first sub-block counts the scales, too.
  V::template prefetch<Slice<kBits>::kBytes + (kSub == 0 ? Blocks256<kBits>::scale_bytes(1) : 0)>(
      codes - (kSub == 0 ? Blocks256<kBits>::scale_bytes(1) : 0));
  typename V::Bytes w[8];
  Slice<kBits>::template unpack<V>(codes, w);
  const auto scale = scales.template get<kBits == 6 ? 2 * kSub : kSub>();
  [[maybe_unused]] const auto second = scales.template get<kBits == 6 ? 2 * kSub + 1 : kSub>();
  for (int64_t c = 0; c < columns; ++c) {
    const int8_t* const inputs = x[c].codes + 32 * kSub;
    if constexpr (kBits == 6) {
      const auto* const start = x[c].offsets + 2 * kSub;
      const auto dots = V::template dots<6, 4>(V::broadcast(start[0]), w, inputs);
      const auto others = V::template dots<6, 4>(V::broadcast(start[1]), w + 4, inputs + 16);
      sums[c] = V::add(sums[c], V::add(V::multiply(dots, scale), V::multiply(others, second)));
    } else {
      const auto dots = V::template dots<kBits, 8>(V::broadcast(int32_t{0}), w, inputs);
      sums[c] = V::add(sums[c], V::multiply(dots, scale));
    }
  }
}

template <class V, int kColumns, int kBits>
inline void panel_product(Blocks256<kBits>, const unsigned char* panel, int64_t inputs,
                          const void* tile, int64_t any_columns,
                          typename V::F (*sums)[16 / V::kLanes]) {
  using B = Blocks256<kBits>;
  constexpr int kParts = 16 / V::kLanes;
  constexpr int64_t kStep = Slice<kBits>::kBytes;
  const int64_t columns = kColumns != 0 ? kColumns : any_columns;
  const Inputs256* x = static_cast<const Inputs256*>(tile);
  typename V::I products[kColumns != 0 ? kColumns : kTileColumns];
  for (int64_t c = 0; c < columns; ++c)
    for (int part = 0; part < kParts; ++part) sums[c][part] = V::broadcast(0.0f);
  for (int64_t b = 0; b < inputs / 256; ++b, panel += B::chunk_bytes(1), x += columns) {
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      const SubScales<V, kBits> scales(panel + 64 + part * 4 * V::kLanes);
      const unsigned char* const codes = panel + B::scale_bytes(1) + part * 4 * V::kLanes;
      for (int64_t c = 0; c < columns; ++c) products[c] = V::broadcast(int32_t{0});
      sub_block<V, kColumns, kBits, 0>(scales, codes, x, columns, products);
      sub_block<V, kColumns, kBits, 1>(scales, codes + kStep, x, columns, products);
      sub_block<V, kColumns, kBits, 2>(scales, codes + 2 * kStep, x, columns, products);
      sub_block<V, kColumns, kBits, 3>(scales, codes + 3 * kStep, x, columns, products);
      sub_block<V, kColumns, kBits, 4>(scales, codes + 4 * kStep, x, columns, products);
      sub_block<V, kColumns, kBits, 5>(scales, codes + 5 * kStep, x, columns, products);
      sub_block<V, kColumns, kBits, 6>(scales, codes + 6 * kStep, x, columns, products);
      sub_block<V, kColumns, kBits, 7>(scales, codes + 7 * kStep, x, columns, products);
      const auto scale = V::half(panel + part * 2 * V::kLanes);
      [[maybe_unused]] const auto minimum = V::half(panel + 32 + part * 2 * V::kLanes);
      for (int64_t c = 0; c < columns; ++c) {
        const auto input_scale = V::broadcast(x[c].scale);
        auto sum = V::add(sums[c][part],
                          V::multiply(V::multiply(scale, input_scale), V::to_float(products[c])));
        if constexpr (B::kMinimum) {
          auto offset = V::broadcast(int32_t{0});
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i)
            offset = V::dot16(offset, scales.minima[i], x[c].sums + 2 * i);
          sum =
              V::subtract(sum, V::multiply(V::multiply(minimum, input_scale), V::to_float(offset)));
        }
        sums[c][part] = sum;
      }
    }
  }
}

}  // namespace
}  // namespace pipespec::cpu
