// Products of many columns with packed weights in tiles of AMX. Fewer columns have those of VNNI,
// whose time is that of reading the weights.
#include "packed.hpp"

#if defined(__AVX512VNNI__) && defined(__AMX_TILE__) && defined(__AMX_INT8__)
#include "lanes_vnni.hpp"
//
#include "blocks256.hpp"
#include "blocks32.hpp"

namespace pipespec::cpu {
namespace {

// Columns that one tile holds, and fewest columns for which tiles pay.
constexpr int64_t kRows = 16, kMinColumns = 32;
// Tiles 0 .. 3 hold sums, these inputs and weights.
constexpr int kInputs = 4, kWeights = 6;

// The intrinsics of gcc take literals only, no constants of templates.
template <int kTile>
inline void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
inline void store_tile(void* to) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(int64_t{64}), "i"(kTile) : "memory");
}
template <int kTile>
inline void clear_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
// sums += inputs x weights: signed bytes times unsigned ones, or signed ones.
template <int kSums, int kInputs, int kWeights>
inline void multiply_unsigned() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kInputs), "i"(kWeights));
}
template <int kSums, int kInputs, int kWeights>
inline void multiply_signed() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kInputs), "i"(kWeights));
}

struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes_per_row[16];
  uint8_t rows[16];
};

// Sets up the tiles of this thread: sums, from `inputs` on of `depth` inputs, from `weights` on of
// that many weights. Returns what they were: oneDNN keeps its own from call to call.
inline TileConfig use_tiles(int inputs, int weights, uint8_t depth) {
  TileConfig before, config{};
  asm volatile("sttilecfg %0" : "=m"(before));
  config.palette = 1;
  for (int i = 0; i < 8; ++i) config.bytes_per_row[i] = 64, config.rows[i] = kRows;
  for (int i = inputs; i < weights; ++i) config.bytes_per_row[i] = depth;
  for (int i = weights; i < 8; ++i) config.rows[i] = depth / 4;
  asm volatile("ldtilecfg %0" ::"m"(config));
  return before;
}

inline void restore_tiles(const TileConfig& before) {
  if (before.palette == 0)
    asm volatile("tilerelease");
  else
    asm volatile("ldtilecfg %0" ::"m"(before));
}

// A block of 256 weights of 16 outputs: codes times sub-scales, which have up to 13 bits, as low
// bytes and signed high bytes. Rows of 64 bytes have 4 inputs of each output, as a tile takes them.
struct alignas(64) Weights {
  unsigned char low[4][16][64], high[4][16][64];
};

template <class B, int kSub>
inline void scale_codes(const SubScales<Vnni, typename B::Subs>& scales, const unsigned char* panel,
                        Weights& to) {
  constexpr bool kHalves = B::Subs::kGroup == 16;
  __m512i codes[8];
  B::Codes::template unpack<Vnni>(panel + B::scale_bytes(1) + kSub * Slice<B::kBits>::kBytes,
                                  codes);
  const auto words = [](__m512i x) {
    return _mm512_mask_blend_epi16(0xAAAAAAAA, x, _mm512_slli_epi32(x, 16));
  };
  const __m512i first = words(scales.template get<kHalves ? 2 * kSub : kSub>());
  const __m512i second = words(scales.template get<kHalves ? 2 * kSub + 1 : kSub>());
  const __m512i even_bytes = _mm512_set1_epi16(0xFF);
  const __m512i offset = _mm512_set1_epi16(B::Codes::kOffset);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const __m512i scale = i < 4 ? first : second;
    __m512i even = _mm512_and_si512(codes[i], even_bytes), odd = _mm512_srli_epi16(codes[i], 8);
    if constexpr (B::Codes::kOffset != 0)
      even = _mm512_sub_epi16(even, offset), odd = _mm512_sub_epi16(odd, offset);
    even = _mm512_mullo_epi16(even, scale), odd = _mm512_mullo_epi16(odd, scale);
    // even_bytes ? a : b
    constexpr int kWhere = 0xCA;
    _mm512_store_si512(
        to.low[kSub / 2][kSub % 2 * 8 + i],
        _mm512_ternarylogic_epi32(even_bytes, even, _mm512_slli_epi16(odd, 8), kWhere));
    _mm512_store_si512(
        to.high[kSub / 2][kSub % 2 * 8 + i],
        _mm512_ternarylogic_epi32(even_bytes, _mm512_srli_epi16(even, 8), odd, kWhere));
  }
}

