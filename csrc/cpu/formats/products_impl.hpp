// The kernels of packed.hpp, written once over a vector type. Included by each products_*.cpp and
// by nothing else; in an unnamed namespace, see span_impl.hpp.
#pragma once

#include "blocks256.hpp"
#include "blocks32.hpp"

namespace pipespec::cpu {
namespace {

template <class V, class Blocks, int kColumns>
void panel_products(const unsigned char* panels, int64_t inputs, int64_t panel_count,
                    const void* tile, int64_t columns, float* out, int64_t out_stride) {
  constexpr int kParts = 16 / V::kLanes;
  constexpr int64_t kChunk = Blocks::kBlock * Blocks::kChunkBlocks;
  const int64_t rest = inputs % kChunk / Blocks::kBlock;
  const int64_t panel_bytes = inputs / kChunk * Blocks::chunk_bytes(Blocks::kChunkBlocks) +
                              (rest != 0 ? Blocks::chunk_bytes(rest) : 0);
  typename V::F sums[kColumns != 0 ? kColumns : kTileColumns][kParts];
  for (int64_t p = 0; p < panel_count; ++p, panels += panel_bytes, out += 16) {
    panel_product<V, kColumns>(Blocks{}, panels, inputs, tile, columns, sums);
    for (int64_t c = 0; c < (kColumns != 0 ? kColumns : columns); ++c)
      for (int part = 0; part < kParts; ++part)
        V::store(out + c * out_stride + part * V::kLanes, sums[c][part]);
  }
}

template <class V, class Blocks>
void product(const unsigned char* panels, int64_t inputs, int64_t panel_count, const void* tile,
             int64_t columns, float* out, int64_t out_stride) {
  (columns == 1
       ? panel_products<V, Blocks, 1>
       : panel_products<V, Blocks, 0>)(panels, inputs, panel_count, tile, columns, out, out_stride);
}

// The codes of `count` inputs; returns their scale.
inline float round_block(const float* x, int64_t count, int8_t* codes) {
  uint32_t top = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    __builtin_memcpy(&bits, x + i, 4);
    bits &= 0x7FFFFFFF;
    top = bits > top ? bits : top;
  }
  float largest;
  __builtin_memcpy(&largest, &top, 4);
  const bool is_finite = top < 0x7F800000, is_zero = largest < 1e-30f;
  if (!is_finite || is_zero) {
    for (int64_t i = 0; i < count; ++i) codes[i] = 0;
    return is_finite ? 0.0f : __builtin_nanf("");
  }
  const float factor = 127.0f / largest;
  for (int64_t i = 0; i < count; ++i) {
    const float y = x[i] * factor + 0x1.8p+23f;  // the integer is in the low bits
    int32_t bits;
    __builtin_memcpy(&bits, &y, 4);
    codes[i] = int8_t(bits);
  }
  return largest / 127.0f;
}

inline int32_t sum_of(const int8_t* codes, int64_t count) {
  int32_t sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += codes[i];
  return sum;
}

template <class V>
void round32(const float* x, int64_t inputs, int64_t columns, void* out) {
  Inputs32* to = static_cast<Inputs32*>(out);
  for (int64_t i = 0; i < inputs; i += 32, to += columns) {
    to->scale = round_block(x + i, 32, to->codes);
    const int32_t first = sum_of(to->codes, 16), second = sum_of(to->codes + 16, 16);
    const int32_t sum = first + second;
    to->scaled_sum = to->scale * float(sum);
    to->offsets[0] = -8 * sum, to->offsets[1] = -16 * sum, to->offsets[2] = -128 * sum;
    to->half_offsets[0] = -16 * first, to->half_offsets[1] = -16 * second;
  }
}

template <class V>
void round256(const float* x, int64_t inputs, int64_t columns, void* out) {
  Inputs256* to = static_cast<Inputs256*>(out);
  for (int64_t i = 0; i < inputs; i += 256, to += columns) {
    to->scale = round_block(x + i, 256, to->codes);
    const auto place = [](int j) { return j % 4 == 1 ? j + 1 : j % 4 == 2 ? j - 1 : j; };
    for (int j = 0; j < 16; ++j) {
      const int32_t sum = sum_of(to->codes + 16 * j, 16);
      to->sums16[place(j)] = int16_t(sum), to->offsets[j] = -32 * sum;
    }
    for (int j = 0; j < 8; ++j)
      to->sums32[place(j)] = int16_t(to->sums16[place(2 * j)] + to->sums16[place(2 * j + 1)]);
  }
}

#define PIPESPEC_FORMAT(Blocks, name) product<V, Blocks>,
template <class V>
constexpr PackedKernels packed_table(const char* name) {
  return {name, kTileColumns, round32<V>, round256<V>, {PIPESPEC_FORMATS(PIPESPEC_FORMAT)}};
}
#undef PIPESPEC_FORMAT

}  // namespace
}  // namespace pipespec::cpu
