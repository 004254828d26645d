// What a decoder copies of its matrices: panels of those in blocks, as formats/ describes them, and
// float32 matrices as bfloat16.
#pragma once

#include <cstdint>
#include <vector>

#include "decoder.hpp"

namespace pipespec::cpu {

// Where the outputs of a panel come from: `count` rows of a matrix [outputs, inputs].
struct PanelSource {
  Weights weights;
  int64_t row, count;
};

// Neighbouring panels of one type: copied blocks of a format, or rows of numbers of `bits` each, 8
// (int8), 16 (bfloat16) or 32, where they lie.
struct Run {
  int64_t first = 0, panels = 0;
  std::optional<Format> format;
  int64_t panel_bytes = 0;
  unsigned char* data = nullptr;  // of blocks
  int bits = 0;
  std::vector<RowPanel> rows;  // of numbers, one per panel
};

struct PanelMatrix {
  int64_t inputs;
  std::vector<PanelSource> panels;
  std::vector<Run> runs;
};

struct WeightSpan {
  Weights weights;
  int64_t count;
};

// Of each span of float32 numbers, whether bfloat16 represents all of them.
std::vector<bool> are_bfloat16(const std::vector<WeightSpan>& spans, int threads);

// Writes the high halves of the numbers of float32 spans, one span after the other.
void narrow(const std::vector<WeightSpan>& spans, uint16_t* to, int threads);

// The runs of a matrix; those of blocks have no data yet.
std::vector<Run> runs_of(const PanelMatrix& matrix);

// Writes the panels of blocks of all matrices to where their runs say.
void pack(const std::vector<PanelMatrix>& matrices, int threads);

}  // namespace pipespec::cpu
