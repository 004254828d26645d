// Copies one stage's sequence from its block to another block: the host shadow in pinned memory.
// Loads and stores follow the order of ring.hpp, so a reader of the copy has the guarantees of the
// original, only later. It only writes to the copy: a load would wait for the bus.
#pragma once

#include "plan.hpp"

namespace pipespec {

namespace detail {

// What the copy of a row lacks.
struct Update {
  Word now;
  std::uint32_t committed;
  std::uint32_t begin;  // of the tokens to copy
  bool rewrites;        // the copy has other tokens there
};

// Within one epoch tokens are only appended. Committed tokens are the same in all epochs.
PIPESPEC_HD inline Update update(const Block& from, std::uint32_t stage, std::uint32_t row) {
  const OwnSequence source(from, stage, row);
  const Private& priv = from.priv(stage, row);
  const Word now{source.epoch(), source.length()}, old = unpack(priv.mirrored_word);
  if (old.epoch == now.epoch) return {now, source.committed(), old.length, false};
  return {now, source.committed(), min(priv.mirrored_committed, now.length), true};
}

}  // namespace detail

// Copies rows first .. last-1: what plan() reads, and the counters that the caller's policy needs.
// Both blocks have the same sizes, and were equal when the rows were reset. Called by the thread or
// the lanes that run `stage`, between two of its steps: the only writer of this stage's part of
// `to`. All rows share each release.
template <typename Lanes = OneLane>
PIPESPEC_HD inline void replicate(const Block& from, const Block& to, std::uint32_t stage,
                                  std::uint32_t first, std::uint32_t last,
                                  const Lanes& lanes = {}) {
  // A new epoch is published before tokens are overwritten.
  bool rewrites = false;
  for (std::uint32_t row = first + lanes.index(); row < last; row += Lanes::kCount) {
    const detail::Update update = detail::update(from, stage, row);
    if (!update.rewrites) continue;
    rewrites = true;
    store_release(&to.published(stage, row).word, pack({update.now.epoch, update.begin}),
                  to.scope());
  }
  if (lanes.ballot(rewrites) != 0) {
    lanes.sync();
    fence_release(to.scope());
  }
  for (std::uint32_t row = first; row < last; ++row) {
    const Sequence source(from, stage, row);
    const detail::Update update = detail::update(from, stage, row);
    std::int32_t* ring = to.ring(stage, row);
    for (std::uint32_t p = update.begin + lanes.index(); p < update.now.length; p += Lanes::kCount)
      store_relaxed(&ring[p & (to.capacity() - 1)], source.token(p), to.scope());
  }
  lanes.sync();
  for (std::uint32_t row = first + lanes.index(); row < last; row += Lanes::kCount) {
    const detail::Update update = detail::update(from, stage, row);
    Published& copy = to.published(stage, row);
    store_release(&copy.word, pack(update.now), to.scope());
    store_relaxed(&copy.committed, update.committed, to.scope());
    Private& priv = from.priv(stage, row);
    Private& priv_copy = to.priv(stage, row);
    priv.mirrored_word = pack(update.now);
    priv.mirrored_committed = update.committed;
    priv_copy.kv = priv.kv;
    priv_copy.agreed = priv.agreed;
    priv_copy.seen_epoch = priv.seen_epoch;
    const Counters& counts = priv.counters;
    store_relaxed(&priv_copy.counters.steps, counts.steps);
    store_relaxed(&priv_copy.counters.drafted, counts.drafted);
    store_relaxed(&priv_copy.counters.accepted, counts.accepted);
  }
}

}  // namespace pipespec
