// The inner kernels of row selection: one contiguous span of logits in, its best entry out.
//
// Each instruction set has its own translation unit (span_portable.cpp, span_avx2.cpp,
// span_avx512.cpp) that provides one table. Files compiled with -mavx512* include this header, so
// it includes nothing with inline functions: the linker could otherwise keep the AVX-512 copy of
// such a function for all callers.
#pragma once

#include <stdint.h>

namespace pipespec::cpu {

// The best entry of a span as one number that can be compared: (order of the value) << 32 | ~index.
// The larger number wins; equal values leave the lower index ahead; NaN has the highest order of
// all and -0.0 the order of +0.0. So `max` merges the spans of one row, in any order.
using Packed = uint64_t;

inline constexpr uint32_t kNanOrder = 0xFFFFFFFFu;

// The format of a dtype: the width of its lane, and the bits of +infinity.
struct LaneFormat {
  int bytes;    // 2 or 4
  int32_t inf;  // bit pattern of +infinity, e.g. 0x7F80 for bfloat16
};

struct SpanKernels {
  const char* name;
  // Best entry of `n >= 1` elements at `data` (any alignment). Reads nothing outside the span.
  Packed (*argmax16)(const void* data, int64_t n, int32_t inf);
  Packed (*argmax32)(const void* data, int64_t n, int32_t inf);
  // Reads `bytes` bytes and folds them into one word, for comparison with the kernels above.
  uint64_t (*read)(const void* data, int64_t bytes);
};

// Null where the compiler could not build the variant.
const SpanKernels* portable_kernels();
const SpanKernels* avx2_kernels();
const SpanKernels* avx512_kernels();

}  // namespace pipespec::cpu
