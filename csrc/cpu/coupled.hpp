// The inner kernels of coupled selection: one contiguous span of a row in, the winner of
// `logit * inv_temperature + noise` out. The rule of kernels.hpp about inline functions applies
// here, too: files that are compiled for one instruction set use only the constants of the headers
// below.
#pragma once

#include <stdint.h>

#include "span.hpp"

namespace pipespec::cpu {

struct CoupledRow {
  const void* data;  // the row from its first token id on
  uint64_t seed, position;
  uint32_t stream;
  float inv_temperature;  // finite, positive
  float cutoff;           // logits below it are not selectable; -inf: all are
};

// Winner among the ids begin .. begin+n-1 (begin a multiple of 4, n >= 1). Reads nothing else.
// The index in the result counts from the row's beginning; if nothing is selectable it is `begin`
// and the value -inf.
using CoupledSelect = Packed (*)(const CoupledRow& row, int64_t begin, int64_t n);

struct CoupledKernels {
  CoupledSelect float32, bfloat16, float16;
  // The noise of the ids begin .. begin+n-1, for tests.
  void (*noise)(uint64_t seed, uint64_t position, uint32_t stream, int64_t begin, int64_t n,
                float* out);
};

}  // namespace pipespec::cpu
