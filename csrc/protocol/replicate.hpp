// One stage's sequence, copied from the block it lives in to another block: the pinned mirror that
// the host reads, or a neighbour's device. Loads and stores only, in the order that ring.hpp
// promises, so whoever reads the copy may believe it as they would the original, only later.
#pragma once

#include "ring.hpp"

namespace pipespec {

// Both blocks have the same sizes. Called by the one who runs `stage`, between two of its steps;
// nobody else writes this stage's part of `to`. Copies what plan() needs to know, and of the
// counters those that the caller steers by.
PIPESPEC_HD inline void replicate(const Block& from, const Block& to, std::uint32_t stage,
                                  std::uint32_t row) {
  const Sequence source(from, stage, row);
  const Word now = source.word();
  Published& copy = to.published(stage, row);
  const Word old = unpack(load_relaxed(&copy.word));
  // Within one epoch tokens are only added. Another one announces itself before it overwrites; what
  // had settled is the same in both.
  std::uint32_t from_position = old.length;
  if (old.epoch != now.epoch) {
    const std::uint32_t settled = load_relaxed(&copy.settled);
    from_position = settled < now.length ? settled : now.length;
    store_release(&copy.word, pack({now.epoch, from_position}));
  }
  std::int32_t* ring = to.ring(stage, row);
  for (std::uint32_t p = from_position; p < now.length; ++p)
    store_release(&ring[p & (to.capacity() - 1)], source.token(p));
  store_release(&copy.word, pack(now));
  store_release(&copy.settled, source.settled());
  const Private& priv = from.priv(stage, row);
  Private& priv_copy = to.priv(stage, row);
  priv_copy.kv = priv.kv;
  priv_copy.agreed = priv.agreed;
  priv_copy.seen_epoch = priv.seen_epoch;
  const Counters& counts = priv.counters;
  store_relaxed(&priv_copy.counters.steps, counts.steps);
  store_relaxed(&priv_copy.counters.drafted, counts.drafted);
  store_relaxed(&priv_copy.counters.accepted, counts.accepted);
}

}  // namespace pipespec
