// How sure a model is of the tokens that it selected: its probability of each, as the byte of
// protocol/confidence.hpp. One more read of the rows of logits that a selection has just read.
#pragma once

#include "select.hpp"

namespace pipespec::cpu {

// `selected` [B, Q] as verify() gives it: the choice in column query_lens[r] - 1 -
// num_draft_tokens[r] + j is selected[r, j], and -1 ends a row. The probability is that of the
// softmax of logit * inv_temperature[r] (null: 1). out [B, Q], contiguous: 0 where nothing is
// selected, and where the logits are no distribution. Throws std::invalid_argument like verify().
void confidence(const Logits& logits, const float* inv_temperature, const int32_t* query_lens,
                const int32_t* num_draft_tokens, const int32_t* selected, uint8_t* out);

}  // namespace pipespec::cpu
