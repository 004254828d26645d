// Products with the matrices of a decoder (weights.hpp), and rounds of work that share a team.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>

#include "formats/formats.hpp"
#include "weights.hpp"

namespace pipespec::cpu {

// Runs work(0 .. units - 1) on the threads of a forward.
using Rounds = std::function<void(int64_t units, const std::function<void(int64_t)>& work)>;

// Rows of inputs as a matrix reads them: as floats, and where it has blocks also rounded.
struct ProductInputs {
  const float* rows = nullptr;
  int64_t stride = 0;
  RoundedInputs rounded[2];  // in blocks of 32, of 256
};

// Tiles of rows times chunks of panels.
struct Pieces {
  int64_t tile_rows, chunk_panels, tiles, chunks;

  // `wanted`: pieces for all threads to have work.
  Pieces(const Matrix& matrix, int64_t rows, int64_t wanted);
  int64_t count() const { return tiles * chunks; }
};

// Rows begin .. begin + rows - 1, the first of a tile, times some panels; with scales and bias.
void multiply(const Matrix& matrix, int64_t panel, int64_t panels, const ProductInputs& inputs,
              int64_t begin, int64_t rows, float* to, int64_t stride);

}  // namespace pipespec::cpu
