// Sleeping until a neighbour publishes, without a busy wait and without a lost wake-up. Host only;
// works between threads and between processes that map the same block.
//
// A stage rings its bell after it has published. A sleeper reads the bells *before* it reads the
// state. When it finds nothing to do, it sets its parked word and reads the bells once more. Bell
// and parked word are accessed sequentially consistently (Dekker): either the sleeper sees the new
// bell, or the publisher sees the parked word and wakes the sleeper. `parked` is the one word with
// several writers: the sleeper stores 1, wakers store 0. A late 0 causes only a spurious wake-up. A
// stage that dies between publishing and waking leaves the others asleep up to their time limit.
#pragma once

#if defined(__linux__) && !defined(PIPESPEC_NO_FUTEX)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#include <time.h>

#include <algorithm>
#include <array>
#include <cstdint>

#include "../protocol/ring.hpp"

namespace pipespec {

#if defined(__linux__) && !defined(PIPESPEC_NO_FUTEX)
// Not FUTEX_PRIVATE_FLAG: waker and sleeper may be different processes.
inline void futex_wake(std::uint32_t* word) {
  syscall(SYS_futex, word, FUTEX_WAKE, 1, nullptr, nullptr, 0);
}
// Sleeps while the word has this value. The kernel compares once more before the thread sleeps.
inline void futex_wait(std::uint32_t* word, std::uint32_t value, std::int64_t timeout_ns) {
  const timespec timeout{timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
  syscall(SYS_futex, word, FUTEX_WAIT, value, &timeout, nullptr, 0);
}
#else
// Without a futex a sleeper looks at its word again and again, less often the longer it sleeps.
// Who wakes it has changed the word before.
inline void futex_wake(std::uint32_t*) {}
inline void futex_wait(std::uint32_t* word, std::uint32_t value, std::int64_t timeout_ns) {
  constexpr std::int64_t kFirstNap = 10'000, kLongestNap = 500'000;
  for (std::int64_t nap = kFirstNap;
       timeout_ns > 0 && __atomic_load_n(word, __ATOMIC_SEQ_CST) == value;
       nap = std::min(2 * nap, kLongestNap)) {
    const timespec rest{0, std::min(nap, timeout_ns)};
    nanosleep(&rest, nullptr);
    timeout_ns -= rest.tv_nsec;
  }
}
#endif

class Bells {
 public:
  // The index of the caller of generate(), in place of a stage. It has a bell of its own (a word
  // has one writer) and never parks.
  static constexpr std::uint32_t kCaller = kMaxStages;

  Bells(const Block& block, std::uint32_t stage) : block_(block), stage_(stage) {}

  // Any publication after this call ends the next park().
  void note() {
    for (std::uint32_t s = 0; s < block_.stages(); ++s) heard_[s] = listen(s);
    heard_[kCaller] = listen(kCaller);
  }

  // After publishing: wakes the stages that sleep.
  void ring() {
    std::uint32_t* own = bell(stage_);
    __atomic_store_n(own, __atomic_load_n(own, __ATOMIC_RELAXED) + 1, __ATOMIC_SEQ_CST);
    for (std::uint32_t s = 0; s < block_.stages(); ++s) {
      std::uint32_t* parked = &block_.parked(s);
      if (s == stage_ || __atomic_load_n(parked, __ATOMIC_SEQ_CST) == 0) continue;
      __atomic_store_n(parked, 0u, __ATOMIC_SEQ_CST);
      futex_wake(parked);
    }
  }

  // Sleeps until another stage or the caller rings, or until the timeout. Returns whether a bell
  // rang since note().
  bool park(std::int64_t timeout_ns) {
    if (timeout_ns <= 0) return rung();
    std::uint32_t* parked = &block_.parked(stage_);
    __atomic_store_n(parked, 1u, __ATOMIC_SEQ_CST);
    if (!rung()) futex_wait(parked, 1, timeout_ns);
    __atomic_store_n(parked, 0u, __ATOMIC_SEQ_CST);
    return rung();
  }

 private:
  std::uint32_t* bell(std::uint32_t s) const {
    return s == kCaller ? &block_.header().bell : &block_.status(s).bell;
  }
  std::uint32_t listen(std::uint32_t s) const { return __atomic_load_n(bell(s), __ATOMIC_SEQ_CST); }
  bool rung() const {
    for (std::uint32_t s = 0; s < block_.stages(); ++s)
      if (s != stage_ && listen(s) != heard_[s]) return true;
    return listen(kCaller) != heard_[kCaller];
  }

  Block block_;
  std::uint32_t stage_;
  std::array<std::uint32_t, kMaxStages + 1> heard_{};
};

}  // namespace pipespec
