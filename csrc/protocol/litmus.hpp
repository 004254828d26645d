// A litmus test of what ring.hpp promises, for any two that share a block: threads, processes, a
// GPU and the host, two GPUs. The writer runs through epochs, the reader checks that within one it
// sees that one's tokens. Neither waits for the other.
#pragma once

#include "ring.hpp"

namespace pipespec {

struct LitmusCount {
  std::uint64_t looks;   // that fell within one epoch
  std::uint64_t epochs;  // different ones among these, one after the other
  std::uint64_t tokens;  // checked
  std::uint64_t wrong;
};

PIPESPEC_HD inline std::int32_t litmus_token(std::uint32_t epoch, std::uint32_t position) {
  return static_cast<std::int32_t>((epoch * 1009u + position) & 0x7fffffffu);
}

// `epochs` times: takes all tokens back, then publishes `length` new ones, one by one.
PIPESPEC_HD inline void litmus_write(const Block& block, std::uint32_t stage, std::uint32_t row,
                                     std::uint32_t epochs, std::uint32_t length) {
  OwnSequence own(block, stage, row);
  const std::uint32_t start = block.span(row).start;
  for (std::uint32_t i = 0; i < epochs; ++i) {
    own.truncate(start);
    for (std::uint32_t n = 0; n < length; ++n) {
      own.append(litmus_token(own.epoch(), own.length()));
      own.publish();
    }
  }
}

// Looks `looks` times at what litmus_write() does there.
PIPESPEC_HD inline LitmusCount litmus_read(const Block& block, std::uint32_t stage,
                                           std::uint32_t row, std::uint32_t looks) {
  const Sequence sequence(block, stage, row);
  const std::uint32_t start = block.span(row).start;
  LitmusCount count{0, 0, 0, 0};
  std::uint32_t epoch = 0;
  for (std::uint32_t i = 0; i < looks; ++i) {
    const Word before = sequence.word();
    std::uint32_t wrong = 0;
    // From the newest on: it is the last to become visible.
    for (std::uint32_t p = before.length; p-- > start;)
      wrong += sequence.token(p) != litmus_token(before.epoch, p);
    if (sequence.word().epoch != before.epoch) continue;
    ++count.looks;
    count.epochs += before.epoch != epoch;
    epoch = before.epoch;
    count.tokens += before.length - start;
    count.wrong += wrong;
  }
  return count;
}

}  // namespace pipespec
