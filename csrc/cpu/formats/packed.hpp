// The inner kernels of products with packed weights, one table per instruction set, and what they
// read. Seen by files compiled for wider instructions, hence nothing with inline functions here
// (see kernels.hpp).
//
// A packed matrix has the blocks of a GGUF format: integer codes of 4 to 8 bits with a scale, and
// perhaps a minimum, per block. Its inputs are rounded to 8 bits first, with a scale per block. The
// sums of products within a block are then exact in int32, and the sum over the blocks is one
// sequence of float32 operations without fused multiply-add:
//
//   sum = 0; for each block: sum = sum + (scale * input scale) * float(codes . inputs)
//                            sum = sum + minimum * (input scale * float(sum of inputs))
//
// for blocks of 32 (codes are less their offset; the second line where there are minima), and
//
//   sum = 0; for each block: sum = sum + (scale * input scale) * float(sub-scales . sums)
//                            sum = sum - (minimum * input scale) * float(sub-minima . sums)
//
// for blocks of 256, whose sub-scales are integers. So the bits depend neither on the number of
// columns nor on threads nor on instructions.
#pragma once

#include <stdint.h>

namespace pipespec::cpu {

enum class Format : int { kQ8_0, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ4_K, kQ5_K, kQ6_K };
inline constexpr int kFormats = 8;

// Maximum columns of one tile of rounded inputs: of every table, and of those without AMX.
inline constexpr int64_t kMaxTileColumns = 256, kTileColumns = 48;
// Columns after a tile that a product may read, and not use.
inline constexpr int64_t kSpareColumns = 15;

// 32 inputs in 8 bits. An input is scale * code, with scale = largest magnitude / 127 and code =
// input * (127 / largest magnitude), to the nearest, ties to even. A block of less than 1e-30 is
// zero; one with an infinity or a NaN has a NaN for scale.
struct alignas(64) Inputs32 {
  int8_t codes[32];
  float scale;
  float scaled_sum;    // scale * float(sum of codes)
  int32_t offsets[3];  // sum of codes times -8, -16, -128: what unsigned weights start from
  int32_t unused[3];
};

// 256 of them.
struct alignas(32) Inputs256 {
  int8_t codes[256];
  int16_t sums[8];  // of 32 codes each: 0, 2, 1, 3, 4, 6, 5, 7
  float scale;
  int32_t unused[3];
  int32_t offsets[16];  // sums of 16 codes times -32
};

// Rounds a row of inputs; its blocks are written `columns` apart. The tile holds for each block the
// columns one after the other.
using RoundInputs = void (*)(const float* x, int64_t inputs, int64_t columns, void* out);

// out[c, 16 p + i] = output i of panel p for column c of a tile, c < columns <= tile_columns.
using PackedProduct = void (*)(const unsigned char* panels, int64_t inputs, int64_t panel_count,
                               const void* tile, int64_t columns, float* out, int64_t out_stride);

struct PackedKernels {
  const char* name;
  int64_t tile_columns;
  RoundInputs round32, round256;
  PackedProduct products[kFormats];
};

// Null where the compiler could not build the variant.
const PackedKernels* portable_packed_kernels();
const PackedKernels* avx2_packed_kernels();
const PackedKernels* vnni_packed_kernels();
const PackedKernels* amx_packed_kernels();

// Those of the instructions in use (set_simd): AVX-512 without VNNI has those of AVX2.
const PackedKernels& packed_kernels();

}  // namespace pipespec::cpu
