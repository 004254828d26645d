// plan(): what should this stage feed next for one row? First half of a step (commit.hpp is the
// second).
//
//   1. Obey. The target's tokens are the truth; every stage compares itself with them directly (a
//   correction reaches the
//      whole chain at once instead of hop by hop). Past the target's length the downstream
//      neighbour knows best. At the first difference take back everything from there, then adopt
//      the other's tokens, its bonus token included.
//   2. Take hints. Upstream's tokens past our length are our drafts, if upstream agrees with us
//   over what overlaps.
//   3. Emit the tokens whose KV is missing, then the hints.
//
// Nothing read from upstream can make a wrong token: hints are compared with our own selection in
// commit().
#pragma once

#include "ring.hpp"

namespace pipespec {

enum class Action : std::int32_t {
  kIdle = 0,  // nothing to do until a neighbour publishes: run-ahead is at its bound, or our text
              // has ended for now
  kStep = 1,  // feed and select
  kCatchUp = 2,   // feed, select nothing: more known tokens than fit in one step
  kWait = 3,      // fewer hints than asked for, and more may come
  kFinished = 4,  // the target's text is complete
};

struct Policy {
  std::uint32_t
      window;  // how far this stage may run ahead of the one downstream (ignored by the target)
  std::uint32_t max_hints;  // hints per step
  std::uint32_t min_hints;  // wait for this many if they can come; 0: never wait
  std::uint32_t width;  // columns of the caller's buffer: at most this many tokens per step, >= 1
};

struct Step {
  Action action;
  std::uint32_t kv;      // position of the first fed token
  std::uint32_t n_fed;   // tokens to feed, hints included
  std::uint32_t n_hint;  // how many of them, at the end, are hints
};

namespace detail {

PIPESPEC_HD inline std::uint32_t min(std::uint32_t a, std::uint32_t b) { return a < b ? a : b; }
PIPESPEC_HD inline std::uint32_t max(std::uint32_t a, std::uint32_t b) { return a > b ? a : b; }

template <typename T>
PIPESPEC_HD inline void count(T* counter, T n) {
  store_relaxed(counter, load_relaxed(counter) + n);
}

// First position in [from, to) at which the two differ; `to` if none.
template <typename Own>
PIPESPEC_HD inline std::uint32_t first_difference(const Own& a, const Sequence& b,
                                                  std::uint32_t from, std::uint32_t to) {
  while (from < to && a.token(from) == b.token(from)) ++from;
  return from;
}

template <typename Own>
PIPESPEC_HD inline void take_back(Own& own, Private& priv, std::uint32_t length) {
  count(&priv.counters.rollbacks, std::uint64_t{1});
  count(&priv.counters.truncated, std::uint64_t{own.length() - length});
  priv.kv = min(priv.kv, length);
  priv.agreed = min(priv.agreed, length);
  own.truncate(length);
}

template <typename Own>
PIPESPEC_HD inline void adopt(Own& own, Private& priv, const Sequence& other,
                              std::uint32_t length) {
  if (own.length() >= length) return;
  count(&priv.counters.adopted, std::uint64_t{length - own.length()});
  own.adopt(other, length);
}

// The target's tokens never change, so one comparison of each position is enough and no epoch is
// needed.
template <typename Own>
PIPESPEC_HD inline std::uint32_t obey_target(Own& own, Private& priv, const Sequence& target) {
  const std::uint32_t truth = target.word().length;
  const std::uint32_t common = min(truth, own.length());
  const std::uint32_t differs = first_difference(own, target, own.settled(), common);
  if (differs < common) take_back(own, priv, differs);
  adopt(own, priv, target, truth);
  own.settle(truth);
  return truth;
}

// The neighbour may rewrite what lies past its settled length. Stale agreement is the trap:
// positions we once compared may have been rewritten since, so a new epoch of its sends us back to
// the settled length. And it may not yet have obeyed the target itself: then what it says past that
// point is about another text.
template <typename Own>
PIPESPEC_HD inline std::uint32_t obey_neighbour(Own& own, Private& priv,
                                                const Sequence& neighbour) {
  const Word seen = neighbour.word();
  const std::uint32_t settled = own.settled();
  const std::uint32_t common = min(seen.length, own.length());
  const std::uint32_t known = min(settled, common);
  if (first_difference(own, neighbour, min(neighbour.settled(), known), known) < known)
    return seen.length;
  if (seen.length < settled) return seen.length;  // it is behind, not different
  const std::uint32_t from = seen.epoch == priv.seen_epoch ? max(priv.agreed, settled) : settled;
  const std::uint32_t differs = first_difference(own, neighbour, min(from, common), common);
  if (neighbour.word().epoch != seen.epoch)
    return seen.length;  // rewritten while we read: believe nothing of it
  if (differs < common) take_back(own, priv, differs);
  adopt(own, priv, neighbour, seen.length);
  priv.agreed = min(seen.length, own.length());
  priv.seen_epoch = seen.epoch;
  // Adopted tokens may be torn if the neighbour moved on meanwhile; its new epoch makes the next
  // plan compare again.
  return seen.length;
}

template <typename Own>
PIPESPEC_HD inline Step plan_for(const Block& block, std::uint32_t stage, std::uint32_t row,
                                 const Policy& policy, std::int32_t* tokens, Own& own,
                                 Private& priv) {
  const std::uint32_t start = load_relaxed(&block.span(row).start);
  const std::uint32_t limit = load_acquire(&block.span(row).limit);
  const bool is_target = stage == block.target();

  std::uint32_t bound = limit;
  if (!is_target) {
    std::uint32_t reached = obey_target(own, priv, Sequence(block, block.target(), row));
    if (stage + 1 != block.target())
      reached = max(reached, obey_neighbour(own, priv, Sequence(block, stage + 1, row)));
    // Not min(limit, reached + window): the sum may overflow, and `reached` pass a lowered limit.
    if (reached < limit && policy.window < limit - reached) bound = reached + policy.window;
  }
  const std::uint32_t length = own.length();
  const bool ended = length >= limit || (length > start && block.is_eos(own.token(length - 1)));
  if (ended) return {is_target ? Action::kFinished : Action::kIdle, priv.kv, 0, 0};
  if (length >= bound) return {Action::kIdle, priv.kv, 0, 0};

  // At least the newest token is fed: its logits select the next one. (kv == length after a
  // take-back that could not adopt, or with kv counting an adopted token: feed the last one again.)
  priv.kv = min(priv.kv, length - 1);
  const std::uint32_t known = length - priv.kv;
  std::uint32_t n_fed = min(known, policy.width);
  for (std::uint32_t i = 0; i < n_fed; ++i) tokens[i] = own.token(priv.kv + i);
  if (n_fed < known) return {Action::kCatchUp, priv.kv, n_fed, 0};

  std::uint32_t n_hint = 0;
  if (stage > 0) {
    const Sequence upstream(block, stage - 1, row);
    const std::uint32_t reach = upstream.word().length;
    const std::uint32_t settled = is_target ? length : own.settled();
    const std::uint32_t overlap = min(upstream.settled(), settled);
    const bool agrees =
        reach >= length && first_difference(own, upstream, min(overlap, length), length) == length;
    // One place is left for the token of our own.
    const std::uint32_t room = min(min(policy.max_hints, policy.width - known), bound - length - 1);
    if (agrees && reach > length) n_hint = min(reach - length, room);
    for (std::uint32_t i = 0; i < n_hint; ++i) tokens[n_fed + i] = upstream.token(length + i);
    if (n_hint < min(policy.min_hints, room) &&
        load_relaxed(&block.control(stage - 1).alive) != 0) {
      const bool upstream_ended =
          agrees && (reach >= limit || (reach > start && block.is_eos(upstream.token(reach - 1))));
      if (!upstream_ended) return {Action::kWait, priv.kv, 0, 0};
    }
    n_fed += n_hint;
  }
  return {Action::kStep, priv.kv, n_fed, n_hint};
}

}  // namespace detail

// `tokens` receives n_fed token ids (room for policy.width). Called by the stage that owns `stage`
// only.
PIPESPEC_HD inline Step plan(const Block& block, std::uint32_t stage, std::uint32_t row,
                             const Policy& policy, std::int32_t* tokens) {
  OwnSequence own(block, stage, row);
  return detail::plan_for(block, stage, row, policy, tokens, own, block.priv(stage, row));
}

// What plan() would return if it were called now, without doing any of it: for those who decide
// whether to call it at all. While no step of `stage` runs; the other stages may.
PIPESPEC_HD inline Step foresee(const Block& block, std::uint32_t stage, std::uint32_t row,
                                const Policy& policy, std::int32_t* tokens) {
  ImaginedSequence own(block, stage, row);
  const Private& real = block.priv(stage, row);
  Private priv{real.kv, real.agreed, real.seen_epoch, {}};
  return detail::plan_for(block, stage, row, policy, tokens, own, priv);
}

}  // namespace pipespec
