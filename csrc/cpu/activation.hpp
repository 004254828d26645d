// The activation of a gated MLP on the host: out = activation(gate) * up, row by row, where a row
// holds the gate and, behind it, the other half.
//
// Arithmetic is float32. The activation and the product are rounded to the dtype of the rows, as
// transformers' modules do. A row's result depends on the row and on the instructions in use alone
// (set_simd in select.hpp). May be called from several threads at once.
#pragma once

#include <cstdint>

#include "decoder_kernels.hpp"
#include "select.hpp"

namespace pipespec::cpu {

// Strides in elements, between rows; a row is contiguous, and has 2 * `size` elements in gate_up.
struct GateTask {
  DType dtype;            // kFloat32 or kBFloat16
  Activation activation;  // kSilu or kGeluTanh
  int64_t rows, size;
  const void* gate_up;
  int64_t stride;
  void* out;
  int64_t out_stride;
};

void gated_activation(const GateTask& task);

}  // namespace pipespec::cpu
