// Matrices in the block formats of GGUF: copied into panels of 16 outputs that a product reads
// front to back, and rows of them as float32.
#pragma once

#include <cstdint>
#include <vector>

#include "../arena.hpp"
#include "packed.hpp"

namespace pipespec::cpu {

struct FormatTraits {
  const char* name;
  int64_t block, block_bytes;  // weights and bytes of a block
  bool rounds256;              // inputs are rounded in blocks of 256, else of 32
  int64_t (*panel_bytes)(int64_t inputs);
  // Writes a row of blocks as output `lane` of a panel.
  void (*put)(const unsigned char* row, int64_t inputs, int lane, unsigned char* panel);
  // A row, or an output of a panel, as float32.
  void (*row_values)(const unsigned char* row, int64_t inputs, float* to);
  void (*lane_values)(const unsigned char* panel, int64_t inputs, int lane, float* to);

  int64_t row_bytes(int64_t inputs) const { return inputs / block * block_bytes; }
};

const FormatTraits& traits(Format format);

inline constexpr int64_t kInputBlock[] = {32, 256};
inline constexpr int64_t kInputBytes[] = {sizeof(Inputs32), sizeof(Inputs256)};

// Columns of inputs in 8 bits, in tiles of nearly equal size: whole groups of 16 where
// there are several.
class RoundedInputs {
 public:
  RoundedInputs() = default;
  // `memory`: memory_bytes(inputs, columns), on a cache line.
  RoundedInputs(bool rounds256, int64_t inputs, int64_t columns, unsigned char* memory)
      : rounds256_(rounds256),
        inputs_(inputs),
        columns_(columns),
        tile_(tile_columns(columns)),
        memory_(memory) {}

  static int64_t tile_columns(int64_t columns);
  static int64_t bytes(bool rounds256, int64_t inputs, int64_t columns) {
    return inputs / kInputBlock[rounds256] * kInputBytes[rounds256] * columns;
  }

  static int64_t memory_bytes(bool rounds256, int64_t inputs, int64_t columns) {
    return bytes(rounds256, inputs, columns) + kSpareColumns * kInputBytes[rounds256];
  }

  explicit operator bool() const { return memory_ != nullptr; }
  void round(const float* x, int64_t column) const;
  // Of the columns from `begin` on, the first of a tile.
  const unsigned char* tile(int64_t begin) const {
    return memory_ + bytes(rounds256_, inputs_, begin);
  }

 private:
  bool rounds256_ = false;
  int64_t inputs_ = 0, columns_ = 0, tile_ = 1;
  unsigned char* memory_ = nullptr;
};

// A matrix [outputs, inputs] by itself.
class PackedMatrix {
 public:
  // `blocks`: rows of blocks, one after the other.
  PackedMatrix(Format format, const void* blocks, int64_t outputs, int64_t inputs, int threads);

  int64_t bytes() const { return panels_ * traits(format_).panel_bytes(inputs_); }
  // out[columns, outputs] of x[columns, inputs].
  void product(const float* x, int64_t columns, float* out, int threads) const;
  void row(int64_t output, float* to) const;

 private:
  Format format_;
  int64_t outputs_, inputs_, panels_;
  Arena arena_;
};

}  // namespace pipespec::cpu
