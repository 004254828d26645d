// The trace buffer: readers in other threads and processes see whole entries. To be run under
// ThreadSanitizer as well.
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "check.hpp"
#include "runtime/clock.hpp"
#include "runtime/trace.hpp"

using namespace pipespec;
using check::trials;
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

TEST_MAIN()
