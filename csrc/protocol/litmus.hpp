// A litmus test of the guarantees of ring.hpp, for any two that share a block: threads, processes,
// a GPU and the host, two GPUs. The writer runs through epochs. The reader checks that within one
// epoch it sees only that epoch's tokens. Neither waits for the other.
#pragma once

#include "ring.hpp"

namespace pipespec {

struct LitmusCount {
  std::uint64_t looks;   // reads that fell within one epoch
  std::uint64_t epochs;  // different ones among these, one after the other
  std::uint64_t tokens;  // checked
  std::uint64_t wrong;
};

PIPESPEC_HD inline std::int32_t litmus_token(std::uint32_t epoch, std::uint32_t position) {
  return static_cast<std::int32_t>((epoch * 1009u + position) & 0x7fffffffu);
}

// `epochs` times: rolls all tokens back, then publishes `length` new ones: one, then two at once,
// then three, ... All lanes write.
template <typename Lanes = OneLane>
PIPESPEC_HD inline void litmus_write(const Block& block, std::uint32_t stage, std::uint32_t row,
                                     std::uint32_t epochs, std::uint32_t length,
                                     const Lanes& lanes = {}) {
  OwnSequence own(block, stage, row);
  const std::uint32_t start = block.span(row).start, end = start + length;
  for (std::uint32_t i = 0; i < epochs; ++i) {
    own.truncate(start, lanes);
    for (std::uint32_t n = 1; own.length() < end; ++n) {
      const std::uint32_t begin = own.length();
      own.append(
          n < end - begin ? n : end - begin,
          [&](std::uint32_t j) { return litmus_token(own.epoch(), begin + j); }, lanes);
      own.publish(lanes);
    }
  }
}

// Reads `looks` times the sequence that litmus_write() writes. All lanes read.
template <typename Lanes = OneLane>
PIPESPEC_HD inline LitmusCount litmus_read(const Block& block, std::uint32_t stage,
                                           std::uint32_t row, std::uint32_t looks,
                                           const Lanes& lanes = {}) {
  const Sequence sequence(block, stage, row);
  const std::uint32_t start = block.span(row).start;
  LitmusCount count{0, 0, 0, 0};
  std::uint32_t epoch = 0;
  for (std::uint32_t i = 0; i < looks; ++i) {
    const Word before = sequence.word(lanes);
    std::uint32_t wrong = 0;
    // Starts at the newest token, which becomes visible last.
    for (std::uint32_t n = lanes.index(); n < before.length - start; n += Lanes::kCount) {
      const std::uint32_t p = before.length - 1 - n;
      wrong += sequence.token(p) != litmus_token(before.epoch, p);
    }
    if (!sequence.still(before, lanes)) continue;
    ++count.looks;
    count.epochs += before.epoch != epoch;
    epoch = before.epoch;
    count.tokens += before.length - start;
    count.wrong += lanes.sum(wrong);
  }
  return count;
}

}  // namespace pipespec
