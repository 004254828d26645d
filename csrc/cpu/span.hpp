// The inner kernels of row selection: one contiguous span of logits in, its best entry out.
//
// Each instruction set has its own translation unit (span_portable.cpp, span_avx2.cpp,
// span_avx512.cpp) that hands out one table. NOTE: this header is seen by files compiled with
// -mavx512*, so it includes nothing with inline functions: the linker could otherwise keep the
// AVX-512 copy of such a function for all callers.
#pragma once

#include <stdint.h>

namespace pipespec::cpu {

// The best entry of a span as one number that can be compared: (order of the value) << 32 | ~index.
// The larger number wins; equal values leave the lower index ahead; NaN has the highest order of
// all and -0.0 the order of +0.0. Spans of one row can therefore be merged by `max`, in any
// sequence.
using Packed = uint64_t;

inline constexpr uint32_t kNanOrder = 0xFFFFFFFFu;

// How a dtype lies in its lane. Only two facts matter: the lane width and the bits of +infinity.
struct LaneFormat {
  int bytes;    // 2 or 4
  int32_t inf;  // bit pattern of +infinity, e.g. 0x7F80 for bfloat16
};

struct SpanKernels {
  const char* name;
  // Best entry of `n >= 1` elements at `data` (any alignment). Reads nothing outside the span.
  Packed (*argmax16)(const void* data, int64_t n, int32_t inf);
  Packed (*argmax32)(const void* data, int64_t n, int32_t inf);
  // Reads `bytes` bytes and folds them into one word: the yardstick for the kernels above.
  uint64_t (*read)(const void* data, int64_t bytes);
};

// Null where the compiler could not build the variant.
const SpanKernels* portable_kernels();
const SpanKernels* avx2_kernels();
const SpanKernels* avx512_kernels();

}  // namespace pipespec::cpu
