#include "formats.hpp"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <new>

#include "../number.hpp"
#include "../share.hpp"
#include "blocks256.hpp"
#include "blocks32.hpp"

namespace pipespec::cpu {
namespace {

struct Half {
  static float value(uint16_t half) { return float_of_float16(half); }
};

// The geometry of a panel of some format.
template <class B>
struct Panel {
  static constexpr int64_t kChunk = B::kBlock * B::kChunkBlocks;
  static constexpr int64_t kSlices = B::kBlock / 32;

  static int64_t bytes(int64_t inputs) {
    const int64_t rest = inputs % kChunk / B::kBlock;
    return inputs / kChunk * B::chunk_bytes(B::kChunkBlocks) +
           (rest != 0 ? B::chunk_bytes(rest) : 0);
  }

  // visit(chunk, block in chunk, its codes, number of the block)
  template <class Byte, class Visit>
  static void each_block(Byte* panel, int64_t inputs, const Visit& visit) {
    const int64_t blocks = inputs / B::kBlock;
    for (int64_t begin = 0; begin < blocks; begin += B::kChunkBlocks) {
      const int64_t count = std::min(B::kChunkBlocks, blocks - begin);
      Byte* const codes = panel + B::scale_bytes(count);
      for (int64_t b = 0; b < count; ++b)
        visit(panel, b, codes + b * kSlices * Slice<B::kBits>::kBytes, begin + b);
      panel += B::chunk_bytes(count);
    }
  }

  static void put(const unsigned char* row, int64_t inputs, int lane, unsigned char* panel) {
    each_block(panel, inputs, [&](unsigned char* chunk, int64_t b, unsigned char* to, int64_t i) {
      uint8_t codes[B::kBlock];
      B::put(B::read(row + i * B::kBlockBytes, codes), lane, b, chunk);
      for (int64_t s = 0; s < kSlices; ++s)
        Slice<B::kBits>::put(codes + 32 * s, lane, to + s * Slice<B::kBits>::kBytes);
    });
  }

  static void row_values(const unsigned char* row, int64_t inputs, float* to) {
    for (int64_t i = 0; i < inputs / B::kBlock; ++i, to += B::kBlock) {
      uint8_t codes[B::kBlock];
      B::template values<Half>(B::read(row + i * B::kBlockBytes, codes), codes, to);
    }
  }

  static void lane_values(const unsigned char* panel, int64_t inputs, int lane, float* to) {
    each_block(panel, inputs,
               [&](const unsigned char* chunk, int64_t b, const unsigned char* from, int64_t i) {
                 uint8_t codes[B::kBlock];
                 for (int64_t s = 0; s < kSlices; ++s)
                   Slice<B::kBits>::get(from + s * Slice<B::kBits>::kBytes, lane, codes + 32 * s);
                 B::template values<Half>(B::get(chunk, lane, b), codes, to + i * B::kBlock);
               });
  }
};

template <class B>
constexpr FormatTraits make(const char* name) {
  return {name,
          B::kBlock,
          B::kBlockBytes,
          B::kBlock == 256,
          Panel<B>::bytes,
          Panel<B>::put,
          Panel<B>::row_values,
          Panel<B>::lane_values};
}

#define PIPESPEC_FORMAT(Blocks, name) make<Blocks>(name),
constexpr FormatTraits kTraits[] = {PIPESPEC_FORMATS(PIPESPEC_FORMAT)};
#undef PIPESPEC_FORMAT
static_assert(std::size(kTraits) == kFormats);

// Panels of one unit of work.
constexpr int64_t kUnitPanels = 8;

}  // namespace

const FormatTraits& traits(Format format) { return kTraits[int(format)]; }

int64_t RoundedInputs::tile_columns(int64_t columns) {
  const int64_t tile = packed_kernels().tile_columns, tiles = (columns + tile - 1) / tile;
  return tiles <= 1 ? columns : ((columns + tiles - 1) / tiles + 15) / 16 * 16;
}

void RoundedInputs::round(const float* x, int64_t column) const {
  const PackedKernels& k = packed_kernels();
  const int64_t begin = column / tile_ * tile_, count = std::min(tile_, columns_ - begin);
  unsigned char* const to =
      memory_ + bytes(rounds256_, inputs_, begin) + (column - begin) * kInputBytes[rounds256_];
  (rounds256_ ? k.round256 : k.round32)(x, inputs_, count, to);
}

PackedMatrix::PackedMatrix(Format format, const void* blocks, int64_t outputs, int64_t inputs,
                           int threads)
    : format_(format), outputs_(outputs), inputs_(inputs), panels_((outputs + 15) / 16) {
  const FormatTraits& f = traits(format_);
  const int64_t panel_bytes = f.panel_bytes(inputs);
  arena_.allocate(bytes());
  share(threads, panels_, [&](int64_t p) {
    unsigned char* const panel = arena_.begin() + p * panel_bytes;
    for (int64_t o = 16 * p; o < std::min(16 * p + 16, outputs); ++o)
      f.put(static_cast<const unsigned char*>(blocks) + o * f.row_bytes(inputs), inputs,
            int(o % 16), panel);
  });
}

void PackedMatrix::row(int64_t output, float* to) const {
  const FormatTraits& f = traits(format_);
  f.lane_values(arena_.begin() + output / 16 * f.panel_bytes(inputs_), inputs_, int(output % 16),
                to);
}

void PackedMatrix::product(const float* x, int64_t columns, float* out, int threads) const {
  if (columns == 0) return;
  const FormatTraits& f = traits(format_);
  const PackedProduct multiply = packed_kernels().products[int(format_)];
  const int64_t size = RoundedInputs::memory_bytes(f.rounds256, inputs_, columns);
  struct Free {
    unsigned char* data;
    ~Free() { std::free(data); }
  } memory{static_cast<unsigned char*>(std::aligned_alloc(64, size_t(size + 63) / 64 * 64))};
  if (memory.data == nullptr) throw std::bad_alloc();
  const RoundedInputs rounded(f.rounds256, inputs_, columns, memory.data);
  share(threads, columns, [&](int64_t c) { rounded.round(x + c * inputs_, c); });
  const int64_t tile = RoundedInputs::tile_columns(columns), tiles = (columns + tile - 1) / tile;
  const int64_t chunks = (panels_ + kUnitPanels - 1) / kUnitPanels;
  share(threads, tiles * chunks, [&](int64_t unit) {
    const int64_t begin = unit / chunks * tile, count = std::min(tile, columns - begin);
    const int64_t panel = unit % chunks * kUnitPanels;
    const int64_t panels = std::min(kUnitPanels, panels_ - panel);
    float products[kMaxTileColumns * kUnitPanels * 16];
    multiply(arena_.begin() + panel * f.panel_bytes(inputs_), inputs_, panels, rounded.tile(begin),
             count, products, panels * 16);
    const int64_t width = std::min(panels * 16, outputs_ - panel * 16);
    for (int64_t c = 0; c < count; ++c)
      std::copy_n(products + c * panels * 16, width, out + (begin + c) * outputs_ + panel * 16);
  });
}

}  // namespace pipespec::cpu
