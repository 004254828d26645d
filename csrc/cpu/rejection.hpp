// Rejection sampling over logits[B, Q, V] of target and draft.
#pragma once

#include <cstdint>

#include "select.hpp"

namespace pipespec::cpu {

// The distributions that the draft tokens were drawn from.
struct Draft {
  Logits logits;                 // of the target's shape; dtype and strides are its own
  const float* inv_temperature;  // [B], finite and positive
  const float* cutoff;           // [B, Q] contiguous; null: none
};

// Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding" (ICML
// 2023), algorithm 1; Chen et al., "Accelerating Large Language Model Decoding with Speculative
// Sampling" (2023), algorithm 2. Rows, counts, columns and results as in verify(). The draft token
// h in column c + 1 is accepted if u q(h) < p(h): p is the softmax of logits[r, c] *
// inv_temperature[r] over what reaches the cutoff, q the draft's in the same column, or 1 at the
// draft token without a draft; u is the uniform number of (seed, position, accept_stream). The
// first rejected draft token is replaced by the id with the largest ln(max(p - q, 0)) + G, where G
// is the noise of noise.stream. After the last accepted draft token comes the id with the largest
// logit * inv_temperature + G. The same id replaces the draft token where p or q is no distribution
// (a NaN, an infinity, nothing but -inf), which rejects the draft token, and where nothing is left
// of p - q. A draft token that is not an id is rejected. Of equals the lowest id wins, the first
// NaN before everything.
//
// All in double, so a result depends on the values only: not on threads, instructions, strides or
// other rows. Columns after a rejected draft token are not read.
void rejection_sample(const Logits& logits, const Tokens& tokens, const int32_t* query_lens,
                      const int32_t* num_draft_tokens, const Draft* draft, const Noise& noise,
                      uint32_t accept_stream, int32_t* selected, int32_t* accepted, int threads);

}  // namespace pipespec::cpu
