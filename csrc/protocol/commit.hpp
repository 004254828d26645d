// commit(): the second half of a step. Keeps the longest prefix of the draft tokens that the
// stage's own choices confirm, and appends one token of its own.
#pragma once

#include "plan.hpp"

namespace pipespec {

// `tokens` and `step` come from plan(). `selected[j]` is the stage's own choice after j accepted
// draft tokens, for j = 0 .. accepted. Called by all lanes. Returns the number of tokens appended.
template <typename Lanes = OneLane>
PIPESPEC_HD inline std::uint32_t commit(const Block& block, std::uint32_t stage, std::uint32_t row,
                                        const Step& step, const std::int32_t* tokens,
                                        const std::int32_t* selected, const Lanes& lanes = {}) {
  Private& priv = block.priv(stage, row);
  Counters& counters = priv.counters;
  if (step.query_len == 0) return 0;
  if (step.action == Action::kCatchUp) {
    lanes.once([&] {
      priv.kv = step.kv + step.query_len;
      detail::count(block.scope(), {{&counters.fed, step.query_len}});
    });
    return 0;
  }

  OwnSequence own(block, stage, row);
  const std::uint32_t length = own.length();
  const std::uint32_t limit = lanes.once([&] { return load_relaxed(&block.span(row).limit); });
  const std::int32_t* draft_tokens = tokens + (step.query_len - step.num_draft_tokens);
  const auto is_accepted = [&](std::uint32_t j) {
    return j < step.num_draft_tokens && selected[j] == draft_tokens[j];
  };
  // The choices up to the first that no draft token confirms or that ends the text. The caller may
  // have ended the row while we computed: then none.
  std::uint32_t produced =
      limit > length ? detail::min(step.num_draft_tokens + 1, limit - length) : 0;
  for (std::uint32_t from = 0; from < produced; from += Lanes::kCount) {
    const std::uint32_t j = from + lanes.index();
    const std::uint32_t last =
        lanes.ballot(j < produced && (!is_accepted(j) || block.is_eos(selected[j])));
    if (last != 0) produced = from + lowest(last) + 1;
  }
  const std::uint32_t accepted =
      produced == 0 || is_accepted(produced - 1) ? produced : produced - 1;
  own.append(produced, [&](std::uint32_t j) { return selected[j]; }, lanes);
  own.publish(lanes);
  if (stage == block.target()) own.set_committed(own.length(), lanes);

  lanes.once([&] {
    // Keys and values are valid up to the last accepted draft token. Those of rejected draft tokens
    // lie past the length and will be overwritten: this store is the whole rollback. The newest
    // token has not been fed yet.
    priv.kv = own.length() - 1;
    detail::count(block.scope(), {{&counters.steps, 1},
                                  {&counters.fed, step.query_len},
                                  {&counters.drafted, step.num_draft_tokens},
                                  {&counters.accepted, accepted},
                                  {&counters.produced, produced},
                                  {&counters.histogram[detail::min(accepted, kHistogram - 1)], 1}});
  });
  return produced;
}

// Puts every stage at the end of a row's prompt, while no stage runs. `last` is the prompt's last
// token. Stages hold the keys and values of positions 0 .. start-2 and feed `last` in their first
// step.
PIPESPEC_HD inline void reset_row(const Block& block, std::uint32_t row, std::uint32_t start,
                                  std::uint32_t limit, std::int32_t last) {
  block.span(row).start = start;
  store_release(&block.span(row).limit, limit);
  for (std::uint32_t stage = 0; stage < block.stages(); ++stage) {
    block.ring(stage, row)[(start - 1) & (block.capacity() - 1)] = last;
    block.published(stage, row).word = pack({0, start});
    block.published(stage, row).committed = start;
    block.priv(stage, row) = Private{start - 1, start, 0, start, pack({0, start}), {}};
  }
}

}  // namespace pipespec
