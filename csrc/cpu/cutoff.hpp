// Top-k, top-p and min-p as one threshold per row of logits[B, Q, V]: what coupled selection takes.
#pragma once

#include <cstdint>

#include "select.hpp"

namespace pipespec::cpu {

// One value per row of the batch.
struct Filters {
  const float* inv_temperature;  // finite and positive
  const int64_t* top_k;          // >= 0; 0, or V and more: off
  const double* top_p;           // 0 .. 1; 1: off
  const double* min_p;           // 0 .. 1; 0: off
};

// cutoff[B, Q] (contiguous): the smallest logit of each row that passes all filters, or -inf where
// all are off. The filters apply one after the other, each to what the one before left, over the
// softmax of float(logit) * inv_temperature rounded to fp32:
//   top-k keeps what is at least the k-th largest;
//   top-p keeps the smallest set of largest probabilities whose sum reaches top_p;
//   min-p keeps probabilities of at least min_p times the largest.
// Logits equal to a kept one are kept, too, so that one threshold describes the result. A row with
// a NaN, or with nothing but -inf, gets -inf. Probabilities are summed in double.
//
// With query_lens and num_draft_tokens (or null for both) only the columns query_lens - 1 -
// num_draft_tokens .. query_lens - 1 of each row are read, since verification needs no others; the
// others get -inf.
void cutoff(const Logits& logits, const Filters& filters, const int32_t* query_lens,
            const int32_t* num_draft_tokens, float* cutoff, int threads);

}  // namespace pipespec::cpu
