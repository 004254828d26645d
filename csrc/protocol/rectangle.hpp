// plan() and commit() of one row within the rectangle that a stage feeds for all rows of a batch:
// the arrays that a step writes and reads back, the same on host and device.
#pragma once

#include "commit.hpp"

namespace pipespec {

struct StepArrays {
  std::int32_t* tokens;    // [rows, width]: ids to feed, zeros behind them
  std::int32_t* kv;        // [rows] each, from here on. Position of the first fed token
  std::int32_t* n_fed;     // tokens to feed, hints included
  std::int32_t* n_hint;    // how many of them, at the end, are hints
  std::int32_t* n_select;  // n_fed where a choice is needed, else 0
  std::int32_t* action;    // Action
};

PIPESPEC_HD inline Step plan_row(const Block& block, std::uint32_t stage, std::uint32_t row,
                                 const Policy& policy, const StepArrays& out) {
  std::int32_t* tokens = out.tokens + std::size_t{row} * policy.width;
  // Rows that the present generation does not use idle.
  const Step step = row < block.header().active_rows ? plan(block, stage, row, policy, tokens)
                                                     : Step{Action::kIdle, 0, 0, 0};
  for (std::uint32_t i = step.n_fed; i < policy.width; ++i) tokens[i] = 0;
  out.kv[row] = static_cast<std::int32_t>(step.kv);
  out.n_fed[row] = static_cast<std::int32_t>(step.n_fed);
  out.n_hint[row] = static_cast<std::int32_t>(step.n_hint);
  out.n_select[row] = step.action == Action::kStep ? static_cast<std::int32_t>(step.n_fed) : 0;
  out.action[row] = static_cast<std::int32_t>(step.action);
  return step;
}

// `in`: as plan_row() filled it; `selected`: this row's, as verify gives them.
PIPESPEC_HD inline std::uint32_t commit_row(const Block& block, std::uint32_t stage,
                                            std::uint32_t row, std::uint32_t width,
                                            const StepArrays& in, const std::int32_t* selected) {
  const Step step{static_cast<Action>(in.action[row]), static_cast<std::uint32_t>(in.kv[row]),
                  static_cast<std::uint32_t>(in.n_fed[row]),
                  static_cast<std::uint32_t>(in.n_hint[row])};
  return commit(block, stage, row, step, in.tokens + std::size_t{row} * width, selected);
}

}  // namespace pipespec