// What the sums of a block are multiplied with.
template <class B>
struct Scales {
  __m512 scale, minimum;
  SubScales<Vnni, typename B::Subs> sub;

  explicit Scales(const unsigned char* panel)
      : scale(B::template scale<Vnni>(panel)), minimum(Vnni::half(panel + 32)), sub(panel + 64) {}
};

template <class B>
inline void ready(const unsigned char* panel, const Scales<B>& scales, Weights& to) {
  scale_codes<B, 0>(scales.sub, panel, to), scale_codes<B, 1>(scales.sub, panel, to);
  scale_codes<B, 2>(scales.sub, panel, to), scale_codes<B, 3>(scales.sub, panel, to);
  scale_codes<B, 4>(scales.sub, panel, to), scale_codes<B, 5>(scales.sub, panel, to);
  scale_codes<B, 6>(scales.sub, panel, to), scale_codes<B, 7>(scales.sub, panel, to);
}

// Adds a block of up to 16 columns to sums of floats, in the order of packed.hpp.
template <class B>
inline void add_block(const Scales<B>& scales, const int32_t* low, const int32_t* high,
                      const Inputs256* x, int64_t columns, bool is_first, float* out,
                      int64_t out_stride) {
  for (int64_t c = 0; c < columns; ++c, out += out_stride) {
    const __m512 input_scale = _mm512_set1_ps(x[c].scale);
    const __m512i products = _mm512_add_epi32(
        _mm512_load_si512(low + 16 * c), _mm512_slli_epi32(_mm512_load_si512(high + 16 * c), 8));
    __m512 sum = is_first ? _mm512_setzero_ps() : _mm512_loadu_ps(out);
    sum = _mm512_add_ps(
        sum, _mm512_mul_ps(_mm512_mul_ps(scales.scale, input_scale), _mm512_cvtepi32_ps(products)));
    if constexpr (B::kMinimum)
      sum = _mm512_sub_ps(sum, _mm512_mul_ps(_mm512_mul_ps(scales.minimum, input_scale),
                                             _mm512_cvtepi32_ps(pair_products(scales.sub, x[c]))));
    _mm512_storeu_ps(out, sum);
  }
}

// Two tiles of columns, or one.
constexpr int64_t kGroup = 2 * kRows;

struct alignas(64) GroupSums {
  int32_t low[kGroup][16], high[kGroup][16];
};

inline void multiply_group(const Weights& weights, const Inputs256* x, bool has_second) {
  clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
  for (int64_t k = 0; k < 4; ++k) {
    load_tile<kWeights>(weights.low[k], 64);
    load_tile<kInputs>(x->codes + 64 * k, sizeof(Inputs256));
    multiply_unsigned<0, kInputs, kWeights>();
    load_tile<kWeights + 1>(weights.high[k], 64);
    multiply_signed<1, kInputs, kWeights + 1>();
    if (!has_second) continue;
    load_tile<kInputs + 1>(x[kRows].codes + 64 * k, sizeof(Inputs256));
    multiply_unsigned<2, kInputs + 1, kWeights>();
    multiply_signed<3, kInputs + 1, kWeights + 1>();
  }
}

inline void store_group(GroupSums& to) {
  store_tile<0>(to.low), store_tile<1>(to.high);
  store_tile<2>(to.low + kRows), store_tile<3>(to.high + kRows);
}

