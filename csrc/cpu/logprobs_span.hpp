// The inner kernels of logprobs.hpp: one pass over a span of a row. The rule of kernels.hpp about
// translation units applies here, too.
#pragma once

#include <stdint.h>

namespace pipespec::cpu {

// The sum of e^y over the scores y = logit * scale of the logits of a span that reach the cutoff,
// as e^largest * sum, where `largest` is the largest of these scores. A sum of 0: there is no score
// above -inf. NaN: the span has a NaN, or a score of +inf.
struct LogSum {
  float largest;
  double sum;
};

// Receives the logits that may be among the largest of the span, in ascending order of their ids.
struct Leaders {
  // May raise the bar.
  void (*visit)(Leaders* self, int64_t id, float logit);
  // Logits that are at most this are not passed.
  float bar;
};

// Of the ids begin .. begin+n-1 (n >= 1); scale > 0; the cutoff is not below -FLT_MAX, so that -inf
// never reaches it. `leaders` may be null. After a NaN or +inf, nothing more is passed to them.
using SumAndLead = LogSum (*)(const void* row, int64_t begin, int64_t n, float scale, float cutoff,
                              Leaders* leaders);

struct LogprobKernels {
  SumAndLead float32, bfloat16, float16;
};

}  // namespace pipespec::cpu
