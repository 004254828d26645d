// plan(): the tokens that a stage feeds next for one row. The first half of a step; commit.hpp has
// the second.
//
//   1. Follow downstream. Every stage compares its tokens with the target's, so that a correction
//      reaches the whole chain at once, and past the target's length with its downstream
//      neighbour's. At the first difference it rolls back everything from there on. Then it adopts
//      the other's tokens, the bonus token included.
//   2. Take draft tokens. Upstream's tokens past this stage's length are its draft tokens, if
//      upstream agrees with it over the positions that both have.
//   3. Emit the tokens whose keys and values are missing, then the draft tokens.
//
// Nothing that a stage reads from upstream can cause a wrong token: commit() compares every draft
// token with the stage's own choice.
#pragma once

#include "ring.hpp"

namespace pipespec {

enum class Action : std::int32_t {
  // Nothing to do until a neighbour publishes: the stage is `lookahead` tokens ahead, or its text
  // has ended for now.
  kIdle = 0,
  // Feed and select.
  kStep = 1,
  // Feed and select nothing: more known tokens than fit in one step.
  kCatchUp = 2,
  // Fewer draft tokens than `min_draft_tokens`, and more may come.
  kWait = 3,
  // The target's text is complete.
  kFinished = 4,
};

struct StepPolicy {
  // How many tokens this stage may be ahead of the one downstream. The target ignores it.
  std::uint32_t lookahead;
  // Maximum number of draft tokens per step.
  std::uint32_t max_draft_tokens;
  // Wait for this many draft tokens while they can come; 0: never wait.
  std::uint32_t min_draft_tokens;
  // Columns of the caller's buffer, at least 1: the maximum of tokens per step.
  std::uint32_t width;
};

struct Step {
  Action action;
  std::uint32_t kv;                // position of the first token to feed
  std::uint32_t query_len;         // tokens to feed, draft tokens included
  std::uint32_t num_draft_tokens;  // how many of them, at the end, are draft tokens
};

namespace detail {

PIPESPEC_HD inline std::uint32_t min(std::uint32_t a, std::uint32_t b) { return a < b ? a : b; }
PIPESPEC_HD inline std::uint32_t max(std::uint32_t a, std::uint32_t b) { return a > b ? a : b; }

struct Increment {
  std::uint64_t* counter;
  std::uint64_t by;
};

// All loads before the first store: they wait for memory together.
template <std::uint32_t kCount>
PIPESPEC_HD inline void count(Scope scope, const Increment (&increments)[kCount]) {
  std::uint64_t old[kCount];
  for (std::uint32_t i = 0; i < kCount; ++i) old[i] = load_relaxed(increments[i].counter, scope);
  for (std::uint32_t i = 0; i < kCount; ++i)
    store_relaxed(increments[i].counter, old[i] + increments[i].by, scope);
}

// A stage's own numbers while it plans: in registers, the same in every lane.
struct Progress {
  std::uint32_t kv, agreed, seen_epoch;  // as in Private
  std::uint32_t adopted = 0, truncated = 0, rollbacks = 0;
};

// First position in [from, to) at which the two differ; `to` if none. The same in all lanes.
template <typename Own, typename Lanes = OneLane>
PIPESPEC_HD inline std::uint32_t first_difference(const Own& a, const Sequence& b,
                                                  std::uint32_t from, std::uint32_t to,
                                                  const Lanes& lanes = {}) {
  for (; from < to; from += Lanes::kCount) {
    const std::uint32_t p = from + lanes.index();
    const std::uint32_t differs = lanes.ballot(p < to && a.token(p) != b.token(p));
    if (differs != 0) return from + lowest(differs);
  }
  return to;
}

template <typename Own, typename Lanes>
PIPESPEC_HD inline void roll_back(Own& own, Progress& at, std::uint32_t length,
                                  const Lanes& lanes) {
  ++at.rollbacks;
  at.truncated += own.length() - length;
  at.kv = min(at.kv, length);
  at.agreed = min(at.agreed, length);
  own.truncate(length, lanes);
}

template <typename Own, typename Lanes>
PIPESPEC_HD inline void adopt(Own& own, Progress& at, const Sequence& other, std::uint32_t length,
                              const Lanes& lanes) {
  if (own.length() >= length) return;
  at.adopted += length - own.length();
  own.adopt(other, length, lanes);
}

// The target's tokens never change: one comparison of each position is enough, and no epoch is
// needed.
template <typename Own, typename Lanes>
PIPESPEC_HD inline std::uint32_t follow_target(Own& own, Progress& at, const Sequence& target,
                                               const Lanes& lanes) {
  const std::uint32_t truth = target.word(lanes).length;
  const std::uint32_t common = min(truth, own.length());
  const std::uint32_t differs = first_difference(own, target, own.committed(), common, lanes);
  if (differs < common) roll_back(own, at, differs, lanes);
  adopt(own, at, target, truth, lanes);
  own.set_committed(truth, lanes);
  return truth;
}

// The neighbour may rewrite the tokens past its committed length. The trap is stale agreement: it
// may have rewritten positions after this stage compared them, so a new epoch of the neighbour
// restarts the comparison at the committed length. The neighbour may also not have seen the
// target's correction yet. Then its tokens past that point continue another text. A neighbour with
// damaged memory may publish any length: nothing past the limit is adopted, the ring has no room
// for it.
template <typename Own, typename Lanes>
PIPESPEC_HD inline std::uint32_t follow_neighbour(Own& own, Progress& at, const Sequence& neighbour,
                                                  std::uint32_t limit, const Lanes& lanes) {
  Word seen = neighbour.word(lanes);
  seen.length = min(seen.length, limit);
  const std::uint32_t committed = own.committed();
  const std::uint32_t common = min(seen.length, own.length());
  const std::uint32_t known = min(committed, common);
  const std::uint32_t theirs = lanes.once([&] { return neighbour.committed(); });
  if (first_difference(own, neighbour, min(theirs, known), known, lanes) < known)
    return seen.length;
  if (seen.length < committed) return seen.length;  // it is behind, not different
  const std::uint32_t from = seen.epoch == at.seen_epoch ? max(at.agreed, committed) : committed;
  const std::uint32_t differs = first_difference(own, neighbour, min(from, common), common, lanes);
  // The tokens changed during the comparison, so its result means nothing.
  if (!neighbour.still(seen, lanes)) return seen.length;
  if (differs < common) roll_back(own, at, differs, lanes);
  adopt(own, at, neighbour, seen.length, lanes);
  at.agreed = min(seen.length, own.length());
  at.seen_epoch = seen.epoch;
  // Adopted tokens may belong to two texts if the neighbour rolled back meanwhile. Its new epoch
  // makes the next plan compare again.
  return seen.length;
}

template <typename Own, typename Lanes>
PIPESPEC_HD inline Step plan_for(const Block& block, std::uint32_t stage, std::uint32_t row,
                                 const StepPolicy& policy, std::int32_t* tokens, Own& own,
                                 Progress& at, const Lanes& lanes) {
  const std::uint32_t start = load_relaxed(&block.span(row).start);
  // The caller may change it at any time, and it orders no other word.
  const std::uint32_t limit = lanes.once([&] { return load_relaxed(&block.span(row).limit); });
  const bool is_target = stage == block.target();

  std::uint32_t bound = limit;
  if (!is_target) {
    std::uint32_t reached = follow_target(own, at, Sequence(block, block.target(), row), lanes);
    if (stage + 1 != block.target())
      reached =
          max(reached, follow_neighbour(own, at, Sequence(block, stage + 1, row), limit, lanes));
    // min(limit, reached + lookahead) could overflow, and `reached` may lie past a lowered limit.
    if (reached < limit && policy.lookahead < limit - reached) bound = reached + policy.lookahead;
  }
  const std::uint32_t length = own.length();
  const bool ended = length >= limit || (length > start && block.is_eos(own.token(length - 1)));
  if (ended) return {is_target ? Action::kFinished : Action::kIdle, at.kv, 0, 0};
  if (length >= bound) return {Action::kIdle, at.kv, 0, 0};

  // A step feeds at least the newest token, whose logits select the next one. After a rollback
  // without an adoption kv equals length: the last token is fed again.
  at.kv = min(at.kv, length - 1);
  const std::uint32_t known = length - at.kv;
  std::uint32_t query_len = min(known, policy.width);
  for (std::uint32_t i = lanes.index(); i < query_len; i += Lanes::kCount)
    tokens[i] = own.token(at.kv + i);
  if (query_len < known) return {Action::kCatchUp, at.kv, query_len, 0};

  std::uint32_t num_draft_tokens = 0;
  if (stage > 0) {
    const Sequence upstream(block, stage - 1, row);
    const std::uint32_t reach = upstream.word(lanes).length;
    const std::uint32_t committed = is_target ? length : own.committed();
    const std::uint32_t theirs = lanes.once([&] { return upstream.committed(); });
    const std::uint32_t overlap = min(min(theirs, committed), length);
    const bool agrees =
        reach >= length && first_difference(own, upstream, overlap, length, lanes) == length;
    // One position stays free for the stage's own token.
    const std::uint32_t room =
        min(min(policy.max_draft_tokens, policy.width - known), bound - length - 1);
    if (agrees && reach > length) num_draft_tokens = min(reach - length, room);
    for (std::uint32_t i = lanes.index(); i < num_draft_tokens; i += Lanes::kCount)
      tokens[query_len + i] = upstream.token(length + i);
    if (num_draft_tokens < min(policy.min_draft_tokens, room)) {
      const bool may_come = lanes.once([&] {
        if (load_relaxed(&block.control(stage - 1).alive) == 0) return false;
        return !(agrees &&
                 (reach >= limit || (reach > start && block.is_eos(upstream.token(reach - 1)))));
      });
      if (may_come) return {Action::kWait, at.kv, 0, 0};
    }
    query_len += num_draft_tokens;
  }
  return {Action::kStep, at.kv, query_len, num_draft_tokens};
}

}  // namespace detail

// `tokens` has room for policy.width ids and receives query_len. Called only by the stage that owns
// `stage`, by all lanes.
template <typename Lanes = OneLane>
PIPESPEC_HD inline Step plan(const Block& block, std::uint32_t stage, std::uint32_t row,
                             const StepPolicy& policy, std::int32_t* tokens,
                             const Lanes& lanes = {}) {
  OwnSequence own(block, stage, row);
  Private& priv = block.priv(stage, row);
  detail::Progress at{priv.kv, priv.agreed, priv.seen_epoch};
  const Step step = detail::plan_for(block, stage, row, policy, tokens, own, at, lanes);
  lanes.once([&] {
    priv.kv = at.kv;
    priv.agreed = at.agreed;
    priv.seen_epoch = at.seen_epoch;
    if (at.adopted == 0 && at.rollbacks == 0) return;
    Counters& counters = priv.counters;
    detail::count(block.scope(), {{&counters.adopted, at.adopted},
                                  {&counters.truncated, at.truncated},
                                  {&counters.rollbacks, at.rollbacks}});
  });
  return step;
}

// What plan() would return now, without its effects: the scheduler uses it to decide whether to
// launch a step. While no step of `stage` runs; other stages may run.
PIPESPEC_HD inline Step foresee(const Block& block, std::uint32_t stage, std::uint32_t row,
                                const StepPolicy& policy, std::int32_t* tokens) {
  ImaginedSequence own(block, stage, row);
  const Private& priv = block.priv(stage, row);
  detail::Progress at{priv.kv, priv.agreed, priv.seen_epoch};
  return detail::plan_for(block, stage, row, policy, tokens, own, at, OneLane{});
}

}  // namespace pipespec