// One block of a panel, all columns. The products of a group are computed while the sums of the
// group before it are converted.
template <class B>
inline void add_panel(const unsigned char* panel, const Inputs256* x, int64_t columns,
                      bool is_first, float* out, int64_t out_stride) {
  Weights weights;
  const Scales<B> scales(panel);
  ready(panel, scales, weights);
  GroupSums sums[2];
  multiply_group(weights, x, columns > kRows);
  store_group(sums[0]);
  for (int64_t c = 0; c < columns; c += kGroup, x += kGroup, out += kGroup * out_stride) {
    const int64_t rest = columns - c - kGroup;
    if (rest > 0) multiply_group(weights, x + kGroup, rest > kRows);
    const GroupSums& of = sums[c / kGroup % 2];
    add_block(scales, of.low[0], of.high[0], x, rest < 0 ? rest + kGroup : kGroup, is_first, out,
              out_stride);
    if (rest > 0) store_group(sums[(c / kGroup + 1) % 2]);
  }
}

template <class Codes, class Subs>
inline void all_products(Blocks256<Codes, Subs>, const unsigned char* panels, int64_t inputs,
                         int64_t panel_count, const void* tile, int64_t columns, float* out,
                         int64_t out_stride) {
  using B = Blocks256<Codes, Subs>;
  const int64_t blocks = inputs / 256, panel_bytes = blocks * B::chunk_bytes(1);
  const Inputs256* x = static_cast<const Inputs256*>(tile);
  const TileConfig before = use_tiles(kInputs, kWeights, 64);
  for (int64_t b = 0; b < blocks; ++b, x += columns, panels += B::chunk_bytes(1))
    for (int64_t p = 0; p < panel_count; ++p)
      add_panel<B>(panels + p * panel_bytes, x, columns, b == 0, out + 16 * p, out_stride);
  restore_tiles(before);
}

// Some blocks of 32 of a panel, codes less their offset.
template <class B, int kCount>
struct SomeBlocks {
  __m512 scale[kCount], minimum[kCount];
  alignas(64) unsigned char codes[kCount][8][64];

  SomeBlocks(const unsigned char* panel, int64_t first, int64_t blocks) {
#pragma GCC unroll 4
    for (int64_t i = 0; i < kCount; ++i) {
      const int64_t place = (first + i) % B::kChunkBlocks, begin = first + i - place;
      const int64_t count = blocks - begin < B::kChunkBlocks ? blocks - begin : B::kChunkBlocks;
      const unsigned char* const chunk =
          panel + begin / B::kChunkBlocks * B::chunk_bytes(B::kChunkBlocks);
      const unsigned char* const scales = chunk + place * B::kScaleBytes;
      scale[i] = B::Scale::template load<Vnni>(scales);
      if constexpr (B::kMinimum) minimum[i] = Vnni::half(scales + 32);
      __m512i unpacked[8];
      B::Codes::template unpack<Vnni>(
          chunk + B::scale_bytes(count) + place * Slice<B::kBits>::kBytes, unpacked);
      for (int row = 0; row < 8; ++row)
        _mm512_store_si512(
            codes[i][row],
            _mm512_sub_epi8(unpacked[row], _mm512_set1_epi8(char(B::Codes::kOffset))));
    }
  }
};

using BlockSums = int32_t[4][kRows][16];

// The weights are in tiles 4 .. 7.
template <int kBlock, int kCount>
inline void multiply_blocks(const Inputs32* x, int64_t columns, BlockSums& to) {
  constexpr int kSums = kBlock % 3, kFrom = 3;
  clear_tile<kSums>();
  load_tile<kFrom>(x[kBlock * columns].codes, sizeof(Inputs32));
  multiply_signed<kSums, kFrom, 4 + kBlock>();
  store_tile<kSums>(to[kBlock]);
  if constexpr (kBlock + 1 < kCount) multiply_blocks<kBlock + 1, kCount>(x, columns, to);
}

