// The inner kernels of recurrent layers (recurrent.hpp), one table per instruction set. The rules
// of decoder_kernels.hpp apply: a number is computed by one sequence of operations.
#pragma once

#include <stdint.h>

namespace pipespec::cpu {

// Columns of one head of a gated delta net (arXiv 2412.06464, equation 10). With S the state before
// a column:
//   delta = beta * (value - decay * S^T key)
//   S     = decay * S + key delta^T
//   out   = S^T query
struct DeltaTask {
  const float *queries, *keys, *values;  // of column j at j * stride
  int64_t stride;
  const float *decay, *beta;  // of column j at j
  // Before column j, and after the last one: [key_dim, value_dim] each. Neighbours may be the same.
  float* const* states;
  int64_t columns, key_dim, value_dim;
  float* out;  // of column j at j * out_stride
  int64_t out_stride;
};

struct RecurrentKernels {
  void (*delta_rule)(const DeltaTask& task);
  // out[i] = activation(sum over t of weights[t * weight_stride + i] * inputs[t * input_stride + i]
  // + bias[i]): SiLU, or none. Null: no bias.
  void (*convolve)(const float* inputs, int64_t input_stride, const float* weights,
                   int64_t weight_stride, int64_t taps, const float* bias, int64_t n,
                   bool activates, float* out);
  // x[i] *= sigmoid(gate i), and also *= gate i where `is_silu`.
  void (*gate)(const float* gates, int64_t n, bool is_silu, float* x);
};

}  // namespace pipespec::cpu
