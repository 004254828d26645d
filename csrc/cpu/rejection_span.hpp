// The inner kernels of the ratio test. What span.hpp says about translation units holds here, too.
//
// They decide nothing. Both are filters in fp32 with known bounds, in front of rejection.cpp's
// arithmetic in double: so no decision depends on instructions, threads, or how rows are cut.
#pragma once

#include <stdint.h>

#include "coupled.hpp"

namespace pipespec::cpu {

// The sum of 2^(logit * factor) over the logits of a span that reach the cutoff, as 2^reference *
// sum, where `reference` is at most 20 below the largest exponent. A sum of 0: none does (or all
// are -inf); NaN: the span has a NaN, an infinity, or a product that fp32 cannot hold.
struct Weight {
  float reference;
  double sum;
};

// Sums of any number of spans of a row, put together in double, are off by a factor of at most
// exp(kWeightError + kWeightErrorPerUnit * |reference * ln2|).
inline constexpr double kWeightError = 1e-4;
inline constexpr double kWeightErrorPerUnit = 0x1p-22;

// Of the ids begin .. begin+n-1 (n >= 1); factor > 0.
using Weigh = Weight (*)(const void* row, int64_t begin, int64_t n, float factor, float cutoff);

// Receives the ids that may win from a scan.
struct Judge {
  // True: the scan is over. May raise the bar.
  bool (*look)(Judge* self, int64_t id, float noise);
  // Ids whose logit * inv_temperature + noise, in fp32, is at most this need not be looked at; NaN:
  // all must.
  float bar;
};

// Shows `judge` the ids begin .. begin+n-1 (begin a multiple of 4, n >= 1) that reach the cutoff
// (not below -FLT_MAX: -inf is never shown) and exceed the bar, in ascending order.
using Scan = void (*)(const CoupledRow& row, int64_t begin, int64_t n, Judge& judge);

struct RejectionKernels {
  struct OfFormat {
    Weigh weigh;
    Scan scan;
  };
  OfFormat float32, bfloat16, float16;
};

// Null where the compiler could not build the variant.
const RejectionKernels* portable_rejection();
const RejectionKernels* avx2_rejection();
const RejectionKernels* avx512_rejection();

// Those of the instructions in use.
const RejectionKernels& rejection_kernels();

}  // namespace pipespec::cpu
