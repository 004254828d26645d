// Copies of weight matrices in panels, as decoder_kernels.hpp and formats/ describe them.
#pragma once

#include <cstdint>
#include <vector>

#include "decoder.hpp"

namespace pipespec::cpu {

// A row of a matrix [outputs, inputs]; null data: zeros.
struct MatrixRow {
  Weights weights;
  int64_t row = 0;
};

// Neighbouring panels of one type: blocks of a format, or numbers of `bits` each, 8 (int8), 16 or
// 32, in groups of panels.
struct Run {
  int64_t first = 0, panels = 0;
  std::optional<Format> format;
  int bits = 0;
  int64_t panel_bytes = 0;
  unsigned char* data = nullptr;
};

struct PanelMatrix {
  int64_t inputs;
  std::vector<MatrixRow> rows;  // one per output, whole panels
  std::vector<Run> runs;
};

struct WeightSpan {
  Weights weights;  // null data: none
  int64_t count;
};

// Whether bfloat16 represents every weight that is not in blocks.
bool are_bfloat16(const std::vector<WeightSpan>& spans, int threads);

// The runs of a matrix, without data. A run of numbers shares its matrix with no other: otherwise
// each of its panels is a run, so that any of them can be the first of a product.
std::vector<Run> runs_of(const PanelMatrix& matrix, int bits);

// Writes the panels of all matrices to where their runs say. 16 bits keep the high half of a
// float32.
void pack(const std::vector<PanelMatrix>& matrices, int threads);

}  // namespace pipespec::cpu
