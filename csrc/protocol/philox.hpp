// Counter-based random numbers: Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel Random
// Numbers: As Easy as 1, 2, 3" (SC'11). A draw is a function of (seed, position, token id, stream)
// alone, not of batch row, step number or thread. So rollbacks, another batch or another number of
// stages cannot change a draw, and there is no generator state to keep.
#pragma once

#include <cstdint>

#include "hd.hpp"

namespace pipespec {

// What a draw is for. Draws for different purposes at one position must be independent; coupled
// selection is the exception by design: draft and target both use kTargetStream.
enum Stream : std::uint32_t {
  kTargetStream = 0,
  kDraftStream = 1,
  kAcceptStream = 2,
  kResidualStream = 3,
};

namespace philox {

constexpr int kRounds = 10;
// Multipliers of words 0 and 2 of the counter, and what each round adds to the words of the key.
constexpr std::uint32_t kMultiplier0 = 0xD2511F53u, kMultiplier1 = 0xCD9E8D57u;
constexpr std::uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;

struct Words {
  std::uint32_t word[4];
};

PIPESPEC_HD inline Words block(Words counter, std::uint32_t key0, std::uint32_t key1) {
  Words c = counter;
  for (int round = 0; round < kRounds; ++round) {
    const std::uint64_t a = std::uint64_t{kMultiplier0} * c.word[0];
    const std::uint64_t b = std::uint64_t{kMultiplier1} * c.word[2];
    c = {{std::uint32_t(b >> 32) ^ c.word[1] ^ key0, std::uint32_t(b),
          std::uint32_t(a >> 32) ^ c.word[3] ^ key1, std::uint32_t(a)}};
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return c;
}

// The four words that belong to the token ids 4 * group .. 4 * group + 3 at a position.
PIPESPEC_HD inline Words draw4(std::uint64_t seed, std::uint64_t position, std::uint32_t stream,
                               std::uint32_t group) {
  return block({{group, std::uint32_t(position), std::uint32_t(position >> 32), stream}},
               std::uint32_t(seed), std::uint32_t(seed >> 32));
}

PIPESPEC_HD inline std::uint32_t draw(std::uint64_t seed, std::uint64_t position,
                                      std::uint32_t stream, std::uint32_t id) {
  return draw4(seed, position, stream, id >> 2).word[id & 3];
}

}  // namespace philox
}  // namespace pipespec
