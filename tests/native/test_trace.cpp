// The trace buffer: readers in other threads and processes see whole entries, and a stage's port
// writes the right ones. To be run under ThreadSanitizer as well.
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <thread>

#include "check.hpp"
#include "fake_stage.hpp"
#include "runtime/clock.hpp"
#include "runtime/generation.hpp"
#include "runtime/stage_port.hpp"

using namespace pipespec;
using check::trials;
using fake::Random;
using fake::Tokens;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

namespace {

constexpr std::int64_t kSecond = 1'000'000'000;
constexpr u32 kCapacity = 16;

// Every word of entry i is a function of i.
TraceEntry entry_of(u64 i) {
  const auto t = static_cast<std::int64_t>(i) * 3;
  const auto n = static_cast<u32>(i);
  return {i, t, t + 1, t + 2, n, n + 1, n + 2, n + 3, n + 4, n + 5, n + 6, n + 7};
}

// Entries as they were written, in order; returns how many.
u64 check_whole(const std::vector<TraceEntry>& entries) {
  u64 wrong = 0;
  for (std::size_t k = 0; k < entries.size(); ++k) {
    const TraceEntry expected = entry_of(entries[k].step);
    wrong += std::memcmp(&entries[k], &expected, sizeof expected) != 0;
    wrong += k > 0 && entries[k].step <= entries[k - 1].step;
  }
  CHECK_EQ(wrong, 0u);
  return entries.size();
}

// Reads a full buffer while it is being written, until enough entries have been seen, or for some
// seconds.
void read_much(const TraceBuffer& buffer) {
  if (!CHECK(check::eventually([&] { return buffer.written() >= kCapacity; }))) return;
  u64 read = check_whole(buffer.read());
  const std::int64_t end = now_ns() + 3 * kSecond;
  while (read < trials(25'000, 100'000) && now_ns() < end) read += check_whole(buffer.read());
}

struct Shared {
  void* base = mmap(nullptr, TraceBuffer::bytes(kCapacity), PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ~Shared() { munmap(base, TraceBuffer::bytes(kCapacity)); }
};

}  // namespace

TEST(entries_are_whole_between_threads) {
  TraceBuffer buffer(kCapacity);
  std::atomic<bool> done{false};
  std::thread writer([&] {
    for (u64 i = 0; !done; ++i) buffer.write(entry_of(i));
  });
  read_much(buffer);
  done = true;
  writer.join();
  const std::vector<TraceEntry> last = buffer.read();
  CHECK_EQ(last.size(), kCapacity);
  CHECK_EQ(last.back().step, buffer.written() - 1);
}

// The writer is another process, and is killed in the middle.
TEST(entries_are_whole_between_processes) {
  const Shared memory;
  const TraceBuffer mine(memory.base, kCapacity);
  const pid_t child = fork();
  if (child == 0) {
    TraceBuffer own(memory.base, kCapacity);
    for (u64 i = 0;; ++i) own.write(entry_of(i));
  }
  read_much(mine);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  const u64 left = check_whole(mine.read());
  CHECK(left == kCapacity || left == kCapacity - 1);  // one was being overwritten
  CHECK_EQ(mine.read().back().step, mine.written() - 1);
}

TEST(a_buffer_is_used_again) {
  const Shared memory;
  TraceBuffer buffer(memory.base, kCapacity);
  CHECK(buffer.read().empty());
  for (u64 i = 0; i < kCapacity + 5; ++i) buffer.write(entry_of(i));
  CHECK_EQ(check_whole(buffer.read()), kCapacity);
  CHECK_EQ(buffer.read().front().step, 5u);
  buffer.clear();
  CHECK(buffer.read().empty());
  for (u64 i = 0; i < 3; ++i) buffer.write(entry_of(i));
  CHECK_EQ(check_whole(buffer.read()), 3u);
  CHECK_EQ(buffer.read().front().step, 0u);
  CHECK_THROWS(TraceBuffer(0));
}

// Whatever the order of the stages, with steps that fail between plan() and commit(), and with a
// port that traces only from the middle on.
TEST(ports_trace_what_the_counters_count) {
  for (u32 seed = 0; seed < trials(25, 100); ++seed) {
    Random random{seed};
    constexpr u32 kStages = 3, kRows = 2, kLimit = 70;
    const fake::Truth truth{.seed = seed, .eos = {2}};
    fake::BlockMemory memory(kStages, kRows, 128);
    reset(memory.block(), {1, 1}, {kLimit, kLimit}, {11, 12}, truth.eos);
    start(memory.block(), 1);
    std::vector<StagePort> ports;
    std::vector<std::unique_ptr<TraceBuffer>> traces;
    std::vector<std::vector<fake::Cache>> caches(kStages);
    for (u32 s = 0; s < kStages; ++s) {
      const fake::Model model{&truth, s + 1 < kStages ? 0.7 : 1.0, s};
      ports.emplace_back(memory.block(), s, 6);
      traces.push_back(std::make_unique<TraceBuffer>(4096));
      ports[s].trace(traces[s].get());
      for (u32 r = 0; r < kRows; ++r) {
        caches[s].emplace_back(model);
        caches[s][r].prefill({static_cast<int>(11 + r)});
      }
    }
    u32 rollbacks_without_a_step = 0;
    std::vector<u32> steps(kStages);
    const std::int64_t began = now_ns();
    for (bool finished = false; !finished;) {
      const u32 s = random.below(kStages);
      StagePort& port = ports[s];
      const Action action = port.plan(1 + random.below(8), random.below(5), random.below(2));
      finished = action == Action::kFinished;
      if (action != Action::kStep || random.chance(0.1)) continue;
      ++steps[s];
      Tokens selected(kRows * port.columns());
      for (u32 r = 0; r < kRows; ++r) {
        const std::int32_t* tokens = &port.tokens()[r * port.width()];
        const auto kv = static_cast<u32>(port.kv()[r]);
        caches[s][r].feed(tokens, kv, static_cast<u32>(port.query_lens()[r]), port.columns());
        caches[s][r].select(tokens, kv, static_cast<u32>(port.n_select()[r]),
                            static_cast<u32>(port.num_draft_tokens()[r]),
                            &selected[r * port.columns()], port.columns());
      }
      port.commit(selected.data(), port.columns());
    }
    for (u32 s = 0; s < kStages; ++s) {
      ports[s].plan(0, 0, 0);  // notes what a step that failed has rolled back
      Counters all{};
      for (u32 r = 0; r < kRows; ++r) {
        const Counters& c = memory.block().priv(s, r).counters;
        all.fed += c.fed, all.drafted += c.drafted, all.accepted += c.accepted;
        all.truncated += c.truncated, all.rollbacks += c.rollbacks;
      }
      u64 fed = 0, draft_tokens = 0, accepted = 0, rolled_back = 0, rollbacks = 0, number = 0;
      u32 with_columns = 0;
      std::int64_t before = began;
      for (const TraceEntry& e : traces[s]->read()) {
        fed += e.fed, draft_tokens += e.draft_tokens, accepted += e.accepted;
        rolled_back += e.rolled_back, rollbacks += e.rollbacks;
        with_columns += e.width > 0;
        rollbacks_without_a_step += e.width == 0;
        CHECK_EQ(e.step, number++);
        CHECK(before <= e.launched_ns && e.launched_ns <= e.start_ns && e.start_ns <= e.end_ns);
        CHECK((e.fed > 0) == (e.width > 0) && (e.fed > 0 || e.rollbacks > 0));
        CHECK((e.rollbacks > 0) == (e.rolled_back > 0) && e.prefill == 0);
        before = e.end_ns;
      }
      CHECK(before <= now_ns());
      CHECK_EQ(with_columns, steps[s]);
      CHECK_EQ(fed, all.fed);
      CHECK_EQ(draft_tokens, all.drafted);
      CHECK_EQ(accepted, all.accepted);
      CHECK_EQ(rolled_back, all.truncated);
      if (!CHECK_EQ(rollbacks, all.rollbacks)) return;
    }
    if (seed == 0) CHECK(rollbacks_without_a_step > 0);
  }
}

TEST_MAIN()
