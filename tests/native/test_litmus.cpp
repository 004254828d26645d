// The GPUs' litmus test (csrc/protocol/litmus.hpp) between threads of the host, and a check that it
// finds faults. To be run under ThreadSanitizer as well.
#include <atomic>
#include <thread>

#include "check.hpp"
#include "fake_stage.hpp"
#include "protocol/litmus.hpp"

using namespace pipespec;
using check::trials;
using u32 = std::uint32_t;

namespace {

constexpr u32 kLength = 50;

void reset(const Block& block) {
  block.header().active_rows = 1;
  reset_row(block, 0, 1, kLength + 1, 7);
}

}  // namespace

TEST(threads_pass) {
  fake::BlockMemory memory(2, 1, 64);
  reset(memory.block());
  std::atomic<bool> done{false}, seen{false};
  std::thread writer([&] {
    // On a busy machine the reader may run long after this thread.
    for (u32 i = 0; i < 20 || !seen; ++i)
      litmus_write(memory.block(), 1, 0, trials(250, 1000), kLength);
    done = true;
  });
  LitmusCount all{};
  while (!done) {
    const LitmusCount some = litmus_read(memory.block(), 1, 0, 100);
    all.looks += some.looks, all.tokens += some.tokens, all.wrong += some.wrong;
    seen = all.tokens > 0;
  }
  writer.join();
  CHECK(all.tokens > 0);
  CHECK_EQ(all.wrong, 0u);
  const LitmusCount last = litmus_read(memory.block(), 1, 0, 3);
  CHECK_EQ(last.looks, 3u);
  CHECK_EQ(last.epochs, 1u);
  CHECK_EQ(last.tokens, 3u * kLength);
  CHECK_EQ(last.wrong, 0u);
}

// A length that is visible before its token, and a token of a new epoch that is not published.
TEST(planted_faults_are_found) {
  fake::BlockMemory memory(2, 1, 64);
  const Block& block = memory.block();
  reset(block);
  litmus_write(block, 1, 0, 3, kLength - 1);
  OwnSequence own(block, 1, 0);
  store_relaxed(&block.published(1, 0).word, pack({own.epoch(), own.length() + 1}));
  CHECK_EQ(litmus_read(block, 1, 0, 5).wrong, 5u);
  store_relaxed(&block.published(1, 0).word, pack({own.epoch(), own.length()}));
  CHECK_EQ(litmus_read(block, 1, 0, 5).wrong, 0u);
  store_relaxed(&block.ring(1, 0)[1], litmus_token(own.epoch() + 1, 1));
  CHECK_EQ(litmus_read(block, 1, 0, 5).wrong, 5u);
}

TEST_MAIN()
