// Log-probabilities of selected tokens and of the likeliest ones; logprobs() in
// pipespec_kernels/logprobs.py says what they are. One pass over the rows that selected a token.
#pragma once

#include "select.hpp"

namespace pipespec::cpu {

// Arrays are contiguous: [B] or [B, Q]. What is no id of the vocabulary counts as not selected.
struct LogprobTask {
  Logits logits;
  const int32_t *query_lens, *num_draft_tokens;
  const int32_t* selected;
  const float* inv_temperature;  // null: 1
  const float* cutoff;           // null: none
  int64_t top_n;                 // 0 .. V
  float* chosen;                 // [B, Q]
  int32_t* top_ids;              // [B, Q, top_n]
  float* top;                    // [B, Q, top_n]
};

// Throws std::invalid_argument like verify().
void logprobs(const LogprobTask& task, int threads);

}  // namespace pipespec::cpu
