// The inner kernels of rejection sampling. The rule of kernels.hpp about inline functions applies
// here, too.
//
// They decide nothing. Both are filters in fp32 with known bounds before the arithmetic of
// rejection.cpp in double. So no decision depends on instructions, threads, or how rows are cut.
#pragma once

#include <stdint.h>

#include "coupled.hpp"

namespace pipespec::cpu {

// The sum of 2^(logit * factor) over the logits of a span that reach the cutoff, as 2^reference *
// sum, where `reference` is at most 20 below the largest exponent. A sum of 0: no logit reaches it
// (or all are -inf); NaN: the span has a NaN, an infinity, or a product that fp32 cannot hold.
struct Weight {
  float reference;
  double sum;
};

// The sums of a row's spans, added in double, have an error of at most a factor of
// exp(kWeightError + kWeightErrorPerUnit * |reference * ln2|).
inline constexpr double kWeightError = 1e-4;
inline constexpr double kWeightErrorPerUnit = 0x1p-22;

// Of the ids begin .. begin+n-1 (n >= 1); factor > 0.
using Weigh = Weight (*)(const void* row, int64_t begin, int64_t n, float factor, float cutoff);

// Receives from a scan the ids that may win.
struct Visitor {
  // Returns true to end the scan. May raise the bar.
  bool (*visit)(Visitor* self, int64_t id, float noise);
  // The scan may skip ids whose logit * inv_temperature + noise, in fp32, is at most this. NaN: it
  // visits all.
  float bar;
};

// Passes to `visitor`, in ascending order, the ids begin .. begin+n-1 (begin a multiple of 4, n >=
// 1) that reach the cutoff (not below -FLT_MAX: -inf is never passed) and exceed the bar.
using Scan = void (*)(const CoupledRow& row, int64_t begin, int64_t n, Visitor& visitor);

struct RejectionKernels {
  struct OfFormat {
    Weigh weigh;
    Scan scan;
  };
  OfFormat float32, bfloat16, float16;
};

}  // namespace pipespec::cpu
