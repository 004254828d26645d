// plan() and commit() for a batch: one row of the rectangle [rows, width] that a stage feeds. The
// arrays are the same on host and device.
#pragma once

#include "commit.hpp"

namespace pipespec {

struct StepArrays {
  std::int32_t* tokens;            // [rows, width]: ids to feed, zeros after them
  std::int32_t* kv;                // [rows]: position of the first token to feed
  std::int32_t* query_lens;        // [rows]: tokens to feed, draft tokens included
  std::int32_t* num_draft_tokens;  // [rows]: how many of them, at the end, are draft tokens
  std::int32_t* n_select;          // [rows]: query_lens where the step selects, else 0
  std::int32_t* action;            // [rows]: Action
};

template <typename Lanes = OneLane>
PIPESPEC_HD inline Step plan_row(const Block& block, std::uint32_t stage, std::uint32_t row,
                                 const StepPolicy& policy, const StepArrays& out,
                                 const Lanes& lanes = {}) {
  std::int32_t* tokens = out.tokens + std::size_t{row} * policy.width;
  // Rows that the present generation does not use idle.
  const Step step = row < block.header().active_rows
                        ? plan(block, stage, row, policy, tokens, lanes)
                        : Step{Action::kIdle, 0, 0, 0};
  for (std::uint32_t i = step.query_len + lanes.index(); i < policy.width; i += Lanes::kCount)
    tokens[i] = 0;
  lanes.once([&] {
    out.kv[row] = static_cast<std::int32_t>(step.kv);
    out.query_lens[row] = static_cast<std::int32_t>(step.query_len);
    out.num_draft_tokens[row] = static_cast<std::int32_t>(step.num_draft_tokens);
    out.n_select[row] =
        step.action == Action::kStep ? static_cast<std::int32_t>(step.query_len) : 0;
    out.action[row] = static_cast<std::int32_t>(step.action);
  });
  return step;
}

// `in`: as plan_row() filled it; `selected`: this row's, see commit().
template <typename Lanes = OneLane>
PIPESPEC_HD inline std::uint32_t commit_row(const Block& block, std::uint32_t stage,
                                            std::uint32_t row, std::uint32_t width,
                                            const StepArrays& in, const std::int32_t* selected,
                                            const Lanes& lanes = {}) {
  const Step step{static_cast<Action>(in.action[row]), static_cast<std::uint32_t>(in.kv[row]),
                  static_cast<std::uint32_t>(in.query_lens[row]),
                  static_cast<std::uint32_t>(in.num_draft_tokens[row])};
  return commit(block, stage, row, step, in.tokens + std::size_t{row} * width, selected, lanes);
}

}  // namespace pipespec
