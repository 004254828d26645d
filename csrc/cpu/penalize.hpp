// Penalties, biases and bitmasks on logits[B, Q, V], on the host, in place; penalize() in
// pipespec_kernels/penalties.py says what they are. The cost of a column is that of the different
// tokens before it, and of the vocabulary only with a bitmask.
#pragma once

#include <cstdint>

#include "select.hpp"

namespace pipespec::cpu {

// Arrays of one entry per row unless noted; the caller has checked all numbers.
struct PenaltyTask {
  float* logits;
  int64_t batch, width, vocab, batch_stride, width_stride;
  Tokens tokens;
  int32_t* history;  // [B, capacity]
  int64_t capacity;
  const int32_t* lengths;
  const float *repetition, *presence, *frequency;
  const int32_t* prompt_lengths;
  const int32_t* bias_ids;  // [B, num_biases]; null: none
  const float* bias;
  int64_t num_biases;
  const int32_t *query_lens, *num_draft_tokens;  // null: all columns
  const uint32_t* bitmask;                       // [B, Q, ceil(V / 32)]; null: none
};

// Allocates a table of V entries per calling thread, kept for later calls.
void penalize(const PenaltyTask& task);

}  // namespace pipespec::cpu
