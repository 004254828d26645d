// Layers with a recurrent state in place of keys and values: gated delta nets, and the short
// convolutions of LFM2. The state after each column may be kept, so that a rollback finds it.
#pragma once

#include <cstdint>
#include <vector>

#include "product.hpp"

namespace pipespec::cpu {

struct RecurrentLayer {
  // Outputs of `in`: the channels of the convolution (queries, keys and values), the gates of the
  // outputs, beta and the input of the decay, of each head. Of a short convolution: two factors of
  // each channel around the third part. Each part in whole panels.
  Matrix in, out;
  DeltaShape delta;
  int64_t channels = 0, taps = 0;
  std::vector<float> kernel, kernel_bias;  // [taps, channels], and [channels] or none
  std::vector<float> decay, decay_bias;    // -e^A_log, of each head of values
  std::vector<float> norm, query_norm, key_norm;
  float eps = 0.0f;

  bool is_used() const { return taps > 0; }
  bool is_delta() const { return delta.key_heads > 0; }
  int64_t outputs() const { return is_delta() ? delta.value_heads * delta.value_dim : channels; }
  int64_t parts() const;  // units of work of a row
};

// Columns first .. first + columns - 1 of a forward of `fed`, of the rows of a batch. The results
// of those from `kept_from` on are wanted.
struct RecurrentColumns {
  int64_t fed, first, columns, kept_from;
  const float* in;  // [rows, columns, in_stride], the outputs of `in`
  int64_t in_stride;
  float* out;  // [rows, columns - kept_from, outputs()]
};

// Part `part` of a row, of recurrent layer number `number`. Parts touch nothing that another one
// does.
void run_recurrent(const RecurrentLayer& layer, const States& states, int64_t number,
                   const RecurrentColumns& columns, int64_t row, int64_t part);

}  // namespace pipespec::cpu
