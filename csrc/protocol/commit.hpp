// commit(): second half of a step. Keeps the longest agreeing prefix of the hints and one token of
// our own.
#pragma once

#include "plan.hpp"

namespace pipespec {

// `tokens` and `step` as plan() gave them; `selected[j]` is this stage's own choice after j
// accepted hints, needed for j = 0 .. number of agreeing hints. Returns how many tokens were
// appended.
PIPESPEC_HD inline std::uint32_t commit(const Block& block, std::uint32_t stage, std::uint32_t row,
                                        const Step& step, const std::int32_t* tokens,
                                        const std::int32_t* selected) {
  Private& priv = block.priv(stage, row);
  Counters& counters = priv.counters;
  if (step.n_fed == 0) return 0;
  detail::count(&counters.fed, std::uint64_t{step.n_fed});
  if (step.action == Action::kCatchUp) {
    priv.kv = step.kv + step.n_fed;
    return 0;
  }

  OwnSequence own(block, stage, row);
  const std::uint32_t length = own.length();
  const std::uint32_t limit = load_acquire(&block.span(row).limit);
  const std::int32_t* hints = tokens + (step.n_fed - step.n_hint);
  std::uint32_t accepted = 0;
  bool ended = length >= limit;  // the caller may have ended the row while we computed
  while (!ended) {
    const bool hint_holds = accepted < step.n_hint && selected[accepted] == hints[accepted];
    own.append(selected[accepted]);
    ended = block.is_eos(selected[accepted]) || own.length() >= limit;
    if (!hint_holds) break;
    ++accepted;
  }
  // KV exists for everything fed up to the last accepted hint; the rest of what was fed lies past
  // the length and will be overwritten: this store is the whole rollback. The newest token always
  // waits to be fed.
  priv.kv = own.length() - 1;
  own.publish();
  if (stage == block.target()) own.settle(own.length());

  detail::count(&counters.steps, std::uint64_t{1});
  detail::count(&counters.drafted, std::uint64_t{step.n_hint});
  detail::count(&counters.accepted, std::uint64_t{accepted});
  detail::count(&counters.produced, std::uint64_t{own.length() - length});
  detail::count(&counters.histogram[detail::min(accepted, kHistogram - 1)], std::uint64_t{1});
  return own.length() - length;
}

// Puts every stage at the end of a row's prompt. While no stage runs. `last` is the prompt's last
// token; stages have the keys and values of positions 0 .. start-2 and feed `last` in their first
// step.
PIPESPEC_HD inline void reset_row(const Block& block, std::uint32_t row, std::uint32_t start,
                                  std::uint32_t limit, std::int32_t last) {
  block.span(row).start = start;
  store_release(&block.span(row).limit, limit);
  for (std::uint32_t stage = 0; stage < block.stages(); ++stage) {
    block.ring(stage, row)[(start - 1) & (block.capacity() - 1)] = last;
    block.published(stage, row).word = pack({0, start});
    block.published(stage, row).settled = start;
    block.priv(stage, row) = Private{start - 1, start, 0, {}};
  }
}

}  // namespace pipespec
