// The inner kernels of row selection: one contiguous span of logits in, its best entry out.
// The rule of kernels.hpp about inline functions applies to this header.
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
};

}  // namespace pipespec::cpu
