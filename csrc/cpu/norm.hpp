// The residual stream of a decoder layer and its RMS norm, on the host: total = x + residual,
// out = total / sqrt(mean(total^2) + eps) * weight + bias, row by row.
//
// Numbers are rounded to the dtype of the rows where transformers' modules round: the sum, the
// normalised numbers before the product with the weight (not with one_plus_weight), the product,
// and its sum with the bias. A row's result depends on the row and on the instructions in use alone
// (set_simd in select.hpp). May be called from several threads at once.
#pragma once

#include <cstdint>

#include "select.hpp"

namespace pipespec::cpu {

// Strides in elements, between rows; a row is contiguous.
struct NormTask {
  DType dtype;  // kFloat32 or kBFloat16
  int64_t rows, hidden;
  const void* x;
  int64_t x_stride;
  const void* residual;  // null: none, and no total
  int64_t residual_stride;
  const void* weight;
  const void* bias;  // null: none
  float eps;
  bool one_plus_weight;
  void* out;  // rows of out and total may be those of x and residual
  int64_t out_stride;
  void* total;
  int64_t total_stride;
};

void add_rms_norm(const NormTask& task);

}  // namespace pipespec::cpu
