// The matrices of a decoder, products with them, and rounds of work that share a team.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "formats/formats.hpp"
#include "pack.hpp"

namespace pipespec::cpu {

// Parts of some outputs each, one after the other and each in whole panels; and that `groups`
// times: heads of queries, keys and values; elsewhere one part.
struct Matrix {
  int64_t inputs = 0, group_panels = 0, groups = 1;
  std::vector<Run> runs;
  std::vector<float> bias, scale;   // of all panels, or none
  bool rounds[2] = {false, false};  // inputs are read in blocks of 32, of 256
  bool reads_floats = false;

  int64_t panels() const { return groups * group_panels; }
  bool reads_rounded() const { return rounds[0] || rounds[1]; }
};

// Runs work(0 .. units - 1) on the threads of a forward.
using Rounds = std::function<void(int64_t units, const std::function<void(int64_t)>& work)>;

// Rows of inputs as a matrix reads them, `count` from number `begin` on, which is the first of a
// tile: as floats, or rounded, in blocks of 32 and of 256.
struct Tile {
  const float* rows;  // the first of them
  int64_t stride;
  const RoundedInputs* rounded;  // both kinds
  int64_t begin, count;
};

// Tiles of rows times chunks of panels.
struct Pieces {
  int64_t tile_rows = 0, chunk_panels = 0, tiles = 0, chunks = 0;

  // `wanted`: pieces for all threads to have work.
  Pieces() = default;
  Pieces(const Matrix& matrix, int64_t rows, int64_t wanted);
  int64_t count() const { return tiles * chunks; }
};

// The rows times some panels, with scales and bias. `threads` share the product: the others take
// the pieces in between before this one takes its next.
void multiply(const Matrix& matrix, int64_t panel, int64_t panels, const Tile& tile, int threads,
              float* to, int64_t stride);

}  // namespace pipespec::cpu
