// A bell that one thread sleeps on and every other thread of the process may ring. (park.hpp has
// the bells of stages in different processes, each with one writer.)
#pragma once

#include <atomic>
#include <cstdint>

#include "park.hpp"

namespace pipespec {

class Doorbell {
 public:
  // Any ring after this call ends the next sleep().
  std::uint32_t note() const { return load_acquire(&rings_); }

  void ring() {
    __atomic_fetch_add(&rings_, 1u, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&sleeps_, __ATOMIC_SEQ_CST) != 0) futex_wake(&rings_);
  }

  // By one thread. Returns when the bell has rung since `noted`, after the timeout, or spuriously.
  void sleep(std::uint32_t noted, std::int64_t timeout_ns) {
    if (timeout_ns <= 0) return;
    __atomic_store_n(&sleeps_, 1u, __ATOMIC_SEQ_CST);
    futex_wait(&rings_, noted, timeout_ns);  // returns at once if the bell has rung
    __atomic_store_n(&sleeps_, 0u, __ATOMIC_SEQ_CST);
  }

 private:
  alignas(kLine) std::uint32_t rings_ = 0;
  std::uint32_t sleeps_ = 0;
};

}  // namespace pipespec
