// The clock of deadlines and traces: CLOCK_MONOTONIC, as Python's time.perf_counter_ns().
#pragma once

#include <chrono>
#include <cstdint>

namespace pipespec {

inline std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace pipespec
