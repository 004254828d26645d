// The inner kernels of products with packed weights, one table per instruction set, and what they
// read. Seen by files compiled for wider instructions, hence nothing with inline functions here
// (see kernels.hpp).
//
// A packed matrix has the blocks of a GGUF format: integer codes of 2 to 8 bits, or 4 bits that
// name an integer of a table, with a scale, and perhaps a minimum, per block. Its inputs are
// rounded to 8 bits first, with a scale per block. The sums of products within a block are then
// exact in int32, and the sum over the blocks is one sequence of float32 operations without fused
// multiply-add:
//
//   sum = 0; for each block: sum = sum + (scale * input scale) * float(codes . inputs)
//                            sum = sum + minimum * (input scale * float(sum of inputs))
//
// for blocks of 32, or for their halves where each has a scale (codes are integers with a sign; the
// second line where there are minima), and
//
//   sum = 0; for each block: sum = sum + (scale * input scale) * float(sub-scales . sums)
//                            sum = sum - (minimum * input scale) * float(sub-minima . sums)
//
// for blocks of 256, whose sub-scales are integers. So the bits depend neither on the number of
// columns nor on threads nor on instructions.
#pragma once

#include <stdint.h>

namespace pipespec::cpu {

// All formats: their descriptions (blocks32.hpp, blocks256.hpp), and names.
// clang-format off
#define PIPESPEC_FORMATS(row)     \
  row(Q8_0, "q8_0")               \
  row(Q4_0, "q4_0")               \
  row(Q4_1, "q4_1")               \
  row(Q5_0, "q5_0")               \
  row(Q5_1, "q5_1")               \
  row(IQ4_NL, "iq4_nl")           \
  row(MXFP4, "mxfp4")             \
  row(NVFP4, "nvfp4")             \
  row(Q2_K, "q2_k")               \
  row(Q3_K, "q3_k")               \
  row(Q4_K, "q4_k")               \
  row(Q5_K, "q5_k")               \
  row(Q6_K, "q6_k")               \
  row(IQ4_XS, "iq4_xs")           \
  row(Table3s, "table_iq3_s")     \
  row(Table3xxs, "table_iq3_xxs") \
  row(Table2, "table_iq2")
// clang-format on

#define PIPESPEC_FORMAT(Blocks, name) k##Blocks,
enum class Format : int { PIPESPEC_FORMATS(PIPESPEC_FORMAT) kCount };
#undef PIPESPEC_FORMAT
inline constexpr int kFormats = int(Format::kCount);

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
  float scaled_sum;  // scale * float(sum of codes)
  // Sums of codes times -8, -16, -128, and of each half times -16: what unsigned weights start
  // from.
  int32_t offsets[3], half_offsets[2];
  int32_t unused[1];
};

// 256 of them.
struct alignas(64) Inputs256 {
  int8_t codes[256];
  // Of so many codes each, of every four in the order 0, 2, 1, 3.
  int16_t sums32[8], sums16[16];
  float scale;
  int32_t unused[3];
  int32_t offsets[16];  // sums of 16 codes times -32: what weights of 6 bits start from
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

const PackedKernels* portable_packed_kernels();
// For x86-64. Null where the compiler could not build the variant.
const PackedKernels* avx2_packed_kernels();
const PackedKernels* vnni_packed_kernels();
const PackedKernels* amx_packed_kernels();
// For 64-bit ARM.
const PackedKernels* neon_packed_kernels();
const PackedKernels* dotprod_packed_kernels();

// Those of the instructions in use (set_simd): AVX-512 without VNNI has those of AVX2.
const PackedKernels& packed_kernels();

}  // namespace pipespec::cpu