// kCount blocks of a panel, all columns, in the order of packed.hpp.
template <class B, int kCount>
inline void add_blocks(const unsigned char* panel, int64_t first, int64_t blocks, const Inputs32* x,
                       int64_t columns, float* out, int64_t out_stride) {
  const SomeBlocks<B, kCount> weights(panel, first, blocks);
  load_tile<4>(weights.codes[0], 64);
  if constexpr (kCount == 4) {
    load_tile<5>(weights.codes[1], 64);
    load_tile<6>(weights.codes[2], 64);
    load_tile<7>(weights.codes[3], 64);
  }
  alignas(64) BlockSums sums[2];
  multiply_blocks<0, kCount>(x, columns, sums[0]);
  for (int64_t begin = 0; begin < columns; begin += kRows, x += kRows) {
    const int64_t rest = columns - begin - kRows;
    if (rest > 0) multiply_blocks<0, kCount>(x + kRows, columns, sums[(begin / kRows + 1) % 2]);
    const BlockSums& of = sums[begin / kRows % 2];
    for (int64_t c = 0; c < (rest < 0 ? rest + kRows : kRows); ++c, out += out_stride) {
      __m512 sum = first == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(out);
#pragma GCC unroll 4
      for (int i = 0; i < kCount; ++i) {
        const Inputs32& inputs = x[i * columns + c];
        const __m512 scale = _mm512_mul_ps(weights.scale[i], _mm512_set1_ps(inputs.scale));
        sum = _mm512_add_ps(sum,
                            _mm512_mul_ps(scale, _mm512_cvtepi32_ps(_mm512_load_si512(of[i][c]))));
        if constexpr (B::kMinimum)
          sum = _mm512_add_ps(sum,
                              _mm512_mul_ps(weights.minimum[i], _mm512_set1_ps(inputs.scaled_sum)));
      }
      _mm512_storeu_ps(out, sum);
    }
  }
}

template <class Codes, Head kHead, class Scale>
inline void all_products(Blocks32<Codes, kHead, Scale>, const unsigned char* panels, int64_t inputs,
                         int64_t panel_count, const void* tile, int64_t columns, float* out,
                         int64_t out_stride) {
  using B = Blocks32<Codes, kHead, Scale>;
  const int64_t blocks = inputs / 32, rest = blocks % B::kChunkBlocks;
  const int64_t panel_bytes = blocks / B::kChunkBlocks * B::chunk_bytes(B::kChunkBlocks) +
                              (rest ? B::chunk_bytes(rest) : 0);
  const Inputs32* x = static_cast<const Inputs32*>(tile);
  const TileConfig before = use_tiles(3, 4, 32);
  for (int64_t b = 0; b < blocks;) {
    const int64_t count = blocks - b >= 4 ? 4 : 1;
    for (int64_t p = 0; p < panel_count; ++p)
      (count == 4 ? add_blocks<B, 4> : add_blocks<B, 1>)(panels + p * panel_bytes, b, blocks, x,
                                                         columns, out + 16 * p, out_stride);
    b += count, x += count * columns;
  }
  restore_tiles(before);
}

// A tile adds up 32 products and more, so halves of blocks have those of VNNI.
template <class B>
constexpr bool has_tiles() {
  if constexpr (B::kBlock == 32)
    return !B::kHalves;
  else
    return true;
}

template <class B, Format kFormat>
void tile_product(const unsigned char* panels, int64_t inputs, int64_t panel_count,
                  const void* tile, int64_t columns, float* out, int64_t out_stride) {
  if constexpr (has_tiles<B>())
    if (columns >= kMinColumns)
      return all_products(B{}, panels, inputs, panel_count, tile, columns, out, out_stride);
  vnni_packed_kernels()->products[int(kFormat)](panels, inputs, panel_count, tile, columns, out,
                                                out_stride);
}

void round32(const float* x, int64_t inputs, int64_t columns, void* out) {
  vnni_packed_kernels()->round32(x, inputs, columns, out);
}

void round256(const float* x, int64_t inputs, int64_t columns, void* out) {
  vnni_packed_kernels()->round256(x, inputs, columns, out);
}

#define PIPESPEC_FORMAT(Blocks, name) tile_product<Blocks, Format::k##Blocks>,
constexpr PackedKernels kKernels = {
    "amx", kMaxTileColumns, round32, round256, {PIPESPEC_FORMATS(PIPESPEC_FORMAT)}};
#undef PIPESPEC_FORMAT

}  // namespace

const PackedKernels* amx_packed_kernels() { return &kKernels; }

}  // namespace pipespec::cpu

#else
namespace pipespec::cpu {
const PackedKernels* amx_packed_kernels() { return nullptr; }
}  // namespace pipespec::cpu
#endif
