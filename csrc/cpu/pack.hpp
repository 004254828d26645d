// Copies of weight matrices in panels, as decoder_kernels.hpp describes them.
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

struct PanelMatrix {
  int64_t inputs;
  std::vector<MatrixRow> rows;  // one per output, whole panels
  unsigned char* to;
};

struct WeightSpan {
  Weights weights;  // null data: none
  int64_t count;
};

// Whether bfloat16 represents every weight.
bool are_bfloat16(const std::vector<WeightSpan>& spans, int threads);

// Writes the panels of all matrices, in `bits` of 8, 16 or 32 per weight: 8 for int8. 16 bits keep
// the high half of a float32.
void pack(const std::vector<PanelMatrix>& matrices, int bits, int threads);

}  // namespace pipespec::cpu
